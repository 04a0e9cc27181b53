"""Sums of labels that exact counts show, and a bound of what they say about one label."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.evidence import MOST_TOLD, leverages

_MOST_SUMS = 2000  # of all parties; more take too long to check


class Shown:
    """Sums of labels that exact counts show to all parties of a run, and what they say.

    Each group of a column is a row of a matrix A [K, N] of zeros and ones, and parties learn A y.
    `leverages` bounds what they say.
    """

    def __init__(self, rows: int, most: float = MOST_TOLD) -> None:
        self.sums = np.ones((1, rows), np.float32)  # A: all parties know the sum of all labels
        self._rows, self._most = rows, most

    def add(self, rows: NDArray[Any], groups: list[NDArray[np.uint8]]) -> bool:
        """Show the sums of groups [n] of each column over rows [n], unless they tell too much."""
        number = len(self.sums) + sum(int(each.max()) + 1 for each in groups)
        if number > min(_MOST_SUMS, self._most * self._rows + len(groups)):
            return False
        added = np.zeros((number - len(self.sums), self._rows), np.float32)
        first = 0
        for each in groups:
            added[first + each.astype(np.int64), rows] = 1
            first += int(each.max()) + 1
        sums = np.concatenate([self.sums, added])
        if leverages(sums).max() > self._most:
            return False
        self.sums = sums
        return True
