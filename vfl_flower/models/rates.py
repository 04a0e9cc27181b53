"""Learning rates of each step, by the same schedules as in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import TrainingConfig

_LR_STEP, _LR_DECAY = 10, 0.1  # defaults of lr-step and lr-decay
_PEAK, _START, _END = 0.3, 25.0, 1e4  # one-cycle: share of rising steps, and torch's divisors


class Rates:
    """Compute the learning rate of each step of one model.

    The rate depends only on the step's number, counted from 0. So both ends of a link and a resumed
    run know it without any state. A party may take over steps of others, beyond its last planned
    step. These steps have the rate of the last planned step.
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
        """Return the learning rate of a step."""
        return self.lr if self.constant else self.lr * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the factor of the rate at a step.

        It is the schedule's factor. During a warm-up of W steps it is also times (step + 1) / W.
        """
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
        """Return the factors of the S steps that begin with step ``first``, [S]."""
        return torch.tensor([self.factor(first + step) for step in range(steps)])


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


def check(training: TrainingConfig) -> None:
    """Raise `ConfigError` if options of the schedule contradict each other."""
    for name, value in (("lr-step", training.lr_step), ("lr-decay", training.lr_decay)):
        if value is not None and training.lr_schedule != "step":
            raise ConfigError(
                f"{name} is for lr-schedule = 'step', and not for {training.lr_schedule!r}. Leave "
                "it out, or choose that schedule."
            )
    if training.epochs is not None and training.warm_up > training.epochs:
        raise ConfigError(
            f"warm-up = {training.warm_up:g} is longer than epochs = {training.epochs}. Make it "
            "shorter."
        )
