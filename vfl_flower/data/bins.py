"""Groups of the rows by one column: bins, to count and compare, and segments, to report on.

Bins are quantiles of numbers, frequent values of texts, and missing values. Segments are all texts,
or ranges of numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.column_types import text_of
from vfl_flower.data.later import pd

MOST = 10  # bins of a column's known values, by default
MISSING = "missing"  # the segment of rows without a value

_MOST_SEGMENTS = 100
_RANGES = 5  # of a column with more numbers


@dataclass(frozen=True)
class Bins:
    """Bins of one column, learnt from some rows.

    A number x is in bin i if ``edges[i-1] < x <= edges[i]``. A text is in the bin of its value, or
    in the bin of all other texts. The last bin has the missing values.
    """

    edges: tuple[float, ...] = ()  # upper edges of all number bins but the last, ascending
    values: tuple[str, ...] | None = None  # texts, the most frequent first; None for numbers

    @classmethod
    def learn(cls, column: Array, most: int = MOST) -> Bins:
        """Learn at most ``most`` bins of known values, or one for each if there are so few."""
        if column.dtype.kind not in "fiub":
            known = Counter(text_of(each) for each in column[~_is_missing(column)].tolist())
            frequent = sorted(known, key=lambda text: (-known[text], text))
            return cls(values=tuple(frequent[: most if len(known) <= most else most - 1]))
        numbers = np.sort(column.astype(np.float64)[~_is_missing(column)])
        if not len(numbers):
            return cls()
        distinct = np.unique(numbers)
        if len(distinct) > most:
            shares = np.arange(1, most) / most
            distinct = np.unique(np.quantile(numbers, shares, method="inverted_cdf"))
        return cls(edges=tuple(distinct[distinct < numbers[-1]].tolist()))

    @property
    def count(self) -> int:
        """Return the number of bins, with the bin of missing values."""
        return len(self.edges if self.values is None else self.values) + 2

    def of(self, column: Array) -> NDArray[np.int64]:
        """Return the bin of each value of a column [R], from 0."""
        missing = _is_missing(column)
        if self.values is None:
            edges = np.array(self.edges, np.float64)
            bins = np.searchsorted(edges, column.astype(np.float64), side="left")
        else:
            known = {text: number for number, text in enumerate(self.values)}
            texts = (known.get(text_of(each), len(known)) for each in column.tolist())
            bins = np.fromiter(texts, np.int64, len(column))
        return np.where(missing, self.count - 1, bins).astype(np.int64)

    def counts(self, column: Array) -> NDArray[np.int64]:
        """Return the number of a column's values in each bin, [count]."""
        return np.bincount(self.of(column), minlength=self.count)

    @property
    def names(self) -> list[str]:
        """Return a name for each bin, for tables that its owner reads."""
        if self.values is not None:
            return [*self.values, "other", "missing"]
        if not self.edges:
            return ["all", "missing"]
        # Different numbers are different texts, of six digits if possible.
        ways = [[f"{each:.{digits}g}" for each in self.edges] for digits in (6, 9, 12)]
        ways.append(list(map(repr, self.edges)))
        edges = next(texts for texts in ways if len(set(texts)) == len(self.edges))
        between = [f"({low}, {high}]" for low, high in pairwise(edges)]
        return [f"<= {edges[0]}", *between, f"> {edges[-1]}", "missing"]

    as_json = asdict

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Bins:
        """Return the bins from what `as_json` returned, also after a JSON file."""
        values = fields["values"]
        return cls(tuple(fields["edges"]), None if values is None else tuple(values))


def _is_missing(column: Array) -> NDArray[np.bool_]:
    """Return which values are missing: NaN, None, or an empty text."""
    if column.dtype.kind in "iub":
        return np.zeros(len(column), bool)
    if column.dtype.kind == "f":
        return np.isnan(column)
    missing = (each is None or each != each or each == "" for each in column.tolist())
    return np.fromiter(missing, bool, len(column))


# --- segments -----------------------------------------------------------------------------------


def check_segments(columns: Mapping[str, Array]) -> None:
    """Raise `ConfigError` if a column has too many values for segments."""
    for name, values in columns.items():
        segments(name, values)


def segments(column: str, values: Array) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of a column's segments in their order, and the segment of each row, [R].

    Each value is a segment, and so are rows without a value. More than ten different numbers form
    five ranges with about equally many rows.
    """
    values = np.asarray(values)
    codes, known = pd.factorize(values, sort=False)
    if values.dtype.kind in "iuf" and len(known) > 2 * _RANGES:
        bins = Bins.learn(values, _RANGES)
        names, numbers = [*bins.names[:-1], MISSING], bins.of(values)
    else:
        if len(known) > _MOST_SEGMENTS:
            raise ConfigError(
                f"Column {column!r} has more than {_MOST_SEGMENTS} values, too many for segments. "
                "Group its values, or leave it out of `segments`."
            )
        texts = np.array([_text(each) for each in known], object)
        of_numbers = np.asarray(known).dtype.kind in "iufb"  # by size, and texts by the alphabet
        order = np.argsort(np.asarray(known) if of_numbers else texts, kind="stable")
        place = np.empty(len(known) + 1, np.int64)
        place[order] = np.arange(len(known))
        place[-1] = len(known)  # factorize's number of a missing value is -1
        names, numbers = [*texts[order].tolist(), MISSING], place[codes]
    at = {name: place for place, name in enumerate(dict.fromkeys(names))}  # merge equal texts
    numbers = np.array([at[name] for name in names])[numbers]
    there = np.bincount(numbers, minlength=len(at)) > 0
    named = [name for name, is_there in zip(at, there, strict=True) if is_there]
    return named, (np.cumsum(there) - 1)[numbers]


def _text(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float | np.floating) else str(value)
    return text or MISSING
