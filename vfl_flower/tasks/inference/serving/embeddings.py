"""The parties' embeddings of a batch: aligned rows, and ids outside the alignment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.alignment.seeking import Seeker
from vfl_flower.config.errors import SumError, VflError
from vfl_flower.protocol.aggregation.base import Collection
from vfl_flower.tasks.drift.label_holder import DriftWatch
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.rows import RowsToPredict
from vfl_flower.tasks.inference.serving.parties import Parties
from vfl_flower.tasks.inference.serving.people import Person, identity
from vfl_flower.tasks.inference.serving.requests import REFUSED, UNKNOWN
from vfl_flower.transport.early_messages import SeekOrder, Sought
from vfl_flower.transport.messages import Arrays, Order, Scored, ScoreOrder

Mask = NDArray[np.bool_]


@dataclass
class Found:
    """People outside the alignment, by `identity`, and where the parties have them.

    places, proofs : place of each person in a party's set, or -1, [k, M], and proofs [k, M, 32].
    refused : whether a party's rule forbids to ask about the person, [k, M].
    missing : party -> why it has not answered.
    """

    encoded: list[bytes]
    places: NDArray[np.int32]
    proofs: NDArray[np.uint8]
    refused: Mask
    missing: dict[int, str]

    @classmethod
    def nowhere(cls, encoded: list[bytes], parties: int) -> Found:
        """Return these people as unasked: no party has had a question about them."""
        places = np.full((len(encoded), parties), -1, np.int32)
        proofs = np.zeros((*places.shape, 32), np.uint8)
        return cls(encoded, places, proofs, np.zeros(places.shape, bool), {})


@dataclass
class Embedded:
    """The parties' embeddings of rows; the last rows are people ``found`` outside the alignment.

    blocks : embeddings, [R, width]; zeros where a party has given none.
    given, has : whether a party has given a row, and whether it should have it, [R, M].
    refused, missing : whether a party's rule forbids the row, [R, M]; party -> why it gave nothing.
    """

    blocks: Tensor
    given: Mask
    has: Mask
    refused: Mask
    missing: dict[int, str]
    found: Found

    def why(self, party: int) -> list[str]:
        """Return why a party has not given each row, [R]; an empty text for a row that it gave."""
        if self.given[:, party].all():
            return [""] * len(self.given)
        why = np.full(len(self.has), UNKNOWN, object)
        why[len(why) - len(self.found.encoded) :] = self.found.missing.get(party, UNKNOWN)
        if party in self.missing:
            why[self.has[:, party]] = self.missing[party]
        why[self.refused[:, party]] = REFUSED
        why[self.given[:, party]] = ""
        return why.tolist()


class Embeddings:
    """Ask the parties for embeddings of rows."""

    def __init__(
        self, parties: Parties, predictor: Predictor, rows: RowsToPredict, drift: DriftWatch
    ) -> None:
        self._parties, self._predictor, self._count = parties, predictor, len(predictor.sizes)
        self._drift = drift  # takes the parties' reports
        self.present = rows.known_by(self._count)
        """Whether a party has a row, [N, M]."""
        self.number()
        self.no_ids = Found.nowhere([], self._count)
        self._used_up: dict[int, int] = {}  # row of masked sums -> party whose rule forbids it

    @property
    def can_find(self) -> bool:
        """Return whether parties can be asked about people outside the alignment."""
        seeker = self._parties.seeker
        parties = range(self._count)
        return seeker is not None and any(seeker.knows(p, r) for p in parties for r in seeker.rules)

    def number(self) -> None:
        """Number the rows that each party has, after a party has joined."""
        self._at = (np.cumsum(self.present, axis=0) - 1).astype(np.int32)  # among its own rows

    def embed(self, rows: NDArray[np.int64], found: Found, until: float) -> Embedded:
        """Return embeddings of aligned rows [n], and then of ids that were found, [k]."""
        size, aligned = len(rows) + len(found.encoded), len(rows)
        said = Embedded(
            torch.zeros(size, self._predictor.width),
            np.zeros((size, self._count), bool),
            np.concatenate([self.present[rows], found.places >= 0]),
            np.concatenate([np.zeros((aligned, self._count), bool), found.refused]),
            {},
            found,
        )
        if self._used_up:  # else one of these rows would cost all rows their masked sums
            used_up = [at for at, row in enumerate(rows.tolist()) if row in self._used_up]
            said.refused[used_up, [self._used_up[int(rows[at])] for at in used_up]] = True
            said.has[used_up] = False
        orders: dict[int, Order] = {}
        for number in range(self._count):
            has = said.has[:, number]
            if not has.any():
                said.missing.setdefault(number, UNKNOWN)
                continue
            arrays = {"rows": self._at[rows[has[:aligned]], number]}
            if has[aligned:].any() and self._parties.seeker:
                new = np.flatnonzero(has[aligned:])
                arrays["places"] = found.places[new, number]
                arrays["proofs"] = found.proofs[new, number]
            orders[number] = ScoreOrder(arrays=arrays)
        answers, silent = self._parties.ask(orders, Scored, until)
        said.missing.update(silent)
        collection = self._predictor.aggregation.collection(self._count)
        for number, answer in answers.items():
            try:
                reason = self._take(number, answer, rows, said, collection)
            except VflError as error:
                self._parties.apart |= isinstance(error, SumError)
                reason = self._parties.refused(number, str(error))
            if reason:
                said.missing[number] = reason
        if said.missing and self._predictor.aggregation.abreast and orders:
            self._parties.apart = True  # they have served other orders, and need new keys
        return said

    def person(self, rows: NDArray[np.int64], found: Found, at: int, party: int) -> Arrays:
        """Return what names a person to a party; the rows and people are as of `embed`."""
        new = at - len(rows)
        if new < 0:
            return {"rows": self._at[rows[[at]], party]}
        return {"places": found.places[[new], party], "proofs": found.proofs[[new], party]}

    def find(self, people: Sequence[int | str | Person], seconds: float) -> Found:
        """Find people outside the alignment: one round trip for ids, or for each rule."""
        seeker = self._parties.seeker
        if seeker is None:
            return self.no_ids
        found = Found.nowhere([identity(one) for one in people], self._count)
        for rule in seeker.rules:
            keys = [
                one.keys.get(rule, b"") if isinstance(one, Person) else identity(one)
                for one in people
            ]
            self._find_by(seeker, rule, keys, found, time.monotonic() + seconds)
        return found

    def _find_by(
        self, seeker: Seeker, rule: str, keys: list[bytes], found: Found, until: float
    ) -> None:
        """Ask each party about keys of the people that no earlier rule has found there."""
        wanted = (found.places < 0) & ~found.refused & np.array([[key != b""] for key in keys])
        known = {party: seeker.knows(party, rule) for party in range(self._count)}
        asked = {
            party: list(dict.fromkeys(keys[at] for at in np.flatnonzero(wanted[:, party])))
            for party, points in known.items()
            if points and party not in found.missing and wanted[:, party].any()
        }
        texts = list(dict.fromkeys(chain.from_iterable(asked.values())))
        points = dict(zip(texts, seeker.blinded(texts), strict=True))
        orders: dict[int, Order] = {
            party: SeekOrder(
                known=known[party], rule=rule, arrays={"ids": np.stack([points[t] for t in mine])}
            )
            for party, mine in asked.items()
        }
        answers, missing = self._parties.ask(orders, Sought, until) if orders else ({}, {})
        found.missing |= missing
        for party, answer in answers.items():
            try:
                refused = self._refused(party, answer, len(asked[party]))
                allowed = [asked[party][at] for at in np.flatnonzero(~refused)]
                places, raised = seeker.places(party, allowed, answer.arrays)
                proofs = seeker.proofs(party, allowed, raised)
            except VflError as error:
                found.missing[party] = self._parties.refused(party, f"sent {error}")
                continue
            of_key = dict(zip(allowed, zip(places, proofs, strict=True), strict=True))
            for at in np.flatnonzero(wanted[:, party]).tolist():
                if keys[at] not in of_key:
                    found.refused[at, party] = True
                else:
                    found.places[at, party], found.proofs[at, party] = of_key[keys[at]]

    def _refused(self, number: int, answer: Scored | Sought, asked: int) -> Mask:
        """Return which of the rows or ids that a party was asked about its rules forbid, [n]."""
        refused = _positions(answer.arrays, "refused", asked)
        if refused.any():
            self._parties.refused(number, f"failed: {answer.why}")
        return refused

    def _take(
        self,
        number: int,
        answer: Scored,
        aligned: NDArray[np.int64],
        said: Embedded,
        collection: Collection,
    ) -> str:
        """Take embeddings; return why they cannot be used, or ''. A misfit is a `VflError`."""
        rows, size = np.flatnonzero(said.has[:, number]), self._predictor.sizes[number]
        there = np.ones(len(rows), bool)
        if "refused" in answer.arrays:
            refused = self._refused(number, answer, len(rows))
            said.refused[rows[refused], number] = True
            if refused.any() and self._predictor.aggregation.abreast:
                self._used_up |= dict.fromkeys(aligned[rows[refused]].tolist(), number)
                return REFUSED
            there &= ~refused
        block = collection.add(number, answer.arrays, (len(rows), size))
        if "gone" in answer.arrays:
            there &= ~_positions(answer.arrays, "gone", len(rows))
        if "drift" in answer.arrays:
            self._drift.take(number, answer.arrays)
        if block is not None:
            said.blocks[torch.from_numpy(rows), self._predictor.columns[number]] = block
        said.given[rows[there], number] = True
        return ""


def _positions(arrays: Arrays, name: str, size: int) -> Mask:
    """Return a list of positions in an answer as a mask [size]; none are named without a list."""
    mask, named = np.zeros(size, bool), arrays.get(name)
    if named is not None and named.size:
        if named.dtype != np.int32 or named.ndim != 1 or named.min() < 0 or named.max() >= size:
            raise VflError(f"{name!r} names rows that were not asked for.")
        mask[named] = True
    return mask
