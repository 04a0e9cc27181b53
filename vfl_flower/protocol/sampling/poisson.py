"""Take each row with probability B / N, as privacy amplification assumes.

The sizes of mini-batches vary around B. An asynchronous party draws them from a private secret.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.protocol.batches import Window, expected_rows, secret_generator
from vfl_flower.protocol.sampling.base import Sampling


class Poisson(Sampling):
    """Draw each row independently in each step."""

    secret: ClassVar[bool] = True
    varies: ClassVar[bool] = True

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw the gaps between rows that are taken."""
        rows, seed = self.rows, self.config.training.seed
        rate = min(1.0, self.batch / rows)
        generator = secret_generator(f"batch|{seed}|{party}|{epoch}|{first}|".encode() + secret)
        trials, taken = steps * rows, np.zeros(0, np.int64)
        last = -1
        while last < trials:
            gaps = generator.geometric(rate, size=int(trials * rate) + 100)
            taken = np.concatenate([taken, last + np.cumsum(gaps)])
            last = int(taken[-1])
        step, found = np.divmod(taken[taken < trials], rows)
        lengths = np.bincount(step, minlength=steps).astype(np.int32)
        ids = found.astype(np.int32)
        ids.flags.writeable = lengths.flags.writeable = False
        return Window(ids, lengths)

    def divisors(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the average number of rows in each step, [S]."""
        return np.full(len(lengths), expected_rows(self.config, self.rows), np.int32)

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window, by ten deviations above the mean."""
        expected = steps * expected_rows(self.config, self.rows)
        return int(expected + 10 * expected**0.5 + 100)
