"""A participant's own data: ids, and samples of given rows.

`own_files` has tables in files. For other data, subclass `Source`, and name the subclass in the
party's node configuration: ``source='waves.py:Waves'``.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.data.ids import encode_ids, in_pieces
from vfl_flower.data.samples import Arrays
from vfl_flower.data.withdrawn import numbers_of, read

Names = Collection[str] | None
Named = Iterator[tuple[str, Array]]  # columns by name, each [rows]

_NOBODY = np.zeros(0, np.uint64)
_FAR = 1e6  # deviations between zero and a mean from which on rounding errors count


@dataclass(frozen=True)
class Preparation:
    """How columns become numbers, learned from training rows, saved with the model.

    mean, deviation : for each resulting column; for images, for each colour.
    shape : shape of a sample, if columns do not decide it: images, sequences, tokens.
    dates : numeric columns that are dates, and the newest training date of each in days since
        1970. Dates are days since then.
    monotone : numeric columns that the score rises with (1) or falls with (-1).
    """

    numbers: dict[str, float]  # numeric columns, in order, and the median of each
    texts: dict[str, list[str]]  # text columns, in order, and the values that get a 0/1 column
    mean: list[float]
    deviation: list[float]
    shape: list[int] = field(default_factory=list)
    tokenizer: str = ""  # digest of the meaning of tokens
    dates: dict[str, float] = field(default_factory=dict)
    monotone: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the fields in JSON types; `Preparation(**...)` restores them."""
        later = "dates", "monotone"  # earlier versions wrote and compared none
        return {name: each for name, each in asdict(self).items() if each or name not in later}

    @property
    def columns(self) -> dict[str, slice]:
        """Return name -> place in the prepared rows, for each column of a table."""
        widths = dict.fromkeys(self.numbers, 1)
        widths |= {name: len(values) for name, values in self.texts.items()}
        ends = [0, *accumulate(widths.values())]
        places = (slice(low, high) for low, high in pairwise(ends))
        return dict(zip(widths, places, strict=True))


def signs_in(preparation: Preparation | None) -> list[int]:
    """Return the sign of each prepared column, 0 if it is free; nothing if all are."""
    if not preparation or not preparation.monotone:
        return []
    named = [preparation.monotone.get(name, 0) for name in preparation.numbers]
    return named + [0] * (len(preparation.mean) - len(named))


class Source(ABC):
    """Own data of a party, or of the label holder.

    A party's source is built from its node configuration and its number.
    """

    lazy: ClassVar[bool] = False
    """Whether to read samples on use, instead of once."""
    withdrawn: Path | None = None
    """The list of people whose rows must not be used."""

    def __init__(self, node_config: Mapping[str, Any], party: int) -> None:
        self.node_config = node_config
        self.party: int | None = party  # None at the label holder

    @property
    def number(self) -> int:
        """Return the number of the party, which the label holder's source has not."""
        assert self.party is not None
        return self.party

    @property
    def whose(self) -> str:
        """Return the data as the subject of a sentence."""
        return f"Party {self.party}'s source"

    @property
    @abstractmethod
    def id_column(self) -> Any:
        """Return the id of each row, whole numbers or texts: [rows]."""

    @abstractmethod
    def rows(self, places: Array, preparation: Preparation) -> Arrays:
        """Return samples of the rows at these places, as the bottom model reads them.

        Samples are an array [n, ...], or a dictionary of arrays by name, of float32 or int64.

        preparation : result of `learn`, now or when the model was trained.
        """

    def learn(self, train: Array) -> Preparation:
        """Learn from the training rows at these places how to prepare any row."""
        return Preparation({}, {}, [], [])

    def load(self, places: Array, preparation: Preparation) -> None:
        """Load these rows, if the source is lazy and keeps rows somewhere.

        Check the rows here if possible, so that errors appear before training.
        """
        return

    def raw_columns(self, places: Array, names: Names = None, dates: Names = None) -> Named:
        """Yield columns by name as they were before any preparation, each [rows].

        Numbers are float64, with NaN for missing values. Texts are objects, with None for them.
        A source without columns, such as images, yields nothing.

        names : columns to yield. The default is all feature columns.
        dates : columns that a model knows as dates, to be yielded as days since 1970. The default
            are those that the owner's options make dates.
        """
        return iter(())

    # Derived from the ids.

    def forget_ids(self) -> None:
        """Drop the cached ids, which take more memory than many columns."""
        for name in ("ids", "id_column"):
            vars(self).pop(name, None)

    @cached_property
    def ids(self) -> Sequence[bytes]:
        """Return the encoded ids of all rows, in their order. No id of a run is a withdrawn one."""
        found = encode_ids(self.id_column, self.whose)
        gone = read(self.withdrawn).have_ids(found)
        if not gone.any():
            return found
        return [b"w:%d" % row if gone[row] else one for row, one in enumerate(found)]

    def id_values(self, rows: Array) -> Array:
        """Return the ids of these rows, not encoded."""
        return np.asarray(self.id_column)[rows]

    def names(self, rows: Array, skipped: int = 0) -> NDArray[np.uint64]:
        """Return a number for the id of each of these rows, the same in all files."""
        some = in_pieces(self.ids, rows)
        return np.concatenate([_NOBODY, *(numbers_of(each, skipped) for each in some)])

    def people(self, rows: Array) -> NDArray[np.uint64]:
        """Return a number for each row's person, by the text of the id: 7 and "7" are one."""
        return self.names(rows, len(b"i:"))  # skip the prefix of `encode_ids`

    @cached_property
    def whole_digest(self) -> str:
        """Return the digest of all rows' ids."""
        return self.digest(np.arange(len(self.ids)))

    def digest(self, rows: Array) -> str:
        """Return a digest of these rows' ids, in their order."""
        digest = hashlib.sha256()
        for some in in_pieces(self.ids, rows):
            digest.update(b"\n".join(some) + b"\n")
        return digest.hexdigest()


class Rows:
    """Rows of a lazy source, read on indexing, like an array."""

    def __init__(self, source: Source, places: Array, preparation: Preparation) -> None:
        self.source, self.places, self.preparation = source, places, preparation
        source.load(places, preparation)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: Any) -> Arrays:
        places = self.places[rows]
        if len(places):
            return self.source.rows(places, self.preparation)
        one = self.source.rows(self.places[:1], self.preparation)
        if isinstance(one, Mapping):
            return {name: each[:0] for name, each in one.items()}
        return one[:0]


class Compact:
    """Rows in memory in a compact form, converted to samples on indexing."""

    def __init__(self, kept: Array, made: Callable[[Array], Arrays]) -> None:
        self._kept, self._made = kept, made

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, rows: Any) -> Arrays:
        return self._made(self._kept[rows])


def alike(one: Any, other: Any) -> bool:
    """Return whether two values in JSON types are equal, but for the last bits of numbers.

    Another machine sums in another order, so its means and deviations have other last bits.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return bool(one == other)


def scaling(train: Array, per_column: bool) -> tuple[Array, Array]:
    """Return mean and deviation of training rows, for each column or for all pixels; 1 for none."""
    axes = tuple(range(train.ndim - 1)) if per_column else None
    mean = np.asarray(train.mean(axis=axes, dtype=np.float64))
    deviation = np.asarray(train.std(axis=axes, dtype=np.float64))
    # Rounding errors of a large mean could hide a deviation, or look like one.
    for at in map(tuple, np.argwhere(np.abs(mean) >= _FAR * deviation)):
        column = train[(..., *at)]
        if (column == column.flat[0]).all():
            mean[at], deviation[at] = column.flat[0], 1.0
        else:
            apart = column.astype(np.float64) - float(column.flat[0])
            mean[at], deviation[at] = float(column.flat[0]) + apart.mean(), apart.std()
    return mean, deviation


class Moments:
    """Mean and deviation of each column, from rows that arrive in pieces."""

    def __init__(self) -> None:
        self._rows = 0
        self._mean: Any = 0.0
        self._least: Any = np.inf
        self._most: Any = -np.inf
        self._squares: Any = 0.0  # sum of squared distances from the mean

    def add(self, rows: Array) -> None:
        """Add rows [n, columns]."""
        if not len(rows):
            return
        self._least = np.minimum(self._least, rows.min(axis=0))
        self._most = np.maximum(self._most, rows.max(axis=0))
        mean, whole = rows.mean(axis=0, dtype=np.float64), self._rows + len(rows)
        apart = mean - self._mean
        self._squares = self._squares + rows.var(axis=0, dtype=np.float64) * len(rows)
        self._squares = self._squares + apart**2 * self._rows * len(rows) / whole
        self._mean = self._mean + apart * len(rows) / whole
        self._rows = whole

    def result(self) -> tuple[list[float], list[float]]:
        """Return mean and deviation of each column. A constant column has deviation 1."""
        deviation = np.sqrt(self._squares / self._rows)
        constant = self._least == self._most
        return self._mean.tolist(), np.where(constant, 1.0, deviation).tolist()


def scaled(rows: Array, mean: Array, deviation: Array) -> Array:
    """Standardise rows, in float32. Overflows become infinite."""
    out = np.empty(rows.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), 65536):  # in double precision, so not all at once
            part = slice(start, start + 65536)
            out[part] = (rows[part] - mean) / deviation
    return out
