"""Find single people at parties, for the online service.

A person may be in no alignment yet. `at_label_holder` and `at_party` then find the person by id, or
by keys of rules, in these steps:

1. The label holder opens a set at the party. With ids, it is the set of blinded ids that both sides
   keep and prove (`blinded_ids`). With rules, it is a fresh set in memory (`OpenKeys`): the party
   sends the outputs of its people's keys, rule by rule.
2. For new people the label holder sends its blinded ids, or keys of one rule, as in steps 1 and 2
   of `alignment.psi`. It compares the answer with the party's points, which it keeps. So it finds
   the place of each person, or that the party lacks the key. With rules, it asks only about people
   that no earlier rule has found there.
3. To have a place scored, the label holder proves that it knows the id or key. A proof of an id is
   a hash of the id, keyed by a secret of the set and by this run. A proof of a key is another
   output of its point, as in `by_rules`. A wrong proof is counted as a question.

So a party counts each new id or key (`asked_ids`), and the label holder cannot score rows of
strangers. A key counts if it is whole, and stands once among all people of the party. It must not
stand twice in the label holder's file.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment import asked_ids, blinded_ids, by_rules, pieces, psi
from vfl_flower.alignment.at_label_holder import lasting_blinding
from vfl_flower.alignment.blinded_ids import FoundSet, keyed_hashes, where
from vfl_flower.alignment.psi import Blinding, Places, Points, shuffled
from vfl_flower.alignment.store import check_method, rules_of
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import digests
from vfl_flower.data.keys import MOST_RULES, parse
from vfl_flower.data.source import Source
from vfl_flower.data.tables import Table
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import OpenSetOrder, SetKept
from vfl_flower.transport.gather import gather
from vfl_flower.transport.messages import Arrays

_NONE, _GONE = np.zeros((0, 32), np.uint8), np.zeros(0, np.int32)


def _key(proof: bytes, party: int, run: str) -> bytes:
    """Return the key of proofs of ids, for one set, party and run."""
    return hmac.digest(proof, f"vfl-flower score|{party}|{run}".encode(), "sha256")


# --- the label holder ---------------------------------------------------------------------------


@dataclass
class _Known:
    """The label holder's knowledge of one party's set.

    points, order : outputs of all places, [n], and what sorts them, unless some were added.
    tried, used : number of rules that the party has answered, and the rules that find people.
    """

    points: NDArray[np.bytes_]
    tried: int = 0
    used: set[str] = field(default_factory=set)
    order: Places | None = None

    def add(self, points: Points) -> None:
        self.points = np.concatenate([self.points, _as_one(points)])
        self.order = None

    def places(self, points: Points) -> Places:
        if self.order is None:
            self.order = np.argsort(self.points, kind="stable")
        mine, ordered = _as_one(points), self.points[self.order]
        at = np.searchsorted(ordered, mine).clip(max=len(ordered) - 1)
        return np.where(ordered[at] == mine, self.order[at], -1)


class Seeker:
    """The label holder's half.

    match, most : rules that find people, and the largest chance that a rule finds a stranger.
    by_text : text of a rule -> rule, for rules that the label holder has the columns of.
    rules : the texts in their order. Without rules, there is only the empty text: ids.
    """

    def __init__(self, own: Table, run: str, match: str = "", most: float = 0.0) -> None:
        self._blinding = lasting_blinding()
        self._own, self._run, self._most = own, run, most
        rules = [rule for rule in parse(match) if not own.keys.missing(rule)] if match else []
        self.by_text = {str(rule): rule for rule in rules}
        self.rules = [*self.by_text] if match else [""]
        stored = {} if match else blinded_ids.stored_sets(own.whose)
        self._sets = {party: found for party, (_, found) in stored.items()}
        self._opening = {} if match else blinded_ids.set_order(stored, run).arrays
        self._known: dict[int, _Known] = {}

    def open(
        self,
        transport: Transport,
        parties: Mapping[int, int],
        about: str,
        timeout: float,
        lax: bool,
    ) -> None:
        """Open the sets of parties, node -> party. With ``lax``, leave out a party that fails."""
        orders = {node: self.order(party, about, anew=True) for node, party in parties.items()}
        while asked := {node: order for node, order in orders.items() if order}:
            answers = gather(transport, asked, SetKept, timeout, lax)
            for node, answer in answers.items():
                self.opened(parties[node], answer)
            orders = {node: self.order(parties[node], about) for node in answers}

    def order(self, party: int, about: str, anew: bool = False) -> OpenSetOrder | None:
        """Return the next order to open a party's set, the first one with ``anew``, or None."""
        if anew:
            self._known[party] = _Known(_as_one(_NONE))
        tried = self._known[party].tried
        if tried == len(self.rules):
            return None
        return OpenSetOrder(
            config=about, anew=anew, rule=self.rules[tried], arrays=dict(self._opening)
        )

    def opened(self, party: int, answer: SetKept) -> None:
        """Take a party's answer, or raise `ConfigError`; note whether the rule finds people."""
        known, stored = self._known[party], self._sets.get(party)
        text, known.tried = self.rules[known.tried], known.tried + 1
        if not text:
            if stored and blinded_ids.is_proved(answer, stored, self._run):
                known.points, known.used = _as_one(stored.arrays["points"]), {text}
            return
        points = answer.arrays.get("own", _NONE)
        with pieces.sent(by=party):
            blinded_ids.check_answer(points, _GONE, len(known.points))
        known.add(points)
        # A stranger has the key of one of these people by this chance.
        chance = self._own.keys.chance(self.by_text[text]) * len(points)
        why = answer.why or "match-error" * (chance > self._most)
        if not why:
            known.used.add(text)
        log.info("New people at party %d by %s: %s", party, text, why or "yes")

    def take(self, party: int, other: Seeker) -> None:
        """Know the set of a party as another one does, after a later alignment."""
        self._opening, self._known[party] = other._opening, other._known[party]
        if party in other._sets:
            self._sets[party] = other._sets[party]

    def knows(self, party: int, rule: str) -> int:
        """Return how many points of a party the label holder has; 0 if the rule finds nobody."""
        known = self._known.get(party)
        return len(known.points) if known and rule in known.used else 0

    def blinded(self, encoded: Sequence[bytes]) -> Points:
        """Return the ids or keys blinded, [n, 32]."""
        return self._blinding.of_ids(encoded)

    def places(self, party: int, encoded: Sequence[bytes], answer: Arrays) -> tuple[Places, Points]:
        """Return each id's or key's place in a party's set, or -1, [n], and its points [n, 32]."""
        again = answer.get("again", np.zeros(0))
        psi.check_points(again)
        if len(again) != len(encoded):
            raise VflError("another number of blinded ids than it was sent.")
        new, known = answer.get("own", again[:0]), self._known[party]
        blinded_ids.check_answer(new, _GONE, len(known.points))
        if len(new):
            known.add(new)
        points = self._blinding.undone(again)
        return known.places(psi.outputs(encoded, points)), points

    def proofs(self, party: int, encoded: Sequence[bytes], points: Points) -> Points:
        """Return proofs that the label holder knows these ids or keys, [n, 32]."""
        if self.by_text:
            return psi.outputs(encoded, points, by_rules.MATCHED)
        key = _key(self._sets[party].arrays["proof"].tobytes(), party, self._run)
        return digests(encoded, 32, key)


def _as_one(points: Points) -> NDArray[np.bytes_]:
    """Return points [n, 32] as an array [n] that can be sorted."""
    return np.ascontiguousarray(points).view("S32")[:, 0]


# --- a party ------------------------------------------------------------------------------------


class Opened:
    """A party's half: what the label holder finds people in, in memory."""

    def __init__(self, context: Context, own: Source) -> None:
        self._context, self._party, self._ids = context, own.number, own.ids
        self._rules = rules_of(context, "psi")
        check_method(self._rules, "psi")
        self._asked = asked_ids.ServiceCount(context, Rules.of(context.node_config))
        self._secrets: dict[str, Blinding] = {}  # of each rule
        self._points, self._at = _NONE, np.zeros(0, np.int64)  # of all places; -1: its row has gone

    def _due(self, place: int, row: int) -> bytes:
        """Return the right proof of a place."""
        raise NotImplementedError

    def again(self, points: Points, known: int, rule: str = "") -> tuple[Arrays, str]:
        """Return points blinded again and places after ``known``; why a rule refuses others."""
        if rule not in self._secrets:
            raise VflError("keeps no set of blinded ids with this label holder.")
        with pieces.sent():
            psi.check_points(points)
            psi.check_distinct(points)
            again = self._secrets[rule].again(points)
        allowed, why = self._asked.count(points)
        if why and not allowed.any():
            raise ConfigError(why)
        refused = {"refused": np.flatnonzero(~allowed).astype(np.int32)} if why else {}
        return {"again": again[allowed], "own": self._points[known:]} | refused, why

    def rows(self, places: Places, proofs: Points) -> Places:
        """Return the rows of proven places in the party's data, or -1."""
        if not self._secrets:
            raise VflError("keeps no set of blinded ids with this label holder.")
        if len(proofs) != len(places) or not len(places):
            raise VflError("was sent places without a proof for each.")
        if places.min() < 0 or places.max() >= len(self._at):
            raise VflError("was asked to score places that do not exist.")
        rows = self._at[places]
        for place, row, proof in zip(places.tolist(), rows.tolist(), proofs, strict=True):
            if row >= 0 and not hmac.compare_digest(proof.tobytes(), self._due(place, row)):
                asked_ids.judge(self._context, self._rules, lambda: False)
                raise VflError("was asked to score a row whose id was not proved.")
        return rows

    def ids(self, rows: Places) -> list[bytes]:
        """Return the encoded ids of rows from `rows`; empty for a row that has gone."""
        return [self._ids[row] if row >= 0 else b"" for row in rows.tolist()]

    def close(self) -> None:
        """Write the count of ids that were asked about."""
        self._asked.close()


class OpenSet(Opened):
    """A set of blinded ids that both sides keep."""

    def __init__(self, context: Context, own: Source, order: OpenSetOrder) -> None:
        super().__init__(context, own)
        self._order = order
        self.use(own, self.found(own))

    def found(self, own: Source) -> FoundSet | None:
        """Return the set, with new ids of the party's data; None if there is none."""
        return blinded_ids.find(self._context, own, self._order, self._rules)

    def use(self, own: Source, found: FoundSet | None) -> None:
        """Use a set that was found, and the data that it was found for."""
        self._ids, self.proof, self._secrets = own.ids, found.proof if found else None, {}
        if found:
            arrays = found.stored.arrays
            self._secrets = {"": Blinding(arrays["key"].tobytes())}
            self._points, self._at = arrays["points"], found.at
            proof, run = arrays["proof"].tobytes(), str(self._context.run_id)
            self._key = _key(proof, self._party, run)

    def _due(self, place: int, row: int) -> bytes:
        return digests([self._ids[row]], 32, self._key).tobytes()


class Keys(NamedTuple):
    """Keys of a party's people by all open rules: a place for each, in secret orders.

    at : the row of each key in the party's data, or -1, [n].
    marks : keyed hash of each, to know it again, [n, 32].
    points, tags : its outputs: what the label holder compares, and what it proves, [n, 32].
    """

    at: Places
    marks: Points
    points: Points
    tags: Points


class OpenKeys(Opened):
    """Keys of the party's people by rules, blinded by secrets that end with the service."""

    def __init__(self, context: Context, own: Source) -> None:
        super().__init__(context, own)
        self._hashes = np.frombuffer(secrets.token_bytes(32), np.uint8)
        self.use(own, Keys(self._at, _NONE, _NONE, _NONE))

    def open(self, own: Source, rule: str) -> tuple[Arrays, str]:
        """Open a rule; return the outputs of its keys, and the party's rule that forbids it."""
        rule = str(by_rules.one_rule(rule))
        if rule in self._secrets or len(self._secrets) >= MOST_RULES:
            raise VflError("was asked to open a rule twice, or too many. Start the service anew.")
        known, secret = len(self._at), Blinding()
        log.info("Party %d is asked to find new people by %s", self._party, rule)
        keys, why = self._with(self._keys, own, rule, secret)
        if not why:
            self._secrets[rule] = secret
        self.use(own, keys)
        return {"own": self._points[known:]}, why

    def found(self, own: Source) -> Keys:
        """Return the keys of the party's data by all open rules; earlier keys keep their places."""
        keys = self._keys._replace(at=np.full(len(self._at), -1))
        for rule, secret in self._secrets.items():
            keys, _ = self._with(keys, own, rule, secret)
        return keys

    def use(self, own: Source, found: Keys) -> None:
        """Use keys that were found, and the data that they were found for."""
        self._keys, self._ids = found, own.ids
        self._points, self._at = found.points, found.at

    def _with(self, known: Keys, own: Source, text: str, secret: Blinding) -> tuple[Keys, str]:
        """Return these keys and the keys of a rule, and the party's rule that forbids it."""
        rule, keys = by_rules.one_rule(text), by_rules.keys_of(own)
        rows, _, why = by_rules.counted(keys, rule, self._rules, np.arange(len(keys)))
        if why:
            return known, why
        rows = rows[shuffled(len(rows), secrets.token_bytes(16))]
        made = by_rules.whole_keys(keys, rule, rows)
        marks = keyed_hashes(made, self._hashes)
        place, at = where(marks, known.marks), known.at.copy()
        at[place[place >= 0]] = rows[place >= 0]
        new = np.flatnonzero(place < 0)
        made = [made[each] for each in new.tolist()]
        points = secret.of_ids(made)
        outputs = psi.outputs(made, points), psi.outputs(made, points, by_rules.MATCHED)
        added = zip(known[1:], (marks[new], *outputs), strict=True)
        return Keys(np.append(at, rows[new]), *map(np.concatenate, added)), ""

    def _due(self, place: int, row: int) -> bytes:
        return bytes(self._keys.tags[place])
