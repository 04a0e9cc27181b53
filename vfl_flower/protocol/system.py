"""Describe systems by choices on the five axes, and baselines. This file does not import torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options.training import KINDS
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import RunConfig

BY_ROWS = ("epochs", "patience", "batch-size", "party-lr", "server-lr")
"""Options with defaults that depend on the number of training rows."""
RATE_KEYS = ("party-lr", "server-lr")


@dataclass(frozen=True)
class Quorum:
    """A rule for how many uploads to wait for, and the name of the rule."""

    word: str
    of: Callable[[int], int]  # parties -> uploads

    @property
    def coordinates(self) -> bool:
        """Return whether it waits for all parties, where 2 to 8 train."""
        return any(self.of(parties) >= parties for parties in range(2, 9))


ALL = Quorum("sync", lambda parties: parties)
ONE = Quorum("async", lambda parties: 1)
HALF = Quorum("t-sync", lambda parties: -(-parties // 2))


@dataclass(frozen=True)
class System:
    """A published system, or a baseline.

    name : the value of option ``strategy``.
    about : one line that describes it.
    quorum : how many uploads the label holder waits for, unless option ``quorum`` is set: a rule,
        or a number.
    defaults : this system's defaults of options and expert settings.
    flower_strategy : import path of the Flower Strategy that runs it.
    baseline : a description instead of the axes, for a baseline; empty for a system.
    gradients : whether its bottom models need a gradient; None follows the estimator.
    rates : learning rates of the parties and of the top model, by kind of optimizer. Kinds that are
        missing here have `RATES`. A rate in ``defaults`` holds for every optimizer.

    Raise `ConfigError` if the quorum is neither, or if rates are not pairs by kind of optimizer.
    """

    name: str
    about: str
    quorum: Quorum = ALL
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    flower_strategy: str = "strategies.vertical:Vertical"
    baseline: str = ""
    gradients: bool | None = None
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        said: Any = self.quorum
        if type(said) is int and said >= 1:
            word = "async" if said == 1 else "t-sync"
            object.__setattr__(self, "quorum", Quorum(word, lambda parties: said))
        elif not isinstance(said, Quorum):
            raise ConfigError(
                f"System {self.name!r} has quorum = {said!r}. Write a number of uploads, or ALL, "
                "HALF or ONE of vfl_flower.protocol.system."
            )
        if "quorum" in self.defaults:
            raise ConfigError(
                f"System {self.name!r} has a quorum among its defaults. Write System(quorum=...)."
            )
        kinds = set(KINDS.values())
        pairs = all(isinstance(each, tuple) and len(each) == 2 for each in self.rates.values())
        if not self.rates.keys() <= kinds or not pairs:
            raise ConfigError(
                f"System {self.name!r} has rates = {dict(self.rates)!r}. Write a pair for some of "
                f"{', '.join(sorted(kinds))}: one rate of the parties, one of the top model."
            )

    def default(self, key: str, optimizer: str) -> Any:
        """Return the system's default of an option with this optimizer, or None."""
        rates = self.rates.get(KINDS.get(optimizer, ""), ())
        return self.defaults.get(key, dict(zip(RATE_KEYS, rates, strict=False)).get(key))

    @property
    def axes(self) -> str:
        """Return the choices on the five axes, in words."""
        if self.baseline:
            return self.baseline
        from vfl_flower.protocol import estimators  # `vfl list` does not wait for torch

        config = RunConfig.of(self.defaults)
        codec = config.uplink.codec
        if config.uplink.surrogates:
            codec += ", error feedback"
        privacy = config.privacy.mechanism
        return " · ".join(
            (
                self.quorum.word,
                estimators.choose(config)(config).word,
                f"{config.estimator.server_update} server",
                codec,
                "no privacy" if privacy == "none" else privacy,
            )
        )


def load_system(name: str) -> System:
    """Return the system or baseline of a name."""
    return SYSTEMS.load(name)


def baselines() -> tuple[str, ...]:
    """Return the names of this project's baselines."""
    return tuple(name for name in SYSTEMS.known if load_system(name).baseline)
