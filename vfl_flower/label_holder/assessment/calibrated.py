"""Calibration of probabilities: the curve of bins, and the expected calibration error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.label_holder.assessment.intervals import DRAWS, Figure, Z, figure, generator, wilson

Array = NDArray[np.float64]

BINS = 10
"""Bins with equally many rows each, of a calibration curve."""

_STEPS = 60  # errors that an interval is searched among
_OUTSIDE = 0.025  # share of an interval's errors on each side


class Bins(NamedTuple):
    """Bins of rows by their probability, without empty bins: all are [B].

    rows : number of rows.
    said : mean probability.
    true : share of rows for which it came true.
    variance : sum of the rows' squared differences.
    """

    rows: Array
    said: Array
    true: Array
    variance: Array


def bins_of(chance: Array, true: NDArray[np.bool_]) -> Bins:
    """Return the bins of scikit-learn's ``calibration_curve(strategy="quantile", n_bins=10)``.

    Parameters
    ----------
    chance : probabilities [R].
    true : whether each came true, [R].
    """
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
    return {
        "x": bins.said.tolist(),
        "y": bins.true.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "rows": bins.rows.astype(int).tolist(),
    }


def error(bins: Bins) -> Figure:
    """Return the expected calibration error: sum over bins of rows / R * abs(said - true).

    Noise makes the error too large on average, most of all for a calibrated model. So the interval
    has the errors c * E whose noisy estimate would be below, or above, E in 2.5 % of samples or
    more. Here E is the estimate, and c multiplies the differences of all bins. A bin's noise is
    normal. The upper end is at least as far from E as noise alone would spread.
    """
    rows = bins.rows.sum()
    apart = bins.rows * (bins.said - bins.true)
    found = float(np.abs(apart).sum())
    spread = np.sqrt(bins.variance)
    if found <= 0:
        return figure(0.0, 0.0, float(spread.sum() / rows), 0, 1)
    noise = generator().standard_normal((DRAWS, len(spread))) * spread
    tried = np.linspace(0, found + 4 * float(np.linalg.norm(spread)), _STEPS)
    estimates = np.abs((tried / found)[:, None, None] * apart + noise).sum(2)  # [tried, draws]
    above = tried[(estimates >= found).mean(1) >= _OUTSIDE]
    below = tried[(estimates <= found).mean(1) >= _OUTSIDE]
    high = max([found + Z * float(estimates[0].std()), *below[-1:]])  # `tried` begins with 0
    return figure(found / rows, above[0] / rows, high / rows, 0, 1)
