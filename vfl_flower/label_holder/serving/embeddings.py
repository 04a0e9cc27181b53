"""The parties' embeddings of a batch: aligned rows, and ids outside the alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import SumError, VflError
from vfl_flower.data.ids import encoded as encoded_id
from vfl_flower.label_holder.drift import DriftWatch
from vfl_flower.label_holder.predictor import Predictor
from vfl_flower.label_holder.rows_to_predict import RowsToPredict
from vfl_flower.label_holder.serving.parties import UNKNOWN, Parties
from vfl_flower.protocol.aggregation.base import Collection
from vfl_flower.transport.early_messages import SeekOrder, Sought
from vfl_flower.transport.messages import Arrays, Order, Scored, ScoreOrder


@dataclass
class Found:
    """Ids outside the alignment, and where the parties have them.

    places : place of each id in a party's set, or -1, [k, M].
    missing : party -> why it has not answered.
    """

    encoded: list[bytes]
    places: NDArray[np.int32]
    missing: dict[int, str]

    @property
    def at_parties(self) -> list[bytes]:
        """Return the ids that some party has."""
        there = np.flatnonzero((self.places >= 0).any(axis=1))
        return [self.encoded[at] for at in there.tolist()]


@dataclass
class Embedded:
    """The parties' embeddings of rows.

    blocks : embeddings, [R, width]; zeros where a party has given none.
    given, has : whether a party has given a row, and whether it should have it, [R, M].
    missing : party -> why it has given nothing.
    found : the last rows, which are ids outside the alignment.
    """

    blocks: Tensor
    given: NDArray[np.bool_]
    has: NDArray[np.bool_]
    missing: dict[int, str]
    found: Found


class Embeddings:
    """Ask the parties for embeddings of rows."""

    def __init__(
        self, parties: Parties, predictor: Predictor, rows: RowsToPredict, drift: DriftWatch
    ) -> None:
        self._parties, self._predictor, self._count = parties, predictor, len(predictor.sizes)
        self._drift = drift  # takes the parties' reports
        self.present = rows.known_by(self._count)
        """Whether a party has a row, [N, M]."""
        self._at = (np.cumsum(self.present, axis=0) - 1).astype(np.int32)  # among its own rows

    def embed(self, rows: NDArray[np.int64], found: Found, until: float) -> Embedded:
        """Return embeddings of aligned rows [n], and then of ids that were found, [k].

        Parameters
        ----------
        until : monotonic time after which no party is waited for.
        """
        size = len(rows) + len(found.encoded)
        said = Embedded(
            torch.zeros(size, self._predictor.width),
            np.zeros((size, self._count), bool),
            np.concatenate([self.present[rows], found.places >= 0]),
            {},
            found,
        )
        orders: dict[int, Order] = {}
        for number in range(self._count):
            has = said.has[:, number]
            if not has.any():
                said.missing.setdefault(number, UNKNOWN)
                continue
            at = self._at[rows[has[: len(rows)]], number]
            orders[number] = ScoreOrder(arrays={"rows": at, **self._of_found(found, number)})
        answers, silent = self._parties.ask(orders, Scored, until)
        said.missing.update(silent)
        collection = self._predictor.aggregation.collection(self._count)
        for number, answer in answers.items():
            reason = self._take(number, answer, said, collection)
            if reason:
                said.missing[number] = reason
        if said.missing and self._predictor.aggregation.abreast and orders:
            self._parties.come_apart()
        return said

    def find(self, ids: Sequence[int | str], until: float) -> Found:
        """Find ids outside the alignment at the parties, in one round trip."""
        nowhere = np.full((len(ids), self._count), -1, np.int32)
        if self._parties.seeker is None or not ids:
            return Found([], nowhere[:0], {})
        encoded = [encoded_id(one) for one in ids]
        found, points = Found(encoded, nowhere, {}), self._parties.seeker.blinded(encoded)
        known = {number: self._parties.seeker.knows(number) for number in range(self._count)}
        orders: dict[int, Order] = {
            number: SeekOrder(known=places, arrays={"ids": points})
            for number, places in known.items()
            if places
        }
        answers, found.missing = self._parties.ask(orders, Sought, until)
        for number, answer in answers.items():
            try:
                found.places[:, number] = self._parties.seeker.places(
                    number, encoded, answer.arrays
                )
            except VflError as error:
                found.missing[number] = self._parties.refused(number, f"sent {error}")
        return found

    def _of_found(self, found: Found, number: int) -> Arrays:
        """Return the arrays of an order about found ids that a party has."""
        has = np.flatnonzero(found.places[:, number] >= 0)
        if self._parties.seeker is None or not len(has):
            return {}
        proofs = self._parties.seeker.proofs(number, [found.encoded[at] for at in has.tolist()])
        return {"places": found.places[has, number], "proofs": proofs}

    def _take(self, number: int, answer: Scored, said: Embedded, collection: Collection) -> str:
        """Take a party's embeddings; return why they cannot be used, or an empty text."""
        rows, size = np.flatnonzero(said.has[:, number]), self._predictor.sizes[number]
        try:
            block = collection.add(number, answer.arrays, (len(rows), size))
            gone = answer.arrays.get("gone", np.zeros(0, np.int32))
            if (
                gone.dtype != np.int32
                or gone.ndim != 1
                or not np.isin(gone, range(len(rows))).all()
            ):
                raise VflError("'gone' names rows that were not asked for.")
            self._drift.take(number, answer.arrays)
        except SumError as error:
            self._parties.come_apart()
            return self._parties.refused(number, str(error))
        except VflError as error:
            return self._parties.refused(number, str(error))
        there = np.ones(len(rows), bool)
        there[gone] = False
        if block is not None:
            said.blocks[torch.from_numpy(rows), self._predictor.columns[number]] = block
        said.given[rows[there], number] = True
        return ""
