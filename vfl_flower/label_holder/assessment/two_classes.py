"""Figures and curves of two classes, by the probability of the second class.

Rows whose probability is above the threshold are flagged as the second class.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix, roc_curve

from vfl_flower.label_holder.assessment import intervals
from vfl_flower.label_holder.assessment.intervals import Figure, by_logit, figure, share, wilson

Array = NDArray[np.float64]
Curve = dict[str, list[float]]

POINTS = 100
"""Most points of a curve."""
DECILES = 10

_CELLS = 2000  # most groups of equal probabilities in a bootstrap; more are merged


class Ranked(NamedTuple):
    """Rows by falling probability, one entry for each distinct probability, [G]."""

    positives: Array  # rows of the second class with a probability, not cumulated
    negatives: Array
    roc: tuple[Array, Array]  # rates of false and of true positives, from (0, 0), [G + 1]

    @classmethod
    def of(cls, chance: Array, positive: NDArray[np.bool_]) -> Ranked:
        """Rank rows by the probability [R] of the second class, which ``positive`` [R] marks."""
        false, true, _ = roc_curve(positive, chance, drop_intermediate=False)
        number = int(positive.sum())
        counts = (true * number, false * (len(positive) - number))
        positives, negatives = (np.diff(np.rint(each)) for each in counts)
        return cls(positives, negatives, (false, true))


def figures(
    chance: Array, positive: NDArray[np.bool_], threshold: float, ranked: Ranked | None = None
) -> dict[str, Figure]:
    """Return the figures of rows by probability of the second class, and by whether it is true."""
    of_auc = _auc(chance, positive)
    found = {
        "auc": of_auc,
        "gini": {name: 2 * each - 1 for name, each in of_auc.items()},
        **_of_ranks(chance, positive, ranked or Ranked.of(chance, positive)),
        "brier": intervals.mean(np.square(positive - chance), 0, 1),
        "ece": intervals.calibration_error(intervals.bins_of(chance, positive)),
    }
    (true_negative, false_positive), (false_negative, true_positive) = counts(
        chance, positive, threshold
    )
    rows, flagged = len(positive), false_positive + true_positive
    found["accuracy"] = share(true_negative + true_positive, rows)
    if flagged:
        found["precision"] = share(true_positive, flagged)
    found["recall"] = share(true_positive, true_positive + false_negative)
    # F1 = 2 J / (1 + J), for the share J of true positives among rows that are or seem positive.
    jaccard = share(true_positive, rows - true_negative)
    found["f1"] = {name: 2 * each / (1 + each) for name, each in jaccard.items()}
    found["flagged"] = share(flagged, rows)
    return found


def counts(chance: Array, positive: NDArray[np.bool_], threshold: float) -> list[list[int]]:
    """Return the confusion matrix: for each true class, the rows of each predicted class."""
    matrix = confusion_matrix(positive, chance > threshold, labels=[False, True])
    return matrix.tolist()


def assessed(
    chance: Array, positive: NDArray[np.bool_], threshold: float
) -> tuple[dict[str, Figure], dict[str, Any]]:
    """Return the figures and the curves; parameters are as for `figures`."""
    ranked = Ranked.of(chance, positive)
    true, false = ranked.positives.cumsum(), ranked.negatives.cumsum()
    positives, flagged = true[-1], true + false
    bins = intervals.bins_of(chance, positive)
    reached = np.concatenate([[0.0], true])
    curves = {
        "roc": _curve(*ranked.roc, *wilson(reached, positives)),
        "precision_recall": _curve(true / positives, true / flagged, *wilson(true, flagged)),
        "calibration": intervals.calibration(bins),
        **_by_decile(flagged, true),
    }
    return figures(chance, positive, threshold, ranked), curves


def _auc(chance: Array, positive: NDArray[np.bool_]) -> Figure:
    """Return the area under the ROC curve, with the variance of DeLong et al. (1988)."""
    shares = intervals.placements(chance, positive)
    parts = shares[positive], shares[~positive]
    fewest = min(map(len, parts))
    variance = sum(float(each.var(ddof=1)) / len(each) for each in parts) if fewest > 1 else 0.0
    return by_logit(float(parts[0].mean()), variance, fewest)


def _of_ranks(chance: Array, positive: NDArray[np.bool_], ranked: Ranked) -> dict[str, Figure]:
    """Return the Kolmogorov-Smirnov statistic and the average precision, by a bootstrap.

    KS is the largest of many differences, so it is too large on average. Its interval is Newcombe's
    (1998) at its probability, and the lower end moves down by this bias.
    """
    false, true = ranked.roc
    at = int((true - false).argmax())
    ks = float(true[at] - false[at])
    number, others = ranked.positives.sum(), ranked.negatives.sum()
    precision = float(average_precision_score(positive, chance))
    drawn_ks, drawn_precision = _drawn(ranked)
    (low, high), (other_low, other_high) = (
        wilson(true[at] * number, number),
        wilson(false[at] * others, others),
    )
    bias = max(0.0, float(drawn_ks[1:].mean() - drawn_ks[0]))
    down = math.hypot(true[at] - float(low), float(other_high) - false[at]) + bias
    up = math.hypot(float(high) - true[at], false[at] - float(other_low))
    return {
        "ks": figure(ks, ks - down, ks + up, 0, 1),
        "average_precision": by_logit(precision, float(drawn_precision[1:].var()), int(number)),
    }


def _drawn(ranked: Ranked) -> tuple[Array, Array]:
    """Return KS and average precision of the rows as they are, and of each draw: [1 + draws]."""
    size = ranked.positives + ranked.negatives
    groups = len(size)
    if groups > _CELLS:  # merge neighbours into cells with about equally many rows
        cell = ((size.cumsum() - size / 2) * (_CELLS / size.sum())).astype(np.int64)
        starts = np.flatnonzero(np.diff(cell, prepend=-1))
        classes = [np.add.reduceat(each, starts) for each in (ranked.positives, ranked.negatives)]
    else:
        classes = [ranked.positives, ranked.negatives]
    random = intervals.generator()
    cumulated = []
    for each in classes:
        there = np.flatnonzero(each)
        weights = np.zeros((1 + intervals.DRAWS, len(each)))
        weights[0] = each
        # Rows of equal probability share a draw: Poisson weights add up to one.
        weights[1:, there] = random.poisson(each[there], (intervals.DRAWS, len(there)))
        cumulated.append(np.cumsum(weights, axis=1, out=weights))
    true, false = cumulated
    drawn = (true[:, -1] > 0) & (false[:, -1] > 0)  # a draw may lack a class
    true, false = true[drawn], false[drawn]
    recall = true / true[:, -1:]
    ks = (recall - false / false[:, -1:]).max(1)
    precision = true / np.maximum(true + false, 1)
    average = (np.diff(recall, axis=1, prepend=0.0) * precision).sum(1)
    return ks, average


def _curve(x: Array, y: Array, low: Array, high: Array) -> Curve:
    """Return a curve with at most `POINTS` of its points, evenly spaced along it."""
    at = np.arange(len(x))
    if len(x) > POINTS:
        steps = np.abs(np.diff(x)) + np.abs(np.diff(y))
        along = np.concatenate([[0.0], steps.cumsum()])
        at = np.searchsorted(along, np.linspace(0, along[-1], POINTS))
        at = np.unique(np.append(np.minimum(at, len(x) - 1)[:-1], len(x) - 1))
    return {
        name: each[at].tolist() for name, each in {"x": x, "y": y, "low": low, "high": high}.items()
    }


def _by_decile(flagged: Array, true: Array) -> dict[str, Curve]:
    """Return the cumulative gain, and the lift of each decile over a random tenth of the rows.

    Equal probabilities count in proportion.
    """
    shares = np.arange(1, DECILES + 1) / DECILES
    reached = np.interp(shares * flagged[-1], np.append(0.0, flagged), np.append(0.0, true))
    positives = reached[-1]
    low, high = wilson(reached, positives)
    low[-1] = 1.0  # all rows have all positives
    inside = np.diff(reached, prepend=0.0)
    of_each = [each * DECILES for each in (inside / positives, *wilson(inside, positives))]
    return {
        "gain": _curve(shares, reached / positives, low, high),
        "lift": _curve(shares, *of_each),
    }
