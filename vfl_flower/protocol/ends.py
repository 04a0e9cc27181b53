"""The two ends of a run, as estimators and aggregations see them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.samples import Samples
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.losses import Loss
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Blocks, Links
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.protocol.sampling.base import Sampling
from vfl_flower.protocol.subsets import Copies
from vfl_flower.transport.messages import Arrays, TrainOrder


class PartyEnd(Protocol):
    """The party, as an estimator sees it."""

    config: RunConfig
    sampling: Sampling
    index: int
    parties: int
    outputs: int
    rows: int  # training rows, N
    size: int  # length of an embedding, E
    device: torch.device
    model: BottomModel
    frozen: bool  # whether the model does not learn
    optimizer: torch.optim.Optimizer
    arrays: Arrays  # the estimator's arrays, saved with the party's state
    secret: bytes  # known to this party only
    trace: Any  # intermediate results that `embed` leaves for `update`; None if they are lost

    def features(self, window: Window) -> Samples:
        """Return the window's rows, [R, ...]."""

    def noise(self, exchange: int, window: Window) -> Perturbation | None:
        """Return the noise on the upload of an exchange, if uploads are perturbed."""

    def directions(self, order: TrainOrder) -> Directions:
        """Return the directions of the window of an order."""


class Reader(Protocol):
    """The part of an estimator that an aggregation uses."""

    def read(self, blocks: Blocks, window: Window) -> Reading:
        """Return the content of an upload's blocks."""


class Columns(Protocol):
    """The part of the label holder's table that an aggregation uses."""

    received: int  # number of columns that hold parties' embeddings

    def write(self, party: int, window: Window, rows: Tensor) -> None:
        """Write a party's embeddings of a window, [R, E]."""


class HolderEnd(Protocol):
    """The label holder, as an estimator and an aggregation see it."""

    config: RunConfig
    sampling: Sampling
    device: torch.device
    top: TopModel
    optimizer: torch.optim.Optimizer | None  # None for a top model without parameters
    labels: Tensor  # labels of the training rows, [N]
    loss: Loss
    parties: int
    frozen: Collection[int]  # parties whose models do not learn, and which get no answer
    columns: dict[int, slice]  # by party: columns of its embeddings in the table
    first_uploads: dict[int, Arrays]  # by party: what began its surrogates, for a broadcast
    uplinks: dict[int, Links]  # by party
    downlinks: dict[int, Links]  # by party
    noise: ScalarNoise | None
    steps: int  # steps of the top model so far

    @property
    def estimator(self) -> Reader:
        """Return the reader of uploads."""

    @property
    def table(self) -> Columns:
        """Return the table of the training rows."""

    @property
    def key(self) -> bytes:
        """Return the key of all randomness in the top model's next passes."""

    def gather(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the window's rows as `TopModel` reads them, and their labels [R]."""

    def step(
        self, h: Tensor, labels: Tensor, lengths: list[int], divisors: list[int], gradients: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Step the top model once a mini-batch; return gradient rows if asked, and losses [S]."""

    def copies(self, h: Tensor, lengths: list[int], step: int) -> Copies | None:
        """Return copies of rows with subsets of their parties, if the run draws any."""

    def directions(self) -> Directions:
        """Return new directions of the top model."""

    def count(self, losses: Tensor) -> None:
        """Count steps of the top model, by their losses, which must be finite."""


@dataclass(frozen=True)
class Reading:
    """Decoded content of an upload."""

    fresh: Tensor  # embeddings for the table, [R, E]
    embeddings: tuple[Tensor, ...]  # all blocks of embeddings that the upload holds


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
