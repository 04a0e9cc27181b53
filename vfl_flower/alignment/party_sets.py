"""The label holder's sets: each party's blinded ids, from all alignments so far.

The party's half is `blinded_ids`.
"""

import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment import store as files
from vfl_flower.alignment.blinded_ids import NAMES, OF_HOLDER, IdSet, keyed_hashes, load, where
from vfl_flower.alignment.psi import MOST, Places, Points, check_points
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import notice
from vfl_flower.transport.early_messages import SetKept, SetOrder


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
        if number.isdecimal() and int(number) not in found and len(found) < NAMES:
            stored = load(path)
            if stored:
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
