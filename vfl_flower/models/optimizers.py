"""Build optimizers by name, and choose their learning rates of each step."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vfl_flower.config.errors import CodeError, ConfigError
from vfl_flower.config.options import TrainingConfig
from vfl_flower.config.options.training import KINDS
from vfl_flower.config.plugins import OPTIMIZERS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.training import trained

Make = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer from parameters, ``lr`` and, unless it is 0, ``weight_decay``."""

sgd: Make = torch.optim.SGD
momentum: Make = partial(torch.optim.SGD, momentum=0.9)
nesterov: Make = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
adam: Make = partial(torch.optim.Adam, weight_decay=0)
adamw: Make = partial(torch.optim.AdamW, weight_decay=0)


def kind_of(name: str) -> str:
    """Return the kind of an optimizer, which decides its default learning rates.

    A class or function of your own names its kind in the attribute ``rates_like``. Without the
    attribute, a subclass of `torch.optim.SGD` is of kind ``sgd``, and any other of kind ``adam``.
    """
    if name in KINDS:
        return KINDS[name]
    made = OPTIMIZERS.load(name)
    plain = isinstance(made, type) and issubclass(made, torch.optim.SGD)
    kind = getattr(made, "rates_like", "sgd" if plain else "adam")
    if kind not in KINDS.values():
        kinds = ", ".join(dict.fromkeys(KINDS.values()))
        raise ConfigError(
            f"optimizer = {_called(name)!r} has rates_like = {kind!r}. Set it to one of {kinds}."
        )
    return kind


def build_optimizer(
    config: RunConfig, model: nn.Module, lr: float, per_epoch: float = 1
) -> torch.optim.Optimizer:
    """Build a model's optimizer, whose schedule spans ``per_epoch`` steps an epoch."""
    training, parameters = config.training, list(trained(model).values())
    decay = {"weight_decay": training.weight_decay} if training.weight_decay else {}
    make: Make = partial(OPTIMIZERS.load(training.optimizer), lr=lr, **decay)
    if training.optimizer not in OPTIMIZERS.known:
        _try_out(make, training.optimizer, parameters)
    optimizer = make(parameters)
    group = optimizer.param_groups[0]
    group["rates"], group["clip"] = Rates(training, lr, per_epoch), training.clip_gradient
    # The steps of a plain optimizer are linear in the gradients, so one can replace several.
    group["plain"] = type(optimizer) is torch.optim.SGD and not any(
        group[each] for each in ("momentum", "weight_decay", "clip", "maximize")
    )
    return optimizer


def _try_out(make: Make, name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot step, or that checkpoints cannot hold."""
    said = f"optimizer = {_called(name)!r}"
    copies = [nn.Parameter(each.detach().clone()) for each in parameters]
    try:
        optimizer = make(copies)
        for each in copies:
            each.grad = torch.zeros_like(each)
        before = _settings(optimizer)
        optimizer.step()
        states: list[dict[str, Any]] = list(optimizer.state.values())
        after = _settings(optimizer)
        moved = [key for key in after if before.get(key) != after[key]]
    except Exception as error:  # a user's code may raise any type
        raise CodeError(f"{said} cannot step on this model", error) from error
    for state in states:
        for key, value in state.items():
            if not (value is None or isinstance(value, torch.Tensor)):
                raise ConfigError(
                    f"{said} keeps {key!r} as {type(value).__name__}, which checkpoints cannot "
                    "hold. Keep it as a tensor."
                )
    if moved:
        raise ConfigError(
            f"{said} changes {moved[0][1]!r} of a parameter group in a step, which checkpoints do "
            "not have. Keep it as a tensor in the optimizer's state."
        )


def _settings(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], str]:
    """Describe the settings of an optimizer's parameter groups, by group and name."""
    return {
        (number, key): repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def _called(name: str) -> str:
    """Return an optimizer's name without its folder, which may be private to a party."""
    return name.rpartition("/")[2]


_LR_STEP, _LR_DECAY = 10, 0.1  # defaults of lr-step and lr-decay
_PEAK, _START, _END = 0.3, 25.0, 1e4  # one-cycle: share of rising steps, and torch's divisors


class Rates:
    """Compute the learning rate of each step of one model.

    The rate depends only on the step's number, counted from 0. So both ends of a link and a resumed
    run know it without any state. Steps beyond the last planned one, which a party takes over from
    others, have its rate.
    """

    def __init__(self, training: TrainingConfig, lr: float, per_epoch: float) -> None:
        self.lr, self.schedule = lr, training.lr_schedule
        self.decay = _LR_DECAY if training.lr_decay is None else training.lr_decay
        self.decay_every = (training.lr_step or _LR_STEP) * per_epoch
        self.warm_up = training.warm_up * per_epoch
        self.total = training.epochs * per_epoch
        self.constant = self.schedule == "constant" and not self.warm_up

    def of(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.lr if self.constant else self.lr * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the schedule's factor at a step, times (step + 1) / W in a warm-up of W steps."""
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
