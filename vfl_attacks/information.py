"""Attack task "information" in the privacy audit: what noisy labels, counts and bins show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vfl_attacks.clients import Ids, Rows
from vfl_attacks.labels import Finding, finding
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import partition_columns
from vfl_flower.data.bins import Bins
from vfl_flower.data.evidence import Groups
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.tasks.information.label_holder import Shown, counted_bins

_EPSILON = 1.0  # the default of the task
_TRIALS = 10  # draws of noise


def of_information(config: RunConfig, parties: int) -> list[Finding]:
    """Return what task "information" would show on these data; nothing without two classes.

    - A party takes each noisy label as the label. Its AUC can be no more than e^eps / (1 + e^eps).
    - All parties solve the linear equations of exact counts, as they are sent, and without the
      check of `Shown`.
    - The label holder takes the mean of a bin as the value of each row in it.
    """
    labels = load_labels(config).train
    if labels.max() != 1:
        return []
    try:
        columns = [
            [values for _, values in partition_columns(config, party, parties).read()]
            for party in range(parties)
        ]
    except ConfigError:  # images, texts or sequences have no columns
        return []
    epsilon = config.privacy.epsilon if config.privacy.mechanism == "labels" else _EPSILON
    assert epsilon is not None
    kept, generator = kept_share(epsilon, 2), np.random.default_rng([config.training.seed, 8])
    flips = generator.random((_TRIALS, len(labels))) >= kept
    found = [
        finding(
            "noisy labels",
            f"party 0: labels of epsilon {epsilon:g}, which bounds it by {kept:.4f}",
            [(_scores(labels ^ flip), labels) for flip in flips],
        )
    ]
    counted = [_counted(each, labels, config.min_bin) for each in columns]
    shown, every = Shown(len(labels)), np.arange(len(labels))
    sent = [shown.add(every, each) for each in counted]
    many = f"counts of {sum(map(len, counted))} columns"
    name = "exact counts" if all(sent) else "exact counts, those sent"
    found.append(_by_counts(name, f"all parties: {many}", shown.sums, labels))
    if not all(sent):
        unchecked = Shown(len(labels), most=np.inf)
        for each in counted:
            unchecked.add(every, each)
        control = "exact counts, control"
        found.append(_by_counts(control, f"all parties, no check: {many}", unchecked.sums, labels))
    success = float(np.mean([_explained(each) for each in columns[0]]))
    attacker = "label holder: bins of party 0 and their means"
    return [*found, Finding("bins of exact counts", attacker, "R2", success, 0.0, len(labels))]


def _scores(score: Any) -> Rows:
    return np.stack([-score, score], axis=1).astype(np.float64)


def _counted(columns: list[Rows], labels: Ids, min_bin: int) -> list[Groups]:
    """Return the group of each row in each column."""
    found = list[Groups]()
    for values in columns:
        bins = Bins.learn(values)
        at = bins.of(values)
        groups, _ = counted_bins(at, bins.count, labels.astype(np.uint8), min_bin)
        found.append(groups[at])
    return found


def _by_counts(name: str, attacker: str, sums: Rows, labels: Ids) -> Finding:
    """Infer labels by the least-squares solution of the counts A y.

    Columns that predict labels tell something about anybody. So guessing is the same solution for
    half of the rows, by counts of the other half.
    """
    sums = sums.astype(np.float64)
    halves = np.arange(len(labels)) % 2 == 0
    weights = [np.linalg.pinv(sums[:, each].T) @ labels[each] for each in (halves, ~halves)]
    others = np.where(halves, weights[1] @ sums, weights[0] @ sums)
    own = np.linalg.pinv(sums.T) @ labels @ sums
    success, guessing = (
        finding(name, attacker, [(_scores(each), labels)]) for each in (own, others)
    )
    return replace(success, guessing=guessing.success)


def _explained(values: Rows) -> float:
    """Return the share of a column's variance that the means of its bins explain."""
    bins = Bins.learn(values).of(values)
    means = np.bincount(bins, values) / np.maximum(np.bincount(bins), 1)
    spread = float(np.var(values))
    return 1 - float(np.var(values - means[bins])) / spread if spread else 1.0
