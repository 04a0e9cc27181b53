"""Parts of a contribution, by columns: what both sides of `reasons` compute alike."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


POINTS = 128
"""Number of reference rows whose paths have a gradient."""
_PLASTIC = 1.32471795724  # the root of x^3 = x + 1


@cache
def on_paths(rows: int, draws: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return which of some rows have a gradient, and where on their paths it is, [k] each.

    Each draw of a row is in its own part of the path. The sequence of places there fills [0, 1]
    evenly, and for 1 and 2 draws together the square (R2 of Roberts, 2018).
    """
    count = min(POINTS, rows)
    at = (np.arange(count) + 0.5) * rows / (count or 1)
    places = (np.arange(draws) + (0.5 + np.arange(count)[:, None] * _PLASTIC**-draws) % 1) / draws
    return at.astype(np.int64).repeat(draws), places.ravel().astype(np.float32)


class References:
    """The reference rows of a participant, [n, ...], and the index of each raw column into them."""

    def __init__(self, rows: NDArray[np.float32], columns: Iterable[Any]) -> None:
        self.rows, self.mean = rows, rows.mean(0)
        places = np.arange(self.mean.size).reshape(1, *self.mean.shape)
        owner = np.stack([np.isin(places, places[at]).ravel() for at in columns], 1)
        self._owner = owner.astype(np.float32)

    def read(self, rows: Any) -> tuple[Any, Any]:
        """Return rows as `products` takes them, and the inputs of the model for them."""
        return rows, rows

    def products(self, rows: Any, slopes: Any) -> Any:
        """Return the products of rows and slopes [k, ...], or of one of them, by column, [k, F]."""
        found = rows * slopes
        return found.reshape(len(found), -1) @ self._owner

    def split(self, sample: Any, some: Any, slopes: Any, total: float) -> tuple[Array, Array]:
        """Return each column's part in a contribution, and its standard error, [F] each.

        The mean slopes correct some rows to the mean of all rows.

        sample : the person, [1, ...].
        some, slopes : rows that have a slope, and the slope of the score on the path, [k, ...].
        """
        mean = slopes.mean(0)[None]
        of_rows = self.products(some, mean)
        shares = self.products(sample, slopes) - self.products(some, slopes)
        shares += of_rows - self.products(self.mean[None], mean)
        parts = shares.mean(0, dtype=float)
        size = np.abs(parts)
        share = len(some) / len(self.rows)  # the mean over all rows varies less
        errors = np.hypot(standard_errors(shares), standard_errors(of_rows) * share**0.5)
        return parts + (total - parts.sum()) * size / (size.sum() or 1), errors


def standard_errors(samples: Array) -> Array:
    """Return the standard errors of the means of samples [n, F], [F]; 0 if nothing is random."""
    if len(samples) < 2:
        return np.zeros(samples.shape[1])
    return samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
