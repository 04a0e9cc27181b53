"""What a run has released, event by event, in a file that tells when it is not whole.

A line that names the format and the run, then the checksum of the last event that may have been
released, then events: six numbers (the last is how many rows follow), rows, and a checksum over
those and the checksum before. So no event can be changed, moved or left out; and none be cut off
from the end, but for one that was not released yet, since it is written before what it counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import write_all, write_whole

Event = tuple[int, int, int, int, int, NDArray[np.int32]]

_FORMAT = b"vfl-flower releases 1, run "
_HEADER = len(_FORMAT) + 21  # with the number of a Flower run, below 2**64, and a line's end
_NUMBERS = 4 * 6
_CHECKSUM = 16

Mark = Sequence[int | str]
"""How far a journal was at a checkpoint: its number of events, and the last's checksum in hex."""


class Journal:
    """Events of a ledger in a file: five numbers and rows each, as int32.

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
        """How far it is, once it has been read."""
        return self._events, self._last.hex()

    def read(self, mark: Mark | None = None) -> Iterator[Event]:
        """All that it holds; then it can be written to.

        An event that was cut short in the writing was not released, and is cut off.

        Parameters
        ----------
        mark : how far it was at least.

        Raises
        ------
        ConfigError
            If it is not as it was written, or was not so far.
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
                    raise self._refused("damaged")
                if length > size - at:
                    break
                ids = file.read(4 * rows)
                before, self._last = self._last, _next(self._last, numbers + ids)
                if file.read(_CHECKSUM) != self._last:
                    raise self._refused("damaged")
                at += length
                self._events += 1
                if mark and self._events == mark[0]:
                    known[self._events] = self._last.hex()
                kind, party, first, second, third = event
                yield kind, party, first, second, third, np.frombuffer(ids, "<i4")
        # On the disk an event may be there of which it is not said yet that it was released.
        if not header.startswith(_FORMAT) or released not in (before, self._last):
            raise self._refused("damaged")
        if mark and known.get(int(mark[0])) != mark[1]:
            raise self._refused("not that of the run's last checkpoint")
        self._file.seek(at)
        self._file.truncate()

    def write(self, numbers: tuple[int, int, int, int, int], ids: NDArray[np.int32]) -> None:
        """Append an event; it is on the disk when this returns, or `VflError` says why not."""
        event = np.array([*numbers, len(ids)], "<i4").tobytes() + ids.astype("<i4").tobytes()
        checksum = _next(self._last, event)
        opened, at = self._file.fileno(), self._file.tell()
        try:
            try:
                write_all(opened, event + checksum)
                os.fsync(opened)
                os.pwrite(opened, checksum, _HEADER)  # on the disk with the next
            except BaseException:
                self._file.seek(at)
                self._file.truncate()
                raise
        except OSError as error:
            raise VflError(
                f"What is released cannot be written to {self.path}, and so is not released "
                f"({error.strerror}): mend that, and resume."
            ) from error
        self._events += 1
        self._last = checksum

    def _refused(self, what: str) -> ConfigError:
        return refused(self.path, what)


def refused(path: Path, what: str) -> ConfigError:
    """The error about a journal that cannot be counted by."""
    return ConfigError(
        f"{path} is {what}, and without it nobody knows what this run has released: put back the "
        "file of then, or begin a new run."
    )


def _next(checksum: bytes, event: bytes) -> bytes:
    """The checksum after an event, from that before it."""
    return hashlib.blake2b(checksum + event, digest_size=_CHECKSUM).digest()
