"""Figures and curves of predicted numbers, in units of the labels."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.label_holder.assessment.intervals import Figure, Z, figure, mean, wilson

Array = NDArray[np.float64]

DECILES = 10
_BARS = 40  # of the histogram of residuals


def figures(said: Array, labels: Array) -> dict[str, Figure]:
    """Return the figures of predictions ``said`` [R] of the labels [R]."""
    rows = len(labels)
    error = said - labels
    squared = np.square(error)
    found = {"rmse": _root(squared), "mae": mean(np.abs(error), 0), "bias": mean(error)}
    variance = float(labels.var())
    if rows > 1 and variance > 0:
        found["r2"] = _r2(squared, labels)
        if float(said.var()) > 0 and rows > 4:
            found["spearman"] = _spearman(said, labels)
    return found


def assessed(said: Array, labels: Array) -> tuple[dict[str, Figure], dict[str, Any]]:
    """Return the figures and the curves: calibration by decile, and a histogram of residuals."""
    return figures(said, labels), {
        "calibration": _calibration(said, labels),
        "residuals": _residuals(said - labels),
    }


def _root(squared: Array) -> Figure:
    """Return the root of a mean of squares, with an interval of its logarithm."""
    found = mean(squared, 0)
    value, half = found["value"], found["high"] - found["value"]
    by = math.exp(half / value / 2) if value > 0 else 1.0
    root = math.sqrt(value)
    return figure(root, root / by, root * by)


def _r2(squared: Array, labels: Array) -> Figure:
    """Return R2 = 1 - e / v, with an interval of log(e / v) by the delta method."""
    apart = np.square(labels - labels.mean())
    error, variance = float(squared.mean()), float(apart.mean())
    value = 1 - error / variance
    if error <= 0:
        return figure(value, value, value)
    half = Z * float((squared / error - apart / variance).std()) / math.sqrt(len(labels))
    ratio = error / variance
    return figure(value, 1 - ratio * math.exp(half), 1 - ratio * math.exp(-half), most=1)


def _spearman(said: Array, labels: Array) -> Figure:
    """Return Spearman's correlation, with the interval of Bonett and Wright (2000)."""
    from scipy.stats import spearmanr  # lazy: slow to import

    value = float(spearmanr(said, labels).statistic)
    if abs(value) >= 1:
        return figure(value, value, value)
    middle = math.atanh(value)
    half = Z * math.sqrt((1 + value**2 / 2) / (len(labels) - 3))
    return figure(value, math.tanh(middle - half), math.tanh(middle + half))


def _calibration(said: Array, labels: Array) -> dict[str, list[float]]:
    parts = [each for each in np.array_split(np.argsort(said, kind="stable"), DECILES) if len(each)]
    means = [mean(labels[each]) for each in parts]
    return {
        "x": [float(said[each].mean()) for each in parts],
        "y": [each["value"] for each in means],
        "low": [each["low"] for each in means],
        "high": [each["high"] for each in means],
        "rows": [len(each) for each in parts],
    }


def _residuals(error: Array) -> dict[str, list[float]]:
    counts, edges = np.histogram(error, bins=min(_BARS, max(1, math.isqrt(len(error)))))
    low, high = wilson(counts, len(error))
    return {
        "x": ((edges[1:] + edges[:-1]) / 2).tolist(),
        "y": counts.astype(float).tolist(),
        "low": (low * len(error)).tolist(),
        "high": (high * len(error)).tolist(),
    }
