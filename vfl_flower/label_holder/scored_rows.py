"""Rows that a model has scored, and what their scores were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class ScoredRows:
    """Scored rows, and what their scores were computed from."""

    blocks: Tensor  # embeddings, [R, width]; zeros where a party has given none
    own: NDArray[np.float32]  # the label holder's own columns, [R, F]
    given: NDArray[np.bool_]  # whether a party has given a row, [R, M]
    outputs: Tensor  # of the top model, [R, C]
    suspects: NDArray[np.int64] | None = None  # party that does not fit the others, or -1, [R]

    @property
    def known(self) -> NDArray[np.bool_]:
        """Return which rows a party or the label holder knows, [R]."""
        known: NDArray[np.bool_] = self.given.sum(1) + self.own.shape[1] > 0
        return known

    def at(self, places: Any) -> ScoredRows:
        """Return the rows at these places."""
        blocks, own, given, outputs = self.blocks, self.own, self.given, self.outputs
        suspects = None if self.suspects is None else self.suspects[places]
        return ScoredRows(blocks[places], own[places], given[places], outputs[places], suspects)

    @classmethod
    def together(cls, parts: Sequence[ScoredRows]) -> ScoredRows:
        """Return the rows of several parts."""
        return cls(
            torch.cat([part.blocks for part in parts]),
            np.concatenate([part.own for part in parts]),
            np.concatenate([part.given for part in parts]),
            torch.cat([part.outputs for part in parts]),
        )
