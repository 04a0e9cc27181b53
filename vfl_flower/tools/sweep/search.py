"""Read and check what a sweep searches: the options, ranges and choices of ``--search``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import KEYS, RunConfig, parse
from vfl_flower.label_holder.earlier_run import without_noise

_RANGE = re.compile(r"(?P<low>[^:|]+?)\.\.(?P<high>[^:|]+)(?P<log>:log)?")
_HOW = "write OPTION=a..b, OPTION=a..b:log or OPTION=x|y|z, with spaces between options"
NOT_SEARCHED = {  # trials could not be compared, or would not all train
    *("strategy", "task", "model", "without", "resume", "out", "observer", "seed", "parties"),
    *("dataset", "label", "target", "id", "test-fraction", "validation-fraction"),
}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, evenly or by their logarithms."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def ends(self) -> tuple[Any, Any]:
        """Return the first and the last value."""
        return self.low, self.high

    def value(self, drawn: Any) -> Any:
        """Return a number that was drawn, to three digits."""
        if isinstance(drawn, int):
            return drawn
        return min(max(float(f"{drawn:.3g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """Some values."""

    key: str
    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, Any]:
        """Return the first and the last value."""
        return self.values[0], self.values[-1]

    def value(self, drawn: Any) -> Any:
        """Return the value that was drawn."""
        return drawn


def search_of(texts: Sequence[str], given: Mapping[str, Any]) -> list[Range | Choice]:
    """Return the ranges and choices of ``--search``, which may name no option that is given."""
    try:
        words = [word for text in texts for word in shlex.split(text)]
    except ValueError:
        raise ConfigError(f"--search {' '.join(texts)!r} has a quote that is left open.") from None
    if not words:
        raise ConfigError(f"--search names nothing: {_HOW}.")
    found: dict[str, Range | Choice] = {}
    for word in words:
        each = _of(word)
        if each.key in found:
            raise ConfigError(f"--search names {each.key} twice: leave one out.")
        if each.key in given:
            raise ConfigError(f"{each.key} is in -c and in --search: leave it out of one.")
        found[each.key] = each
    return list(found.values())


def of_trial(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a trial, without noise on embeddings if it chose no privacy."""
    keys = {**shared, **own}
    return without_noise(keys) if own.get("privacy") == "none" else keys


def _of(word: str) -> Range | Choice:
    """Return the range or the choice that one word names."""
    name, equals, said = word.partition("=")
    if not equals or not said:
        raise ConfigError(f"--search {word!r} cannot be read: {_HOW}.")
    if name not in KEYS:
        parse({name: ""})  # raises, with the name that was perhaps meant
    if name in NOT_SEARCHED:
        raise ConfigError(
            f"{name} cannot be searched, as it decides what a trial does or what it is measured "
            "by: set it for all by -c."
        )
    kind = KEYS[name].type
    match = _RANGE.fullmatch(said) if kind in (int, float) else None
    if match:
        low, high = _value(name, match["low"]), _value(name, match["high"])
        if low >= high:
            raise ConfigError(f"--search {word!r} is no range: write the lower number first.")
        if match["log"] and low <= 0:
            raise ConfigError(f"--search {word!r} has no logarithm: let it begin above 0.")
        return Range(name, low, high, bool(match["log"]))
    values = tuple(_value(name, each) for each in said.split("|"))
    if len(values) == 1:
        what = "a..b or x|y" if kind in (int, float) else "x|y"
        raise ConfigError(f"--search {word!r} is one value: write {name}={what}, or set it by -c.")
    if len(set(values)) < len(values):
        raise ConfigError(f"--search {word!r} names a value twice: leave one out.")
    return Choice(name, values)


def _value(name: str, text: str) -> Any:
    """Return a value of an option, in the option's type."""
    kind = KEYS[name].type
    value: Any = text
    if kind is bool:
        value = {"true": True, "false": False}.get(text, text)
    elif kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"--search: {name} = {text} must be {what}; {_HOW}.") from None
    RunConfig.of(parse({name: value}))
    return value
