"""Align people without a common id: keys by rules, one rule after the other.

A rule joins columns to a key (`data.keys`). Each rule is steps 1 to 3 of `alignment.psi` for the
people that no earlier rule has matched. A key counts if it is whole, and stands once at its side
among these people. With the next rule, the label holder says which people of the party have
matched, and proves that it knows their keys. Steps 4 to 6 follow once. Their question is about the
key of each row, by the rule that matched it.

The label holder learns which rule matched each common person. It learns how many people of the
party each rule compared, and how many share a key. If it does not say who has matched, it learns
which later rules agree too. A party learns which of its people the label holder has, and which rule
matched them. Both learn that these people's columns of the rule are equal. About other people, a
side learns only that their keys differ.

Without the proof, the label holder could leave one person over. Rules of one column would then read
this person's columns. For the same reason, a party answers no rule for fewer than `min-rows`
people, no rule twice, and none without keys. It answers none below `match-bits`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment import asked_ids, pieces, psi, store
from vfl_flower.alignment.blinded_ids import where
from vfl_flower.alignment.psi import Blinding, Places, Points, shuffled
from vfl_flower.alignment.rule_figures import RuleFigures
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.keys import MOST_RULES, KeyTable, Rule, expected_false, parse
from vfl_flower.data.source import Source
from vfl_flower.data.tables import Table
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import Aligned, AlignOrder
from vfl_flower.transport.messages import Arrays

_NONE, _NO_POINT = np.zeros(0, np.int32), np.zeros((0, 32), np.uint8)
_FEW, _REPEATED = 5, 0.01  # rows with the same key of the first rule, and their share: a warning
_LARGER = 0.01  # `match-error` of a hint; an even larger one is no advice
MATCHED = b"vfl-flower psi matched|"
"""Name of the outputs that prove that the label holder knows a matched key."""
LACKS = "match-columns"  # rule of a party that lacks columns of a rule


# --- the label holder -----------------------------------------------------------------------------


class RuleMatch:
    """The label holder's knowledge of one party's people.

    places : place of each row in the party's order, of all rules together, or -1, [N].
    by : number of the rule that matched each row, or -1, [N].
    told, proof : places of the last rule that have matched, and a proof of their keys, [1, 32].
    """

    def __init__(self, party: int, rows: int) -> None:
        self.party, self.left = party, np.arange(rows)
        self.places, self.by = np.full(rows, -1, np.int32), np.full(rows, -1, np.int16)
        self.told, self.proof = _NONE, _NO_POINT
        self.first, self.offset = True, 0
        self.figures: list[RuleFigures] = []
        self.refused: list[tuple[float, Places]] = []  # false matches of a rule, all its rows

    def learn(self, number: int, rows: Places, found: Places, theirs: int, proof: Points) -> None:
        """Note the places [n] of these rows, ascending, among ``theirs`` places of a rule."""
        self.places[rows], self.by[rows] = self.offset + found, number
        self.told, self.proof = found.astype(np.int32), proof
        self.left = np.setdiff1d(self.left, rows, assume_unique=True)
        self.offset += theirs

    def hint(self) -> str:
        """Say what a larger `match-error` would match, from what is known already, if anything."""
        some = [each for each in self.refused if each[0] <= _LARGER * len(each[1])]
        people = np.intersect1d(np.concatenate([_NONE, *(rows for _, rows in some)]), self.left)
        hint = (
            f"expert='match-error={_LARGER}' would use {len(some)} more rule{'s' * (len(some) > 1)}"
            f" and match up to {len(people)} more people, {sum(each for each, _ in some):.2g} of "
            "them falsely."
        )
        return hint if len(people) else ""


class RuleSteps:
    """Steps 1 to 3 with all parties, rule by rule. ``matches`` has each node's `RuleMatch`."""

    def __init__(
        self,
        transport: Transport,
        config: RunConfig,
        keys: KeyTable,
        parties: Mapping[int, int],
        blinding: Blinding,
        order: AlignOrder,
        lenient: bool,
    ) -> None:
        self.transport, self.config, self.keys = transport, config, keys
        self.blinding, self.order, self.lenient = blinding, order, lenient
        self.rules = parse(config.data.match)
        self.matches = {node: RuleMatch(party, len(keys)) for node, party in parties.items()}

    def match(self) -> None:
        """Compare the keys of all rules."""
        for number, rule in enumerate(self.rules if self.matches else ()):
            missing = self.keys.missing(rule)
            figures = {
                node: RuleFigures(each.party, str(rule), lacks=missing, why="the label holder")
                for node, each in self.matches.items()
            }
            if not missing and self.matches:
                figures = self._ask(number, rule)
            for node, each in self.matches.items():
                each.figures.append(figures[node])

    def _ask(self, number: int, rule: Rule) -> dict[int, RuleFigures]:
        """Compare the keys of one rule with all parties."""
        figures, asked = {}, {}
        for node, each in self.matches.items():
            rows, ambiguous = self.keys.once(rule, each.left)
            figures[node] = RuleFigures(each.party, str(rule), ambiguous=ambiguous)
            if not len(rows):
                figures[node].why = "not used: no key stands alone"
                continue
            arrays: Arrays = {"matched": each.told, "proof": each.proof}
            order = replace(self.order, rule=str(rule), anew=each.first, arrays=arrays)
            wanted = np.zeros(len(self.keys), bool)
            wanted[rows] = True
            asked[node] = pieces.Reply(each.party, order, wanted)
            each.told, each.proof, each.first = _NONE, _NO_POINT, False
        keys, timeout = partial(whole_keys, self.keys, rule), self.config.running.party_timeout
        replies = pieces.ask(self.transport, self.blinding, keys, asked, timeout, self.lenient)
        stay = replies.keys() | (self.matches.keys() - asked.keys())
        self.matches = {node: each for node, each in self.matches.items() if node in stay}
        for node, each in self.matches.items():
            if node in replies:
                with pieces.sent(by=each.party):
                    self._read(replies.pop(node), each, figures[node], number)
        return figures

    def _read(
        self, reply: pieces.Reply, match: RuleMatch, figures: RuleFigures, number: int
    ) -> None:
        """Note which rows the party has, unless too many matches would be false."""
        rule, first = self.rules[number], reply.first
        if first.missing:
            figures.lacks = tuple(first.missing.split(", "))
            figures.why = f"party {match.party}"
            if not set(figures.lacks) <= set(rule.columns):
                raise VflError("names of columns that the rule does not have. Start it anew.")
            return
        if first.why:
            figures.why = f"not used: by the rule {first.why} of party {match.party}"
            return
        figures.their_ambiguous = first.ambiguous
        rows, keys = reply.rows, partial(whole_keys, self.keys, rule)
        found = where(pieces.outputs_of(keys, rows, reply.points), reply.own)
        matched, most = int((found >= 0).sum()), self.config.data.match_error
        figures.chance = self.keys.chance(rule)
        if matched:
            figures.false = expected_false(figures.chance, len(rows), len(reply.own), matched)
        if figures.false > most * matched:
            figures.why = (
                f"not used: {figures.false:.2g} of {matched} matches would be false, and "
                f"match-error = {most}"
            )
            match.refused.append((figures.false, rows[found >= 0]))
            found, matched = np.full(len(rows), -1), 0
        figures.matched = matched
        new = np.flatnonzero(found >= 0)
        new = new[np.argsort(found[new])]
        proof = pieces.proof_of(pieces.outputs_of(keys, rows[new], reply.points[new], MATCHED))
        match.learn(number, rows[new], found[new], len(reply.own), proof)

    def keys_of(self, node: int, rows: Places) -> list[bytes]:
        """Return the keys that matched these rows at a party."""
        return _keys_by(self.keys, self.rules, rows, self.matches[node].by[rows])

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of all rules, by party."""
        every = sorted(self.matches.values(), key=lambda each: each.party)
        return [asdict(figures) for each in every for figures in each.figures]


# --- a party --------------------------------------------------------------------------------------


def blind(context: Context, own: Source, parties: int, order: AlignOrder) -> Aligned:
    """Blind the label holder's keys of a rule again, and the keys of the party's people."""
    rule, rules = one_rule(order.rule), store.rules_of(context, "psi")
    store.check_method(rules, "psi")
    keys, file = keys_of(own), store.digest_of(own)
    theirs = order.arrays.get("ids", np.zeros(0))
    answer = Aligned(party=own.number, parties=parties)
    if order.piece:
        kept = store.saved_state(context)
        same = "turn" in kept and store.text_of(kept["rules"]).splitlines()[-1] == str(rule)
        changed = pieces.taken(kept if same else {}, order, theirs)
        store.check_file(kept, file)
    else:
        kept = _begun(context, rules, len(keys), file, order)
        changed = pieces.taken(kept | pieces.begun(), order, theirs)
        texts = store.text_of(kept["rules"]).splitlines()
        if not len(theirs) or str(rule) in texts or len(texts) >= MOST_RULES:
            raise VflError("was asked about a rule twice, or without keys. Start the run anew.")
        log.info("Party %d is asked to match people by %s", own.number, rule)
        rows, ambiguous, why = counted(keys, rule, rules, np.flatnonzero(kept["left"]))
        if why:
            store.save_state(context, **kept)
            if why == LACKS:
                return replace(answer, missing=", ".join(keys.missing(rule)))
            return replace(answer, why=why)
        if order.anew and ambiguous > max(_FEW, _REPEATED * len(keys)):
            log.warning(
                "Party %d has %d of %d rows whose %s is another row's too, and matches none of "
                "them. If a person may have several rows, set rows='last' or 'mean'.",
                *(own.number, ambiguous, len(keys), rule),
            )
        kept |= _of_rule(kept, [*texts, str(rule)], rows, keys.bits(rule))
        answer = replace(answer, ambiguous=ambiguous)
    asked_ids.count(context, rules, theirs)
    key, rows = kept["key"].tobytes(), kept["at"][int(kept["last"][0]) :]

    def outputs(part: slice) -> Points:
        made = whole_keys(keys, rule, rows[part])
        points = Blinding(key).of_ids(made)
        changed[f"tags.{part.start // pieces.PIECE}"] = psi.outputs(made, points, MATCHED)
        return psi.outputs(made, points)

    asked = kept["asked"] + len(changed["sent"])
    arrays = pieces.answered(changed, theirs, key, len(rows), outputs)
    more = {"asked": asked, "shown": np.zeros(len(kept["at"]), np.uint8)}
    kept = pieces.state_after(kept, changed, more, {"key"})
    store.save_state(context, **kept)
    return replace(answer, places=len(rows) * (not order.more), arrays=arrays)


def _of_rule(kept: Arrays, rules: list[str], rows: Places, bits: float) -> Arrays:
    """Return the arrays of the last of ``rules``, which finds these rows: a new key and order."""
    rows = rows[shuffled(len(rows), secrets.token_bytes(16))]
    return {
        "last": np.array([len(kept["at"])]),
        "at": np.concatenate([kept["at"], rows]),
        "by": np.concatenate([kept["by"], np.full(len(rows), len(rules) - 1, np.int16)]),
        "rules": np.frombuffer("\n".join(rules).encode(), np.uint8),
        "bits": np.append(kept["bits"], bits),
        "key": np.frombuffer(secrets.token_bytes(32), np.uint8),
    }


def counted(keys: KeyTable, rule: Rule, rules: Rules, left: Places) -> tuple[Places, int, str]:
    """Return the rows left whose keys count, how many rows are ambiguous, and why none is used."""
    if rules.match and rule not in parse(rules.match):
        return left[:0], 0, "match"
    if keys.missing(rule):
        return left[:0], 0, LACKS
    if keys.bits(rule) < rules.match_bits:
        return left[:0], 0, "match-bits"
    rows, ambiguous = keys.once(rule, left)
    if len(rows) + ambiguous < rules.min_rows:  # an answer about few people could tell of one
        return left[:0], 0, "min-rows"
    return rows, ambiguous, ""


def _begun(
    context: Context, rules: Rules, people: int, file: NDArray[np.uint8], order: AlignOrder
) -> Arrays:
    """Return the state of the rules so far, without the people that have matched."""
    none = np.zeros(0, np.int64)
    if order.anew:
        return {
            **{"left": np.ones(people, bool), "at": none, "by": none.astype(np.int16)},
            **{"asked": np.zeros(1, np.int64), "rules": none.astype(np.uint8)},
            **{"bits": np.zeros(0), "file": file},
        }
    kept, matched = store.saved_state(context), order.arrays.get("matched", none.astype(np.int32))
    if "left" not in kept or "turn" in kept:
        raise VflError(
            "was asked about a later rule, and has seen no first one. Start the run anew."
        )
    store.check_file(kept, file)
    tags, proof = pieces.joined(kept, "tags"), order.arrays.get("proof", _NO_POINT)
    valid = matched.dtype == np.int32 and matched.ndim == 1
    if not valid or (len(matched) and not 0 <= matched.min() <= matched.max() < len(tags)):
        raise VflError("was told people that it was not asked about. Start the run anew.")

    def proves() -> bool:
        return not len(matched) or np.array_equal(pieces.proof_of(tags[matched]), proof)

    if not asked_ids.judge(context, rules, proves):
        store.save_state(context)
        raise VflError("was told people whose keys the label holder has not shown to know.")
    if len(matched):
        kept["left"] = kept["left"].copy()
        kept["left"][kept["at"][int(kept["last"][0]) + matched]] = False
    return {name: kept[name] for name in kept if not name.startswith("tags.")}


def keys_at(own: Source, kept: Arrays, places: Places) -> list[bytes]:
    """Return the keys at places of a party's order, of all rules together."""
    rules = [rule for text in store.text_of(kept["rules"]).splitlines() for rule in parse(text)]
    return _keys_by(keys_of(own), rules, kept["at"][places], kept["by"][places])


def one_rule(text: str) -> Rule:
    """Return the rule of an order; raise `VflError` if there are several."""
    rule, *others = parse(text)
    if others:
        raise VflError("was asked by several rules at once. Start the run anew.")
    return rule


def check_ids(own: Source) -> None:
    """Raise `ConfigError` if a party's people have no ids to align."""
    if isinstance(own, Table) and own.match_columns:
        raise ConfigError(
            f"Party {own.number} matches people by columns, and the run aligns ids. Set match in "
            "the run configuration, or leave match-columns out of the party's node configuration."
        )


def keys_of(own: Source) -> KeyTable:
    """Return the keys of a party's people; raise `ConfigError` without `match-columns`."""
    if not isinstance(own, Table) or not own.match_columns:
        raise ConfigError(
            f"Party {own.number} does not say which columns tell who a person is, and the run "
            "matches people by such columns. Give it match-columns='surname birthdate' in its node "
            "configuration."
        )
    return own.keys


# --- both -----------------------------------------------------------------------------------------


def whole_keys(keys: KeyTable, rule: Rule, rows: Places) -> list[bytes]:
    """Return the keys of rows that have whole ones."""
    made = [key for key in keys.keys(rule, rows) if key is not None]
    assert len(made) == len(rows)
    return made


def _keys_by(keys: KeyTable, rules: Sequence[Rule], rows: Places, by: NDArray[Any]) -> list[bytes]:
    """Return the key of each row, by the rule of its number in ``by``."""
    made: dict[int, bytes] = {}
    for number in np.unique(by).tolist():
        which = np.flatnonzero(by == number)
        made |= zip(which.tolist(), whole_keys(keys, rules[number], rows[which]), strict=True)
    return [made[place] for place in range(len(rows))]
