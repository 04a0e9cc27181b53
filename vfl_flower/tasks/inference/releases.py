"""Releases of rows by predictions, under noise on embeddings: each upload of a row is one more."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.files import locked
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.journal import EVALUATE, Event, Journal, refused, second_count
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.release_log import ReleaseLog

notice = logging.getLogger("flwr.notice")  # `vfl predict` shows these records too


def counts_uploads(found: Checkpoint) -> bool:
    """Return whether each prediction with this model is a release that costs epsilon."""
    mechanism = mechanism_of(found.config)
    return mechanism.perturbs_uploads and mechanism.claims and found.parties > 0


class UploadCount:
    """Counts uploads of a row under noise on embeddings, and knows their epsilon.

    It counts the uploads before they happen, in a file beside the run and in a second count. It
    assumes that they are uploads of the rows that were uploaded most.
    """

    def __init__(self, config: RunConfig, found: Checkpoint) -> None:
        self._folder, self._found = Path(config.model).expanduser(), found
        self._journal: Journal | None = None
        self._times = 0  # that the journal counts
        self._trained = 0

    def add(self, uploads: int = 1) -> float | None:
        """Count uploads, and return the epsilon of perturbed embeddings; None without them.

        Read the file only if it is new, or if something else has written to it.

        Raise `ConfigError` if a journal is damaged or of another run, or if a journal of training
        is older than it was.
        """
        found = self._found
        if not counts_uploads(found):
            return None
        path = self._folder / "predictions.journal"
        with locked(path.with_suffix(".lock"), f"Another prediction uses {path}. Try again."):
            if self._journal is None or not self._journal.is_current:
                self._journal, self._times = self._read(path)
                self._trained = _trained(self._folder, found)
            lost = self._journal.lost
            self._journal.write(Event(EVALUATE, 0), uploads + lost)
            self._times += uploads
        rows = len(found.arrays["table.rows"])
        times = self._trained + self._times
        return mechanism_of(found.config).epsilon_of_uploads(rows, times)

    def _read(self, path: Path) -> tuple[Journal, int]:
        run = self._found.origin.partition("-")[0]
        journal = Journal(path, run, second_count(self._found.origin, path.name))
        times = sum(1 for _ in journal.read())
        if journal.run != run and "origin" in self._found.strategy:  # 0.2.0 named another one
            raise refused(path, "of another run")
        if journal.lost:
            notice.warning(
                "%s lacks %d predictions that %s has: it was deleted, restored or copied. They "
                "count.",
                *(path, journal.lost, journal.second),
            )
        return journal, times + journal.lost


def _trained(folder: Path, found: Checkpoint) -> int:
    """Return how often training has uploaded a row, also after the checkpoint of a cut-off run."""
    known, mark = int(found.strategy["uploads"]), found.strategy.get("journal")
    if found.finished or mark is None:
        return known
    config = found.config
    mechanism, rows = mechanism_of(config), len(found.arrays["table.rows"])
    accountant = mechanism.accountant(rows, estimators.choose(config)(config))
    second = second_count(found.origin, checkpoint.JOURNAL)
    ReleaseLog(accountant).keep(folder / checkpoint.JOURNAL, mark=mark, second=second)
    return max(known, accountant.uploads())


class Releases:
    """Counts how often the most asked row was released, before each release.

    The journal of the run counts a prediction as one release of all its rows (`vfl predict`). A
    service writes to it when a row is released more often than the journal says. So epsilon is that
    of the most released row, also after a restart.

    counts : whether there is such noise, so that a service must call `count`.
    epsilon : of the run and all its predictions; None without such noise.
    """

    def __init__(self, config: RunConfig, found: Checkpoint, rows: int) -> None:
        self._uploads = UploadCount(config, found)
        self.counts = counts_uploads(found)
        self._times = np.zeros(rows if self.counts else 0, np.int64)
        self._of_ids: Counter[bytes] = Counter()  # of ids outside the alignment
        self._counted = 0
        self.epsilon: float | None = None

    def count(self, rows: NDArray[np.int64], ids: Sequence[bytes]) -> None:
        """Count one release of each of these rows, and of these ids outside the alignment.

        ids : ids that a party has. No other id is released.
        """
        self._times[rows] += 1
        self._of_ids.update(ids)
        most = max([self._times[rows].max(initial=0), *(self._of_ids[one] for one in ids)])
        if most > self._counted:
            self.epsilon = self._uploads.add(int(most) - self._counted)
            self._counted = int(most)
