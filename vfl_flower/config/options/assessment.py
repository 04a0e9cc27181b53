"""Options of the figures that show how well a model does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options.data import DataConfig
from vfl_flower.config.options.option import key


class Rule(NamedTuple):
    """How the threshold is chosen.

    kind : ``number``, ``f1``, ``cost`` or ``rate``.
    number : the threshold; the cost of a missed positive in false alarms; or the share to flag.
    """

    kind: str
    number: float = math.nan


_DEFAULT = Rule("number", 0.5)


@dataclass(frozen=True)
class AssessmentConfig:
    """The threshold of two classes, and the segments of rows."""

    threshold: str = key(
        "0.5",
        "Sets the probability above which the second of two classes is predicted. `f1`, `cost:R` "
        "and `rate:R` choose it on validation rows. `f1` takes the best F1 score. With `cost:R`, a "
        "missed positive costs as much as R false alarms. `rate:R` flags that share of the rows.",
        example="dataset='breast-cancer' threshold='cost:5'",
        values="a number between 0 and 1, 'f1', 'cost:R' or 'rate:R'",
        numbers=True,
        related=("validation-fraction", "class-weights", "segments"),
    )
    min_segment: int = key(
        50,
        "Sets the fewest rows of a segment that has figures.",
        example="dataset='files:labels.csv' segments='region' min-segment=100",
        expert=True,
        least=1,
        related=("segments",),
    )

    @property
    def rule(self) -> Rule:
        """Return how the threshold is chosen, or raise `ConfigError` if the option is invalid."""
        kind, _, text = self.threshold.partition(":")
        if self.threshold == "f1":
            return Rule("f1")
        try:
            number = float(text if kind in ("cost", "rate") else self.threshold)
        except ValueError:
            number = math.nan
        if kind == "cost" and 0 < number < math.inf:
            return Rule(kind, number)
        if kind == "rate" and 0 < number < 1:
            return Rule(kind, number)
        if kind not in ("cost", "rate") and 0 < number < 1:
            return Rule("number", number)
        raise ConfigError(
            f"threshold = {self.threshold!r} is not a threshold. Give a number between 0 and 1, "
            "'f1', 'cost:5' for the cost of a missed positive, or 'rate:0.1' for the share to flag."
        )

    def check(self, data: DataConfig) -> None:
        """Raise `ConfigError` if these options contradict the options of the data."""
        rule = self.rule
        if data.target == "regression" and rule != _DEFAULT:
            raise ConfigError(
                f"threshold = {self.threshold!r} is for two classes, and target = 'regression' has "
                "none. Leave threshold out."
            )
        if rule.kind != "number" and data.validation_fraction == 0:
            raise _no_rows(self.threshold)
        for option, named in (("segments", data.segments), ("time", data.time)):
            if named and not data.own_data:
                raise ConfigError(
                    f"{option} = {named!r} names columns of the label holder's file, and dataset "
                    f"= {data.dataset!r} is divided among the parties. Leave {option} out, or set "
                    "dataset='files:PATH'."
                )
        if data.split == "time" and not (data.time and data.test_fraction and data.align != "ids"):
            raise ConfigError(
                "split = 'time' needs a column of dates, test rows, and align = 'psi' or 'any'. "
                "Set time, a test-fraction above 0 and such an align, or leave split out."
            )

    def check_rows(self, classes: int, validation: int) -> None:
        """Raise `ConfigError` if so many classes and validation rows do not fit the threshold."""
        if classes > 2 and self.rule != _DEFAULT:
            raise ConfigError(
                f"threshold = {self.threshold!r} is for two classes, and the labels have "
                f"{classes}. Leave threshold out."
            )
        if self.rule.kind != "number" and not validation:
            raise _no_rows(self.threshold)


def _no_rows(threshold: str) -> ConfigError:
    return ConfigError(
        f"threshold = {threshold!r} is chosen on validation rows, and there are none. Set "
        "validation-fraction, or give threshold as a number."
    )
