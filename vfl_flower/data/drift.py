"""Drift of columns: the population stability index between training rows and new rows.

With the share p of a bin among training rows, and its share q among new rows, the index is the sum
over all bins of (q - p) ln(q / p). `Watch` keeps the bins and counts of some columns. It keeps no
row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.files import whole
from vfl_flower.data.bins import Bins
from vfl_flower.data.later import pd
from vfl_flower.records.ledger import today

Counts = NDArray[np.int64]
Columns = Iterable[tuple[str, Array]]  # columns by name, each [rows]

MODERATE, LARGE = 0.1, 0.25  # indices above which drift is moderate, and large
LEAST = 200
"""Least new rows that get an index. At 200 rows, chance alone rarely reaches 0.1."""
FLOOR = 1e-4  # smaller shares of a bin count as this: the logarithm of no share is infinite
HIDING = 0.25  # spread of the logarithm of a random factor that hides an index
_CHANCE = 0.001  # most chance that a warning is false, over all columns of a watch
_ROWS, _FEWEST, _VALUES = 20_000, 1_000, 10_000_000  # that `sampled` keeps

_MOST = 100_000  # rows of a window
_STEP = 1_000  # most new rows between two indices of a window


def _terms(then: Counts, now: Counts) -> NDArray[np.float64]:
    """Return what each bin adds to the population stability index of counts by bin, [bins]."""
    p, q = (np.maximum(counts / counts.sum(), FLOOR) for counts in (then, now))
    return (q - p) * np.log(q / p)


class Drift(NamedTuple):
    """Drift of a column."""

    raw: float  # the population stability index
    value: float  # the index, less its mean under chance; at least 0
    chance: float  # an index that chance alone rarely exceeds

    def level(self, factor: float = 1.0) -> str:
        """Return "moderate" or "large"; an empty text below, or if chance explains the index."""
        if self.raw * factor <= self.chance:
            return ""
        value = self.value * factor
        return "large" if value > LARGE else "moderate" if value > MODERATE else ""


def drift_of(then: Counts, now: Counts, looks: int = 1) -> Drift:
    """Return the drift between counts by bin, [bins], of ``looks`` columns that are looked at.

    Without drift, n new rows and m training rows have an index of about (1/n + 1/m) times a
    chi-square variable. Its degrees of freedom are the bins with rows, less one. So subtract the
    mean. Chance exceeds the bound with a probability of 0.001 / ``looks``.
    """
    raw, unit = float(_terms(then, now).sum()), 1 / now.sum() + 1 / then.sum()
    freedom = int(((then > 0) | (now > 0)).sum()) - 1
    bound = unit * _chi_square(freedom, _CHANCE / looks) if freedom else 0.0
    return Drift(raw, float(max(0.0, raw - freedom * unit)), float(bound))


def _chi_square(freedom: int, chance: float) -> float:
    """Return what a chi-square variable exceeds with this probability (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    z = NormalDist().inv_cdf(1 - chance)
    return float(freedom * (1 - spread + z * spread**0.5) ** 3)


@dataclass
class _Watched:
    """One column: its bins, and counts by bin of training rows and of new rows, [bins]."""

    bins: Bins
    then: Counts

    def __post_init__(self) -> None:
        self.now = np.zeros_like(self.then)


class Watch:
    """Bins and counts of columns at training rows, and counts of new rows."""

    def __init__(self) -> None:
        self._columns: dict[str, _Watched] = {}
        self.rows = 0  # new ones

    @classmethod
    def learn(cls, columns: Columns) -> Watch:
        """Learn bins and shares from columns of training rows."""
        watch = cls()
        for name, values in columns:
            bins = Bins.learn(values)
            watch._columns[name] = _Watched(bins, bins.counts(values))
        return watch

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._columns)

    def add(self, columns: Columns) -> None:
        """Count new rows."""
        rows = 0
        for name, values in columns:
            column = self._columns[name]
            column.now = column.now + column.bins.counts(values)
            rows = len(values)
        self.rows += rows

    def clear(self) -> None:
        """Forget the new rows."""
        self.rows = 0
        for column in self._columns.values():
            column.now = np.zeros_like(column.then)

    def drifts(self) -> dict[str, Drift]:
        """Return the drift of each column, if there are new rows."""
        looks = len(self._columns)
        known = {name: each for name, each in self._columns.items() if each.now.sum()}
        return {name: drift_of(each.then, each.now, looks) for name, each in known.items()}

    def largest(self) -> Drift | None:
        """Return the largest drift of all columns; None with fewer than `LEAST` new rows."""
        if self.rows < LEAST or not self._columns:
            return None
        return max(self.drifts().values(), key=lambda each: each.value)

    def levels(self, hidden: bool = False) -> tuple[int, int]:
        """Return how many columns drift moderately, and how many largely.

        ``hidden`` multiplies each index by a random factor, so that one row hardly changes them.
        """
        drifts, generator = self.drifts().values(), np.random.default_rng()
        spread = HIDING if hidden else 0.0
        factors = np.exp(generator.uniform(-spread, spread, len(drifts)))
        levels = [each.level(factor) for each, factor in zip(drifts, factors, strict=True)]
        return levels.count("moderate"), levels.count("large")

    def table(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each column: its drift, and the bin that adds most to the index."""
        for name, drift in self.drifts().items():
            column = self._columns[name]
            p, q = column.then / column.then.sum(), column.now / column.now.sum()
            most = int(_terms(column.then, column.now).argmax())
            yield {
                "column": name,
                "index": drift.value,
                "plain_index": drift.raw,
                "level": drift.level(),
                "bin": column.bins.names[most],
                "share_in_training": p[most],
                "share_now": q[most],
                "training_rows": int(column.then.sum()),
                "new_rows": int(column.now.sum()),
            }

    def write(self, path: Path) -> None:
        """Write `table` as a csv file."""
        with whole(path) as file:
            write_csv(file, pd.DataFrame(self.table()))

    def as_json(self) -> list[dict[str, Any]]:
        """Return names, bins and counts of training rows in JSON types."""
        return [
            {"name": name, "bins": each.bins.as_json(), "counts": each.then.tolist()}
            for name, each in self._columns.items()
        ]

    @classmethod
    def from_json(cls, columns: Sequence[dict[str, Any]]) -> Watch:
        """Return a watch from the result of `as_json`."""
        watch = cls()
        for each in columns:
            counts = np.array(each["counts"], np.int64)
            watch._columns[each["name"]] = _Watched(Bins.from_json(each["bins"]), counts)
        return watch


def between(then: Columns, now: Columns) -> dict[str, dict[str, float]]:
    """Return each column's `Drift` between other rows and these, in JSON types."""
    watch = Watch.learn(then)
    watch.add(now)
    return {name: each._asdict() for name, each in watch.drifts().items()}


def sampled(rows: int, columns: int, values: int | None = None) -> NDArray[np.int64]:
    """Return the places of at most 20,000 rows, ascending, to count.

    More rows would change an index by less than 0.001. ``values`` bounds their values.
    """
    least, values = (_FEWEST, _VALUES) if values is None else (LEAST, values)
    most = max(least, min(_ROWS, values // max(1, columns)))
    if rows <= most:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False, shuffle=False))


def columns_of(matrix: Array) -> Iterator[tuple[str, Array]]:
    """Return the columns of a matrix [rows, columns], named by their numbers."""
    return ((str(number), column) for number, column in enumerate(matrix.T))


class Window:
    """Which rows of a service are counted, and when: each row once in a window.

    A window lasts for a day of UTC, or for 100,000 rows, but for at least `LEAST` rows. Indices are
    due when the window has twice as many rows as before, or 1,000 more. So each new row shares its
    first index with as many other new rows as old ones, or with 999.
    """

    def __init__(self) -> None:
        self.waiting = 0  # rows that are not in an index yet
        self._rows = 0
        self._seen: set[Hashable] = set()
        self._day = today()

    def new(self, keys: Sequence[Hashable]) -> list[int]:
        """Return positions of the rows that the window has not counted yet. Count them."""
        places = {key: at for at, key in enumerate(keys) if key not in self._seen}
        self._seen.update(places)
        self.waiting += len(places)
        return list(places.values())

    @property
    def is_due(self) -> bool:
        """Return whether the next indices are due."""
        return self.waiting >= max(LEAST, min(self._rows, _STEP))

    def step(self) -> bool:
        """Take the waiting rows. Return whether they begin a new window."""
        day = today()
        begins = self._rows >= LEAST and (day != self._day or self._rows >= _MOST)
        if begins:
            self._rows, self._seen = 0, set()
        self._day = day if begins or not self._rows else self._day
        self._rows, self.waiting = self._rows + self.waiting, 0
        return begins
