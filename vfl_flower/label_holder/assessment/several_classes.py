"""Figures and curves of three classes or more, by the probability of each.

The predicted class of a row is the most probable one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, f1_score

from vfl_flower.label_holder.assessment import intervals

Array = NDArray[np.float64]
Classes = NDArray[np.int64]

_MOST = 50  # classes of a confusion matrix
_WEIGHTS = 10**6  # of a bootstrap at once
_LEAST = float(np.finfo(np.float64).eps)  # probability that scikit-learn's log loss rises to


def figures(chance: Array, labels: Classes) -> dict[str, intervals.Figure]:
    """Return the figures of rows with class probabilities [R, K] and labels [R]."""
    predicted, of_label = chance.argmax(1), chance[np.arange(len(labels)), labels]
    right = predicted == labels
    found = {
        "accuracy": intervals.share(int(right.sum()), len(labels)),
        "macro_f1": _macro_f1(predicted, labels),
        "log_loss": intervals.mean(-np.log(np.clip(of_label, _LEAST, 1 - _LEAST)), 0),
        "brier": intervals.mean(np.square(chance).sum(1) - 2 * of_label + 1, 0, 2),
        "ece": intervals.calibration_error(intervals.bins_of(chance.max(1), right)),
    }
    if len(np.unique(labels)) > 1:
        found["macro_auc"] = _macro_auc(chance, labels)
    return found


def assessed(chance: Array, labels: Classes) -> tuple[dict[str, intervals.Figure], dict[str, Any]]:
    """Return the figures and the curves; parameters are as for `figures`."""
    right = chance.argmax(1) == labels
    curves = {"calibration": intervals.calibration(intervals.bins_of(chance.max(1), right))}
    return figures(chance, labels), curves


def counts(chance: Array, labels: Classes) -> list[list[int]] | None:
    """Return the confusion matrix, true by predicted class; None for more than 50 classes."""
    classes = chance.shape[1]
    if classes > _MOST:
        return None
    matrix = confusion_matrix(labels, chance.argmax(1), labels=np.arange(classes))
    return matrix.tolist()


def _macro_auc(chance: Array, labels: Classes) -> intervals.Figure:
    """Return the mean AUC of each class against the rest, by each row's influence on it."""
    rows = len(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    influence, values = np.zeros(rows), []
    for number, size in zip(classes, sizes, strict=True):
        mine = labels == number
        right = intervals.placements(chance[:, number], mine)
        values.append(value := float(right[mine].mean()))
        influence += (right - value) * (rows / np.where(mine, size, rows - size))
    variance = float(influence.var()) / rows / len(classes) ** 2
    least = int(sizes.min())
    return intervals.by_logit(float(np.mean(values)), variance if least > 1 else 0.0, least)


def _macro_f1(predicted: Classes, labels: Classes) -> intervals.Figure:
    """Return the mean F1 of the classes, by a bootstrap of the cells of the confusion matrix."""
    value = float(f1_score(labels, predicted, average="macro", zero_division=0))
    classes = 1 + int(max(predicted.max(), labels.max()))
    cells, sizes = np.unique(labels * classes + predicted, return_counts=True)
    true, said = np.divmod(cells, classes)
    random, drawn = intervals.generator(), []
    for draws in np.array_split(
        np.arange(intervals.DRAWS), 1 + intervals.DRAWS * len(cells) // _WEIGHTS
    ):
        weights = random.poisson(sizes, (len(draws), len(cells)))
        first = np.arange(len(draws))[:, None] * classes
        of_true, of_said, right = (
            np.bincount((first + at).ravel(), each.ravel(), len(draws) * classes)
            for at, each in ((true, weights), (said, weights), (true, weights * (true == said)))
        )
        size = of_true + of_said  # a class without rows in a draw has no F1
        of_class = np.divide(2 * right, size, out=np.zeros_like(size), where=size > 0)
        there = (size > 0).reshape(len(draws), classes).sum(1)
        drawn.append(of_class.reshape(len(draws), classes).sum(1) / np.maximum(there, 1))
    return intervals.by_logit(value, float(np.concatenate(drawn).var()), len(labels))
