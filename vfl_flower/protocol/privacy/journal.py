"""The file of a `ReleaseLog`: one event for each release, with checksums.

The first line names the format and the run. The checksum of the last event that may have been
released follows. Then come the events. An event has six numbers, its rows, and a checksum. The last
of the numbers counts the rows. The checksum is over the numbers, the rows, and the checksum before.
So no event can be changed, moved or left out. Only an event that was not released yet can be cut
off, because an event is written before its release.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import write_all, write_whole

TRAIN, EMBED, EVALUATE, RECEIVED, ANSWERED = range(5)
"""Kinds of events: three orders, an upload and an answer."""


class Event(NamedTuple):
    """One release: five numbers, and the training rows that have a part in it.

    TRAIN has three numbers: epoch, first step, and number of steps. RECEIVED has the number of
    steps. ANSWERED has the number of steps, and how often each row has a part in them. Other kinds
    have no numbers.
    """

    kind: int
    party: int
    first: int = 0
    second: int = 0
    third: int = 0
    rows: NDArray[np.int32] = np.zeros(0, np.int32)


_FORMAT = b"vfl-flower releases 1, run "
_HEADER = len(_FORMAT) + 21  # 20 digits for a run's number, below 2**64, and a newline
_NUMBERS = 4 * 6
_CHECKSUM = 16

Mark = Sequence[int | str]
"""Position in a file at a checkpoint: number of events, and the last event's checksum in hex."""


class Journal:
    """Events in a file, as int32.

    Parameters
    ----------
    run : the Flower run that creates the file, if the file is missing.
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        if not path.exists():
            header = _FORMAT + f"{run:>20}\n".encode()
            write_whole(path, header + _next(b"", header))
        self._file: BinaryIO = path.open("r+b", buffering=0)
        self._events = 0
        self._last = b""  # checksum of the last event

    @property
    def mark(self) -> Mark:
        """Return the current position, once the file has been read."""
        return self._events, self._last.hex()

    def read(self, mark: Mark | None = None) -> Iterator[Event]:
        """Yield all events. Then events can be written.

        Cut off an event that was written in part, because it was not released.

        Parameters
        ----------
        mark : a position that the file must have reached.

        Raises
        ------
        ConfigError
            If the file is damaged, or did not reach the mark.
        """
        size = os.fstat(self._file.fileno()).st_size
        with self.path.open("rb") as file:
            header, released = file.read(_HEADER), file.read(_CHECKSUM)
            before = self._last = _next(b"", header)
            known = {0: self._last.hex()}
            at = _HEADER + _CHECKSUM
            while size - at >= _NUMBERS:
                numbers = file.read(_NUMBERS)
                *event, rows = np.frombuffer(numbers, "<i4").tolist()
                length = _NUMBERS + 4 * rows + _CHECKSUM
                if rows < 0:
                    raise refused(self.path, "damaged")
                if length > size - at:
                    break
                ids = file.read(4 * rows)
                before, self._last = self._last, _next(self._last, numbers + ids)
                if file.read(_CHECKSUM) != self._last:
                    raise refused(self.path, "damaged")
                at += length
                self._events += 1
                if mark and self._events == mark[0]:
                    known[self._events] = self._last.hex()
                kind, party, first, second, third = event
                yield Event(kind, party, first, second, third, np.frombuffer(ids, "<i4"))
        # A crash may leave the last event on the disk before its checksum is in the header.
        if not header.startswith(_FORMAT) or released not in (before, self._last):
            raise refused(self.path, "damaged")
        if mark and known.get(int(mark[0])) != mark[1]:
            raise refused(self.path, "not the file of the run's last checkpoint")
        self._file.seek(at)
        self._file.truncate()

    def write(self, event: Event) -> None:
        """Append an event, and wait until it is on the disk.

        Raises
        ------
        VflError
            If it cannot be written.
        """
        *numbers, rows = event
        written = np.array([*numbers, len(rows)], "<i4").tobytes() + rows.astype("<i4").tobytes()
        checksum = _next(self._last, written)
        opened, at = self._file.fileno(), self._file.tell()
        try:
            try:
                write_all(opened, written + checksum)
                os.fsync(opened)
                os.pwrite(opened, checksum, _HEADER)  # the next event's fsync covers this
            except BaseException:
                self._file.seek(at)
                self._file.truncate()
                raise
        except OSError as error:
            raise VflError(
                f"A release cannot be written to {self.path}, so it is not made "
                f"({error.strerror}). Fix that, and resume the run."
            ) from error
        self._events += 1
        self._last = checksum


def refused(path: Path, what: str) -> ConfigError:
    """Return the error about a file without which releases cannot be counted."""
    return ConfigError(
        f"{path} is {what}, and without it nobody knows what this run has released. Restore the "
        "file of that run, or begin a new run."
    )


def _next(checksum: bytes, event: bytes) -> bytes:
    """Return the checksum after an event, from the checksum before it."""
    return hashlib.blake2b(checksum + event, digest_size=_CHECKSUM).digest()
