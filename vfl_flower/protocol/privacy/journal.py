"""The file of a `ReleaseLog`: one event for each release, with checksums.

The first line names the format and the run. The checksum of the last event that may have been
released follows. Then come the events. An event has six numbers, its rows, and a checksum. The last
of the numbers counts the rows. The checksum is over the numbers, the rows, and the checksum before.
So no event can be changed, moved or left out. Only an event that was not released yet can be cut
off, because an event is written before its release.

A file that was deleted, or restored from a backup, has fewer events than were released. The second
count detects this. It lies in another folder, has the checksums of all events, and is named by the
run. So a copy of a run shares it.

A journal is no ledger (`records.ledger`). Each release waits for its event, and to append one takes
a fourth of the time of a transaction.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import make_own_folder, told, write_all, write_whole

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
    """Events in a file, as int32, which ``run`` creates if it is missing."""

    def __init__(self, path: Path, run: str = "", second: Path | None = None) -> None:
        self.path = path
        self.second = second
        if not path.exists():
            header = _FORMAT + f"{run:>20}\n".encode()
            write_whole(path, header + _next(b"", header))
        self._file: BinaryIO = path.open("r+b", buffering=0)
        self._events = 0
        self._last = b""  # checksum of the last event
        self._checksums = bytearray()  # of all events
        self._counted = 0  # bytes in the second count

    @property
    def run(self) -> str:
        """Return the Flower run that created the file."""
        return self.path.read_bytes()[len(_FORMAT) : _HEADER].decode(errors="replace").strip()

    @property
    def mark(self) -> Mark:
        """Return the current position, once the file has been read."""
        return self._events, self._last.hex()

    def read(self, mark: Mark | None = None) -> Iterator[Event]:
        """Yield all events that were written whole. Then events can be written.

        Raise `ConfigError` if the file is damaged or of another run, or lacks events of ``mark`` or
        of the second count.
        """
        counted = b""
        if self.second and self.second.exists():  # read first: it never has more than the file
            counted = self.second.read_bytes()
        counted = counted[: len(counted) // _CHECKSUM * _CHECKSUM]
        size = os.fstat(self._file.fileno()).st_size
        with self.path.open("rb") as file:
            header, released = file.read(_HEADER), file.read(_CHECKSUM)
            self._last = _next(b"", header)
            known, reached = {0: self._last.hex()}, self._last == released
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
                self._last = _next(self._last, numbers + ids)
                if file.read(_CHECKSUM) != self._last:
                    raise refused(self.path, "damaged")
                at += length
                self._events += 1
                self._checksums += self._last
                reached |= self._last == released
                if mark and self._events == mark[0]:
                    known[self._events] = self._last.hex()
                kind, party, first, second, third = event
                yield Event(kind, party, first, second, third, np.frombuffer(ids, "<i4"))
        # A crash may leave the last events on the disk before the header has their checksum.
        if not header.startswith(_FORMAT) or not reached:
            raise refused(self.path, "damaged")
        if mark and known.get(int(mark[0])) != mark[1]:
            raise refused(self.path, "not the file of the run's last checkpoint")
        if not self._checksums.startswith(counted):
            raise refused(self.path, f"older than {self.second}, or a copy of the run went on")
        self._counted = len(counted)
        self._file.seek(at)

    @contextmanager
    def _second(self, checksum: bytes) -> Iterator[None]:
        """Hold the second count, and add the checksum of an event once this is on the disk."""
        if self.second is None:
            yield
            return
        with told(self.second):
            make_own_folder(self.second.parent)
            opened = os.open(self.second, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if os.fstat(opened).st_size // _CHECKSUM * _CHECKSUM != self._counted:
                raise VflError(
                    f"Another process has released something with the model of {self.path}, or "
                    "with a copy. Try again."
                )
            yield
            os.pwrite(opened, self._checksums[self._counted :] + checksum, self._counted)
            self._counted = len(self._checksums) + len(checksum)
        finally:
            os.close(opened)

    def write(self, event: Event) -> None:
        """Append an event, and wait until it is on the disk."""
        *numbers, rows = event
        written = np.array([*numbers, len(rows)], "<i4").tobytes() + rows.astype("<i4").tobytes()
        last = _next(self._last, written)
        opened, at = self._file.fileno(), self._file.tell()
        try:
            try:
                with self._second(last):
                    self._file.truncate()  # an event that was written in part
                    write_all(opened, written + last)
                    os.fsync(opened)
                os.pwrite(opened, last, _HEADER)  # the next event's fsync covers this
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
        self._last = last
        self._checksums += last


def has_events(path: Path) -> bool:
    """Return whether a journal has events, or is damaged."""
    return path.stat().st_size != _HEADER + _CHECKSUM


def refused(path: Path, what: str) -> ConfigError:
    """Return the error about a file without which releases cannot be counted."""
    return ConfigError(
        f"{path} is {what}, and without it nobody knows what this run has released. Restore the "
        "file of that run, or begin a new run."
    )


def _next(checksum: bytes, event: bytes) -> bytes:
    """Return the checksum after an event, from the checksum before it."""
    return hashlib.blake2b(checksum + event, digest_size=_CHECKSUM).digest()
