"""Bins of one column: quantiles of numbers, frequent values of texts, and missing values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.data.column_types import text_of

MOST = 10  # bins of a column's known values, by default


@dataclass(frozen=True)
class Bins:
    """Bins of one column, learnt from some rows.

    A number x is in bin i if ``edges[i-1] < x <= edges[i]``. A text is in the bin of its value, or
    in the bin of all other texts. The last bin has the missing values.

    edges : upper edges of all number bins but the last, ascending.
    values : texts with a bin each, the most frequent first. None for a column of numbers.
    """

    edges: tuple[float, ...] = ()
    values: tuple[str, ...] | None = None

    @classmethod
    def learn(cls, column: Array, most: int = MOST) -> Bins:
        """Learn at most ``most`` bins of known values from a column [R].

        A column of numbers with few values has a bin for each value.
        """
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
        return len(self.edges) + 2 if self.values is None else len(self.values) + 2

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
        edges = _texts(self.edges)
        between = [f"({low}, {high}]" for low, high in pairwise(edges)]
        return [f"<= {edges[0]}", *between, f"> {edges[-1]}", "missing"]

    def as_json(self) -> dict[str, Any]:
        """Return the fields in JSON types; `from_json` restores them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Bins:
        """Return the bins from what `as_json` returned, also after a JSON file."""
        values = fields["values"]
        return cls(tuple(fields["edges"]), None if values is None else tuple(values))


def _texts(edges: Sequence[float]) -> list[str]:
    """Return different numbers as different texts, of six digits if possible."""
    ways = [[f"{each:.{digits}g}" for each in edges] for digits in (6, 9, 12)]
    ways.append(list(map(repr, edges)))
    return next(texts for texts in ways if len(set(texts)) == len(edges))


def _is_missing(column: Array) -> NDArray[np.bool_]:
    """Return which values are missing: NaN, None, or an empty text."""
    if column.dtype.kind in "iub":
        return np.zeros(len(column), bool)
    if column.dtype.kind == "f":
        return np.isnan(column)
    return np.fromiter(
        (each is None or each != each or each == "" for each in column.tolist()),
        bool,
        len(column),
    )
