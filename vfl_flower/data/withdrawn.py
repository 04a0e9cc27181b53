"""The people who have withdrawn: a list that keeps them out of all later work of its owner.

The list is a ledger of keyed hashes, which nobody can tell ids from without its secret. It lies
beside the owner's alignments. `Source` and `OwnFile` read it, so that no alignment, training,
report or score has these people, also if their rows are still in the file. `vfl forget` writes it.
It knows a person by `Table.people_in_file`, and checkpoints use the same hashes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.ids import People, cut, digests
from vfl_flower.records.ledger import opened
from vfl_flower.transport.node import lasting_folder

FILE = "withdrawn"
_PEOPLE = "person"  # name in the ledger: keyed hash of a number -> time of the withdrawal
_NONE = np.zeros(0, np.uint64)


def numbers_of(ids: Iterable[bytes], skipped: int = 0) -> People:
    """Return a number for each encoded id, [n], without its first bytes."""
    return digests((one[skipped:] for one in ids), 8).view("<u8")[:, 0]


@dataclass(frozen=True)
class Withdrawn:
    """A list of people who have withdrawn."""

    secret: bytes = b""  # key of the hashes
    hashes: People = field(default_factory=_NONE.copy)  # of the people's numbers
    since: int = 0  # time of the last withdrawal, in seconds since 1970
    now: Sequence[bytes] = ()  # encoded ids of people who withdraw just now, if they are known

    def tags(self, numbers: People) -> People:
        """Return the keyed hash of each number, [n]; never 0."""
        whole = np.ascontiguousarray(numbers, "<u8").view(np.uint8).data
        hashes = digests(cut(whole, 8), 8, self.secret).view("<u8")[:, 0]
        return np.maximum(hashes, 1, out=hashes).astype(np.uint64, copy=False)

    def have(self, numbers: People) -> NDArray[np.bool_]:
        """Return which people the list has, by their numbers, [n]."""
        return np.isin(self.tags(numbers), self.hashes)

    def have_ids(self, ids: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return which people the list has, by their encoded ids, [n]."""
        return self.have(numbers_of(ids)) if len(self.hashes) else np.zeros(len(ids), bool)


def place(node_config: Mapping[str, Any] | None = None) -> Path:
    """Return the list of a party, by its node configuration, or of the label holder."""
    return lasting_folder(node_config or {}) / FILE


def version(path: Path) -> int:
    """Return when a list was last written; 0 if there is none."""
    return os.stat(path).st_mtime_ns if path.exists() else 0


def read(path: Path | None, begin: bool = False) -> Withdrawn:
    """Return a list, which is empty if it is missing. ``begin`` makes a missing list."""
    if path is None or not (begin or path.exists()):
        return Withdrawn()
    with opened(path) as ledger:
        hashes, times = ledger.table(_PEOPLE)
        return Withdrawn(ledger.secret, hashes, int(times.max(initial=0)))


def add(path: Path, numbers: People, time: int) -> None:
    """Put people on a list. Those who are on it already stay as they are."""
    with opened(path) as ledger:
        tags = Withdrawn(ledger.secret).tags(numbers)
        if len(new := tags[ledger.numbers(_PEOPLE, tags) == 0]):
            ledger.put(_PEOPLE, new, time)
