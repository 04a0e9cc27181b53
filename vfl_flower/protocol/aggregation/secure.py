"""Secure aggregation: the label holder learns the sum of the embeddings alone.

Parties mask their blocks (`masks`, `keys`), and the label holder adds the uploads. The masks cancel
in the sum over all parties.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_bytes
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.options import RunningConfig
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.aggregation import keys
from vfl_flower.protocol.aggregation import masks as masking
from vfl_flower.protocol.aggregation.base import Aggregation, Collection, Seal
from vfl_flower.protocol.aggregation.masks import Masks, Sum, alike, told
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.ends import Arrival, HolderEnd, Reading
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import Agreed, AgreeOrder, KeyMade, KeyOrder
from vfl_flower.transport.gather import gather_all
from vfl_flower.transport.messages import (
    Arrays,
    Introduction,
    Order,
    PredictOrder,
    ServeOrder,
    bounded,
)
from vfl_flower.transport.node import refused, simulated


class SummedTop(TopModel):
    """A top model of rows h [R, E + F]: the sum of the embeddings, then own features."""

    def __init__(self, sizes: Sequence[int], *rest: Any) -> None:
        super().__init__(sizes, *rest)
        self.received = sizes[0]

    def combined(self, blocks: Tensor, h: Tensor) -> Tensor:
        """Return the first layer's inputs from the sum and the label holder's block."""
        x = blocks.view(len(blocks), -1, self.received).sum(1)
        return x / self.blocks if self.combine == "mean" else x

    def spread(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows of the sum, [R, E]. Every party gets the same rows."""
        return rows / self.blocks if self.combine == "mean" else rows


@dataclass(frozen=True)
class MaskedReading(Reading):
    """A party's masked upload. It can be read only in the sum over all parties."""

    blocks: Arrays


class MaskedCollection(Collection):
    """Collect the parties' masked blocks of the same rows. Only their sum is readable."""

    def __init__(self, parties: int) -> None:
        self.sum = Sum(parties)

    def add(self, party: int, arrays: Arrays, shape: tuple[int, int]) -> Tensor | None:
        """Add a party's block; with the last party's, return the sum, [R, E]."""
        total = self.sum.add(party, masking.read(arrays, ("embedding",), shape), shape)
        if not total:
            return None
        bounded("embedding", total["embedding"])
        return torch.from_numpy(total["embedding"])


class MaskedSums(Seal):
    """The masks of a party's uploads, and the lineage of its model."""

    masks: Masks | None = None  # None before the parties have agreed on keys

    def hide(self, arrays: Arrays) -> Arrays:
        """Return masked blocks."""
        return self._agreed().hide(arrays)

    def bind(self, order: Order) -> None:
        """Start a new stream, which follows from all orders so far."""
        self._agreed().bind(order)

    def _agreed(self) -> Masks:
        """Return the masks, or raise `VflError`, so that no block leaves unmasked."""
        if self.masks is None:
            raise VflError(
                "has not agreed with the other parties on keys for masked sums. Start the run anew."
            )
        return self.masks

    def refuse_alone(self) -> None:
        """Raise `VflError`: a step of one party alone would reveal its embeddings."""
        raise VflError(
            "takes part in masked sums, and does not act without the other parties. Resume the "
            "run from its last checkpoint."
        )

    def begin(self, run: str) -> None:
        """Start the lineage of a new model."""
        self.lineage = alike("begun", run)

    def resume(self, order: Order) -> None:
        """Continue the lineage with the model of a checkpoint."""
        self.lineage = alike(self.lineage, told(order))

    def agree(self, context: Context, arrays: Arrays, about: bytes) -> Arrays:
        """Agree on keys with the parties of these offers; return tags of the keys."""
        self.masks, tags = keys.agree(context, arrays, alike(about, self.lineage))
        return tags

    def serve(self, context: Context, order: PredictOrder, about: bytes, lineage: bytes) -> Arrays:
        """Agree on keys for this order's task and model alone, which the state does not hold."""
        keys.refuse_second(context)
        task = "serve" if isinstance(order, ServeOrder) else "predict"
        model = alike(alike(task, about, lineage), order.run, str(order.number))
        try:
            self.masks, tags = keys.agree(context, order.arrays, model)
            return tags
        finally:  # the state may hold another model, which must not use these keys
            keys.forget(context)

    def load(self, context: Context, scalars: Mapping[str, Any]) -> None:
        """Load the masks and the lineage."""
        self.masks = keys.load(context, self.masks)
        self.lineage = scalars.get("lineage", b"")

    @property
    def scalars(self) -> dict[str, Any]:
        """Return the current lineage of the model."""
        return {"lineage": self.masks.transcript if self.masks else self.lineage}

    def keep(self, context: Context) -> None:
        """Save in the state how far the masks have been used."""
        if self.masks:
            keys.keep(context, self.masks)

    def fail(self, context: Context) -> dict[str, Any]:
        """Separate from the other parties, in masks and lineage."""
        if self.masks:
            keys.part(context, self.masks)
        return {"lineage": token_bytes(32)}  # this party alone may have learned


class Secure(Aggregation):
    """Sum embeddings that the parties mask."""

    tops: ClassVar = (SummedTop, None)
    # If a unit is dead at all parties but one, the masked sum shows the last party's value.
    defaults: ClassVar[Mapping[str, Any]] = {"embedding-activation": "none"}
    abreast = agrees = waits = alike = rounds = True
    may_grow = False

    def check(self, answers_by_scalars: bool, baseline: bool) -> None:
        """Raise `ConfigError` if an option needs more than sums of the embeddings."""
        config, models = self.config, self.config.models
        if baseline:
            raise _refusal(
                f"strategy = {config.strategy!r} is a baseline, which sums nothing", "aggregation"
            )
        if models.top != "sum" and models.combine == "concat":
            raise _refusal(
                f"top-model = {models.top!r} reads the parties' embeddings side by side",
                "aggregation, or set combine = 'mean' or 'sum' for a linear or mlp top model",
            )
        if config.estimator.labels == "shared":
            raise _refusal("labels = 'shared' sends embeddings to all parties", "labels")
        if answers_by_scalars and config.estimator.perturbs != "all":
            raise _refusal(
                "each party's difference depends on its own embeddings alone",
                "estimator, or set perturbs = 'all'",
            )
        if config.uplink.codec != "identity":
            raise _refusal(
                f"codec = {config.uplink.codec!r} has nothing to compress in masked numbers, which "
                "look random",
                "codec",
            )
        if config.data.partial:
            raise _refusal("if one party alone has a row, the sum is its embedding", "partial rows")
        if config.subsets != "off":
            raise _refusal("the top model would read single parties' embeddings", "subsets")
        if config.running.grow:
            raise _refusal(
                "the difference of two sums, with and without a new party, is its embeddings",
                "grow",
            )

    def check_schedule(self, parties: int, coordinated: bool) -> None:
        """Raise `ConfigError` unless at least two parties step together."""
        if parties < 2:
            raise _refusal("a sum over one party hides nothing", "aggregation, or add parties")
        if not coordinated:
            raise _refusal(
                "parties that do not step together upload other rows at other times",
                "the strategy, or set quorum to the number of parties",
            )

    def permissions(self) -> dict[str, Any]:
        """Return the activation, if units can stop: the sum could become one party's embedding."""
        activation = self.config.models.embedding_activation
        return {} if activation in (None, "none") else {"embedding-activation": activation}

    def check_rules(self, context: Context, rules: Rules) -> None:
        """Raise `ConfigError` if a party's own rules forbid the activation."""
        if simulated(context) and not rules.aggregation:
            return
        permitted = rules.embedding_activation
        for key, value in self.permissions().items():
            if value != permitted:
                gives = f"{key} = {permitted!r}" if permitted else f"no {key}"
                raise refused(
                    context,
                    f"{key} = {value!r} in masked sums, since a sum can then become its own "
                    f"embedding: its own node configuration gives {gives}. "
                    "Leave that option out of the run configuration",
                )

    # --- the label holder -----------------------------------------------------------------------

    def columns(self, sizes: Mapping[int, int]) -> dict[int, slice]:
        """Return the columns of the sum for every party. Embeddings have one size."""
        return dict.fromkeys(sizes, slice(0, next(iter(sizes.values()), 0)))

    def agree(self, transport: Transport) -> None:
        """Have all parties agree on keys. From then on, they mask their uploads."""
        running = self.config.running
        order = AgreeOrder(arrays=self.question(transport, running))
        self.check_agreed(gather_all(transport, order, Agreed, running).values())

    def question(self, transport: Transport, running: RunningConfig) -> Arrays:
        """Return the fresh keys of all parties, in order, as arrays for orders."""
        order = KeyOrder(config=json.dumps(self.config.values()))
        answers = gather_all(transport, order, KeyMade, running).values()
        made = sorted(answers, key=lambda each: each.party)
        for each in made:
            try:
                masking.read_offers(each.arrays, 1)
            except VflError as error:
                raise PartyError(f"Party {each.party}", f"sent no key: {error}") from None
        return {
            name: np.concatenate([each.arrays[name] for each in made]) for name in masking.OFFERS
        }

    def check_agreed(self, answers: Iterable[Introduction]) -> None:
        """Raise an error, as `check_tags`, if two parties have not agreed."""
        by_party = sorted(answers, key=lambda each: each.party)
        try:
            masking.check_tags([each.arrays for each in by_party])
        except VflError as error:
            if type(error) is not VflError:
                raise
            raise PartyError("A party", f"sent no tags of its keys: {error}") from None

    def read(self, end: HolderEnd, party: int, window: Window, arrays: Arrays) -> Reading:
        """Return a masked upload after a check of its shapes."""
        columns = end.columns[party]
        shape = len(window.ids), columns.stop - columns.start
        blocks = masking.read(arrays, tuple(end.uplinks[party]), shape)
        return MaskedReading(torch.empty(0), (), blocks)

    def complete(self, end: HolderEnd, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Write the sum of all uploads into the table; read each upload as the sum."""
        party, window = arrivals[0].party, arrivals[0].window
        of_all, total = Sum(end.parties), None
        width = end.table.received
        for arrival in arrivals:
            assert isinstance(arrival.reading, MaskedReading)
            if not np.array_equal(arrival.window.ids, window.ids):
                raise VflError(
                    f"Party {arrival.party} has uploaded other rows than other parties. Resume the "
                    "run from its last checkpoint."
                )
            total = of_all.add(arrival.party, arrival.reading.blocks, (len(window.ids), width))
        if total is None:
            raise VflError(
                "The sum is not known: some parties' uploads are missing. Resume the run from its "
                "last checkpoint."
            )
        reading = end.estimator.read(end.uplinks[party].decode(total, window), window)
        end.table.write(party, window, reading.fresh)
        return [replace(arrival, reading=reading) for arrival in arrivals]

    def collection(self, parties: int) -> Collection:
        """Return a collection that adds the masked blocks of all parties."""
        return MaskedCollection(parties)

    # --- the party ------------------------------------------------------------------------------

    def seal(self, party: int, parties: int) -> Seal:
        """Return the masks of a party."""
        return MaskedSums()

    def order_bytes(self, parties: int) -> int:
        """Return the size of all parties' keys in an order, in bytes."""
        return 128 * parties


def _refusal(why: str, leave: str) -> ConfigError:
    return ConfigError(f"aggregation = 'secure' is not possible: {why}. Leave out {leave}.")
