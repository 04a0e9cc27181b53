"""Find single ids at parties, for the online service.

An id may be in no alignment yet. `at_label_holder` and `at_party` then find it, by the blinded ids
that both sides keep (`blinded_ids`), in one round trip:

1. The label holder opens the party's set once, by the names and proofs of a `SetOrder`. The party
   proves that it keeps the set too, and keeps it in memory.
2. For new ids the label holder sends its blinded ids, and the party blinds them again, as in steps
   1 and 2 of `alignment.psi`. The label holder compares them with the party's points, which it
   keeps, and so finds the place of each id, or that the party lacks it.
3. To have a place scored, the label holder proves that it knows the id. Its proof is a hash of the
   id, keyed by a secret of the set and by this run. A party that compares it learns which of its
   ids is asked about, as with an aligned row. A wrong proof is counted as a question.

So a party counts each new id (`asked_ids`), and the label holder cannot score rows of strangers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment import asked_ids, blinded_ids, party_sets, pieces, psi
from vfl_flower.alignment.at_label_holder import lasting_blinding
from vfl_flower.alignment.blinded_ids import IdSet
from vfl_flower.alignment.party_rows import check_method, rules_of
from vfl_flower.alignment.psi import Blinding, Places, Points
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.source import Source
from vfl_flower.transport.early_messages import SetKept, SetOrder
from vfl_flower.transport.messages import Arrays


def _key(proof: bytes, party: int, run: str) -> bytes:
    """Return the key of proofs of ids, for one set, party and run."""
    return hmac.digest(proof, f"vfl-flower score|{party}|{run}".encode(), "sha256")


def _proof(one: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(one, digest_size=32, key=key).digest()


# --- the label holder ---------------------------------------------------------------------------


class Seeker:
    """The label holder's half.

    Parameters
    ----------
    own : the label holder's table, which names its sets.
    run : number of the Flower run.
    """

    def __init__(self, own: Source, run: str) -> None:
        self._blinding = lasting_blinding()
        self._run, self._whose = run, own.whose
        stored = party_sets.stored_sets(own.whose)
        self._sets = {party: found for party, (_, found) in stored.items()}
        self._points: dict[int, NDArray[np.bytes_]] = {}  # of opened sets
        self.opening: SetOrder = party_sets.set_order(stored, run)

    def opened(self, party: int, answer: SetKept) -> bool:
        """Return whether a party has proved that it keeps the set that the label holder keeps."""
        stored = self._sets.get(party)
        if stored is None or not party_sets.is_proved(answer, stored, self._run):
            self._points.pop(party, None)
            return False
        self._points[party] = _as_one(stored.arrays["points"])
        return True

    def take(self, party: int, other: Seeker) -> None:
        """Know the set of a party as another one does, after a later alignment."""
        self.opening = other.opening
        if party in other._sets:
            self._sets[party] = other._sets[party]

    def knows(self, party: int) -> int:
        """Return how many points of a party the label holder has; 0 without an open set."""
        return len(self._points.get(party, ()))

    def blinded(self, encoded: Sequence[bytes]) -> Points:
        """Return the ids blinded, [n, 32]."""
        return self._blinding.of_ids(encoded)

    def places(self, party: int, encoded: Sequence[bytes], answer: Arrays) -> Places:
        """Return the place of each id in a party's set, or -1, [n].

        Raise `VflError`, about the party, if the answer does not fit.
        """
        again = answer.get("again", np.zeros(0))
        psi.check_points(again)
        if len(again) != len(encoded):
            raise VflError("another number of blinded ids than it was sent.")
        new = answer.get("own", again[:0])
        party_sets.check_answer(new, np.zeros(0, np.int32), self.knows(party))
        if len(new):
            self._points[party] = np.concatenate([self._points[party], _as_one(new)])
        mine = _as_one(psi.outputs(encoded, self._blinding.undone(again)))
        points = self._points[party]
        order = np.argsort(points, kind="stable")
        at = np.searchsorted(points[order], mine).clip(max=len(points) - 1)
        found: Places = np.where(points[order[at]] == mine, order[at], -1)
        return found

    def proofs(self, party: int, encoded: Sequence[bytes]) -> Points:
        """Return proofs that the label holder knows these ids, [n, 32]."""
        key = _key(self._sets[party].arrays["proof"].tobytes(), party, self._run)
        made = b"".join(_proof(one, key) for one in encoded)
        return np.frombuffer(made, np.uint8).reshape(-1, 32)


def _as_one(points: Points) -> NDArray[np.bytes_]:
    """Return points [n, 32] as an array [n] that can be sorted."""
    found: NDArray[np.bytes_] = np.ascontiguousarray(points).view("S32")[:, 0]
    return found


# --- a party ------------------------------------------------------------------------------------


class OpenSet:
    """A party's half: one set in memory."""

    def __init__(self, context: Context, own: Source, order: SetOrder) -> None:
        assert own.party is not None
        self._context, self._party, self._order = context, own.party, order
        self._rules = rules_of(context, "psi")
        check_method(self._rules, "psi")
        self._asked = asked_ids.ServiceCount(context, Rules.of(context.node_config))
        self.use(own, self.found(own))

    def found(self, own: Source) -> blinded_ids.FoundSet | None:
        """Return the set, with new ids of the party's data; None if there is none."""
        return blinded_ids.find(self._context, own, self._order, self._rules)

    def use(self, own: Source, found: blinded_ids.FoundSet | None) -> None:
        """Use a set that was found, and the data that it was found for."""
        self._set = found.stored if found else None
        self._at = found.at if found else np.zeros(0, np.int64)
        self._ids = own.ids if found else []
        self.proof = found.proof if found else None

    def again(self, points: Points, known: int) -> tuple[Arrays, str]:
        """Return the label holder's points, blinded again, and the places after ``known``.

        Further come the positions of points that a rule forbids, if any, and its sentence.
        """
        stored = self._opened()
        with pieces.sent():
            psi.check_points(points)
            psi.check_distinct(points)
            again = Blinding(stored.arrays["key"].tobytes()).again(points)
        allowed, why = self._asked.count(points)
        if why and not allowed.any():
            raise ConfigError(why)
        refused = {"refused": np.flatnonzero(~allowed).astype(np.int32)} if why else {}
        return {"again": again[allowed], "own": stored.arrays["points"][known:]} | refused, why

    def rows(self, places: Places, proofs: Points) -> Places:
        """Return the rows of these places in the party's data, or -1.

        Raise an error if a place does not exist, or a proof is wrong.
        """
        stored = self._opened()
        if len(proofs) != len(places) or not len(places):
            raise VflError("was sent places without a proof for each.")
        if places.min() < 0 or places.max() >= len(self._at):
            raise VflError("was asked to score places that do not exist.")
        key = _key(stored.arrays["proof"].tobytes(), self._party, str(self._context.run_id))
        rows = self._at[places]
        for row, proof in zip(rows.tolist(), proofs, strict=True):
            known = row >= 0
            due = _proof(self._ids[row], key) if known else b""
            if known and not hmac.compare_digest(proof.tobytes(), due):
                asked_ids.judge(self._context, self._rules, lambda: False)
                raise VflError("was asked to score a row whose id was not proved.")
        return rows

    def ids(self, rows: Places) -> list[bytes]:
        """Return the encoded ids of rows from `rows`; empty for a row that has gone."""
        return [self._ids[row] if row >= 0 else b"" for row in rows.tolist()]

    def close(self) -> None:
        """Write the count of ids that were asked about."""
        self._asked.close()

    def _opened(self) -> IdSet:
        if self._set is None:
            raise VflError("keeps no set of blinded ids with this label holder.")
        return self._set
