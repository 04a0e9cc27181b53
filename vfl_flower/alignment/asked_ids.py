"""Count on disk of the ids that a party is asked about, over all orders and runs.

The party sees blinded ids. A label holder keeps its secret (`at_label_holder`), so that it sends
the same point for the same id each time. The party counts points that it was not sent before. A
second question about an id is free. The party stores no points, but a keyed hash of 8 bytes for
each.

A label holder can also guess ids by its proof that it knows the ids of rows (`ConfirmOrder`). A
failed proof counts as one id.

The party forces the count to the disk before it blinds the ids. The count is never below the
number of ids asked about. A service counts some ids ahead. It gives the rest back to the day on
which it counted them. Services may ask about half of the ids that a rule allows. So made-up ids of
their callers leave the other half to alignments. Only the owner can reset the count, by deleting
the file. The first line of the file is JSON, and shows how many ids are left
(``head -1 party-0.ids``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.psi import Points
from vfl_flower.alignment.store import home
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import alone_in, make_folder, unsealed, write_sealed
from vfl_flower.config.node_rules import Rules
from vfl_flower.transport.node import refused, simulated

log = logging.getLogger("flwr")

_DAY = 86400
_FIRST = date(1970, 1, 1)
_KEY = 32  # bytes


@dataclass
class _Count:
    """The count of ids that a party has been asked about.

    asked : number of distinct points and of failed proofs, and what is counted ahead.
    ahead : the part of ``asked`` that services have counted ahead (`Session`).
    served : the part of ``asked`` that services have counted.
    wrong : number of failed proofs.
    day : days from 1970 to the day of the count, in UTC.
    that_day : the part of ``asked`` that was counted on that day.
    served_that_day : the part of ``that_day`` that services have counted.
    key : key of the hash.
    points : hashes of the points, in ascending order, uint64 [asked - wrong - ahead].
    """

    asked: int
    wrong: int
    day: int
    that_day: int
    key: bytes
    points: NDArray[np.uint64]
    ahead: int = 0
    served: int = 0
    served_that_day: int = 0
    changed: bool = False  # whether to write it, even if no id was added

    def add(self, more: int) -> None:
        """Count ``more`` further ids."""
        self.asked += more
        self.that_day += more

    def left_to_services(self, rules: Rules) -> tuple[int, str]:
        """Return how many further ids services may ask about, and the rule that says so."""
        limits = [
            (self.asked, self.served, rules.max_ids, "max-ids"),
            (self.that_day, self.served_that_day, rules.max_ids_per_day, "max-ids-per-day"),
        ]
        return min(
            (max(0, left), f"its rule is {rule} = {most}{which}")
            for counted, served, most, rule in limits
            if most is not None
            for left, which in (
                (most - counted, ""),
                (most // 2 - served, ", half of it for services"),
            )
        )


def count(context: Context, rules: Rules, points: Points) -> None:
    """Count the ids of the points that a party was sent, [n, 32].

    Raises
    ------
    ConfigError
        If its rules allow no more ids, or no more today. The count then stays as it was.
    VflError
        If the party cannot keep the count.
    """
    if not _counts(context):
        return
    with _opened(context, rules) as kept:
        found = np.unique(_hashed(points, kept.key))
        new = np.setdiff1d(found, kept.points, assume_unique=True)
        kept.add(len(new))
        _check(context, rules, kept, f"to be asked about {len(new)} more ids")
        kept.points = np.union1d(kept.points, new)


def judge(context: Context, rules: Rules, proves: Callable[[], bool]) -> bool:
    """Return whether a label holder proves that it knows ids; count a failed proof.

    Raises
    ------
    ConfigError, VflError
        As `count`.
    """
    if not _counts(context):
        return proves()
    with _opened(context, rules) as kept:
        _check(context, rules, kept, "a proof")
        proved = proves()
        if not proved:
            kept.add(1)
            kept.wrong += 1
    return proved


class Session:
    """Counts the ids that a service asks about, a few at a time.

    It writes `_AHEAD` ids ahead to the disk, so that most orders write nothing. `close` replaces
    them by what was asked. After a crash, the count may be too high by that many. Ids that were
    counted ahead serve their day alone.
    """

    def __init__(self, context: Context, rules: Rules) -> None:
        self._context, self._rules = context, rules
        self._known: set[int] = set()
        self._key = b""
        self._new: list[int] = []
        self._day = self._left = 0  # ids left ahead, and their day
        self._rule = ""  # that leaves nothing

    def count(self, points: Points) -> tuple[NDArray[np.bool_], str]:
        """Count the ids of the points, [n, 32].

        Known ids are free. The first new ids are counted, as far as the rules allow.

        Returns
        -------
        which ids are allowed, [n], and the sentence that refuses the others, if any.

        Raises
        ------
        VflError
            If the party cannot keep the count.
        """
        allowed = np.ones(len(points), bool)
        if not _counts(self._context):
            return allowed, ""
        if not self._key:
            self._reserve(0)
        hashes, new = self._new_of(points)
        if new and (len(new) > self._left or int(time.time()) // _DAY > self._day):
            self._reserve(len(new))
            hashes, new = self._new_of(points)
        new, beyond = new[: self._left], new[self._left :]
        allowed[beyond] = False
        self._left -= len(new)
        self._new += [hashes[at] for at in new]
        self._known.update(self._new[len(self._new) - len(new) :])
        what = f"to be asked about {len(beyond)} more ids"
        return allowed, str(refused(self._context, f"{what}: {self._rule}")) if beyond else ""

    def _new_of(self, points: Points) -> tuple[list[int], list[int]]:
        """Return the hashes of points, and the positions of new ones."""
        hashes = _hashed(points, self._key).tolist()
        return hashes, [at for at, one in enumerate(hashes) if one not in self._known]

    def _reserve(self, lacks: int) -> None:
        """Count ids of today ahead, if the rules allow it; at least so many."""
        with _opened(self._context, self._rules) as kept:
            self._give_back(kept)
            most, self._rule = kept.left_to_services(self._rules)
            few = min(_AHEAD, self._rules.max_ids // 100)
            more = max(lacks, few) if lacks and few <= most else min(lacks, most)
            self._left = more = min(more, most)
            for counted in ("asked", "that_day", "ahead", "served", "served_that_day"):
                setattr(kept, counted, getattr(kept, counted) + more)

    def _give_back(self, kept: _Count) -> None:
        """Give back what is left, to the day on which it was counted."""
        kept.changed = True
        if kept.key != self._key:  # the session begins, or the owner has reset the count
            self._known, self._key, self._new = set(kept.points.tolist()), kept.key, []
            self._left = 0
        of_day = ("that_day", "served_that_day") if kept.day == self._day else ()
        for counted in ("asked", "ahead", "served", *of_day):
            setattr(kept, counted, getattr(kept, counted) - self._left)
        self._day, self._left = kept.day, 0

    def close(self) -> None:
        """Write what was asked, and give back the rest."""
        if not self._new and not self._left:
            return
        with _opened(self._context, self._rules) as kept:
            self._give_back(kept)
            new = np.setdiff1d(np.array(self._new, np.uint64), kept.points)
            kept.points = np.union1d(kept.points, new)
            kept.ahead -= len(self._new)
            twice = len(self._new) - len(new)  # an id that others have counted since counts once
            kept.asked -= twice
            kept.served -= twice
        self._new = []


_AHEAD = 1000


def _counts(context: Context) -> bool:
    """Return whether the party counts ids.

    If one owner has all parties, only a party with a named rule counts.
    """
    named = {"max-ids", "max-ids-per-day"} & context.node_config.keys()
    return bool(named) or not simulated(context)


def _check(context: Context, rules: Rules, kept: _Count, what: str) -> None:
    for most, counted, rule in (
        (rules.max_ids, kept.asked, "max-ids"),
        (rules.max_ids_per_day, kept.that_day, "max-ids-per-day"),
    ):
        if most is not None and counted > most:
            raise refused(context, f"{what}: its rule is {rule} = {most}")


def _hashed(points: Points, key: bytes) -> NDArray[np.uint64]:
    """Return the keyed hash of each point, 64 bits.

    Nobody without the key can make two points collide.
    """
    data, hashed = points.tobytes(), hashlib.blake2b
    each = (data[at : at + 32] for at in range(0, len(data), 32))
    return np.frombuffer(
        b"".join([hashed(point, digest_size=8, key=key).digest() for point in each]), "<u8"
    ).astype(np.uint64)


# --- the file -----------------------------------------------------------------------------------


@contextmanager
def _opened(context: Context, rules: Rules) -> Iterator[_Count]:
    """Yield the count on the disk under a lock; write it at the end."""
    party = context.node_config.get("partition-id")
    path = home("", context) / f"party-{party}.ids"
    try:
        make_folder(path.parent)
        with alone_in(path.parent):
            kept = _read(path)
            before = kept.asked
            yield kept
            if kept.asked > before or kept.changed:
                write_sealed(path, _written(kept, rules))
                log.info("Party %s has been asked about %d ids: %s", party, kept.asked, path)
    except ConfigError:
        raise  # a rule's refusal
    except (OSError, ValueError, KeyError, TypeError, VflError) as error:
        log.warning("The party cannot keep its count of ids in %s: %s", path, error)
        raise VflError(
            "cannot count the ids that it is asked about: its own log says why."
        ) from None


def _read(path: Path) -> _Count:
    """Return the count in a file, or a new count if the file is missing."""
    today = int(time.time()) // _DAY
    if not path.exists():
        return _Count(0, 0, today, 0, secrets.token_bytes(_KEY), np.zeros(0, np.uint64))
    head, _, rest = unsealed(path).partition(b"\n")
    said = json.loads(head)
    day = (date.fromisoformat(said["day"]) - _FIRST).days
    points = np.frombuffer(rest[_KEY:], "<u8").astype(np.uint64)
    ahead = said.get("ahead", 0)
    of_services = ahead, said.get("served", ahead), said.get("served that day", 0)
    kept = _Count(
        said["asked"], said["wrong"], day, said["that day"], rest[:_KEY], points, *of_services
    )
    if len(points) != kept.asked - kept.wrong - ahead:
        raise ValueError("the count does not fit its points")
    if today > day:  # a clock that is set back must not start a new day
        kept.day, kept.that_day, kept.served_that_day = today, 0, 0
    return kept


def _written(kept: _Count, rules: Rules) -> bytes:
    """Return the content of the file. Its first line is for the party's owner."""
    per_day = rules.max_ids_per_day
    said = {
        "asked": kept.asked,
        "wrong": kept.wrong,
        "left": max(0, rules.max_ids - kept.asked),
        "day": (_FIRST + timedelta(kept.day)).isoformat(),
        "that day": kept.that_day,
        "left that day": None if per_day is None else max(0, per_day - kept.that_day),
    }
    said |= {"ahead": kept.ahead} if kept.ahead else {}
    if kept.served:
        said |= {"served": kept.served, "served that day": kept.served_that_day}
    return json.dumps(said).encode() + b"\n" + kept.key + kept.points.astype("<u8").tobytes()
