"""Flower Strategies: one exchange loop (`vertical`), and a file for each system and baseline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from strategies.alone import Alone
from strategies.asyrevel import AsyREVEL, SynREVEL
from strategies.cascaded import Cascaded, SynZoo
from strategies.dpzv import DPZV
from strategies.ef_vfl import CVFL, EFVFL
from strategies.frozen import Frozen
from strategies.joined import Joined
from strategies.split_nn import SplitNN
from strategies.vafl import Vafl, VaflT
from strategies.vertical import Vertical
from vfl_flower.config import RunConfig, parse
from vfl_flower.errors import ConfigError
from vfl_flower.models import BLACK_BOXES

SYSTEMS: dict[str, type[Vertical]] = {
    system.name: system
    for system in (
        SplitNN,
        Vafl,
        VaflT,
        AsyREVEL,
        SynREVEL,
        Cascaded,
        SynZoo,
        EFVFL,
        CVFL,
        DPZV,
        Frozen,
        Alone,
        Joined,
    )
}
"""Name -> Strategy, in the order in which `vfl list` prints them."""

BASELINES = (Frozen.name, Alone.name, Joined.name)


def resolve(raw: Mapping[str, Any]) -> RunConfig:
    """The run configuration that a user's keys give, validated.

    Raises
    ------
    ConfigError
        If a key, a value or the strategy's name is unknown, or values contradict each other.
    """
    # Types are part of the key, since 1, 1.0 and True are equal.
    return _resolve(tuple((key, type(raw[key]), raw[key]) for key in sorted(raw)))


@lru_cache(maxsize=64)
def _resolve(items: tuple[tuple[str, type, Any], ...]) -> RunConfig:
    given = parse({key: value for key, _, value in items})
    name = given.get("strategy", RunConfig.strategy)
    if name not in SYSTEMS:
        raise ConfigError(f"strategy = {name!r} is not known: choose one of {', '.join(SYSTEMS)}.")
    defaults = dict(SYSTEMS[name].defaults)
    other_privacy = given.get("privacy", "scalar") != "scalar"
    if {"epsilon", "delta", "noise_multiplier"} & given.keys() or other_privacy:
        for half in ("epsilon", "delta"):  # a budget is given whole, or taken whole
            defaults.pop(half, None)
    config = RunConfig(**{**defaults, **given})
    sends = config.codec != "identity" or config.downlink_codec != "identity"
    if name in BASELINES and (sends or config.labels == "shared"):
        raise ConfigError(
            f"strategy = {name!r} is a baseline, for which there are no codecs and no shared "
            "labels: leave `codec`, `downlink-codec` and `labels` out."
        )
    if config.bottom_model in BLACK_BOXES and not SYSTEMS[name].serves_black_boxes(config):
        raise ConfigError(
            f"bottom-model = {config.bottom_model!r} has no gradient, which strategy = {name!r} "
            "needs of it: choose a zeroth-order system, such as 'cascaded', or another model."
        )
    return config
