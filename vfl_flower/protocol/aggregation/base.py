"""The base of aggregations, and `plain`: every party's embeddings side by side.

A party seals its blocks (`Seal`). The label holder reads them into its table (`Aggregation.read`).
The top model reads the table's rows (`Aggregation.tops`). `secure` and `partial` are the other two
aggregations, and a package can add one (CONTRIBUTING.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

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
from vfl_flower.models.tops import Monotone, OwnTop, build_top
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.ends import Arrival, HolderEnd, Reading
from vfl_flower.transport import messages
from vfl_flower.transport.base import Transport

Masks = NDArray[np.bool_]


class Seal:
    """A party's work on its blocks before upload. This base class changes nothing.

    A seal without state between messages overrides `hide` alone.
    """

    lineage = b""  # hash of the history of the party's model, which parties can compare

    def hide(self, arrays: messages.Arrays) -> messages.Arrays:
        """Return blocks of embeddings as the party uploads them."""
        return arrays

    def bind(self, order: messages.Order) -> None:
        """Advance to an order before the party serves it, or raise `VflError`."""

    def refuse_alone(self) -> None:
        """Raise `VflError` if the party may not act without the other parties."""

    def begin(self, run: str) -> None:
        """Start with a new model, in the run of this name."""

    def resume(self, order: messages.Order) -> None:
        """Continue with the model of the checkpoint that this order names."""

    def agree(self, context: Context, arrays: messages.Arrays, alike: bytes) -> messages.Arrays:
        """Agree with parties of these arrays, and of equal ``alike``; return arrays to compare."""
        raise VflError("was asked to agree on keys, and its aggregation masks no uploads.")

    def serve(
        self, context: Context, order: messages.PredictOrder, alike: bytes, lineage: bytes
    ) -> messages.Arrays:
        """Prepare to hide blocks of a saved model of this lineage; return arrays to compare."""
        return {}

    # --- between messages -----------------------------------------------------------------------

    def load(self, context: Context, scalars: Mapping[str, Any]) -> None:
        """Load what the last message left in the state, and its `scalars`."""

    @property
    def scalars(self) -> dict[str, Any]:
        """Return values for the party's state and for its checkpoints on disk."""
        return {}

    def keep(self, context: Context) -> None:
        """Save in the state what no checkpoint keeps, after a served message."""

    def fail(self, context: Context) -> dict[str, Any]:
        """Do as `keep` after a failed message; return the `scalars` that change."""
        return {}


class Collection:
    """Collect the parties' blocks of the same rows. Each can be read at once."""

    def add(self, party: int, arrays: messages.Arrays, shape: tuple[int, int]) -> Tensor | None:
        """Take a party's block, float32 [R, E]; return the values of its columns, if known."""
        block = messages.checked(arrays, "embedding", "float32", shape, messages.LARGEST)
        return torch.from_numpy(block)


class Aggregation:
    """Combine the parties' embeddings at the label holder.

    An aggregation has no memory of a run. All objects of one configuration are alike.

    tops : classes of the top models that read a row of the table: the built-in class, and the class
        for a user's top model. The second may be None: a user's top model cannot read the row.
    defaults : options whose defaults differ under this aggregation.
    abreast : whether all parties serve the same orders in the same sequence. No party then serves
        an order alone.
    agrees : whether parties agree on something before they train.
    waits : whether the label holder can read an upload only after all parties' uploads arrive.
    alike : whether all parties get the same answer, to the last bit.
    rounds : whether blocks lose bits on the way to the label holder.
    any_subset : whether the model can predict from any subset of the parties.
    may_grow : whether a run can start from the models of an earlier run.
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
        """Raise `ConfigError` if other options contradict the aggregation.

        `aggregation.check` explains the parameters.
        """

    def check_schedule(self, parties: int, coordinated: bool) -> None:
        """Raise `ConfigError` if the schedule does not suit the aggregation.

        Parameters
        ----------
        coordinated : whether all parties use the same mini-batch.
        """
        if (self.abreast or self.waits) and not coordinated:
            raise ConfigError(
                f"aggregation = {self.config.models.aggregation!r} needs parties that step "
                "together. Choose a synchronous system, or set quorum to the number of parties."
            )

    def permissions(self) -> dict[str, Any]:
        """Return the options that each party's node configuration must permit."""
        return {}

    def check_rules(self, context: Context, rules: Rules) -> None:
        """Raise `ConfigError` if a party's own rules forbid this configuration."""

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
        """Return row masks [N, M] of training and test rows.

        Return None if every party has every row.
        """
        return None

    def rows(self, blocks: Tensor, own: Tensor, present: Tensor) -> Tensor:
        """Return rows of a table as the top model reads them.

        Parameters
        ----------
        blocks : the parties' columns, in the layout of `columns`.
        own : the label holder's own columns, [R, F].
        present : whether a party has a row, [R, M].
        """
        return torch.cat([blocks, own], dim=1)

    def build_top(
        self,
        sizes: Sequence[int],
        outputs: int,
        own_columns: int = 0,
        alone: bool = False,
        monotone: Monotone = ((), ()),
    ) -> TopModel:
        """Return the label holder's model, as `models.tops.build_top`."""
        return build_top(self.config, sizes, outputs, own_columns, alone, self.tops, monotone)

    # --- the label holder -------------------------------------------------------------------------

    def agree(self, transport: Transport) -> None:
        """Ask the parties to agree before they train, if the aggregation `agrees`."""

    def read(self, end: HolderEnd, party: int, window: Window, arrays: messages.Arrays) -> Reading:
        """Return the content of a party's upload of a window.

        The party's links decode it, and measure its largest magnitude.

        Raises
        ------
        VflError
            If the upload cannot be read. The message continues a sentence.
        """
        return end.estimator.read(end.uplinks[party].decode(arrays, window), window)

    def complete(self, end: HolderEnd, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Read uploads that waited for each other; write them into the table.

        Raises
        ------
        SumError, VflError
            If uploads are missing, or do not fit each other.
        """
        return arrivals

    def collection(self, parties: int) -> Collection:
        """Return a collection for the parties' blocks of test rows or prediction rows."""
        return Collection()

    def question(self, transport: Transport, running: RunningConfig) -> messages.Arrays:
        """Return further arrays for the orders to predict."""
        return {}

    def check_agreed(self, answers: Iterable[messages.Introduction]) -> None:
        """Raise an error if these parties' predictions do not fit each other."""

    # --- the party --------------------------------------------------------------------------------

    def seal(self, party: int, parties: int) -> Seal | None:
        """Return the seal of a party's blocks; None if they leave as they are."""
        return None

    def order_bytes(self, parties: int) -> int:
        """Return the most bytes that the aggregation adds to an order to a party."""
        return 0
