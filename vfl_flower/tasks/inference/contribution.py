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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
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
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.models.losses import loss_per_row
from vfl_flower.models.tops import load_top
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of

FILE = "contribution.json"
EXACT = 10
"""Largest number of parties for exact values from all subsets. Above, sample random orders."""
ORDERS = 200
"""Number of random orders above that."""
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

    worths = [Worth() for _ in range(parties)]
    chance = np.zeros(parties)  # variance of the mean over sampled orders
    if parties <= exact:
        for used in product((False, True), repeat=parties):
            of_used = value(used)
            for worth, in_it in zip(worths, used, strict=True):
                worth.add(share(sum(used) - in_it, parties) * (1 if in_it else -1), of_used)
    else:
        each = np.zeros((ORDERS, parties))
        for number, order in enumerate(orders(parties)):
            used = (False,) * parties
            for party in order:
                more = tuple(have or other == party for other, have in enumerate(used))
                worths[party].add(1 / ORDERS, value(more))
                worths[party].add(-1 / ORDERS, value(used))
                each[number, party] = value(more)[0].mean() - value(used)[0].mean()
                used = more
        chance = each.var(0) / ORDERS
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


def share(before: int, parties: int) -> float:
    """Return the share of orders where one set of ``before`` parties precedes a party."""
    return 1 / (parties * math.comb(parties - 1, before))


def orders(parties: int) -> Iterator[NDArray[np.int64]]:
    """Yield random orders, each followed by its reverse to reduce variance."""
    generator = np.random.default_rng(0)
    for _ in range(ORDERS // 2):
        order = generator.permutation(parties)
        yield order
        yield order[::-1]


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
    scores = outputs[:, 0].double().numpy()
    positive, negative = np.sort(scores[labels.test == 1]), np.sort(scores[labels.test == 0])
    groups = []
    for mine, others, sign in (
        (scores[labels.test == 1], negative, 1),
        (scores[labels.test == 0], positive, -1),
    ):
        below = np.searchsorted(others, mine, "left") + np.searchsorted(others, mine, "right")
        share = below / (2 * len(others))
        groups.append(share if sign > 0 else 1 - share)
    return groups


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


@torch.no_grad()
def _outputs(found: Checkpoint, labels: Labels) -> Callable[[tuple[bool, ...]], Tensor]:
    """Return a function from the parties to use to outputs of the test rows, [R, C]."""
    sizes: list[int] = found.strategy["holder"]["sizes"]
    own = labels.features[1] if labels.features else np.zeros((len(labels.test), 0), np.float32)
    top = aggregation_of(found.config).build_top(sizes, labels.outputs, own.shape[1]).eval()
    load_top(found.config, top, of_group("top", found.arrays))
    has = labels.present[1] if labels.present else np.ones((len(own), len(sizes)), bool)
    table = found.arrays["test_table.rows"]  # validation rows come first
    known = [torch.from_numpy(table[len(table) - len(own) :]), torch.from_numpy(own)]
    prior: list[float] | None = found.strategy["holder"]["prior"]

    @torch.no_grad()
    def outputs(used: tuple[bool, ...]) -> Tensor:
        present = torch.from_numpy((has & np.array(used)).astype(np.float32))
        said: Tensor = top(torch.cat([*known, present], dim=1))
        if own.shape[1] or not prior:
            return said
        return torch.where(present.any(1)[:, None], said, torch.tensor(prior))

    return outputs
