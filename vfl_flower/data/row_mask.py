"""Which rows a party has, where it may lack some that others have.

All N rows of a run are numbered alike at all participants. A party knows which of them it has, and
nothing of others; the label holder knows of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig

Array = NDArray[Any]


@dataclass(frozen=True)
class RowMask:
    """The rows of a run that a party has: their numbers ``ids``, ascending, of ``rows`` in all."""

    rows: int
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, has: NDArray[np.bool_]) -> RowMask:
        """Those of which a mask [rows] says so."""
        return cls(len(has), np.flatnonzero(has).astype(np.int32))

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether it has each row, [rows]."""
        mask = np.zeros(self.rows, bool)
        mask[self.ids] = True
        return mask


@dataclass(frozen=True)
class Alignment:
    """Rows of one's own data that a run is of, in common order, and the name of their alignment.

    The label holder draws the name; it says nothing of the rows. A party has -1 for a row that it
    lacks, and only the label holder knows who has which, ``present`` [N, M]; none where all have
    all. ``nodes`` are those that were told, by party. ``answers`` are those by which the label
    holder has shown to each party that it knows their ids, [parties, 32]; nobody else has seen
    them.
    """

    name: str
    rows: NDArray[np.int64]
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    answers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))


def draw_row_masks(config: RunConfig, rows: int, parties: int) -> NDArray[np.bool_]:
    """Who has which rows of a divided data set, [rows, parties], by the seed.

    Each has a row by chance ``presence``; one that nobody would have is one party's, at random.
    """
    return _drawn(config.training.seed, config.data.presence, rows, parties)


@lru_cache(maxsize=2)  # each party asks, and the label holder
def _drawn(seed: int, presence: float, rows: int, parties: int) -> NDArray[np.bool_]:
    generator = np.random.default_rng([seed, 7])
    has = generator.random((rows, parties)) < presence
    nobody = np.flatnonzero(~has.any(1))
    has[nobody, generator.integers(0, parties, len(nobody))] = True
    has.flags.writeable = False
    return has
