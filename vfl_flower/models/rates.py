"""Learning rates: what a schedule makes of them, step by step, as torch's schedulers do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import TrainingConfig

_LR_STEP, _LR_DECAY = 10, 0.1  # where they are not given
_PEAK, _START, _END = 0.3, 25.0, 1e4  # of one cycle: share of steps, and divisors, as in torch


class Rates:
    """The learning rate of each step of one model.

    It follows from the number of the step alone, counted from 0: both ends and a run that is gone
    on with know it without keeping anything. A step beyond the last that is planned, of a party
    that takes over what others have not done, has the rate of that one.

    Parameters
    ----------
    lr : what the schedule's factors multiply.
    per_epoch : steps of this model in an epoch, K for a party.
    """

    def __init__(self, training: TrainingConfig, lr: float, per_epoch: float) -> None:
        self.lr = lr
        self.schedule = training.lr_schedule
        self.decay = _LR_DECAY if training.lr_decay is None else training.lr_decay
        self.decay_every = (training.lr_step or _LR_STEP) * per_epoch
        self.warm_up = training.warm_up * per_epoch
        self.total = training.epochs * per_epoch
        self.constant = self.schedule == "constant" and not self.warm_up

    def of(self, step: int) -> float:
        """The rate of a step."""
        return self.lr if self.constant else self.lr * self.factor(step)

    def factor(self, step: int) -> float:
        """What multiplies the rate of a step: by schedule, times (step + 1) / W of warm-up."""
        rise = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        step = min(step, math.ceil(self.total) - 1)
        if self.schedule == "step":
            return rise * math.pow(self.decay, step // self.decay_every)
        if self.schedule == "cosine":
            return rise * _cosine(1.0, 0.0, step / self.total)
        if self.schedule == "one-cycle":
            peak, last = _PEAK * self.total - 1, self.total - 1
            if step <= peak:
                return rise * _cosine(1 / _START, 1.0, step / peak if peak > 0 else 1.0)
            down = (step - peak) / (last - peak)
            return rise * _cosine(1.0, 1 / (_START * _END), min(1.0, down))
        return rise

    def factors(self, first: int, steps: int) -> Tensor:
        """The factors of the steps of a window, [S], of which this is the first."""
        return torch.tensor([self.factor(first + step) for step in range(steps)])


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


def check(training: TrainingConfig) -> None:
    """Raise `ConfigError` if keys of the schedule contradict each other."""
    for name, value in (("lr-step", training.lr_step), ("lr-decay", training.lr_decay)):
        if value is not None and training.lr_schedule != "step":
            raise ConfigError(
                f"{name} is for lr-schedule = 'step', and not for {training.lr_schedule!r}: leave "
                "it out, or choose that schedule."
            )
    if training.epochs is not None and training.warm_up > training.epochs:
        raise ConfigError(
            f"warm-up = {training.warm_up:g} is longer than epochs = {training.epochs}: make it "
            "shorter."
        )
