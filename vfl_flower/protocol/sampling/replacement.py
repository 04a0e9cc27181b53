"""Draw each mini-batch anew from all rows, as the papers do.

Line 3 of AsyREVEL's and Cascaded's Algorithm 1 draws so, and line 4 of VAFL's and DPZV's. Rows
of one mini-batch differ, but the next can have some of them again. An epoch is ceil(N / B)
mini-batches.
"""

from __future__ import annotations

import numpy as np

from vfl_flower.protocol.batches import Window, expected_rows
from vfl_flower.protocol.sampling.base import Sampling


class Replacement(Sampling):
    """Draw each mini-batch from all rows. Both ends derive it from the seed."""

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw the rows of each step by a generator of that step."""
        if self.batch >= self.rows:
            return super().draw(party, epoch, first, steps, secret)
        stream = 0 if party is None else party + 1
        ids = np.empty(steps * self.batch, np.int32)
        for step in range(steps):
            seed = [self.config.training.seed, 2, stream, epoch, first + step]
            rows = np.random.default_rng(seed).choice(self.rows, self.batch, replace=False)
            ids[step * self.batch : (step + 1) * self.batch] = rows
        lengths = np.full(steps, self.batch, np.int32)
        ids.flags.writeable = lengths.flags.writeable = False  # windows are shared
        return Window(ids, lengths)

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window of so many steps."""
        return steps * expected_rows(self.config, self.rows)
