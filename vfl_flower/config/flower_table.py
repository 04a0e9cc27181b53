"""Flower's table of options in pyproject.toml, and a run's options as Flower takes them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from vfl_flower.config.run_config import AUTO, KEYS, OPTIONS, opened

SHOWN = (
    *("strategy", "dataset", "label", "target", "id"),
    *("epochs", "batch-size", "party-lr", "seed", "out"),
)
"""Options that pyproject.toml shows to a user of Flower. No system has its own default for one
whose default is a value."""


def flower_defaults() -> dict[str, Any]:
    """Return the table ``[tool.flwr.app.config]`` of pyproject.toml: `SHOWN`, then all others.

    Flower refuses options that the table lacks, and passes on the table's value of each option
    that a user omits.
    """
    shown = {name: AUTO if KEYS[name].auto else KEYS[name].default for name in SHOWN}
    return shown | {name: AUTO for name in OPTIONS if name not in shown}


def given_to_flower(raw: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the options of a Flower run that a user named, or changed in pyproject.toml."""
    table = flower_defaults()
    return {key: raw[key] for key in raw if key in named or raw[key] != table.get(key)}


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with all expert settings in the option ``expert``: the reverse of `opened`."""
    values = opened(values)
    expert = {name: value for name, value in values.items() if name in KEYS and KEYS[name].expert}
    rest = {name: value for name, value in values.items() if name not in expert}
    words = (f"{name}={_text(value)}" for name, value in expert.items())
    return {**rest, "expert": shlex.join(words)} if expert else rest


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
