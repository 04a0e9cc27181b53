"""The base of aggregations, and `plain`: every party's embeddings side by side.

A party seals its blocks (`Seal`), the label holder reads them into its table (`Aggregation.read`),
and the top model reads the table's rows (`Aggregation.tops`). `secure` and `partial` are the other
two, and a package can add one (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.options import RunningConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.tops import OwnTop, build_top
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Blocks, Links
from vfl_flower.protocol.uploads import Arrival, Reading
from vfl_flower.transport.base import Transport
from vfl_flower.transport.messages import (
    Arrays,
    Introduction,
    Order,
    PredictOrder,
    bounded,
    checked,
)

Masks = NDArray[np.bool_]


class Reader(Protocol):
    """What an aggregation has of an estimator."""

    def read(self, blocks: Blocks, window: Window) -> Reading:
        """Return what the blocks of an upload say."""


class Columns(Protocol):
    """What an aggregation has of the label holder's table."""

    received: int  # columns of parties

    def write(self, party: int, window: Window, rows: Tensor) -> None:
        """Write a party's embeddings of a window, [R, E]."""


class HolderEnd(Protocol):
    """What an aggregation has of the label holder."""

    parties: int
    columns: dict[int, slice]  # of each party's embeddings in the table
    uplinks: dict[int, Links]  # by party

    @property
    def estimator(self) -> Reader:
        """Return how uploads are read."""

    @property
    def table(self) -> Columns:
        """Return the table of the training rows."""


class Seal:
    """What a party does to its blocks before they leave; as it is, nothing.

    A seal that keeps nothing between messages overrides `hide` alone.

    lineage : a hash of how the party's model came about, which parties can compare.
    """

    lineage = b""

    def hide(self, arrays: Arrays) -> Arrays:
        """Return blocks of embeddings as the party uploads them."""
        return arrays

    def bind(self, order: Order) -> None:
        """Go on to the next order before the party serves it, or raise `VflError`."""

    def refuse_alone(self) -> None:
        """Raise `VflError` if the party does nothing that the other parties do not."""

    def begin(self, run: str) -> None:
        """Begin with a new model, in the run of this name."""

    def resume(self, order: Order) -> None:
        """Go on with the model of a checkpoint, which this order has named."""

    def agree(self, context: Context, arrays: Arrays, alike: bytes) -> Arrays:
        """Agree with the other parties; return what the label holder compares.

        Parameters
        ----------
        arrays : what the label holder passes on from the other parties.
        alike : a hash of what must be the same at all parties.
        """
        raise VflError("was asked to agree on keys, and its uploads are not masked.")

    def predict(
        self, context: Context, order: PredictOrder, arrays: Arrays, alike: bytes, lineage: bytes
    ) -> Arrays:
        """Return blocks of embeddings as the party uploads them for predictions.

        Parameters
        ----------
        alike : a hash of what must be the same at all parties.
        lineage : what the kept model's state has of it.
        """
        return self.hide(arrays)

    # --- between messages -----------------------------------------------------------------------

    def load(self, context: Context, scalars: Mapping[str, Any]) -> None:
        """Take over what the last message left in the state, and its `scalars`."""

    @property
    def scalars(self) -> dict[str, Any]:
        """Return what the party's state keeps, and a checkpoint of it on disk."""
        return {}

    def keep(self, context: Context) -> None:
        """Leave in the state what no checkpoint keeps, after a message that was served."""

    def fail(self, context: Context) -> dict[str, Any]:
        """Do so after a message that failed; return the `scalars` that change by it."""
        return {}


class Collection:
    """The parties' blocks of the same rows, as they come; each can be read at once."""

    def add(self, party: int, arrays: Arrays, shape: tuple[int, int]) -> Tensor | None:
        """Take a party's block [R, E]; return what goes into its columns, if known.

        Raises
        ------
        VflError
            If the block is not as it should be, as the end of a sentence.
        """
        block = bounded("embedding", checked(arrays, "embedding", "float32", shape))
        return torch.from_numpy(block)


class Aggregation:
    """How the label holder brings the parties' embeddings together.

    It has no memory of a run; every object of one configuration is alike.

    tops : classes of the top models that read a row of the table: of ours, and of one's own; none
        if a top model of one's own cannot read it.
    defaults : options whose defaults differ with it.
    abreast : whether all parties serve the same orders, one after the other, and none by itself.
    agrees : whether parties agree on something before they train.
    waits : whether an upload can be read only once all parties' uploads are in.
    alike : whether all parties get the same answer, to the last bit.
    rounds : whether blocks lose bits on their way.
    any_subset : whether the model predicts by any subset of the parties.
    may_grow : whether a run can begin by the models of an earlier run.
    """

    tops: ClassVar[tuple[type[TopModel], type[OwnTop] | None]] = (TopModel, OwnTop)
    defaults: ClassVar[Mapping[str, Any]] = {}
    abreast: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    any_subset: ClassVar[bool] = False
    may_grow: ClassVar[bool] = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    # --- what it refuses ------------------------------------------------------------------------

    def check(self, answers_by_scalars: bool, baseline: bool) -> None:
        """Raise `ConfigError` if it contradicts other options: see `aggregation.check`."""

    def check_schedule(self, parties: int, coordinated: bool) -> None:
        """Raise `ConfigError` if the schedule does not go with it.

        Parameters
        ----------
        coordinated : whether all parties use one mini-batch.
        """
        if (self.abreast or self.waits) and not coordinated:
            raise ConfigError(
                f"aggregation = {self.config.models.aggregation!r} needs parties that step "
                f"together: choose a synchronous system, or set quorum = {parties}."
            )

    def permissions(self) -> dict[str, Any]:
        """Return what each party's own node configuration must permit."""
        return {}

    def check_rules(self, context: Context, rules: Rules) -> None:
        """Raise `ConfigError` if a party's own rules do not permit a run so configured."""

    # --- the table, and the top model that reads it -----------------------------------------------

    def columns(self, sizes: Mapping[int, int]) -> dict[int, slice]:
        """Return the columns of each party's embeddings in the table.

        Parameters
        ----------
        sizes : party -> embedding size.
        """
        ends = accumulate(sizes.values())
        return {
            party: slice(end - sizes[party], end) for party, end in zip(sizes, ends, strict=True)
        }

    def row_masks(self, labels: Labels, parties: Sequence[int]) -> tuple[Masks, Masks] | None:
        """Return the row masks [N, M] of training and test rows; none if all have all."""
        return None

    def rows(self, blocks: Tensor, own: Tensor, present: Tensor) -> Tensor:
        """Return rows of a table as the top model reads them.

        Parameters
        ----------
        blocks : columns of the parties, as `columns` has them.
        own : the label holder's own columns, [R, F].
        present : which party has which row, [R, M].
        """
        return torch.cat([blocks, own], dim=1)

    def build_top(
        self, sizes: Sequence[int], outputs: int, own_columns: int = 0, alone: bool = False
    ) -> TopModel:
        """Return the label holder's model: see `models.tops.build_top`."""
        return build_top(self.config, sizes, outputs, own_columns, alone, self.tops)

    # --- the label holder -------------------------------------------------------------------------

    def agree(self, transport: Transport) -> None:
        """Have the parties agree before they train, if it `agrees`."""

    def read(self, end: HolderEnd, party: int, window: Window, arrays: Arrays) -> Reading:
        """Return what a party's upload of a window says.

        Raises
        ------
        VflError
            If there is nothing to read, as the end of a sentence.
        """
        return end.estimator.read(end.uplinks[party].decode(arrays, window), window)

    def complete(self, end: HolderEnd, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Read uploads that waited for each other, and write them into the table.

        Raises
        ------
        SumError, VflError
            If some are missing, or do not fit the others.
        """
        return arrivals

    def collection(self, parties: int) -> Collection:
        """Return what takes so many parties' blocks of test rows, or of rows to predict."""
        return Collection()

    def question(self, transport: Transport, running: RunningConfig) -> Arrays:
        """Return what the orders for predictions bring besides."""
        return {}

    def check_agreed(self, answers: Iterable[Introduction]) -> None:
        """Raise an error if these parties' predictions do not go together."""

    # --- the party --------------------------------------------------------------------------------

    def seal(self, party: int, parties: int) -> Seal | None:
        """Return what a party does to its blocks before they leave; none if nothing."""
        return None

    def order_bytes(self, parties: int) -> int:
        """Return how many bytes more an order to a party can have, at most."""
        return 0
