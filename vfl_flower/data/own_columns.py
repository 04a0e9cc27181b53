"""The columns of your own table: which ones are ids, labels, segments and features.

Nobody else learns the names or the content of a party's own columns. Errors that leave the party
say what is wrong, and its own log says where.
"""

import re
from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from vfl_flower.config.errors import ConfigError, UnfitError, asked, first_of, label_asked
from vfl_flower.config.logs import log
from vfl_flower.data.keys import ID, parse
from vfl_flower.data.source import Source

LOGGED = "Its own log says more."  # end of an error about a party's table that others read
_SHOWN = "A run in one process says more."
"""End of an error about the label holder's table that others read."""


@dataclass(frozen=True)
class OwnColumns(Source):
    """Columns by name, and their owner's options for them."""

    kind: ClassVar[str] = "table"

    path: str  # only the label holder's errors show it
    id: str = "id"
    columns: str = ""  # names separated by commas; empty: all other columns
    missing: str = "refuse"
    missing_words: str = ""  # texts that are missing values, separated by commas
    text: str = "refuse"
    dates: str = "refuse"
    monotonic: str = ""  # columns that the score rises or falls with, as in 'income:+ debt:-'
    match_columns: str = ""  # names in rules of own columns, as in 'surname=last_name birthdate'
    label: str = ""  # at the label holder
    segments: str = ""  # names of columns, as in ``columns``
    time: str = ""  # at the label holder; the column of periods, which are segments too
    party: int | None = None  # None: the label holder
    withdrawn: Path | None = None

    @property
    @abstractmethod
    def _names(self) -> list[str]:
        """Return the column names."""

    @property
    def whose(self) -> str:
        """Return the table as the subject of a sentence."""
        return self.path if self.party is None else f"Party {self.party}'s {self.kind}"

    @property
    def words(self) -> tuple[str, ...]:
        """Return the texts that are missing values, beside the empty one."""
        return tuple(filter(None, _listed(self.missing_words)))

    @property
    def matching(self) -> dict[str, str]:
        """Return the own column of each name in rules, if people have no common id."""
        given = {name: column for name, (column, _) in self._matched_columns().items()}
        if self.party is None:  # rules name columns that the label holder may lack
            given = {k: v for k, v in given.items() if k != v or v in self._names}
        if self.match_columns and not given:
            raise self.wrong(
                "does not have any column of the rules that match people. Name them in "
                "match-columns.",
                f"match-columns = {self.match_columns!r}.",
            )
        if absent := next((each for each in given.values() if each not in self._names), None):
            raise self.wrong(
                "does not have a column that `match-columns` names. Correct it.",
                f"match-columns = {self.match_columns!r}, and there is no column {absent!r}.",
            )
        return given

    @property
    def date_orders(self) -> dict[str, str]:
        """Return the order of dates in columns of rules, where `match-columns` names it."""
        return {name: order for name, (_, order) in self._matched_columns().items() if order}

    def _matched_columns(self) -> dict[str, tuple[str, str]]:
        """Return name -> (own column, order of dates) from NAME=COLUMN:ORDER."""
        named = (text.partition("=") for text in self.match_columns.replace(",", " ").split())
        columns = {name: (column or name).partition(":") for name, _, column in named}
        return {name: (column, order) for name, (column, _, order) in columns.items()}

    # --- features -------------------------------------------------------------------------------

    @property
    def leaves_out(self) -> bool:
        """Return whether `columns` names columns to leave out, each after a minus."""
        named = _listed(self.columns)
        return all(name.startswith("-") and name not in self._names for name in named)

    @property
    def feature_names(self) -> list[str]:
        """Return the feature columns: named ones, or all except ids, labels and segments."""
        others = [name for name in self._names if name not in (self.id, self.label)]
        kept_out = {*self.segment_names, *self.matching.values()}
        plain = [name for name in others if name not in kept_out]
        if self.columns in ("", "none"):
            return [] if self.columns else plain
        features = named = _listed(self.columns)
        if self.leaves_out:  # a later file may lack the columns
            named = [name.removeprefix("-") for name in named]
            features = [name for name in plain if name not in named]
        if len(set(named)) < len(named) or not set(features) <= set(others):
            raise self._misnamed()
        return features

    def check_features(self) -> None:
        """Refuse a table without a feature column, or without one to leave out."""
        if self.columns and self.leaves_out:
            named = {name.removeprefix("-") for name in _listed(self.columns)}
            if named - (set(self._names) - {self.id, self.label}):
                raise self._misnamed()
        if not self.feature_names:
            raise self.wrong("has no feature columns. Add one.", "it has only ids and labels.")

    def _misnamed(self) -> ConfigError:
        return self.wrong(
            "does not have the columns that `columns` names, or has one twice. Correct it.",
            f"columns = {self.columns!r}, the {self.kind} has {first_of(self._names, 100)}.",
        )

    # --- ids, labels and segments ---------------------------------------------------------------

    @property
    def has_ids(self) -> bool:
        """Return whether a column has the ids."""
        return True

    @property
    def names_people(self) -> bool:
        """Return whether there is a column of ids."""
        return self.has_ids and self.id in self._names

    @property
    def names_besides_ids(self) -> list[str]:
        """Return all columns except the id column."""
        return [name for name in self._names if name != self.id]

    @property
    def has_labels(self) -> bool:
        """Return whether there is a label column."""
        return self.label in self._names

    def check_labels(self) -> None:
        """Refuse a table without a label column besides its ids."""
        if not self.has_labels:
            ask = label_asked(self.label, self.names_besides_ids)
            raise self._without("no label column", self.label, "label", ask)
        if self.label == self.id:
            raise ConfigError(f"label = {self.label!r} names the id column. Name another column.")

    @property
    def segment_names(self) -> list[str]:
        """Return the columns that `segments` and `time` name."""
        named = [*(_listed(self.segments) if self.segments else []), self.time]
        return [*dict.fromkeys(filter(None, named))]

    def with_known_segments(self, given: Container[str]) -> Self:
        """Return this table with the segments that it has, and with all of ``given`` options."""
        known = ",".join(name for name in _listed(self.segments) if name in self._names)
        segments = self.segments if "segments" in given else known
        has_time = "time" in given or self.time in self._names
        return replace(self, segments=segments, time=self.time if has_time else "")

    def check_segments(self) -> None:
        """Refuse a segment column that is missing, or that is the label column."""
        if self.party is not None and not set(self.segment_names) <= set(self._names):
            raise self.wrong(
                "does not have the columns that `segments` names. Correct it.",
                f"segments = {self.segments!r}, the {self.kind} has {first_of(self._names, 100)}.",
            )
        others = [name for name in self._names if name not in (self.id, self.label)]
        shown = f"{first_of(others)}."
        for name in self.segment_names:
            option = "time" if name == self.time else "segments"
            if name == self.label:
                raise ConfigError(
                    f"{option} = {getattr(self, option)!r} names the label column {name!r}, and no "
                    "group of one label has figures. Name other columns."
                )
            if name not in self._names:
                ask = f"{asked(name, others, 'name')} some of {shown}"
                ask = ask if others else " it has no column besides ids and labels."
                raise self._without("no column", name, option, ask)

    # --- errors ---------------------------------------------------------------------------------

    def _without(self, what: str, name: str, option: str, ask: str) -> ConfigError:
        """Return an error about an absent column. The first line of a file may hold cells."""
        which = f", which `{option}` names" * (option != "label")
        said = f"{self.path} has {what} {name!r}{which}:"
        return ConfigError(f"{said}{ask}", outside=f"{said} correct `{option}`. {_SHOWN}")

    def wrong(self, what: str, detail: str, whole: str = "") -> ConfigError:
        """Return an error, with the detail after its first sentence, or with the whole text.

        The detail may quote cells, so others do not read it. A party's own log has it.
        """
        wrong, _, advice = what.removesuffix(".").partition(". ")
        what_and_where = whole or f"{wrong}: {detail}" + (f" {advice}." if advice else "")
        if self.party is None:
            return UnfitError(
                f"{self.path} {what_and_where}", outside=f"{self.path} {what} {_SHOWN}"
            )
        log.warning("The %s %s of this party %s", self.kind, self.path, what_and_where)
        return UnfitError(f"{self.whose} {what} {LOGGED}")


def _listed(names: str) -> list[str]:
    """Return the names in an option, which commas separate."""
    return [name.strip() for name in names.split(",")]


def signs_of(monotonic: str) -> dict[str, int]:
    """Return 1 or -1 for each column of 'income:+ debt:-'; 0 for a text that names none."""
    *pairs, rest = re.split(r":([+-])(?:[,\s]+|$)", monotonic.strip())
    names = map(str.strip, pairs[::2])
    found = {name: 1 if sign == "+" else -1 for name, sign in zip(names, pairs[1::2], strict=True)}
    return found | ({rest: 0} if rest else {})


def match_columns_of(match: str, given: str) -> str:
    """Return an option ``match-columns`` that also has the columns of rules which it leaves out."""
    pairs = given.replace(",", " ").split() if match else []
    named = [text.partition("=")[0] for text in pairs]
    columns = [name for rule in (parse(match) if match else ()) for name in rule.columns]
    return " ".join([*pairs, *dict.fromkeys(c for c in columns if c not in (*named, ID))])
