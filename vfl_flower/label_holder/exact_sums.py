"""Sums of labels that exact counts show, and a bound of what they say about one label."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_SUMS = 2000  # of all parties; more take too long to check


class Shown:
    """Sums of labels that exact counts show to all parties of a run, and what they say.

    Each group of a column is a row of a matrix A [K, N] of zeros and ones, and parties learn A y.
    The leverage of label i is a_i' (A A')^+ a_i, where a_i is its column in A. It is the share of
    the label's variance that the best linear estimate explains. At 1, the sums determine the label.
    """

    most = 0.2
    """Largest leverage. A label with noise explains tanh^2(eps / 2) of itself: 0.21 at 1."""

    def __init__(self, rows: int, most: float = most) -> None:
        self.sums = np.ones((1, rows), np.float32)  # A: all parties know the sum of all labels
        self._rows, self._most = rows, most

    def add(self, rows: NDArray[Any], groups: list[NDArray[np.uint8]]) -> bool:
        """Show the sums of a party's groups, unless they say too much about one label.

        Parameters
        ----------
        rows : training rows that the party has, [n].
        groups : group of each of these rows, [n], for each column.

        Returns
        -------
        Whether they are shown.
        """
        number = len(self.sums) + sum(int(each.max()) + 1 for each in groups)
        if number > min(_MOST_SUMS, self._most * self._rows + len(groups)):
            return False
        added = np.zeros((number - len(self.sums), self._rows), np.float32)
        first = 0
        for each in groups:
            added[first + each.astype(np.int64), rows] = 1
            first += int(each.max()) + 1
        sums = np.concatenate([self.sums, added])
        if self.leverages(sums).max() > self._most:
            return False
        self.sums = sums
        return True

    @staticmethod
    def leverages(sums: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the leverage of each label by sums A [K, N]: [N]."""
        gram = np.zeros((len(sums),) * 2)
        for at in range(0, sums.shape[1], 65536):
            piece = sums[:, at : at + 65536].astype(np.float64)
            gram += piece @ piece.T
        values, vectors = np.linalg.eigh(gram)
        real = values > 1e-9 * values[-1]
        whitened = (vectors[:, real] / np.sqrt(values[real])).T
        found = np.zeros(sums.shape[1])
        for at in range(0, sums.shape[1], 65536):
            piece = whitened @ sums[:, at : at + 65536]
            found[at : at + 65536] = np.square(piece).sum(0)
        return found
