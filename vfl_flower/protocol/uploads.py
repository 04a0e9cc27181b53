"""What an upload holds, once the label holder has read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from vfl_flower.protocol.batches import Window
from vfl_flower.transport.messages import Arrays


@dataclass(frozen=True)
class Reading:
    """What an upload says.

    fresh : embeddings for the table, [R, E].
    embeddings : all blocks of embeddings that the upload holds.
    """

    fresh: Tensor
    embeddings: tuple[Tensor, ...]


@dataclass(frozen=True)
class Arrival:
    """A party's upload of one window.

    ``batches`` are the mini-batches that losses are means over: the window, or if it is coordinated
    the mini-batches of all parties, of which this party may lack rows. ``arrays`` are the upload as
    it came, if the estimator passes uploads on.
    """

    party: int
    window: Window
    coordinated: bool
    reading: Reading
    batches: Window
    arrays: Arrays = field(default_factory=dict)
