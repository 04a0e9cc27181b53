"""Contribution of each party: Shapley values of figures on held-out rows.

The model must predict with any subset of the parties. No further training is needed. v(S) is the
model's figure with the parties S alone, on all test rows of the run. The checkpoint has the
embeddings of the last evaluation, so nobody asks the parties. A party's value is the mean, over all
orders of the parties, of what it adds to the parties before it (Shapley, 1953). The values add up
to v(all) - v(none). Without any party, the model predicts by the training labels alone, or by the
label holder's own columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels, load_own_labels, own_table, with_row_masks
from vfl_flower.data.labels import Labels
from vfl_flower.data.row_mask import Alignment
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.models.losses import loss_per_row
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.importance import placements
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.shapley import EXACT, ORDERS, all_sets, sampled_sets

FILE = "contribution.json"
_SURE = 1.96  # standard deviations in half of a 95 % interval

Array = NDArray[np.float64]


@dataclass
class Worth:
    """A sum of values v(S), and each row's share in it, by groups of rows.

    A value is the mean over each group. Accuracy, log loss and R2 have one group, all rows. An AUC
    has two groups with equal means. Positives carry the share of negatives below them. Negatives
    carry the share of positives above them. The variance follows from both (DeLong et al., 1988).
    """

    groups: list[Array] = field(default_factory=list)

    def add(self, factor: float, groups: Sequence[Array]) -> None:
        """Add a multiple of each row's share in a value."""
        if not self.groups:
            self.groups = [np.zeros(len(each)) for each in groups]
        for mine, each in zip(self.groups, groups, strict=True):
            mine += factor * each

    @property
    def value(self) -> float:
        """Return the sum."""
        return float(self.groups[0].mean())

    @property
    def variance(self) -> float:
        """Return the variance of the sum, over samples of rows."""
        return float(sum(each.var() / len(each) for each in self.groups))


def contribution(folder: Path, metric: str = "", exact: int = EXACT) -> dict[str, Any]:
    """Return Shapley values of a run's parties, and write them as `FILE`.

    Parameters
    ----------
    metric : accuracy, auc, log-loss (its decrease) or r2. The default is AUC for two classes,
        accuracy for more, and R2 for numbers.
    exact : largest number of parties for which all subsets are evaluated.

    Raises
    ------
    ConfigError
        If the model does not predict with any subset, or if its data have changed.
    """
    found = checkpoint.load(folder)
    if not aggregation_of(found.config).any_subset:
        raise ConfigError(
            f"The model in {folder} needs all its parties. To see each party's contribution, "
            "train a model that predicts with any subset: set subsets = 'sampled'."
        )
    if not found.strategy["history"]["recorded"]:
        raise ConfigError(f"The run in {folder} has no evaluation yet. Wait for the first one.")
    labels = _labels(found)
    if labels.differ_from(found.about_labels):
        raise ConfigError(
            f"{found.config.data.called} has changed since the run in {folder} began: it has "
            f"other rows, classes or values. Restore its data."
        )
    if labels.repeats and mechanism_of(found.config).hides_labels:
        raise ConfigError(
            f"The run in {folder} held out no test rows, and its noise protects the labels of its "
            "training rows. Train with a test-fraction to see contributions."
        )
    labels = labels.tested
    metric = _metric(metric, labels)
    outputs = _outputs(found, labels)
    parties = len(found.strategy["holder"]["sizes"])

    @lru_cache(maxsize=2**10)
    def value(used: tuple[bool, ...]) -> list[Array]:
        return _by_row(metric, outputs(used), labels)

    worths, chance = _shapley(value, parties, exact)
    ends = [float(value((which,) * parties)[0].mean()) for which in (False, True)]
    figures = {
        "metric": metric,
        "rows": len(labels.test),
        "nobody": ends[0],
        "all": ends[1],
        "orders": None if parties <= exact else ORDERS,
        "parties": [
            {
                "party": party,
                "value": worth.value,
                "margin": _SURE * math.sqrt(worth.variance + chance[party]),
            }
            for party, worth in enumerate(worths)
        ],
    }
    write_whole(folder / FILE, (json.dumps(figures, indent=2) + "\n").encode())
    return figures


def _shapley(
    value: Callable[[tuple[bool, ...]], list[Array]], parties: int, exact: int
) -> tuple[list[Worth], Array]:
    """Return each party's value, and its variance over sampled orders, [M]."""
    worths = [Worth() for _ in range(parties)]
    chance = np.zeros(parties)  # variance of the mean over sampled orders
    if parties <= exact:
        sets, weights = all_sets(parties)
        for used, of_parties in zip(sets.tolist(), weights.tolist(), strict=True):
            for worth, weight in zip(worths, of_parties, strict=True):
                worth.add(weight, value(tuple(used)))
    else:
        added = np.zeros((ORDERS, parties))
        orders, places = sampled_sets(parties)
        for number, (along, of_parties) in enumerate(
            zip(orders.tolist(), places.tolist(), strict=True)
        ):
            for party, place in enumerate(of_parties):
                before, after = value(tuple(along[place])), value(tuple(along[place + 1]))
                worths[party].add(1 / ORDERS, after)
                worths[party].add(-1 / ORDERS, before)
                added[number, party] = after[0].mean() - before[0].mean()
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


def _by_row(metric: str, outputs: Tensor, labels: Labels) -> list[Array]:
    """Return each row's share in a value, by groups (see `Worth`)."""
    y = torch.from_numpy(labels.test)
    if metric == "r2":
        of_rows = 1 - (outputs[:, 0] - y).double().square() / y.double().var(correction=0)
        return [of_rows.numpy()]
    if metric == "log-loss":
        return [-loss_per_row(outputs, y).double().numpy()]
    if metric == "accuracy":
        one = outputs.shape[1] == 1
        said = (outputs[:, 0] > 0).long() if one else outputs.argmax(1)
        return [(said == y).double().numpy()]
    positive = labels.test == 1
    shares = placements(outputs[:, 0].double().numpy(), positive)
    return [shares[positive], shares[~positive]]


def _labels(found: Checkpoint) -> Labels:
    """Return the labels of the run's rows."""
    config: RunConfig = found.config
    if not config.data.own_data:
        labels = load_labels(config)
        return with_row_masks(labels, config, len(found.strategy["holder"]["sizes"]))
    own = own_table(config.data)
    if len(own.ids) <= found.rows.max():
        raise ConfigError(f"{own.path} has lost rows since the run began. Restore its rows.")
    common = Alignment(found.about_labels["alignment"], found.rows, found.present)
    about = found.about_labels if config.running.grow else None
    return load_own_labels(config.data, own, common, about)


def _outputs(found: Checkpoint, labels: Labels) -> Callable[[tuple[bool, ...]], Tensor]:
    """Return a function from the parties to use to outputs of the test rows, [R, C]."""
    own = labels.features[1] if labels.features else np.zeros((len(labels.test), 0), np.float32)
    predictor = Predictor(found, own.shape[1])
    has = labels.present[1] if labels.present else np.ones((len(own), len(predictor.sizes)), bool)
    table = found.arrays["test_table.rows"]  # validation rows come first
    blocks = torch.from_numpy(table[len(table) - len(own) :])
    return lambda used: predictor.outputs(blocks, own, has & np.array(used))
