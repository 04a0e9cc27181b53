"""A model that a party has saved, with the rows to embed, and predictions with it.

A process keeps what a service or an explanation has loaded, until the run ends (`forget`).
"""

from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.store import common_rows, is_aligned
from vfl_flower.config.errors import OutOfStepError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import FeatureBlock, prepared
from vfl_flower.data.source import Compact, Preparation, Source
from vfl_flower.party import builder, state, state_file
from vfl_flower.party.inputs import own_source
from vfl_flower.party.limits import counted_predictions
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.tasks.drift.party import DriftReports, of_block
from vfl_flower.transport.messages import Arrays, Predicted, PredictOrder, Serving
from vfl_flower.transport.node import index_and_parties

A = TypeVar("A", bound=Predicted | Serving)


class LoadedModel:
    """A saved model and its rows: the rows just aligned, or the test rows.

    places : places of the rows among the samples of ``block``, int32 [n].
    background : numbers of the people in `background_rows` of training, for own data.
    source, in_source : the party's own data, if it has some, and the place of each row there, [n].
    """

    def __init__(self, context: Context, order: PredictOrder) -> None:
        self.context = context
        self.index, self.parties = index_and_parties(context)
        self.source: Source | None = None
        self.in_source = np.zeros(0, np.int64)
        saved = state_file.load(context, order.run, order.number)
        self.party = builder.for_prediction(context, saved, order.run, self._read)
        self.block = self.party.inputs.block
        self.places = self.block.tested
        self._number, self._scalars = saved.number, state.load_scalars(saved.state)
        perturbs = self.party.learner.mechanism.perturbs_uploads
        self.background = state_file.background(saved.state)
        self.drift = DriftReports(context, saved, order.run, perturbs)

    def _read(self, preparation: Preparation) -> FeatureBlock:
        """Return the party's own features of the rows that were just aligned."""
        if not is_aligned(self.context):
            raise OutOfStepError(
                "was not told which of its rows are common to all. Start the run anew."
            )
        own = self.source = own_source(self.context)
        common = common_rows(self.context, own)
        mine = self.in_source = common.rows[common.rows >= 0]  # the party may lack some rows
        digest, names = own.digest(mine), own.names(mine)
        rows = prepared(own, mine, preparation)
        none = Compact(np.zeros(0, np.int64), lambda at: rows[:0])
        return FeatureBlock(none, rows, digest, preparation, common.name, names[:0], names)

    def agree(self, order: PredictOrder, *rows: bytes) -> Arrays:
        """Agree on keys for this model and these rows, if sums are masked; return tags of them."""
        if not self.party.seal:
            return {}
        of_rows = alike(self.party.alike, self.party.same_rows, *rows)
        return self.party.seal.serve(
            self.context, order, of_rows, self._scalars.get("lineage", b"")
        )

    def hide(self, embedding: NDArray[np.float32]) -> Arrays:
        """Return embeddings as the party uploads them: masked, if sums are masked."""
        arrays: Arrays = {"embedding": embedding}
        return self.party.seal.hide(arrays) if self.party.seal else arrays

    def answer(self, kind: type[A], arrays: Arrays, **fields: Any) -> A:
        """Return the answer that says which party, model and rows it comes from."""
        return kind(
            party=self.index,
            parties=self.parties,
            exchange=self._scalars["exchange"],
            checkpoint=self._number,
            alignment=self.block.alignment,
            arrays=arrays,
            **fields,
        )


def predict(context: Context, order: PredictOrder) -> Predicted:
    """Embed rows with a saved model: the rows just aligned, or the test rows."""
    model = LoadedModel(context, order)
    party, block, rows = model.party, model.block, model.places
    with counted_predictions(context, Rules.of(context.node_config), len(rows)):
        party.count_uploads(rows)
    embedding = party.learner.embeddings(block.test, rows).cpu().numpy()
    tags = model.agree(order)
    arrays = model.hide(embedding) | tags
    read, places = of_block(block), rows.astype(np.int64)
    if model.source and block.preparation:
        read = partial(model.source.raw_columns, dates=block.preparation.dates)
        places = model.in_source[places]
    people = block.test_rows.astype(np.uint64)[rows]
    arrays |= model.drift.of_prediction(people, places, read)
    return model.answer(Predicted, arrays)


U = TypeVar("U")

in_use: dict[tuple[int, Any], Any] = {}
"""(Flower run, party) -> what this process has loaded, which has a method ``close``."""


def current(context: Context, kind: type[U], what: str) -> U:
    """Return what the party has loaded, or raise `OutOfStepError`: it has loaded no ``what``."""
    loaded = in_use.get((context.run_id, context.node_config.get("partition-id")))
    if not isinstance(loaded, kind):
        raise OutOfStepError(f"has loaded no {what}.")
    return loaded


def forget(run: int, party: int | None = None) -> None:
    """Drop what a Flower run has loaded for one party, or for all in this process."""
    for key in [key for key in list(in_use) if key[0] == run and party in (None, key[1])]:
        in_use.pop(key).close()
