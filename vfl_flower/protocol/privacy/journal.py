"""The file of a `ReleaseLog`: releases, event by event, so that any damage shows.

A line names the format and the run. Then comes the checksum of the last event that may have been
released. Then come the events. An event has six numbers, the last being its number of rows, the
rows, and a checksum over both and the checksum before. So no event can be changed, moved or left
out. Only an event that was not released yet can be cut off: an event is written first.
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

    The numbers of TRAIN are epoch, first step and steps. RECEIVED has the steps. ANSWERED has the
    steps, and how often each row has a part in them. Other kinds have no numbers.
    """

    kind: int
    party: int
    first: int = 0
    second: int = 0
    third: int = 0
    rows: NDArray[np.int32] = np.zeros(0, np.int32)


_FORMAT = b"vfl-flower releases 1, run "
_HEADER = len(_FORMAT) + 21  # with the number of a Flower run, below 2**64, and a line's end
_NUMBERS = 4 * 6
_CHECKSUM = 16

Mark = Sequence[int | str]
"""How far a file was at a checkpoint: its number of events, and the last's checksum in hex."""


class Journal:
    """Events in a file, as int32.

    Parameters
    ----------
    run : the Flower run that begins the file, if it is not there.
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        if not path.exists():
            header = _FORMAT + f"{run:>20}\n".encode()
            write_whole(path, header + _next(b"", header))
        self._file: BinaryIO = path.open("r+b", buffering=0)
        self._events = 0
        self._last = b""  # checksum

    @property
    def mark(self) -> Mark:
        """How far the file is, once it has been read."""
        return self._events, self._last.hex()

    def read(self, mark: Mark | None = None) -> Iterator[Event]:
        """Yield all events. Then events can be written.

        Cut off an event that was written in part: it was not released.

        Parameters
        ----------
        mark : how far the file was at least.

        Raises
        ------
        ConfigError
            If the file is not as it was written, or was not so far.
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
        # An event may be on the disk while the header does not yet say that it was released.
        if not header.startswith(_FORMAT) or released not in (before, self._last):
            raise refused(self.path, "damaged")
        if mark and known.get(int(mark[0])) != mark[1]:
            raise refused(self.path, "not that of the run's last checkpoint")
        self._file.seek(at)
        self._file.truncate()

    def write(self, event: Event) -> None:
        """Append an event. It is on the disk at the end, or `VflError` says why not."""
        *numbers, rows = event
        written = np.array([*numbers, len(rows)], "<i4").tobytes() + rows.astype("<i4").tobytes()
        checksum = _next(self._last, written)
        opened, at = self._file.fileno(), self._file.tell()
        try:
            try:
                write_all(opened, written + checksum)
                os.fsync(opened)
                os.pwrite(opened, checksum, _HEADER)  # on the disk with the next
            except BaseException:
                self._file.seek(at)
                self._file.truncate()
                raise
        except OSError as error:
            raise VflError(
                f"A release cannot be written to {self.path}, and so is not made "
                f"({error.strerror}): mend that, and resume."
            ) from error
        self._events += 1
        self._last = checksum


def refused(path: Path, what: str) -> ConfigError:
    """Return the error about a file that cannot be counted by."""
    return ConfigError(
        f"{path} is {what}, and without it nobody knows what this run has released: put back the "
        "file of that run, or begin a new run."
    )


def _next(checksum: bytes, event: bytes) -> bytes:
    """Return the checksum after an event, from the checksum before it."""
    return hashlib.blake2b(checksum + event, digest_size=_CHECKSUM).digest()
