"""The record of all draws of label noise: ``labels.draws``, and a second count.

Noise on labels follows from a secret, so a label that was drawn gets the same noise again. The file
``labels.draws`` holds the secret and one entry for each draw. The epsilon of a run is a sum over
entries.

- Rows with ids are people. An entry names a person and a draw by keyed hashes. A person's sum is
  over all draws of that person.
- Rows without ids could be anybody. An entry is a draw of all labels of a data set, in their order.
  It counts for every row with or without an id, except for rows of scikit-learn's data sets.

A file that was deleted, or restored from a backup, holds less than was spent. The second count
detects this. It lies in another folder, and holds the number of the last entry and the largest sum.
That sum then counts for everybody.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import alone_in, make_own_folder, told, unsealed, write_sealed
from vfl_flower.protocol.privacy.journal import second_counts
from vfl_flower.transport.flower_internals import lasting_home

notice = logging.getLogger("flwr.notice")  # `vfl run` shows this logger too

Tags = NDArray[np.uint64]

SHIPPED = ("digits", "breast-cancer")
"""Data sets of scikit-learn, whose rows are in no other data set."""


class Spent(NamedTuple):
    """The parts of a sum of epsilons.

    own : draws of one person's label. For rows without ids, draws of any rows without ids.
    unknown : draws of rows without ids. For rows without ids, draws of one person's label.
    lost : draws whose record was lost.
    """

    own: float
    unknown: float
    lost: float

    @property
    def epsilon(self) -> float:
        """Return the sum."""
        return self.own + self.unknown + self.lost


class Draws:
    """All draws with one secret of 32 bytes, from which all noise follows."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.added = False
        self._number = 0  # number of writes of the file
        self._lost = 0.0
        # (digest of labels in their order, data set of `SHIPPED`, mechanism) -> epsilon
        self._wholes: dict[tuple[str, str, str], float] = {}
        self._people: Tags = np.zeros(0, np.uint64)
        self._draws: Tags = np.zeros(0, np.uint64)
        self._epsilons = np.zeros(0)
        self._lost_some = False
        self._counted = False  # whether the second count is up to date

    def add_whole(self, whole: str, named: str, mechanism: str, epsilon: float) -> Spent:
        """Count a draw of all labels of a data set without ids, by their digest, if it is new.

        ``named`` is the data set, if it is one of `SHIPPED`. Return the epsilons that the rows have
        spent.
        """
        if (whole, named, mechanism) not in self._wholes:
            self._wholes[whole, named, mechanism] = epsilon
            self.added = True
        if named:
            return Spent(self._unknown(named), 0.0, self._lost)
        return Spent(self._unknown(), self._largest(self._people), self._lost)

    def add_people(self, people: Tags, draws: Tags, epsilon: float) -> Spent:
        """Count new draws of labels, by keyed hashes [rows] of people, who may repeat, and of
        draws.

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

    @classmethod
    def _read(cls, path: Path) -> Draws:
        content = unsealed(path)
        if content.startswith(b"{"):
            raise VflError(
                f"{path} is of an older version, which counted no draws by person. Name another "
                "folder by VFL_HOME, and add its epsilon yourself."
            )
        with np.load(BytesIO(content), allow_pickle=False) as file:
            text = json.loads(file["text"].tobytes())
            found = cls(bytes.fromhex(text["secret"]))
            found._people, found._draws = file["people"], file["draws"]
            found._epsilons = file["epsilons"]
        found._number, found._lost = text["number"], text["lost"]
        found._wholes = {(whole, of, how): each for whole, of, how, each in text["wholes"]}
        return found

    def _write(self, path: Path) -> None:
        self._number += 1
        text = {
            "secret": self.secret.hex(),
            "number": self._number,
            "lost": self._lost,
            "wholes": [(*each, epsilon) for each, epsilon in self._wholes.items()],
        }
        content = BytesIO()
        np.savez(
            content,
            text=np.frombuffer(json.dumps(text).encode(), np.uint8),
            people=self._people,
            draws=self._draws,
            epsilons=self._epsilons,
        )
        write_sealed(path, content.getvalue())

    def _write_second(self, second: Path) -> None:
        counted = {"of": self._name, "number": self._number, "spent": self._most()}
        with told(second):
            make_own_folder(second.parent)
        write_sealed(second, json.dumps(counted).encode())

    @property
    def _name(self) -> str:
        """Return the name of these draws in the second count. It does not show the secret."""
        return hashlib.blake2b(self.secret, digest_size=16, person=b"labels.draws").hexdigest()

    def _heed(self, second: Path, path: Path) -> None:
        """Take over the sum of a second count, if it has draws that are missing here."""
        if not second.exists():
            return
        counted: dict[str, Any] = json.loads(unsealed(second))
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
            *(path, second, counted["spent"]),
        )


def _among(tags: Tags, known: Tags) -> NDArray[np.bool_]:
    """Return which tags are among sorted tags. `np.isin` takes ten times as long."""
    if not len(known):
        return np.zeros(len(tags), bool)
    return known[np.searchsorted(known[:-1], tags)] == tags


@contextmanager
def opened() -> Iterator[Draws]:
    """Lock and open the record of draws. Write new draws at the end.

    Raise `VflError` if a file is damaged or cannot be written, or another user can change its
    folder.
    """
    path = path_of_draws()
    second = _path_of_second_count(path)
    with told(path):
        make_own_folder(path.parent)
        with alone_in(path.parent):
            draws = Draws._read(path) if path.exists() else Draws(secrets.token_bytes(32))
            with told(second):
                draws._heed(second, path)
            yield draws
            changed = draws.added or draws._lost_some
            if changed:
                draws._write(path)
            if changed or not draws._counted:
                draws._write_second(second)  # last: it never has more than the file


def path_of_draws() -> Path:
    """Return the path of the file with the secret and all draws."""
    return lasting_home() / "labels.draws"


def _path_of_second_count(path: Path) -> Path:
    """Return the path of the second count, outside of the folder of the first."""
    which = hashlib.sha256(os.fsencode(path.parent.resolve())).hexdigest()[:16]
    return second_counts() / f"labels-{which}.count"
