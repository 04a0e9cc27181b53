"""Blinded ids that both sides keep, so that a later alignment asks about new ids alone.

An alignment by `alignment.psi` leaves a set: the party has its secret b and its outputs F(id)
in their secret order, of which each has a place; the label holder has these outputs too, and F(id)
of each of its own ids about which it has asked. A set only grows: ids that come to the
party's file get places at the end, and where one has gone from the file its place stays, without a
row.

1. The label holder names the sets that it keeps (`SetOrder`), with proofs: codes of the points that
   it has and of this run, by a secret of that set, the answer by which it showed at first that it
   knows the party's ids. There are always as many names; most are random, and say nothing.
2. A party that finds a set and its proof blinds the ids that are new in its file, and answers with
   a proof of its own (`SetKept`). To anybody else, and of any other set, it says that it has none.
3. `AlignOrder` has only the ids that the label holder has not asked about with this set, and the
   answer only the points that it has not. The rest is as with a fresh set.

A party keeps a set no longer than `alignment-days` after it was made, and begins a new one if more
than half of its places have no row. It forgets the set by which rows were named whose ids were not
known. What it is asked with all sets together is counted by `alignment.asked_ids`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from os import utime
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment import store as files
from vfl_flower.alignment.psi import (
    Blinding,
    Places,
    Points,
    check_points,
    match,
    outputs,
    shuffled,
)
from vfl_flower.config.errors import VflError
from vfl_flower.config.files import alone_in, make_folder, told
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.source import Source
from vfl_flower.transport.early_messages import SetKept, SetOrder
from vfl_flower.transport.messages import Arrays

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_NAMES = 30  # of sets in an order, most of them random
_DAY = 86400.0
_OF_HOLDER = "of-"  # as names of the label holder's files begin


@dataclass(frozen=True)
class IdSet:
    """One side's half of a set.

    made : when it was, in seconds since 1970.
    asked : about how many ids a party has been asked.
    arrays : "points", outputs of the party's places, [n, 32]; "proof", what the label holder showed
        when it was made, [1, 32]; "key", by which this side marks ids, at a party also the secret
        b, [1, 32]; "marks" of ids, [m, 32]: at a party of its places, at the label holder of those
        that it has asked about, whose outputs are "blinded", [m, 32]. A party also has "lengths",
        how many places there have been, and "shown", whether the label holder has been told to use
        the row of a place, bool [n].
    """

    made: float
    asked: int
    arrays: Arrays

    @property
    def name(self) -> str:
        """By which the two name it, and which nobody else can tell from chance."""
        proof = self.arrays["proof"].tobytes()
        return hmac.digest(proof, b"vfl-flower set of outputs", "sha256").hex()[:32]

    def proofs(self, party: int, run: str) -> Iterator[tuple[int, bytes, bytes]]:
        """Of the set as it is and has been: places, and what the two sides prove it by in a run."""
        points, digest = self.arrays["points"], hashlib.sha256()
        lengths = self.arrays.get("lengths", np.array([len(points)])).tolist()
        for start, end in pairwise([0, *lengths]):
            digest.update(points[start:end].tobytes())
            about = f"{party}|{run}|{digest.hexdigest()}"
            proof = self.arrays["proof"].tobytes()
            asks, keeps = (
                hmac.digest(proof, f"vfl-flower set {side}|{about}".encode(), "sha256")
                for side in ("asks", "keeps")
            )
            yield end, asks, keeps


def keyed_hashes(ids: Sequence[bytes], key: NDArray[np.uint8]) -> Points:
    """What tells an id again to who has the key, [n, 32]."""
    secret, mark = key.tobytes(), hashlib.blake2b
    marks = b"".join([mark(one, digest_size=32, key=secret).digest() for one in ids])
    return np.frombuffer(marks, np.uint8).reshape(-1, 32)


def _where(mine: Points, marks: Points) -> Places:
    """Where in these marks each of mine is, [n]; -1 if it is not there."""
    where = np.full(len(mine), -1, np.int64)
    here, there = match(mine, marks)
    where[here] = there
    return where


def _load(path: Path) -> IdSet | None:
    """The set in a file, of either side."""

    def is_set(kept: IdSet) -> bool:
        arrays = kept.arrays
        n, m = len(arrays["points"]), len(arrays["marks"])
        due = {"points": (n, 32), "marks": (m, 32), "proof": (1, 32), "key": (1, 32)}
        if path.name.startswith(_OF_HOLDER):
            due["blinded"] = (m, 32)
        elif n != m or arrays["lengths"][-1] != n or arrays["shown"].shape != (n,):
            return False
        sound = all(arrays[name].dtype == np.uint8 for name in due)
        shapes = {name: arrays[name].shape for name in due}
        return sound and shapes == due and (type(kept.made), type(kept.asked)) == (float, int)

    return files.load_as(IdSet, path, is_set)


# --- the label holder ---------------------------------------------------------------------------


class PartySet:
    """What the label holder knows of a party's set, which may be a fresh one.

    new : which of its ids it has not asked about with this set, bool [N].
    """

    def __init__(self, party: int, ids: Sequence[bytes], path: Path, kept: IdSet | None) -> None:
        none = np.zeros((0, 32), np.uint8)
        self.party, self.path, self.kept = party, path, kept
        key = np.frombuffer(secrets.token_bytes(32), np.uint8)[None]
        self.arrays = {"points": none, "marks": none, "blinded": none, "key": key}
        if kept:
            self.arrays = dict(kept.arrays)
        self._marks = keyed_hashes(ids, self.arrays["key"])
        self._at = _where(self._marks, self.arrays["marks"])
        self.new = self._at < 0

    def learn(self, rows: Places, blinded: Points, points: Points) -> None:
        """The outputs of its own ids in these rows, [k, 32], and of places at the end, [l, 32]."""
        known = self.arrays
        self._at[rows] = len(known["marks"]) + np.arange(len(rows))
        known["marks"] = np.concatenate([known["marks"], self._marks[rows]])
        known["blinded"] = np.concatenate([known["blinded"], blinded])
        known["points"] = np.concatenate([known["points"], points])

    def places(self, gone: Places) -> NDArray[np.int32]:
        """The place of each of its ids in the party's order, or -1, [N]; these have no row.

        Raises
        ------
        VflError
            As the end of a sentence that says who sent them, if a point is there twice.
        """
        there = np.ones(len(self.arrays["points"]), bool)
        there[gone] = False
        theirs = np.flatnonzero(there)
        found = _where(self.arrays["blinded"][self._at], self.arrays["points"][theirs])
        return np.where(found < 0, -1, theirs[found] if len(theirs) else -1).astype(np.int32)

    def keep(self, proof: Points) -> None:
        """Keep it for later; if it is fresh, with what was just shown."""
        kept = self.kept or IdSet(time.time(), 0, {"proof": proof})
        kept = replace(kept, arrays={**self.arrays, "proof": kept.arrays["proof"]})
        try:
            files.save(self.path, kept, f"{_OF_HOLDER}*.npz")
        except VflError as error:
            notice.warning("The next alignment has to ask about all ids: %s", error)


def kept_of(whose: str) -> dict[int, tuple[Path, IdSet]]:
    """The sets that the label holder keeps, one of each party; first those of this file."""
    found: dict[int, tuple[Path, IdSet]] = {}
    of_file = files.newest_first(files.home("sets"), f"{_OF_HOLDER}{files.where(whose)}-*.npz")
    for path in [*of_file, *files.newest_first(files.home("sets"), f"{_OF_HOLDER}*.npz")]:
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and int(number) not in found and len(found) < _NAMES:
            kept = _load(path)
            if kept:
                found[int(number)] = path, kept
    return found


def path_of(whose: str, party: int) -> Path:
    """Where the label holder keeps a fresh set."""
    return files.home("sets") / f"{_OF_HOLDER}{files.where(whose)}-{party}.npz"


def naming(kept: Mapping[int, tuple[Path, IdSet]], run: str, about: str = "") -> SetOrder:
    """Return the order that asks parties for these sets, to prepare a run configured ``about``."""
    names = np.frombuffer(secrets.token_bytes(_NAMES * 16), np.uint8).reshape(_NAMES, 16).copy()
    proofs = np.frombuffer(secrets.token_bytes(_NAMES * 32), np.uint8).reshape(_NAMES, 32).copy()
    rows = secrets.SystemRandom().sample(range(_NAMES), len(kept))
    for row, (party, (_, each)) in zip(rows, kept.items(), strict=True):
        names[row] = np.frombuffer(bytes.fromhex(each.name), np.uint8)
        for _, code, _ in each.proofs(party, run):
            proofs[row] = np.frombuffer(code, np.uint8)
    return SetOrder(config=about, arrays={"names": names, "proofs": proofs})


def has_kept(answer: SetKept, kept: IdSet, run: str) -> bool:
    """Whether the party has shown that it keeps this set too."""
    proof = answer.arrays.get("proof", np.zeros(0))
    codes = kept.proofs(answer.party, run)
    return any(hmac.compare_digest(proof.tobytes(), code) for _, _, code in codes)


def check_answer(points: NDArray[Any], gone: NDArray[Any], known: int) -> None:
    """Refuse, by `VflError` as the end of a sentence, what cannot be of a set of `known` places."""
    check_points(points)
    places = known + len(points)
    if places > Rules.max_ids:
        raise VflError(f"{places} blinded ids, and at most {Rules.max_ids} may be.")
    if gone.dtype != np.int32 or gone.ndim != 1 or len(np.unique(gone)) < len(gone):
        raise VflError("places without a row that are none.")
    if len(gone) and not 0 <= gone.min() <= gone.max() < places:
        raise VflError("places without a row that there are not.")


# --- a party ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundSet:
    """A set of which an order has shown to be by whom it was made.

    known : how many places the label holder knows.
    at : row of the id of each place, -1 where it has gone from the file, [n].
    proof : what shows to the label holder that it is kept, [1, 32].
    """

    kept: IdSet
    known: int
    at: Places
    proof: Points


def fresh(own: Source) -> Arrays:
    """What a party needs of a new set: its "key", "points", and "at", the row at each place."""
    key = np.frombuffer(secrets.token_bytes(32), np.uint8)[None]
    at = shuffled(len(own.ids), secrets.token_bytes(16))
    return {"key": key, "points": _outputs(own, key, at), "at": at}


def _outputs(own: Source, key: NDArray[np.uint8], rows: Places) -> Points:
    """F(id) of these rows, by the secret b of a set."""
    points = Blinding(key.tobytes()).of_ids(own.ids, rows)
    return outputs([own.ids[row] for row in rows.tolist()], points)


def find(context: Context, own: Source, order: SetOrder, rules: Rules) -> FoundSet | None:
    """The set of which an order has the name and a proof, with the ids that are new in the file.

    Raises
    ------
    VflError
        If the order is none.
    """
    names, proofs = (order.arrays.get(name, np.zeros(0)) for name in ("names", "proofs"))
    shapes = names.shape, proofs.shape
    if shapes != ((_NAMES, 16), (_NAMES, 32)) or not names.dtype == proofs.dtype == np.uint8:
        raise VflError("was sent no names of sets, and proofs.")
    assert own.party is not None
    files.forget(files.home("sets", context), _beside(own.party), rules.alignment_days * _DAY)
    for name, proof in zip(names, proofs, strict=True):
        path = _path(context, name.tobytes().hex(), own.party)
        kept = _usable(path, rules)
        for known, code, shown in kept.proofs(own.party, str(context.run_id)) if kept else ():
            if hmac.compare_digest(proof.tobytes(), code):
                with _alone(path):
                    grown = _grown(path, own, rules)
                answer = np.frombuffer(shown, np.uint8)[None]
                return FoundSet(grown[0], known, grown[1], answer) if grown else None
    return None


def _grown(path: Path, own: Source, rules: Rules) -> tuple[IdSet, Places] | None:
    """A set with the ids that have come to the file, and the row at each place, or -1.

    None if it has gone, or most of its ids have.
    """
    kept = _usable(path, rules)
    if not kept:
        return None
    marks = keyed_hashes(own.ids, kept.arrays["key"])
    at = _where(kept.arrays["marks"], marks)
    if 2 * (at >= 0).sum() < len(at):
        return None
    new = np.setdiff1d(np.arange(len(own.ids)), at)
    if not len(new):
        return kept, at
    new = new[shuffled(len(new), secrets.token_bytes(16))]
    at = np.concatenate([at, new])
    added = {
        "marks": marks[new],
        "points": _outputs(own, kept.arrays["key"], new),
        "shown": np.zeros(len(new), bool),
        "lengths": np.array([len(at)]),
    }
    both = {name: np.concatenate([kept.arrays[name], each]) for name, each in added.items()}
    kept = replace(kept, arrays={**kept.arrays, **both})
    return (kept, at) if _write(path, kept) else None


def asked(context: Context, party: int, name: str, ids: int, rules: Rules) -> IdSet:
    """The set of this name, in which so many more ids are counted as asked about.

    Raises
    ------
    VflError
        If it has gone.
    """
    path = _path(context, name, party)
    with _alone(path):
        kept = _usable(path, rules)
        if not kept:
            raise VflError("has just forgotten the blinded ids that it kept: begin the run anew.")
        kept = replace(kept, asked=kept.asked + ids)
        if ids:
            _write(path, kept)
    return kept


def shown(context: Context, party: int, name: str, places: Places, rules: Rules) -> None:
    """Note that the label holder knows the ids at these places of a set."""
    path = _path(context, name, party)
    with _alone(path):
        kept = _usable(path, rules)
        if kept and not kept.arrays["shown"][places].all():
            kept.arrays["shown"][places] = True
            _write(path, kept)


def lets(context: Context, rules: Rules) -> bool:
    """Whether a party's rules let it keep sets."""
    return bool(rules.alignment_days) and context.node_config.get("source") != "memory"


def keep(context: Context, party: int, made: IdSet) -> None:
    """Keep a new set."""
    path = _path(context, made.name, party)
    try:
        with _alone(path):
            _write(path, made)
    except VflError as error:
        log.warning("The party cannot keep blinded ids: %s", error)


def forget(context: Context, party: int, name: str) -> None:
    """Keep this set no more."""
    _path(context, name, party).unlink(missing_ok=True)


def _usable(path: Path, rules: Rules) -> IdSet | None:
    """The set in a file, unless the party's rules have ended it."""
    kept = _load(path)
    return kept if kept and 0 <= files.age(kept) < rules.alignment_days * _DAY else None


def _write(path: Path, kept: IdSet) -> bool:
    """Write a set, by who is alone in the folder, or else forget it; whether it was written."""
    try:
        files.write(path, kept, _beside(int(path.stem.rpartition("-")[2])))
        utime(path, (kept.made, kept.made))  # from which on its days are counted
        return True
    except (OSError, VflError) as error:
        log.warning("The party forgets blinded ids that it kept: %s", error)
        path.unlink(missing_ok=True)
        return False


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other runs from changing sets meanwhile."""
    with told(path):
        make_folder(path.parent)
        with alone_in(path.parent):
            yield


def _path(context: Context, name: str, party: int) -> Path:
    return files.of_party(files.home("sets", context), name, party)


def _beside(party: int) -> str:
    return f"*-party-{party}.npz"
