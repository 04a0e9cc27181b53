"""Blinded ids on both sides, so that later alignments ask only about new ids.

An alignment leaves a set (`IdSet`). The party has its secret b and its outputs F(id) in their
secret order: each output has a place. The label holder has these outputs too, and F(id) of each id
that it has asked about (`PartySet`). A set only grows. A new id in the party's file gets a place
at the end. An id that goes from the file leaves its place, which then has no row.

Step 0 of `alignment.psi` finds a set again:

1. The label holder names the sets that it keeps (`SetOrder`), each with a proof. A proof is a keyed
   hash of the label holder's points and of this run. Its key is the answer that first showed the
   party that the label holder knows its ids. The number of names is always the same, and most names
   are random.
2. A party that finds a set and its proof blinds the new ids of its file. It answers with its own
   proof (`SetKept`). To anybody else, and about any other set, it says that it keeps no set.
3. `AlignOrder` then has only the ids that the label holder has not asked about with this set. The
   answer has only the points that the label holder lacks.

A party keeps a set for at most `alignment-days`. It begins a new set if more than half of the
places have no row. It forgets a set if the label holder named rows of it without knowing their ids.
`asked_ids` counts the ids that a party is asked about, over all sets together.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
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
    MOST,
    Blinding,
    Places,
    Points,
    check_points,
    match,
    outputs,
    shuffled,
)
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import chosen, digests
from vfl_flower.data.source import Source
from vfl_flower.transport.early_messages import SetKept, SetOrder
from vfl_flower.transport.messages import Arrays

NAMES = 30
"""Number of set names in an order. Most names are random."""
OF_HOLDER = "of-"  # prefix of the names of the label holder's files


@dataclass(frozen=True)
class IdSet:
    """One side's half of a set.

    made : time when the set was made, in seconds since 1970.
    asked : number of ids that the party has been asked about.
    arrays : arrays of n places and m ids, by name:

        - "points" : outputs of the party's places, [n, 32].
        - "proof" : the label holder's answer when the set was made, [1, 32].
        - "key" : key of this side's keyed hashes, [1, 32]. At a party it is also the secret b.
        - "marks" : keyed hashes of ids, [m, 32]. A party hashes the ids of its places, so that
          m = n. The label holder hashes the ids that it has asked about.
        - "blinded" : at the label holder, the outputs of these ids, [m, 32].
        - "lengths" : at a party, the number of places after each growth.
        - "shown" : at a party, whether the label holder has named the row of a place, bool [n].
    """

    made: float
    asked: int
    arrays: Arrays

    @property
    def name(self) -> str:
        """Return the name that both sides derive. To anybody else it looks random."""
        proof = self.arrays["proof"].tobytes()
        return hmac.digest(proof, b"vfl-flower set of outputs", "sha256").hex()[:32]

    def proofs(self, party: int, run: str) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (places, the label holder's proof, the party's proof) for each length."""
        points, digest = self.arrays["points"], hashlib.sha256()
        lengths = self.arrays.get("lengths", np.array([len(points)])).tolist()
        for start, end in pairwise([0, *lengths]):
            digest.update(points[start:end].tobytes())
            about = f"{party}|{run}|{digest.hexdigest()}"
            key = self.arrays["proof"].tobytes()
            asks, keeps = (
                hmac.digest(key, f"vfl-flower set {side}|{about}".encode(), "sha256")
                for side in ("asks", "keeps")
            )
            yield end, asks, keeps


def keyed_hashes(ids: Sequence[bytes], key: NDArray[np.uint8]) -> Points:
    """Return the keyed hash that identifies each id to the owner of the key, [n, 32]."""
    return digests(ids, 32, key.tobytes())


def where(mine: Points, theirs: Points) -> Places:
    """Return the position in ``theirs`` of each of ``mine``, [n]; -1 if missing."""
    found = np.full(len(mine), -1, np.int64)
    in_mine, in_theirs = match(mine, theirs)
    found[in_mine] = in_theirs
    return found


def load(path: Path) -> IdSet | None:
    """Return the set in a file of either side, unless it is missing or damaged."""

    def is_set(stored: IdSet) -> bool:
        arrays = stored.arrays
        n, m = len(arrays["points"]), len(arrays["marks"])
        due = {"points": (n, 32), "marks": (m, 32), "proof": (1, 32), "key": (1, 32)}
        if path.name.startswith(OF_HOLDER):
            due["blinded"] = (m, 32)
        elif n != m or arrays["lengths"][-1] != n or arrays["shown"].shape != (n,):
            return False
        sound = all(arrays[name].dtype == np.uint8 for name in due)
        shapes = {name: arrays[name].shape for name in due}
        return sound and shapes == due and (type(stored.made), type(stored.asked)) == (float, int)

    return files.load_as(IdSet, path, is_set)


# --- a party ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundSet:
    """A set that an order has named and proved.

    known : number of places that the label holder knows.
    at : the row of each place's id, [n]; -1 if the id has gone from the file.
    proof : the proof to the label holder that the party keeps the set, [1, 32].
    """

    stored: IdSet
    known: int
    at: Places
    proof: Points


def fresh(own: Source) -> Arrays:
    """Return arrays of a new set: "key", and "at", the row of each place."""
    key = np.frombuffer(secrets.token_bytes(32), np.uint8)[None]
    return {"key": key, "at": shuffled(len(own.ids), secrets.token_bytes(16))}


def own_outputs(own: Source, key: NDArray[np.uint8], rows: Places) -> Points:
    """Return F(id) of these rows, with the secret b of a set."""
    return outputs(chosen(own.ids, rows), Blinding(key.tobytes()).of_ids(own.ids, rows))


def find(context: Context, own: Source, order: SetOrder, rules: Rules) -> FoundSet | None:
    """Return the set that an order names and proves, with the file's new ids added."""
    names, proofs = (order.arrays.get(name, np.zeros(0)) for name in ("names", "proofs"))
    shapes = names.shape, proofs.shape
    if shapes != ((NAMES, 16), (NAMES, 32)) or not names.dtype == proofs.dtype == np.uint8:
        raise VflError("was sent no names and proofs of sets. Start the run anew.")
    if context.node_config.get("source") == "memory":  # data in memory leave no set on disk
        return None
    files.forget_old(files.home("sets", context), own.number, rules)
    for name, proof in zip(names, proofs, strict=True):
        path = _path(context, name.tobytes().hex(), own.number)
        stored = _usable(path, rules)
        for known, asks, keeps in stored.proofs(own.number, str(context.run_id)) if stored else ():
            if hmac.compare_digest(proof.tobytes(), asks):
                with files.alone(path):
                    grown = _grown(path, own, rules)
                answer = np.frombuffer(keeps, np.uint8)[None]
                return FoundSet(grown[0], known, grown[1], answer) if grown else None
    return None


def _grown(path: Path, own: Source, rules: Rules) -> tuple[IdSet, Places] | None:
    """Return a set with the file's new ids, and each place's row; None if most ids have gone."""
    if not (stored := _usable(path, rules)):
        return None
    hashes = keyed_hashes(own.ids, stored.arrays["key"])
    at = where(stored.arrays["marks"], hashes)
    if 2 * (at >= 0).sum() < len(at):
        return None
    new = np.setdiff1d(np.arange(len(own.ids)), at)
    if not len(new):
        return stored, at
    new = new[shuffled(len(new), secrets.token_bytes(16))]
    at = np.concatenate([at, new])
    added = {
        "marks": hashes[new],
        "points": own_outputs(own, stored.arrays["key"], new),
        "shown": np.zeros(len(new), bool),
        "lengths": np.array([len(at)]),
    }
    both = {name: np.concatenate([stored.arrays[name], each]) for name, each in added.items()}
    stored = replace(stored, arrays={**stored.arrays, **both})
    return (stored, at) if _write(path, stored) else None


def asked(context: Context, party: int, name: str, ids: int, rules: Rules) -> IdSet:
    """Return the set of this name; add ``ids`` to its count of asked ids."""
    path = _path(context, name, party)
    with files.alone(path):
        if not (stored := _usable(path, rules)):
            raise VflError("has just forgotten its set of blinded ids. Start the run anew.")
        stored = replace(stored, asked=stored.asked + ids)
        if ids:
            _write(path, stored)
    return stored


def shown(context: Context, party: int, name: str, places: Places, rules: Rules) -> None:
    """Note that the label holder knows the ids at these places of a set."""
    path = _path(context, name, party)
    with files.alone(path):
        stored = _usable(path, rules)
        if stored and not stored.arrays["shown"][places].all():
            stored.arrays["shown"][places] = True
            _write(path, stored)


def lets(context: Context, rules: Rules) -> bool:
    """Return whether a party's rules permit it to keep sets."""
    return rules.alignment_days > 0 and context.node_config.get("source") != "memory"


def keep(context: Context, party: int, made: IdSet) -> None:
    """Store a new set."""
    path = _path(context, made.name, party)
    try:
        with files.alone(path):
            _write(path, made)
    except VflError as error:
        log.warning("The party cannot keep blinded ids: %s", error)


def forget(context: Context, party: int, name: str) -> None:
    """Remove a set."""
    _path(context, name, party).unlink(missing_ok=True)


def _usable(path: Path, rules: Rules) -> IdSet | None:
    """Return the set in a file, if the party's rules still permit its use."""
    stored = load(path)
    return stored if stored and files.is_valid(stored, rules) else None


def _write(path: Path, stored: IdSet) -> bool:
    """Write a set, inside `alignment.store.alone`, or forget it; return whether it was written."""
    try:
        files.write(path, stored, files.every_of_party(int(path.stem.rpartition("-")[2])))
        utime(path, (stored.made, stored.made))  # `alignment-days` count from then
        return True
    except (OSError, VflError) as error:
        log.warning("The party forgets a set of blinded ids: %s", error)
        path.unlink(missing_ok=True)
        return False


def _path(context: Context, name: str, party: int) -> Path:
    return files.of_party(files.home("sets", context), name, party)


# --- the label holder ---------------------------------------------------------------------------


class PartySet:
    """The label holder's knowledge of a party's set; ``new`` masks own ids not asked about, [N]."""

    def __init__(self, party: int, ids: Sequence[bytes], path: Path, stored: IdSet | None) -> None:
        self.party, self.path, self.stored = party, path, stored
        none = np.zeros((0, 32), np.uint8)
        key = np.frombuffer(secrets.token_bytes(32), np.uint8)[None]
        self.arrays = {"points": none, "marks": none, "blinded": none, "key": key}
        if stored:
            self.arrays = dict(stored.arrays)
        self._hashes = keyed_hashes(ids, self.arrays["key"])
        self._at = where(self._hashes, self.arrays["marks"])
        self.new = self._at < 0

    def learn(self, rows: Places, blinded: Points, points: Points) -> None:
        """Add outputs of the ids in these rows, [k, 32], and of new places, [l, 32]."""
        known = self.arrays
        self._at[rows] = len(known["marks"]) + np.arange(len(rows))
        new = {"marks": self._hashes[rows], "blinded": blinded, "points": points}
        for name, each in new.items():  # without a copy for a fresh set
            known[name] = np.concatenate([known[name], each]) if len(known[name]) else each

    def places(self, gone: Places) -> NDArray[np.int32]:
        """Return each own id's place in the party's order, [N], or -1, also for places ``gone``."""
        points = self.arrays["points"]
        there = np.ones(len(points), bool)
        there[gone] = False
        theirs = np.flatnonzero(there)
        found = where(self.arrays["blinded"][self._at], points[theirs] if len(gone) else points)
        return np.where(found < 0, -1, theirs[found] if len(theirs) else -1).astype(np.int32)

    def keep(self, proof: Points) -> None:
        """Store the set; a fresh set keeps ``proof``, the answer just shown."""
        stored = self.stored or IdSet(time.time(), 0, {"proof": proof})
        stored = replace(stored, arrays={**self.arrays, "proof": stored.arrays["proof"]})
        try:
            files.save(self.path, stored, f"{OF_HOLDER}*.npz")
        except VflError as error:
            notice.warning("The next alignment has to ask about all ids: %s", error)


def stored_sets(whose: str) -> dict[int, tuple[Path, IdSet]]:
    """Return party -> (path, set) of the label holder; sets of this file come first."""
    found: dict[int, tuple[Path, IdSet]] = {}
    folder = files.home("sets")
    of_file = files.newest_first(folder, f"{OF_HOLDER}{files.digest_of_path(whose)}-*.npz")
    for path in [*of_file, *files.newest_first(folder, f"{OF_HOLDER}*.npz")]:
        number = path.stem.rpartition("-")[2]
        wanted = number.isdecimal() and int(number) not in found and len(found) < NAMES
        if wanted and (stored := load(path)):
            found[int(number)] = path, stored
    return found


def path_of(whose: str, party: int) -> Path:
    """Return where the label holder stores a fresh set."""
    return files.home("sets") / f"{OF_HOLDER}{files.digest_of_path(whose)}-{party}.npz"


def set_order(stored: Mapping[int, tuple[Path, IdSet]], run: str, about: str = "") -> SetOrder:
    """Return the order that asks parties for these sets, with the run's configuration ``about``."""
    names = np.frombuffer(secrets.token_bytes(NAMES * 16), np.uint8).reshape(NAMES, 16).copy()
    proofs = np.frombuffer(secrets.token_bytes(NAMES * 32), np.uint8).reshape(NAMES, 32).copy()
    rows = secrets.SystemRandom().sample(range(NAMES), len(stored))
    for row, (party, (_, each)) in zip(rows, stored.items(), strict=True):
        names[row] = np.frombuffer(bytes.fromhex(each.name), np.uint8)
        for _, asks, _ in each.proofs(party, run):
            proofs[row] = np.frombuffer(asks, np.uint8)
    return SetOrder(config=about, arrays={"names": names, "proofs": proofs})


def is_proved(answer: SetKept, stored: IdSet, run: str) -> bool:
    """Return whether the party's proof shows that it keeps this set too."""
    proof = answer.arrays.get("proof", np.zeros(0)).tobytes()
    due = stored.proofs(answer.party, run)
    return any(hmac.compare_digest(proof, keeps) for _, _, keeps in due)


def check_answer(points: NDArray[Any], gone: NDArray[Any], known: int) -> None:
    """Raise `VflError`, about a sender, unless points and ``gone`` extend a set of known places."""
    check_points(points)
    places = known + len(points)
    if places > MOST:
        raise VflError(f"{places} blinded ids, more than {MOST}. Split the data.")
    if gone.dtype != np.int32 or gone.ndim != 1 or len(np.unique(gone)) < len(gone):
        raise VflError("an invalid list of places without a row. Start it anew.")
    if len(gone) and not 0 <= gone.min() <= gone.max() < places:
        raise VflError("places without a row that do not exist. Start it anew.")
