"""Parts of a contribution, by columns: what both sides of `reasons` compute alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


POINTS = 128
"""Number of reference rows whose paths have a gradient."""


def on_paths(
    there: NDArray[np.bool_], draws: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the reference rows whose paths have a gradient, and where on them it is, [k] each.

    there : whether a participant has the row, [n].
    """
    rows = np.flatnonzero(there)
    rows = rows[np.linspace(0, len(rows) - 1, min(POINTS, len(rows))).astype(np.int64)]
    rows = rows.repeat(draws)
    places = np.random.default_rng(0).permutation(len(rows)) + 0.5
    return rows, (places / len(rows)).astype(np.float32)


class References:
    """The reference rows of a participant, and its columns.

    rows : the rows as the model reads them, [n, ...].
    columns : index of each raw column into the rows.
    """

    def __init__(self, rows: NDArray[np.float32], columns: Iterable[Any]) -> None:
        self.rows, self.mean = rows, rows.mean(0)
        places = np.arange(self.mean.size).reshape(1, *self.mean.shape)
        self._owner = np.stack([np.isin(places, places[at]).ravel() for at in columns], 1)

    def split(self, sample: Any, at: Any, slopes: Any, total: float) -> tuple[Array, Array]:
        """Return the part of each column in a contribution, and its standard error, [F] each.

        The mean slopes correct some rows to the mean of all rows.

        sample : the person, [1, ...].
        at, slopes : rows that have a slope, [k], and the slope of the score on the path, [k, ...].
        total : what the parts add up to.
        """
        some, mean = self.rows[at], slopes.mean(0)
        shares, of_rows = (
            each.reshape(len(each), -1) @ self._owner.astype(np.float32)
            for each in ((sample - some) * slopes + (some - self.mean) * mean, some * mean)
        )
        parts, size = shares.mean(0, dtype=float), np.abs(shares.mean(0, dtype=float))
        share = len(some) / len(self.rows)  # the mean over all rows varies less
        errors = np.hypot(standard_errors(shares), standard_errors(of_rows) * share**0.5)
        return parts + (total - parts.sum()) * size / (size.sum() or 1), errors


def standard_errors(samples: Array) -> Array:
    """Return the standard errors of the means of samples [n, F], [F]; 0 if nothing is random."""
    if len(samples) < 2:
        return np.zeros(samples.shape[1])
    errors: Array = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    return errors
