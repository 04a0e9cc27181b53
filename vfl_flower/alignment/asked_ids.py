"""Count on disk of the ids that a party is asked about, over all orders and runs.

The party sees blinded ids. A label holder keeps its secret (`at_label_holder`), so an id is the
same point each time, and a second question about it is free. The party stores a keyed hash of 8
bytes for each point. A failed proof that a label holder knows ids (`ConfirmOrder`) counts as one
id.

The party forces the count to the disk before it blinds the ids. Services may ask about half of the
ids that a rule allows, so made-up ids of their callers leave the other half to alignments. Only the
owner can reset the count, by deleting the file, and can read it:
``sqlite3 party-0.ids "SELECT * FROM entries WHERE name = 'asked'"``. Key 0 has the total, and other
keys are days since 1970.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.psi import Points
from vfl_flower.alignment.store import home
from vfl_flower.config.files import unsealed
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import cut, digests
from vfl_flower.records import budget
from vfl_flower.records.budget import Budget, Limit, limits_of
from vfl_flower.records.ledger import Ledger, Value, opened_by_party
from vfl_flower.transport.node import refused, simulated

# Names in the ledger. Its secret is the key of the hashes.
_ASKED, _SERVED = "asked", "served"  # ids and failed proofs, by all and by services
_IDS, _WRONG = "id", "wrong"  # hashes of points, and the number of failed proofs


def _limits(rules: Rules) -> list[Limit]:
    return limits_of(_ASKED, "max-ids", rules.max_ids, rules.max_ids_per_day)


def count(context: Context, rules: Rules, points: Points) -> None:
    """Count the ids of the points, [n, 32], or raise `ConfigError` if the rules allow no more."""
    if not _counts(context):
        return
    with _opened(context) as ledger:
        known = _known(ledger)
        hashes = np.unique(_hashed(points, ledger.secret))
        new = np.setdiff1d(hashes, known, assume_unique=True)
        _check(context, rules, ledger, len(new), f"to be asked about {len(new)} more ids")
        if len(new):
            _add(ledger, rules, len(new))
            _keep(ledger, np.union1d(known, new))


def judge(context: Context, rules: Rules, proves: Callable[[], bool]) -> bool:
    """Return whether a label holder proves that it knows ids; count a failed proof."""
    if not _counts(context):
        return proves()
    with _opened(context) as ledger:
        _check(context, rules, ledger, 0, "a proof")
        if not (proved := proves()):
            _add(ledger, rules, 1)
            ledger.add(_WRONG, 1)
    return proved


class ServiceCount:
    """Counts a service's ids, some ahead. After a crash, ids since the start count once more."""

    def __init__(self, context: Context, rules: Rules) -> None:
        self._context, limits = context, _limits(rules)
        limits += [
            Limit(_SERVED, most // 2, f"{rule}, half of it for services", daily)
            for _, most, rule, daily in limits
            if most is not None
        ]
        self._budget = Budget(partial(_opened, context), limits)
        self._known: set[int] = set()
        self._key = b""
        self._new: list[int] = []

    def count(self, points: Points) -> tuple[NDArray[np.bool_], str]:
        """Count ids of points [n, 32]; return which are allowed, [n], and what refuses others."""
        allowed = np.ones(len(points), bool)
        if not _counts(self._context):
            return allowed, ""
        if not self._key:
            self._read()
        hashes, new = self._new_of(points)
        number, rule = self._budget.take_some(len(new))
        if new and self._budget.ledger != self._key:  # the owner has reset the count
            self._budget.give_back(number)
            self._read()
            hashes, new = self._new_of(points)
            number, rule = self._budget.take_some(len(new))
        new, beyond = new[:number], new[number:]
        allowed[beyond] = False
        self._new += [hashes[at] for at in new]
        self._known.update(hashes[at] for at in new)
        what = f"to be asked about {len(beyond)} more ids: its rule is {rule}"
        return allowed, str(refused(self._context, what)) if beyond else ""

    def _read(self) -> None:
        """Read the hashes of all ids that were counted."""
        with _opened(self._context) as ledger:
            self._known, self._new = set(_known(ledger).tolist()), []
            self._key = ledger.secret

    def _new_of(self, points: Points) -> tuple[list[int], list[int]]:
        """Return the hashes of points, and the positions of new ones."""
        hashes = _hashed(points, self._key).tolist()
        return hashes, [at for at, one in enumerate(hashes) if one not in self._known]

    def close(self) -> None:
        """Write what was asked, and give back the rest."""
        if self._new:
            with _opened(self._context) as ledger:
                if ledger.secret == self._key:
                    known = _known(ledger)
                    together = np.union1d(known, np.array(self._new, np.uint64))
                    # An id that others have counted since counts once.
                    self._budget.give_back(len(known) + len(self._new) - len(together))
                    _keep(ledger, together)
        self._new = []
        self._budget.close()


def _counts(context: Context) -> bool:
    """Return whether the party counts: if one owner has all parties, only by a named rule."""
    named = {"max-ids", "max-ids-per-day"} & context.node_config.keys()
    return bool(named) or not simulated(context)


def _check(context: Context, rules: Rules, ledger: Ledger, more: int, what: str) -> None:
    limits = _limits(rules)
    most, rule = budget.left(ledger, limits, budget.last_day(ledger, limits))
    if more > most:
        raise refused(context, f"{what}: its rule is {rule}")


def _add(ledger: Ledger, rules: Rules, more: int) -> None:
    limits = _limits(rules)
    budget.count(ledger, limits, more, budget.last_day(ledger, limits))


def _known(ledger: Ledger) -> NDArray[np.uint64]:
    """Return the hashes of all points that were counted, in ascending order."""
    return np.frombuffer(ledger.content(_IDS), "<u8").astype(np.uint64)


def _keep(ledger: Ledger, hashes: NDArray[np.uint64]) -> None:
    ledger.write(_IDS, hashes.astype("<u8").tobytes())


def _hashed(points: Points, key: bytes) -> NDArray[np.uint64]:
    """Return a hash of 64 bits of each point. Without the key, nobody makes two of them collide."""
    return digests(cut(points.tobytes(), 32), 8, key).view("<u8")[:, 0].astype(np.uint64)


@contextmanager
def _opened(context: Context) -> Iterator[Ledger]:
    party = context.node_config.get("partition-id")
    path = home("", context) / f"party-{party}.ids"
    sentence = "cannot count the ids that it is asked about: its own log says why."
    with opened_by_party(path, sentence, _earlier) as ledger:
        before = ledger.count(_ASKED)
        yield ledger
        if (asked := ledger.count(_ASKED)) > before:
            log.info("Party %s has been asked about %d ids: %s", party, asked, path)


def _earlier(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the file of an earlier version: a line of JSON, the key, and the hashes."""
    if not path.exists():
        return
    line, _, rest = unsealed(path).partition(b"\n")
    said = json.loads(line)
    day = (date.fromisoformat(said["day"]) - date(1970, 1, 1)).days
    served = said.get("served", 0), said.get("served that day", 0)
    yield from ((_ASKED, 0, said["asked"]), (_ASKED, day, said["that day"]))
    yield from ((_SERVED, 0, served[0]), (_SERVED, day, served[1]))
    yield from ((_WRONG, 0, said["wrong"]), ("secret", 0, rest[:32]), (_IDS, 0, rest[32:]))
