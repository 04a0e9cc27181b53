"""95 % intervals of shares and means, and figures with their intervals, of calibration too."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Figure = dict[str, float]
"""The keys ``value``, ``low`` and ``high``: a figure and its 95 % interval."""

Z = 1.959963984540054
"""Standard deviations in half of a 95 % interval."""
DRAWS = 400
"""Draws of a bootstrap."""
BINS = 10
"""Bins with equally many rows each, of a calibration curve."""

_STEPS = 60  # sizes that an interval is searched among
_OUTSIDE = 0.025  # share of samples outside, on each side


def figure(
    value: Any, low: Any, high: Any, least: float = -math.inf, most: float = math.inf
) -> Figure:
    """Return a figure whose interval contains its value, and stays within its range."""
    value = float(value)
    low, high = max(least, float(low)), min(most, float(high))
    return {"value": value, "low": min(low, value), "high": max(high, value)}


def wilson(number: Any, of: Any) -> tuple[Array, Array]:
    """Return the ends of the interval of a share (Wilson, 1927); of no rows, 0 and 1."""
    number, of = np.asarray(number, np.float64), np.asarray(of, np.float64)
    rows = np.where(of > 0, of, 1.0)
    share = number / rows
    centre = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z * np.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2)) / (1 + Z**2 / rows)
    low, high = np.clip(centre - half, 0, share), np.clip(centre + half, share, 1)
    return np.where(of > 0, low, 0.0), np.where(of > 0, high, 1.0)


def share(number: float, of: float) -> Figure:
    """Return a share of independent rows."""
    low, high = wilson(number, of)
    return figure(number / of, low, high)


def mean(values: Array, least: float = -math.inf, most: float = math.inf) -> Figure:
    """Return the mean of a number of each row, [R]."""
    value, half = float(values.mean()), 0.0
    if len(values) > 1:
        half = Z * (float(values.std(ddof=1)) / math.sqrt(len(values)))
    return figure(value, value - half, value + half, least, most)


def by_logit(value: float, variance: float, rows: int) -> Figure:
    """Return a figure between 0 and 1, with an interval that is symmetric on the logit scale.

    Without a variance, as on few rows, use the interval of a share of so many rows.
    """
    if not (0 < value < 1 and variance > 0):
        return share(value * rows, rows)
    from scipy.special import expit  # lazy: slow to import

    middle = math.log(value / (1 - value))
    half = Z * math.sqrt(variance) / (value * (1 - value))
    low, high = expit(middle - half), expit(middle + half)
    return figure(value, low, high)


def difference(first: tuple[float, float], second: tuple[float, float]) -> Figure:
    """Return the difference of two shares of other rows (Newcombe, 1998, method 10)."""
    shares = [number / of for number, of in (first, second)]
    (low, high), (other_low, other_high) = (wilson(*each) for each in (first, second))
    value = shares[0] - shares[1]
    down = math.hypot(shares[0] - float(low), float(other_high) - shares[1])
    up = math.hypot(float(high) - shares[0], shares[1] - float(other_low))
    return figure(value, value - down, value + up, -1, 1)


def placements(scores: NDArray[Any], positive: NDArray[np.bool_]) -> Array:
    """Return the share of the other class that each row ranks rightly against, [R].

    The mean over either class is the AUC. The variances of both means add up to the AUC's variance
    (DeLong et al., 1988).
    """
    from scipy.stats import rankdata  # lazy: slow to import

    found, ranks = np.empty(len(scores)), rankdata(scores)
    for rows in (positive, ~positive):
        below = ranks[rows] - rankdata(scores[rows])  # rows of the other class
        found[rows] = below / max(1, int((~rows).sum()))
    return np.where(positive, found, 1 - found)


def inflated(apart: Array, spread: Array, size: Callable[[Array], Array]) -> tuple[float, float]:
    """Return the interval of the ``size`` of estimated differences [D], which noise makes too
    large.

    The size is too large on average, most of all if there is no difference. So the interval has
    those sizes c * E whose noisy estimate would be below, or above, E in 2.5 % of samples or more.
    Here E is the estimate, and c multiplies all differences. The noise is normal. The upper end is
    at least as far from E as noise alone would spread.
    """
    found = float(size(apart))
    noise = generator().standard_normal((DRAWS, len(spread))) * spread
    of_noise = size(noise)
    tried = np.linspace(0, found + 4 * float(np.linalg.norm(spread)), _STEPS)
    by = tried / found if found > 0 else np.zeros(1)
    estimates = size(by[:, None, None] * apart + noise)  # [tried, draws]
    above = tried[: len(by)][(estimates >= found).mean(1) >= _OUTSIDE]
    below = tried[: len(by)][(estimates <= found).mean(1) >= _OUTSIDE]
    return float(above[0]), max([found + Z * float(of_noise.std()), *below[-1:].tolist()])


def generator() -> np.random.Generator:
    """Return the generator of a bootstrap: the same figures have the same intervals."""
    return np.random.default_rng(0)


# --- calibration ----------------------------------------------------------------------------------


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


def calibration(bins: Bins) -> dict[str, Any]:
    """Return the calibration curve: mean probability to share that came true."""
    low, high = wilson(bins.true * bins.rows, bins.rows)
    points = {"x": bins.said, "y": bins.true, "low": low, "high": high}
    rows = bins.rows.astype(int).tolist()
    return {**{name: each.tolist() for name, each in points.items()}, "rows": rows}


def calibration_error(bins: Bins) -> Figure:
    """Return the expected calibration error: sum over bins of rows / R * abs(said - true)."""
    rows = bins.rows.sum()
    apart = bins.rows * (bins.said - bins.true) / rows
    spread = np.sqrt(bins.variance) / rows
    low, high = inflated(apart, spread, lambda each: np.abs(each).sum(-1))
    return figure(np.abs(apart).sum(), low, high, 0, 1)
