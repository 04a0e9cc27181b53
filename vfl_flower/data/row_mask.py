"""Row masks: which rows of a run a party has, if parties may lack rows.

All participants number the N rows of a run alike. A party knows only its own mask. The label holder
knows the masks of all parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.run_config import RunConfig


@dataclass(frozen=True)
class RowMask:
    """A party's rows: their numbers ``ids``, ascending, of ``rows`` rows of the run."""

    rows: int
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, has: NDArray[np.bool_]) -> RowMask:
        """Build from a mask [rows]."""
        return cls(len(has), np.flatnonzero(has).astype(np.int32))

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Return the mask [rows]."""
        mask = np.zeros(self.rows, bool)
        mask[self.ids] = True
        return mask


@dataclass(frozen=True)
class Alignment:
    """A participant's rows of a run, in common order, and the name of their alignment.

    name : name that the label holder draws. It reveals nothing about the rows.
    rows : places of the rows in the participant's data; -1 for a row that a party lacks.
    present : row mask [N, M] of all parties, known to the label holder alone; None if all parties
        have all rows.
    nodes : party -> node, of the parties that know the alignment.
    answers : proofs [parties, 32] that the label holder knows each party's ids. Nobody else has
        seen them.
    known : party -> number of the label holder's ids that it has, as far as this is known.
    rules : figures of each rule at each party (`alignment.by_rules.RuleFigures`), without ids.
    held_out : number of test rows; 0 if ``test-fraction`` says it (`split.newest`).
    """

    name: str
    rows: NDArray[np.int64]
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    answers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    known: Mapping[int, int] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()
    held_out: int = 0


def draw_row_masks(config: RunConfig, rows: int, parties: int) -> NDArray[np.bool_]:
    """Draw the row masks of a partitioned data set, [rows, parties], by the seed.

    Each party has a row with probability ``presence``. A row without a party goes to a random one.
    """
    return _drawn(config.training.seed, config.data.presence, rows, parties)


def row_masks_of(
    config: RunConfig, numbers: tuple[Array, Array], parties: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the drawn row masks of these training and test rows, each [rows, parties]."""
    has = draw_row_masks(config, 1 + max(int(part.max()) for part in numbers), parties)
    return has[numbers[0]], has[numbers[1]]


@lru_cache(maxsize=2)  # each party and the label holder call it
def _drawn(seed: int, presence: float, rows: int, parties: int) -> NDArray[np.bool_]:
    generator = np.random.default_rng([seed, 7])
    has = generator.random((rows, parties)) < presence
    nobody = np.flatnonzero(~has.any(1))
    has[nobody, generator.integers(0, parties, len(nobody))] = True
    has.flags.writeable = False
    return has
