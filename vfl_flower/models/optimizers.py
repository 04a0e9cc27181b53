"""Build optimizers by name, and choose their default learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from vfl_flower.config.errors import CodeError, ConfigError
from vfl_flower.config.options.training import KINDS
from vfl_flower.config.plugins import OPTIMIZERS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.rates import Rates
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
    found: str = kind
    return found


def build_optimizer(
    config: RunConfig, model: nn.Module, lr: float, per_epoch: float = 1
) -> torch.optim.Optimizer:
    """Build a model's optimizer, whose schedule spans ``per_epoch`` steps an epoch."""
    training = config.training
    name, decay, parameters = training.optimizer, training.weight_decay, trained(model).values()
    make: Make = OPTIMIZERS.load(name)
    if name not in OPTIMIZERS.known:
        _try_out(make, name, parameters, lr, decay)
    optimizer = _made(make, parameters, lr, decay)
    group = optimizer.param_groups[0]
    group["rates"], group["clip"] = Rates(training, lr, per_epoch), training.clip_gradient
    # The steps of a plain optimizer are linear in the gradients, so one can replace several.
    group["plain"] = type(optimizer) is torch.optim.SGD and not any(
        group[each] for each in ("momentum", "weight_decay", "clip", "maximize")
    )
    return optimizer


def _made(
    make: Make, parameters: Iterable[nn.Parameter], lr: float, decay: float
) -> torch.optim.Optimizer:
    more = {"weight_decay": decay} if decay else {}
    return make(list(parameters), lr=lr, **more)


def _try_out(
    make: Make, name: str, parameters: Iterable[nn.Parameter], lr: float, decay: float
) -> None:
    """Raise `ConfigError` if an optimizer cannot step, or its state is no tensors."""
    said = f"optimizer = {_called(name)!r}"
    copies = [nn.Parameter(each.detach().clone()) for each in parameters]
    try:
        optimizer = _made(make, copies, lr, decay)
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
