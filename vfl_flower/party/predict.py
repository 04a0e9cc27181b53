"""A party's half of prediction (the label holder's is `vfl_flower.label_holder.predict`)."""

from __future__ import annotations

import numpy as np
from flwr.app import Context

from vfl_flower.alignment.at_party import common_rows
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.provenance import code_digest
from vfl_flower.data.at_party import FeatureBlock, prepared
from vfl_flower.data.source import Compact
from vfl_flower.models.training import load_model
from vfl_flower.party import state
from vfl_flower.party.about import read
from vfl_flower.party.context import (
    check_model,
    check_number,
    check_weights,
    limits_of,
    party_of,
)
from vfl_flower.party.inputs import load_block, own_source
from vfl_flower.party.limits import count_predictions
from vfl_flower.party.state_file import Saved
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.transport.messages import Predicted, PredictOrder
from vfl_flower.transport.node import seat


def predict(context: Context, kept: Saved, order: PredictOrder) -> Predicted:
    """Embeddings by a model that was kept: of the rows just aligned, or of the test rows.

    Raises
    ------
    ConfigError
        If the party's columns, or rows, are not those that the model was trained with.
    """
    index, parties = seat(context)
    saved = kept.state
    about = state.load_about(saved)
    written = read(about)
    config, preparation = written.config, written.preparation
    check_number(about, parties)
    rules = Rules.of(context.node_config)
    if preparation is None:
        block = load_block(context, config)
        ids = block.ids_digest
        if block.ids_digest != written.ids:
            raise ConfigError(f"Party {index} has other rows than its model was trained with.")
    else:
        own = own_source(context)
        common = common_rows(context, own)
        mine = common.rows[common.rows >= 0]  # of those that it is asked about
        ids = own.digest(mine)
        rows, names = prepared(own, mine, preparation), own.names(mine)
        none = Compact(np.zeros(0, np.int64), lambda at: rows[:0])
        block = FeatureBlock(none, rows, "", preparation, common.name, names[:0], names)
    scalars = state.load_scalars(saved)
    limits = limits_of(context, rules, scalars.get("origin", order.run))
    limits.go_on()
    rows = block.tested
    limits.count(block.test_rows, rows if len(block.test_rows) else slice(None))
    count_predictions(context, rules, len(rows))
    party = party_of(context, config, written.outputs, block)
    check_model(about, party)
    check_weights(party, about)
    load_model(party.model, state.load_arrays(saved, "model"))
    arrays = {"embedding": party.embeddings(block.test, rows).cpu().numpy()}
    if party.seal:
        of_rows, lineage = alike(party.alike, ids), scalars.get("lineage", b"")
        arrays = party.seal.predict(context, order, arrays, of_rows, lineage)
    return Predicted(
        party=index,
        parties=parties,
        exchange=scalars["exchange"],
        checkpoint=kept.number,
        alignment=block.alignment,
        code_digest=code_digest(),
        arrays=arrays,
    )
