"""Contents of an upload, after the label holder has read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from vfl_flower.protocol.batches import Window
from vfl_flower.transport.messages import Arrays


@dataclass(frozen=True)
class Reading:
    """Decoded content of an upload.

    fresh : embeddings for the table, [R, E].
    embeddings : all blocks of embeddings that the upload holds.
    """

    fresh: Tensor
    embeddings: tuple[Tensor, ...]


@dataclass(frozen=True)
class Arrival:
    """A party's upload of one window.

    ``batches`` are the mini-batches over which losses are means. They are the window, or the
    mini-batches of all parties if the upload is coordinated. This party may lack some of their
    rows. ``arrays`` are the undecoded upload, if the estimator passes uploads on.
    """

    party: int
    window: Window
    coordinated: bool
    reading: Reading
    batches: Window
    arrays: Arrays = field(default_factory=dict)
