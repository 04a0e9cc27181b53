"""Contribution of each party: Shapley values of figures on held-out rows.

v(S) is the model's figure with the parties S alone, on all test rows of the run, so the model must
predict with any subset. The checkpoint has the embeddings of the last evaluation, and nobody asks
the parties. A party's value is the mean, over all orders of the parties, of what it adds to the
parties before it (Shapley, 1953). The values add up to v(all) - v(none). Without any party, the
model predicts by the training labels alone, or by the label holder's own columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_json
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.models.losses import loss_per_row
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.contribution_to_score import EXACT, ORDERS, all_sets, sampled_sets
from vfl_flower.tasks.inference.importance import ACCURACY, AUC, SURE, Floats, Score
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.rows import labels_of

FILE = "contribution.json"


def contribution(folder: Path, metric: str = "", exact: int = EXACT) -> dict[str, Any]:
    """Return Shapley values of a run's parties by a metric, and write them as `FILE`.

    metric : by default, AUC for two classes, accuracy for more, and R2 for numbers.
    exact : largest number of parties for which all subsets are evaluated.
    """
    found, labels = _evaluated(folder)
    metric = _metric(metric, labels)
    outputs = outputs_of(found, labels)
    parties = len(found.strategy["holder"]["sizes"])

    of_auc = metric == AUC or not labels.classes
    score = Score(labels.test, len(labels.classes), metric=None if of_auc else ACCURACY)

    @lru_cache(maxsize=2**10)
    def shares(used: tuple[bool, ...]) -> Floats:
        said = outputs(used)
        if metric == "log-loss":
            return -loss_per_row(said, torch.from_numpy(labels.test)).double().numpy()
        return score.shares(said.numpy())

    worths, chance = _shapley(shares, score, parties, exact)
    ends = [score.value(shares((which,) * parties)) for which in (False, True)]
    figures = {
        "metric": metric,
        "rows": len(labels.test),
        "nobody": ends[0],
        "all": ends[1],
        "orders": None if parties <= exact else ORDERS,
        "parties": [
            {
                "party": party,
                "value": score.value(worth),
                "margin": math.hypot(score.fall(worth).margin, SURE * math.sqrt(chance[party])),
            }
            for party, worth in enumerate(worths)
        ],
    }
    write_json(folder / FILE, figures)
    return figures


def _evaluated(folder: Path) -> tuple[Checkpoint, Labels]:
    """Return the model of a run that shows contributions, and the labels of its test rows."""
    found = checkpoint.load(folder)
    if not found.parties:
        raise ConfigError(f"{folder} has a model without parties. Name the run that taught it.")
    if not aggregation_of(found.config).any_subset:
        raise ConfigError(
            f"The model in {folder} needs all its parties. To see each party's contribution, "
            "train a model that predicts with any subset: set subsets = 'sampled'."
        )
    if not found.strategy["history"]["entries"]:
        raise ConfigError(f"The run in {folder} has no evaluation yet. Wait for the first one.")
    labels = labels_of(found)
    if labels.repeats and mechanism_of(found.config).hides_labels:
        raise ConfigError(
            f"The run in {folder} held out no test rows, and its noise protects the labels of its "
            "training rows. Train with a test-fraction to see contributions."
        )
    return found, labels.tested


def _shapley(
    shares: Callable[[tuple[bool, ...]], Floats], score: Score, parties: int, exact: int
) -> tuple[list[Floats], Floats]:
    """Return each row's share in each party's value, [R], and the variance over orders, [M]."""
    worths = [np.zeros_like(shares((True,) * parties)) for _ in range(parties)]
    chance = np.zeros(parties)  # variance of the mean over sampled orders
    if parties <= exact:
        sets, weights = all_sets(parties)
        for used, of_parties in zip(sets.tolist(), weights.tolist(), strict=True):
            for worth, weight in zip(worths, of_parties, strict=True):
                worth += weight * shares(tuple(used))
    else:
        added = np.zeros((ORDERS, parties))
        orders, places = sampled_sets(parties)
        pairs = zip(orders.tolist(), places.tolist(), strict=True)
        for number, (along, of_parties) in enumerate(pairs):
            for party, place in enumerate(of_parties):
                adds = shares(tuple(along[place + 1])) - shares(tuple(along[place]))
                worths[party] += adds / ORDERS
                added[number, party] = score.value(adds)
        chance = added.var(0) / ORDERS
    return worths, chance


# --- values -------------------------------------------------------------------------------------


def _metric(metric: str, labels: Labels) -> str:
    fit = ["accuracy", "log-loss"] if labels.classes else ["r2"]
    if len(labels.classes) == 2:
        fit.insert(0, "auc")
    if metric and metric not in fit:
        raise ConfigError(
            f"metric = {metric!r} does not fit these labels. Choose {' or '.join(fit)}."
        )
    return metric or fit[0]


def outputs_of(found: Checkpoint, labels: Labels) -> Callable[[tuple[bool, ...]], Tensor]:
    """Return a function from the parties to use to outputs of the test rows, [R, C]."""
    own = labels.features[1] if labels.features else np.zeros((len(labels.test), 0), np.float32)
    predictor = Predictor(found, own.shape[1])
    has = labels.present[1] if labels.present else np.ones((len(own), len(predictor.sizes)), bool)
    table = found.arrays["test_table.rows"]  # validation rows come first
    blocks = torch.from_numpy(table[len(table) - len(own) :])
    return lambda used: predictor.outputs(blocks, own, has & np.array(used, bool))
