"""Flower Strategies: one exchange loop (`vertical`), and a file for each system and baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from vfl_flower.config import RunConfig, keys, parse
from vfl_flower.errors import ConfigError
from vfl_flower.holder import checkpoint
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

_MAY_DIFFER = (  # where given, from the run that is gone on with: not what it computes, but how
    *("transport", "stream_address", "stream_ports", "session_seconds", "parties"),
    *("party_timeout", "on_party_failure", "checkpoint_every", "resume"),
)

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


def configured(raw: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run: `resolve`, or with ``resume`` that of the run to go on with.

    Raises
    ------
    ConfigError
        As `resolve`; or if that run has finished, or had another value for a key that is given.
    """
    given = parse(raw)
    if not given.get("resume"):
        return resolve(raw)
    folder = given["resume"]
    found = checkpoint.load(folder)
    if found.finished:
        raise ConfigError(f"The run in {folder} has finished: there is nothing to resume.")
    anew = {}
    for key, spec in keys().items():
        now, then = given.get(spec.name, spec.default), getattr(found.config, spec.name)
        if now in (spec.default, then) or spec.name == "out":
            continue
        if spec.name not in _MAY_DIFFER:
            raise ConfigError(
                f"{folder} holds a run with {key} = {then!r}, not {now!r}: leave the key out to go "
                "on with that run, or `resume` to begin another."
            )
        anew[spec.name] = now
    return replace(found.config, **anew)
