"""What an estimator is: both halves of how parties learn, in the order in which data meets them.

A party embeds a window of rows (`Estimator.embed`), the label holder reads the upload (`read`) and
answers it (`answer`), and the party learns from the answer (`update`). Of each end it is given what
`PartyEnd` and `HolderEnd` say, and keeps its links: `Channel` by name, "uplink" for embeddings.
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
from vfl_flower.models.bottoms import BottomModel
from vfl_flower.models.losses import Loss
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Channel, zeros
from vfl_flower.protocol.estimators.directions import Directions
from vfl_flower.protocol.privacy.ledger import ledger_of
from vfl_flower.protocol.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.protocol.subsets import Copies
from vfl_flower.protocol.uploads import Arrival, Reading
from vfl_flower.transport.messages import Arrays, TrainOrder

Links = dict[str, Channel]


class PartyEnd(Protocol):
    """What an estimator has of a party."""

    config: RunConfig
    index: int
    parties: int
    outputs: int
    rows: int  # training rows, N
    size: int  # of an embedding, E
    device: torch.device
    model: BottomModel
    frozen: bool  # whether the model stays as it is
    optimizer: torch.optim.Optimizer
    links: Links
    arrays: Arrays  # of its own, which are kept with the party's state
    secret: bytes  # which only this party knows
    trace: Any  # of the upload, if this process still has it when the answer comes

    def features(self, window: Window) -> Samples:
        """The window's rows, [R, ...]."""

    def noise(self, exchange: int, window: Window) -> Perturbation | None:
        """The noise of the upload that answers this message, if there is any."""

    def send(self, name: str, rows: Tensor, window: Window) -> Arrays:
        """What is sent of rows [R, E], over the link for blocks of this name."""


class HolderEnd(Protocol):
    """What an estimator has of the label holder."""

    config: RunConfig
    device: torch.device
    top: TopModel
    optimizer: torch.optim.Optimizer | None  # none for a top model without parameters
    labels: Tensor  # of the training rows, [N]
    loss: Loss
    parties: int
    frozen: Collection[int]  # parties whose models stay as they are, and which are not answered
    columns: dict[int, slice]  # of each party's embeddings in the table
    links: dict[int, Links]  # by party
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

    def copies(self, h: Tensor, lengths: list[int]) -> Copies | None:
        """The rows with subsets of their parties, if the top model is to learn from these."""

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
    """

    windows: ClassVar[Mapping[str, int]] = {"free": 1, "cheap": 8, "dear": 16}
    uploads_per_row: ClassVar[int] = 1
    uploads_reach: ClassVar[str] = "the label holder's"
    gradients: ClassVar[bool] = True
    answers_by_scalars: ClassVar[bool] = False
    broadcasts: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.aggregation = aggregation_of(config)

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

    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks of embeddings that an upload consists of, in messages."""
        return ("embedding",)

    # --- links: both ends ---------------------------------------------------------------------

    def party_links(self, end: PartyEnd) -> Links:
        """A party's ends of its links, in the order in which surrogates are compared."""
        return {"uplink": self.uplink(zeros((end.rows, end.size)))}

    def holder_links(self, table: Tensor) -> Links:
        """The label holder's ends of the links of one party, whose columns of the table these are.

        With error feedback the table holds the label holder's copy of the party's surrogates.
        """
        return {"uplink": self.uplink(table)}

    def links_of_all(self, end: HolderEnd) -> Links:
        """Ends of links that are not of one party."""
        return {}

    def compared(self, end: HolderEnd, party: int) -> list[Channel]:
        """The links of which a party has the other end, in the order of `party_links`."""
        return list(end.links[party].values())

    def party_tables(self, parties: int) -> int:
        """Surrogates [N, E] that a party keeps."""
        return int(self.config.uplink.surrogates)

    def holder_tables(self) -> int:
        """Surrogates [N, E] that the label holder keeps of each party, beside its table."""
        return 0

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """Bytes of what a party is sent for a window of so many rows and steps, at most."""
        return 2 * 4 * rows * (end.size + 1)  # with ids, and as much again for what a codec adds

    def uplink(self, table: Tensor) -> Channel:
        """A link of embeddings; ``table`` is where this end keeps surrogates, if there are any."""
        return Channel(self.config.uplink, table, self._by_row)

    def downlink(self, table: Tensor) -> Channel:
        """A link of what the label holder sends."""
        return Channel(self.config.downlink, table, self._by_row)

    @property
    def _by_row(self) -> bool:
        return ledger_of(self.config).noise_on == "scalars"

    # --- the protocol ---------------------------------------------------------------------------

    def opening(self, end: HolderEnd) -> Arrays:
        """What goes with a party's first order."""
        return {}

    @abstractmethod
    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Arrays:
        """Party: the upload of a window."""

    @abstractmethod
    def read(self, links: Links, arrays: Arrays, window: Window, size: int) -> Reading:
        """Label holder: what an upload says; `VflError`, as the end of a sentence, if nothing."""

    @abstractmethod
    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Arrays]:
        """Label holder: step the top model; party -> the answer to its window."""

    def silence(self, arrival: Arrival) -> Arrays:
        """Label holder: an answer to an upload that says nothing, for scalars that are spent.

        An estimator that answers by scalars has one, and hands all that labels have a part in to
        the noise of its `HolderEnd`, if there is any: what it does not is not counted.
        """
        raise NotImplementedError

    @abstractmethod
    def update(self, end: PartyEnd, arrays: Arrays, order: TrainOrder, window: Window) -> None:
        """Party: learn from the answer to an upload, by the parameters that made it.

        The model changes in place, by whole steps: there is no copy of it to go back to.
        `VflError`, as the end of a sentence, if the answer says nothing.
        """
