"""A party's half of prediction (the other: `vfl_flower.tasks.inference.predict`)."""

from functools import partial

import numpy as np
from flwr.app import Context

from vfl_flower.config.node_rules import Rules
from vfl_flower.party.limits import counted_predictions
from vfl_flower.tasks.drift.party import of_block
from vfl_flower.tasks.inference.party.model import LoadedModel
from vfl_flower.transport.messages import Predicted, PredictOrder


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
