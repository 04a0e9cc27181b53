"""A number for each person on the disk, such as the day of the last release about the person.

The file has the form of the counts in `party.limits`: ascending numbers of people, and their
values. A value is on the disk before anything that it counts happens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import alone_in, make_folder, told, unsealed, write_sealed

People = NDArray[np.uint64]


def today() -> int:
    """Return the number of this day of UTC since 1970."""
    return int(time.time()) // 86400


def of_rows(dataset: str, rows: NDArray[Any]) -> People:
    """Return a number for the person of each row of a partitioned data set, [n]."""
    name = hashlib.blake2b(dataset.encode(), digest_size=8).digest()
    return rows.astype(np.uint64) ^ np.uint64(int.from_bytes(name))


class ByPerson:
    """The values of all people in a file, as `opened` yields them."""

    def __init__(self, kept: NDArray[np.uint64]) -> None:
        self._people, self._values = kept.reshape(2, -1).astype(np.uint64)
        self.changed = False

    def of(self, people: People) -> NDArray[np.int64]:
        """Return the value of each of these people, [n]. It is 0 for a new person."""
        found = np.zeros(len(people), np.int64)
        places = np.searchsorted(self._people, people)
        known = places < len(self._people)
        known[known] = self._people[places[known]] == people[known]
        found[known] = self._values[places[known]].astype(np.int64)
        return found

    def put(self, people: People, value: int) -> None:
        """Give these people this value, below 2**63."""
        merged, first = np.unique(np.concatenate([people, self._people]), return_index=True)
        values = np.concatenate([np.full(len(people), value, np.uint64), self._values])
        self._people, self._values, self.changed = merged, values[first], True

    def as_bytes(self) -> bytes:
        """Return the content of the file."""
        return np.stack([self._people, self._values]).astype("<u8").tobytes()


@contextmanager
def opened(path: Path) -> Iterator[ByPerson]:
    """Yield the values in a file under a lock. Write them at the end if they have changed.

    Raises
    ------
    VflError
        If the file is damaged or cannot be written.
    """
    with told(path):
        make_folder(path.parent)
        with alone_in(path.parent):
            content = unsealed(path) if path.exists() else b""
            if len(content) % 16:
                raise VflError(f"{path} is damaged. Restore the earlier file.")
            kept = ByPerson(np.frombuffer(content, "<u8"))
            yield kept
            if kept.changed:
                write_sealed(path, kept.as_bytes())
