"""Count of releases under noise on embeddings: each score releases one more of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.tasks.inference.predict import UploadCount, counts_uploads


class Releases:
    """Counts how often the most asked row was released, before each release.

    The journal of the run counts a prediction as one release of all its rows (`vfl predict`). A
    service writes to it when a row is released more often than the journal says. So epsilon is that
    of the most released row, also after a restart.

    epsilon : of the run and all its predictions; None without such noise.
    """

    def __init__(self, config: RunConfig, found: Checkpoint, rows: int) -> None:
        self._uploads = UploadCount(config, found)
        self._times = np.zeros(rows, np.int64) if counts_uploads(found) else None
        self._of_ids: Counter[bytes] = Counter()  # of ids outside the alignment
        self._counted = 0
        self.epsilon: float | None = None

    def count(self, rows: NDArray[np.int64], ids: Sequence[bytes]) -> None:
        """Count one release of each of these rows, and of these ids outside the alignment.

        Parameters
        ----------
        ids : ids that a party has. No other id is released.
        """
        if self._times is None:
            return
        self._times[rows] += 1
        self._of_ids.update(ids)
        most = max([self._times[rows].max(initial=0), *(self._of_ids[one] for one in ids)])
        if most > self._counted:
            self.epsilon = self._uploads.add(int(most) - self._counted)
            self._counted = int(most)
