"""Which rows of its own data a participant uses, once the participants are aligned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


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
