"""A party's half of prediction (the other: `vfl_flower.tasks.inference.predict`)."""

from __future__ import annotations

from functools import partial

import numpy as np
from flwr.app import Context

from vfl_flower.alignment.party_rows import common_rows
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import FeatureBlock, prepared
from vfl_flower.data.source import Compact, Preparation
from vfl_flower.party import builder, state
from vfl_flower.party.drift import DriftReports, Read, of_block
from vfl_flower.party.inputs import own_source
from vfl_flower.party.limits import counted_predictions
from vfl_flower.party.state_file import Saved
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.transport.messages import Predicted, PredictOrder
from vfl_flower.transport.node import index_and_parties


def predict(context: Context, saved: Saved, order: PredictOrder) -> Predicted:
    """Embed rows with a saved model: the rows just aligned, or the test rows.

    Raises
    ------
    ConfigError, VflError
        If the party's columns, rows or model differ from training, or if a rule forbids the
        prediction.
    """
    index, parties = index_and_parties(context)
    read: list[Read] = []
    party = builder.for_prediction(context, saved, order.run, partial(new_rows, context, read=read))
    block = party.inputs.block
    rows = block.tested
    with counted_predictions(context, Rules.of(context.node_config), len(rows)):
        party.count_uploads(rows)
    arrays = {"embedding": party.learner.embeddings(block.test, rows).cpu().numpy()}
    scalars = state.load_scalars(saved.state)
    if party.seal:
        of_rows, lineage = alike(party.alike, block.ids_digest), scalars.get("lineage", b"")
        arrays = party.seal.predict(context, order, arrays, of_rows, lineage)
    perturbs = party.learner.mechanism.perturbs_uploads
    reports = DriftReports(context, saved, order.run, perturbs)
    places = rows.astype(np.int64)
    names = block.test_rows.astype(np.uint64)[rows]
    arrays |= reports.of_prediction(names, places, read[0] if read else of_block(block))
    return Predicted(
        party=index,
        parties=parties,
        exchange=scalars["exchange"],
        checkpoint=saved.number,
        alignment=block.alignment,
        arrays=arrays,
    )


def new_rows(
    context: Context, preparation: Preparation, read: list[Read] | None = None
) -> FeatureBlock:
    """Return the party's own features of the rows that were just aligned.

    Parameters
    ----------
    read : a list that gets a function to read their raw columns, if any.
    """
    own = own_source(context)
    common = common_rows(context, own)
    mine = common.rows[common.rows >= 0]  # the party may lack some rows
    if read is not None:
        read.append(lambda places, names: own.raw_columns(mine[places], names, preparation.dates))
    digest = own.digest(mine)
    rows, names = prepared(own, mine, preparation), own.names(mine)
    none = Compact(np.zeros(0, np.int64), lambda at: rows[:0])
    return FeatureBlock(none, rows, digest, preparation, common.name, names[:0], names)
