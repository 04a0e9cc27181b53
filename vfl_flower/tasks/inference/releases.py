"""Releases of rows by predictions, under noise on embeddings: each upload of a row is one more."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.journal import Journal, refused
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.records import second_count
from vfl_flower.records.ledger import Value, no_file

_UPLOADS, _RUN = "uploads", "run"  # names in the ledgers


def counts_uploads(found: Checkpoint) -> bool:
    """Return whether each prediction with this model is a release that costs epsilon."""
    mechanism = mechanism_of(found.config)
    return mechanism.perturbs_uploads and mechanism.claims and found.parties > 0


class UploadCount:
    """Counts uploads of a row with noise, before they happen, and knows their epsilon.

    It assumes that they are uploads of the rows that were uploaded most.
    """

    def __init__(self, config: RunConfig, found: Checkpoint) -> None:
        self._folder, self._found = Path(config.model).expanduser(), found

    @cached_property
    def _trained(self) -> int:
        """Return how often training uploaded a row, also after the checkpoint of a cut-off run."""
        found, config = self._found, self._found.config
        known, mark = int(found.strategy["uploads"]), found.strategy.get("journal")
        if found.finished or mark is None:
            return known
        mechanism, rows = mechanism_of(config), len(found.arrays["table.rows"])
        accountant = mechanism.accountant(rows, estimators.choose(config)(config))
        second = second_count.of_run(found.origin, checkpoint.JOURNAL)
        ReleaseLog(accountant).keep(self._folder / checkpoint.JOURNAL, mark=mark, second=second)
        return max(known, accountant.uploads())

    def add(self, uploads: int = 1) -> float | None:
        """Count uploads, and return the epsilon of perturbed embeddings; None without them."""
        found = self._found
        if not counts_uploads(found):
            return None
        trained, path = self._trained, self._folder / "predictions.journal"
        second, run = second_count.of_run(found.origin, path.name), found.origin.partition("-")[0]
        both = second_count.opened_with(path, second, _earlier, _earlier_second)
        with both as (ledger, counted):
            if not ledger.content(_RUN):
                ledger.write(_RUN, run.encode())
            of_another = ledger.content(_RUN) != run.encode()
            if of_another and "origin" in found.strategy:  # 0.2.0 named another one
                raise refused(path, "of another run")
            times = ledger.count(_UPLOADS)
            if (lost := counted.count(_UPLOADS) - times) > 0:
                notice.warning(
                    "%s lacks %d predictions that %s has: it was deleted, restored or copied. They "
                    "count.",
                    *(path, lost, second),
                )
            times += max(0, lost) + uploads
            ledger.write(_UPLOADS, times)
            counted.write(_UPLOADS, times)
        rows = len(found.arrays["table.rows"])
        return mechanism_of(found.config).epsilon_of_uploads(rows, trained + times)


def _earlier(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the file of an earlier version: a journal with an event for each upload."""
    if path.exists():
        journal = Journal(path)
        yield _UPLOADS, 0, sum(1 for _ in journal.read())
        yield _RUN, 0, journal.run.encode()


def _earlier_second(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the second count of an earlier version: a checksum of 16 bytes for each upload."""
    content = path.read_bytes() if path.exists() else b""
    if content.startswith(b"SQLite"):
        no_file(path)  # a damaged ledger
    yield _UPLOADS, 0, len(content) // 16


class Releases:
    """Counts how often the most asked row was released, before each release.

    The ledger of the run counts a prediction as one release of all its rows (`vfl predict`). A
    service adds to it when a row is released more often than it has counted. So epsilon is that
    of the most released row, also after a restart.
    """

    def __init__(self, config: RunConfig, found: Checkpoint, rows: int) -> None:
        self._uploads = UploadCount(config, found)
        self.counts = counts_uploads(found)
        self._times = np.zeros(rows if self.counts else 0, np.int64)
        self._of_ids: Counter[bytes] = Counter()  # of ids outside the alignment
        self._counted = 0
        self.epsilon: float | None = None

    def count(self, rows: NDArray[np.int64], ids: Sequence[bytes]) -> None:
        """Count a release of each row, and of each id outside the alignment that a party has."""
        self._times[rows] += 1
        self._of_ids.update(ids)
        most = max([self._times[rows].max(initial=0), *(self._of_ids[one] for one in ids)])
        if most > self._counted:
            self.epsilon = self._uploads.add(int(most) - self._counted)
            self._counted = int(most)
