"""What an estimator is: both halves of how parties learn, in the order in which data meets them.

A party embeds a window of rows (`Estimator.embed`), the label holder reads the upload (`read`) and
answers it (`answer`), and the party learns from the answer (`update`). All four give and take
tensors by name. `Links` encode these tensors before they leave an end, and decode them when they
have reached the other. An estimator sees of each end what `PartyEnd` and `HolderEnd` say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.samples import Samples
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.losses import Loss
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks, Channel, Links
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.protocol.sampling.base import Sampling
from vfl_flower.protocol.subsets import Copies
from vfl_flower.protocol.uploads import Arrival, Reading
from vfl_flower.transport.messages import Arrays, TrainOrder


class PartyEnd(Protocol):
    """What an estimator has of a party."""

    config: RunConfig
    sampling: Sampling
    index: int
    parties: int
    outputs: int
    rows: int  # training rows, N
    size: int  # of an embedding, E
    device: torch.device
    model: BottomModel
    frozen: bool  # whether the model stays as it is
    optimizer: torch.optim.Optimizer
    arrays: Arrays  # of its own, which are kept with the party's state
    secret: bytes  # which only this party knows
    trace: Any  # of the upload, if this process still has it when the answer comes

    def features(self, window: Window) -> Samples:
        """The window's rows, [R, ...]."""

    def noise(self, exchange: int, window: Window) -> Perturbation | None:
        """Return the noise of the upload that answers this message, where uploads are perturbed."""


class HolderEnd(Protocol):
    """What an estimator has of the label holder."""

    config: RunConfig
    sampling: Sampling
    device: torch.device
    top: TopModel
    optimizer: torch.optim.Optimizer | None  # none for a top model without parameters
    labels: Tensor  # of the training rows, [N]
    loss: Loss
    parties: int
    frozen: Collection[int]  # parties whose models stay as they are, and which are not answered
    columns: dict[int, slice]  # of each party's embeddings in the table
    uplinks: dict[int, Links]  # by party
    downlinks: dict[int, Links]  # by party
    noise: ScalarNoise | None
    steps: int  # of the top model so far

    @property
    def key(self) -> bytes:
        """What is random in the top model's next passes follows from it."""

    def gather(self, window: Window) -> tuple[Tensor, Tensor]:
        """The window's rows of the table, as `TopModel` reads them, and its labels."""

    def step(
        self, h: Tensor, labels: Tensor, lengths: list[int], divisors: list[int], gradients: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Step the top model once a mini-batch; gradient rows, if wanted, and losses [S]."""

    def copies(self, h: Tensor, lengths: list[int], step: int) -> Copies | None:
        """Return rows with subsets of their parties, if the top model learns from such.

        Parameters
        ----------
        step : by whose number subsets are drawn.
        """

    def directions(self) -> Directions:
        """New directions of the top model."""

    def count(self, losses: Tensor) -> None:
        """Count steps of the top model, whose losses are to be finite."""


class Estimator(ABC):
    """How parties learn. Each end of a run has one of its own.

    windows : steps of a window where none is configured, by what an exchange costs: nothing, less
        than a step or seconds (`transport.base.Cost`).
    uploads_per_row : embeddings of a row that an upload holds.
    uploads_reach : whose view of uploads the noise on them is for.
    gradients : whether bottom models need one.
    answers_by_scalars : whether the label holder answers one number a step.
    broadcasts : whether uploads and the top model go on to all parties, which then step together.
    answer_dtype : type of the numbers in gradient rows where no codec changes it.
    """

    windows: ClassVar[Mapping[str, int]] = {"free": 1, "cheap": 8, "dear": 16}
    uploads_per_row: ClassVar[int] = 1
    uploads_reach: ClassVar[str] = "the label holder's"
    gradients: ClassVar[bool] = True
    answers_by_scalars: ClassVar[bool] = False
    broadcasts: ClassVar[bool] = False
    answer_dtype: ClassVar[str] = "float32"

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.aggregation = aggregation_of(config)
        self.mechanism = mechanism_of(config)

    @property
    def word(self) -> str:
        """What it is, in few words."""
        return self.config.estimator.kind

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise `ConfigError` if it cannot work as configured."""
        if config.estimator.local_steps > 1:
            raise ConfigError(
                f"local-steps = {config.estimator.local_steps} needs labels = 'shared': without "
                "labels and top model, a party has a gradient for one step only."
            )

    # --- links: both ends ---------------------------------------------------------------------

    def uplinks(self, table: Tensor) -> Links:
        """Make either end of the links of uploads, in the order in which surrogates are compared.

        Parameters
        ----------
        table : [N, E], where this end keeps surrogates. At the label holder these are the party's
            columns of the table.
        """
        return Links(embedding=self.uplink(table))

    def fresh_links(self, uplinks: Links, table: Tensor) -> Links:
        """Return either end of the link of fresh embeddings, for rows that have grown too old.

        That is the link among ``uplinks`` that carries embeddings, with its surrogates, or one
        made as by `uplinks`.
        """
        return Links(embedding=uplinks.get("embedding") or self.uplink(table))

    def downlinks(self, rows: int, size: int) -> Links:
        """Make the label holder's end of the links of answers to a party with rows [N, E]."""
        return Links()

    def downlinks_of(self, end: PartyEnd) -> Links:
        """Make a party's end of the links of its answers."""
        return self.downlinks(end.rows, end.size)

    def links_of_all(self, end: HolderEnd) -> Links:
        """Return links that are not of one party."""
        return Links()

    def compared(self, end: HolderEnd, party: int) -> list[Tensor]:
        """Return surrogates that a party must have too, in the order in which it compares them."""
        links = end.uplinks[party], end.downlinks[party]
        return [surrogate for each in links for _, surrogate in each.with_surrogates()]

    def party_tables(self, parties: int) -> int:
        """Count the surrogates [N, E] that a party keeps."""
        return int(self.config.uplink.surrogates)

    def holder_tables(self) -> int:
        """Count the surrogates [N, E] that the label holder keeps of a party, beside its table."""
        return 0

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """Bound the bytes of what a party is sent for a window of so many rows and steps."""
        return 2 * 4 * rows * (end.size + 1)  # with ids, and as much again for what a codec adds

    def uplink(self, table: Tensor, saved: str = "uplink") -> Channel:
        """Make an end of a link of embeddings; ``table`` and ``saved`` are as in `Channel`."""
        return Channel(self.config.uplink, table, self.mechanism.encodes_by_row, saved=saved)

    def downlink(self, table: Tensor, saved: str, by_step: bool = False) -> Channel:
        """Make an end of a link of answers."""
        by_row, dtype = self.mechanism.encodes_by_row, "float32" if by_step else self.answer_dtype
        return Channel(
            *(self.config.downlink, table, by_row), saved=saved, by_step=by_step, dtype=dtype
        )

    # --- the protocol ---------------------------------------------------------------------------

    def opening(self, end: HolderEnd) -> Arrays:
        """Return what goes with a party's first order."""
        return {}

    @abstractmethod
    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Blocks:
        """Embed the rows of a window at a party: the blocks of its upload, by `uplinks`."""

    def read(self, blocks: Blocks, window: Window) -> Reading:
        """Read the blocks of an upload at the label holder."""
        rows = blocks["embedding"]
        return Reading(rows, (rows,))

    @abstractmethod
    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Step the top model at the label holder, and answer each party: blocks, by `downlinks`.

        A party whose model stays as it is gets no blocks.
        """

    def encode(
        self, end: HolderEnd, arrivals: Sequence[Arrival], answers: Mapping[int, Blocks]
    ) -> dict[int, Arrays]:
        """Make the arrays of each party's answer."""
        encoded = {}
        for arrival in arrivals:
            whose = "all" if self.aggregation.alike else arrival.party
            key = f"{self.config.training.seed}|down|{whose}|{end.steps}"
            links, blocks = end.downlinks[arrival.party], answers[arrival.party]
            encoded[arrival.party] = links.encode(blocks, arrival.window, key)
        return encoded

    def silence(self, arrival: Arrival) -> Blocks:
        """Return an answer to an upload that says nothing, for scalars that are spent.

        An estimator that answers by scalars has one, and hands all that labels have a part in to
        the noise of its `HolderEnd`, if there is any: what it does not is not counted.
        """
        raise NotImplementedError

    @abstractmethod
    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Learn from the answer to an upload at a party, by the parameters that made the upload.

        The model changes in place, by whole steps: there is no copy of it to go back to.
        `VflError`, as the end of a sentence, if the answer says nothing.
        """
