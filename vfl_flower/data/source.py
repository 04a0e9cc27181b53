"""A participant's own data: ids, and samples of given rows.

`own_files` has tables in files; subclass `Source` for anything else, and name it in the party's
node configuration: ``source='waves.py:Waves'``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.psi import encode_ids, id_kind

Array = NDArray[Any]


@dataclass(frozen=True)
class Preparation:
    """How columns become numbers, as the training rows taught it; kept with the model.

    numbers : numeric columns, in order, and the median of each.
    texts : text columns, in order, and the values of each that get a 0/1 column.
    mean, deviation : of each resulting column.
    """

    numbers: dict[str, float]
    texts: dict[str, list[str]]
    mean: list[float]
    deviation: list[float]

    def as_json(self) -> dict[str, Any]:
        """What `Preparation(**...)` makes it of again."""
        return asdict(self)


class Source(ABC):
    """Own data of a party, or of the label holder.

    A party's is made of its node configuration and its number.
    """

    lazy: ClassVar[bool] = False
    """Whether samples are read when they are used, instead of once."""

    def __init__(self, node_config: Mapping[str, Any], party: int) -> None:
        self.node_config = node_config
        self.party: int | None = party

    @property
    def whose(self) -> str:
        """The data as the subject of a sentence."""
        return f"Party {self.party}'s source"

    @property
    @abstractmethod
    def id_column(self) -> Any:
        """The id of each row, whole numbers or texts: [rows]."""

    @abstractmethod
    def rows(self, places: Array, preparation: Preparation) -> Array:
        """Samples of the rows at these places, float32 [n, ...], as the bottom model reads them.

        ``preparation`` is what `learn` has given, now or when the model was trained.
        """

    def learn(self, train: Array) -> Preparation:
        """What must be known of the training rows, at these places, to prepare any row."""
        return Preparation({}, {}, [], [])

    # What follows from the ids.

    @cached_property
    def ids(self) -> list[bytes]:
        """The ids of all rows, in their order, encoded."""
        return encode_ids(self.id_column, self.whose)

    @property
    def id_kind(self) -> str:
        """What ids are: whole numbers, or texts."""
        return id_kind(self.id_column)

    def id_values(self, rows: Array) -> Array:
        """The ids of these rows, as they are."""
        values: Array = np.asarray(self.id_column)[rows]
        return values

    def names(self, rows: Array) -> NDArray[np.uint64]:
        """A number for the id of each of these rows, the same in all files."""
        ids = (self.ids[row] for row in rows.tolist())
        each = b"".join(hashlib.blake2b(encoded, digest_size=8).digest() for encoded in ids)
        return np.frombuffer(each, "<u8")

    def digest(self, rows: Array) -> str:
        """Digest of these rows' ids, in their order."""
        digest = hashlib.sha256()
        for row in rows.tolist():
            digest.update(self.ids[row] + b"\n")
        return digest.hexdigest()


class Rows:
    """Rows of a lazy source, which are read when they are asked for, as from an array."""

    def __init__(self, source: Source, places: Array, preparation: Preparation) -> None:
        self.source = source
        self.places = places
        self.preparation = preparation
        self.shape = (len(places), *source.rows(places[:1], preparation).shape[1:])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: Any) -> Array:
        places = self.places[rows]
        if not len(places):
            return np.zeros((0, *self.shape[1:]), np.float32)
        return self.source.rows(places, self.preparation)


# --- scaling ------------------------------------------------------------------------------------


def scaling(train: Array, per_column: bool) -> tuple[Array, Array]:
    """Mean and deviation of training rows: of each column of a table, or of all pixels at once."""
    axes = tuple(range(train.ndim - 1)) if per_column else None
    mean = train.mean(axis=axes, dtype=np.float64)
    deviation = train.std(axis=axes, dtype=np.float64)
    constant = deviation <= 1e-9 * np.abs(mean)  # up to rounding
    return np.asarray(mean), np.where(constant, 1.0, deviation)


def scaled(rows: Array, mean: Array, deviation: Array) -> Array:
    """Rows less the mean, over the deviation, as float32; what overflows becomes infinite."""
    out = np.empty(rows.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), 65536):  # in double precision, but not all at once
            part = slice(start, start + 65536)
            out[part] = (rows[part] - mean) / deviation
    return out
