"""What an upload holds, once the label holder has read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vfl_flower.protocol.batches import Window


@dataclass(frozen=True)
class Reading:
    """The embeddings of an upload, [R, E]; estimators add what they answer by."""

    fresh: Tensor

    @property
    def embeddings(self) -> Sequence[Tensor]:
        """Return all blocks of embeddings that the upload holds."""
        return (self.fresh,)


@dataclass(frozen=True)
class Arrival:
    """A party's upload of one window.

    ``batches`` are the mini-batches that losses are means over: the window, or if it is coordinated
    the mini-batches of all parties, of which this party may lack rows.
    """

    party: int
    window: Window
    coordinated: bool
    reading: Reading
    batches: Window
