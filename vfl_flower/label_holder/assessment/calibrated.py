"""Calibration of probabilities: the curve of bins, and the expected calibration error."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.label_holder.assessment.intervals import Figure, figure, inflated, wilson

Array = NDArray[np.float64]

BINS = 10
"""Bins with equally many rows each, of a calibration curve."""


class Bins(NamedTuple):
    """Bins of rows by their probability, without empty bins: all are [B]."""

    rows: Array  # number of rows
    said: Array  # mean probability
    true: Array  # share of rows for which it came true
    variance: Array  # sum of the rows' squared differences


def bins_of(chance: Array, true: NDArray[np.bool_]) -> Bins:
    """Return the bins of scikit-learn's ``calibration_curve(strategy="quantile", n_bins=10)``."""
    edges = np.percentile(chance, np.linspace(0, 100, BINS + 1))
    number = np.searchsorted(edges[1:-1], chance)
    per_row = (np.ones(len(chance)), chance, true.astype(np.float64), np.square(true - chance))
    rows, said, happened, variance = (
        np.bincount(number, weights=each, minlength=BINS).astype(np.float64) for each in per_row
    )
    there = rows > 0
    rows = rows[there]
    return Bins(rows, said[there] / rows, happened[there] / rows, variance[there])


def curve(bins: Bins) -> dict[str, Any]:
    """Return the calibration curve: mean probability to share that came true."""
    low, high = wilson(bins.true * bins.rows, bins.rows)
    points = {"x": bins.said, "y": bins.true, "low": low, "high": high}
    rows = bins.rows.astype(int).tolist()
    return {**{name: each.tolist() for name, each in points.items()}, "rows": rows}


def error(bins: Bins) -> Figure:
    """Return the expected calibration error: sum over bins of rows / R * abs(said - true)."""
    rows = bins.rows.sum()
    apart = bins.rows * (bins.said - bins.true) / rows
    spread = np.sqrt(bins.variance) / rows
    low, high = inflated(apart, spread, lambda each: np.abs(each).sum(-1))
    return figure(np.abs(apart).sum(), low, high, 0, 1)
