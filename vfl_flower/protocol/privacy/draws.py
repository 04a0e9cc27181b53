"""The record of all draws of label noise: ``labels.draws``, and a second count.

Noise on labels follows from a secret, so a label that was drawn gets the same noise again. The
ledger ``labels.draws`` has the secret, and all draws. The epsilon of a run is a sum over draws.

- Rows with ids are people. ``people``, ``draws`` and ``epsilons`` name a person and a draw by keyed
  hashes. A person's sum is over all draws of that person.
- Rows without ids could be anybody. ``about`` has the draws of all labels of a data set, in their
  order. They count for every row with or without an id, except for rows of scikit-learn's data
  sets.

A ledger that was deleted, or restored from a backup, holds less than was spent. The second count
detects this. It is a ledger in another folder, and has the number of changes and the largest sum.
That sum then counts for everybody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import make_own_folder, told, unsealed
from vfl_flower.config.logs import notice
from vfl_flower.records import second_count
from vfl_flower.records.ledger import Ledger, Value, content_in_file
from vfl_flower.transport.flower_internals import lasting_home

Tags = NDArray[np.uint64]

_COUNTED = "counted"  # name in the second count
SHIPPED = ("digits", "breast-cancer")
"""Data sets of scikit-learn, whose rows are in no other data set."""


class Spent(NamedTuple):
    """The parts of a sum of epsilons."""

    own: float  # draws of one person's label; for rows without ids, of any rows without ids
    unknown: float  # draws of rows without ids; for rows without ids, of one person's label
    lost: float  # draws whose record was lost

    @property
    def epsilon(self) -> float:
        """Return the sum."""
        return self.own + self.unknown + self.lost


class Draws:
    """All draws with one secret of 32 bytes, from which all noise follows."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.secret = ledger, ledger.secret
        self.added = False
        self._number = ledger.count("number")  # of changes
        about = json.loads(ledger.content("about") or '{"lost": 0.0, "wholes": []}')
        self._lost = about["lost"]
        # (digest of labels in their order, data set of `SHIPPED`, mechanism) -> epsilon
        self._wholes: dict[tuple[str, str, str], float] = {
            (whole, of, how): epsilon for whole, of, how, epsilon in about["wholes"]
        }
        self._people: Tags = np.frombuffer(ledger.content("people"), "<u8")
        self._draws: Tags = np.frombuffer(ledger.content("draws"), "<u8")
        self._epsilons = np.frombuffer(ledger.content("epsilons"), "<f8")
        self._lost_some = False
        self._counted = False  # whether the second count is up to date

    def add_whole(self, whole: str, named: str, mechanism: str, epsilon: float) -> Spent:
        """Count a draw of all labels without ids, by their digest, if it is new.

        ``named`` is the data set, if it is one of `SHIPPED`. Return what the rows have spent.
        """
        if (whole, named, mechanism) not in self._wholes:
            self._wholes[whole, named, mechanism] = epsilon
            self.added = True
        if named:
            return Spent(self._unknown(named), 0.0, self._lost)
        return Spent(self._unknown(), self._largest(self._people), self._lost)

    def add_people(self, people: Tags, draws: Tags, epsilon: float) -> Spent:
        """Count new draws by keyed hashes [rows] of people, who may repeat, and of draws.

        Return the largest sum of epsilons of one of these people.
        """
        draws, first = np.unique(draws, return_index=True)
        people = people[first]
        new = ~_among(draws, np.sort(self._draws))
        if new.any():
            self._people = np.concatenate([self._people, people[new]])
            self._draws = np.concatenate([self._draws, draws[new]])
            spent = np.full(int(new.sum()), epsilon)
            self._epsilons = np.concatenate([self._epsilons, spent])
            self.added = True
        return Spent(self._largest(people), self._unknown(), self._lost)

    def _largest(self, people: Tags) -> float:
        """Return the largest sum over draws of one of these people."""
        of_these = _among(self._people, np.sort(people))
        if not of_these.any():
            return 0.0
        found = self._people[of_these]
        order = np.argsort(found)
        first = np.flatnonzero(np.diff(found[order], prepend=~found[order[:1]]))
        return float(np.add.reduceat(self._epsilons[of_these][order], first).max())

    def _unknown(self, named: str = "") -> float:
        """Return the sum over draws of rows without ids, or of one of `SHIPPED`."""
        kept = {
            (whole, mechanism, epsilon)
            for (whole, of, mechanism), epsilon in self._wholes.items()
            if (of == named if named else of not in SHIPPED)
        }
        return sum(sorted(epsilon for *_, epsilon in kept))

    def _most(self) -> float:
        """Return the most that anybody has spent."""
        others = self._unknown() + self._largest(self._people)
        return self._lost + max(others, *map(self._unknown, SHIPPED))

    # --- on the disk ----------------------------------------------------------------------------

    def _write(self, second: Ledger) -> None:
        """Write changes, and count them in the second count."""
        changed = self.added or self._lost_some
        if changed:
            self._number += 1
            wholes = [(*each, epsilon) for each, epsilon in self._wholes.items()]
            about = {"lost": self._lost, "wholes": wholes}
            self._ledger.write("number", self._number)
            self._ledger.write("about", json.dumps(about).encode())
            self._ledger.write("people", self._people.astype("<u8").tobytes())
            self._ledger.write("draws", self._draws.astype("<u8").tobytes())
            self._ledger.write("epsilons", self._epsilons.astype("<f8").tobytes())
        if changed or not self._counted:
            counted = {"of": self._name, "number": self._number, "spent": self._most()}
            second.write(_COUNTED, json.dumps(counted).encode())

    @property
    def _name(self) -> str:
        """Return the name of these draws in the second count. It does not show the secret."""
        return hashlib.blake2b(self.secret, digest_size=16, person=b"labels.draws").hexdigest()

    def _heed(self, second: Ledger, path: Path, place: Path) -> None:
        """Take over the sum of a second count, if it has draws that are missing here."""
        if not second.content(_COUNTED):
            return
        counted: dict[str, Any] = json.loads(second.content(_COUNTED))
        same, number = counted["of"] == self._name, int(counted["number"])
        self._counted = same and number == self._number
        if same and number <= self._number:
            return
        if same:  # the draws here are part of that sum
            self._wholes = dict.fromkeys(self._wholes, 0.0)
            self._epsilons = np.zeros_like(self._epsilons)
            self._lost, self._number = counted["spent"], number
        else:
            self._lost += counted["spent"]
        self._lost_some = True
        notice.warning(
            "%s lacks draws that %s has counted: it was deleted, replaced or restored from a "
            "backup. The largest sum in that count, epsilon = %g, now counts for every label.",
            *(path, place, counted["spent"]),
        )


def _among(tags: Tags, known: Tags) -> NDArray[np.bool_]:
    """Return which tags are among sorted tags. `np.isin` takes ten times as long."""
    if not len(known):
        return np.zeros(len(tags), bool)
    return known[np.searchsorted(known[:-1], tags)] == tags


@contextmanager
def opened() -> Iterator[Draws]:
    """Open the record of draws, and wait for others first. Write new draws at the end."""
    path = path_of_draws()
    place = second_count.place("labels", str(path.parent.resolve()))
    with told(path):
        make_own_folder(path.parent)
    both = second_count.opened_with(path, place, _earlier, content_in_file(_COUNTED))
    with both as (ledger, counted):
        draws = Draws(ledger)
        draws._heed(counted, path, place)
        yield draws
        draws._write(counted)


def _earlier(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the file of an earlier version: arrays, and a text in JSON."""
    if not path.exists():
        return
    content = unsealed(path)
    if content.startswith(b"{"):
        raise VflError(
            f"{path} is of an older version, which counted no draws by person. Name another "
            "folder by VFL_HOME, and add its epsilon yourself."
        )
    with np.load(BytesIO(content), allow_pickle=False) as file:
        about = json.loads(file["text"].tobytes())
        yield from ((name, 0, file[name].tobytes()) for name in ("people", "draws", "epsilons"))
    yield from (("secret", 0, bytes.fromhex(about["secret"])), ("number", 0, about["number"]))
    yield "about", 0, json.dumps({name: about[name] for name in ("lost", "wholes")}).encode()


def path_of_draws() -> Path:
    """Return the path of the ledger with the secret and all draws."""
    return lasting_home() / "labels.draws"
