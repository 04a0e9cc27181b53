"""The label holder's record of a party that a service asks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment.reuse import proof_of
from vfl_flower.config.run_config import RunConfig
from vfl_flower.tasks.inference.rows import RowsToPredict
from vfl_flower.transport.early_messages import ReuseOrder
from vfl_flower.transport.messages import Order

READY, ASKED, LATE, LOADING, DOWN = "ready", "asked", "late", "loading", "down"


@dataclass
class PartyRecord:
    """The label holder's knowledge of one party.

    key, order, sent : the message that is out to it, what it asks, and when it was sent.
    why : the reason of the party's last refusal.
    alignment, shown : the alignment of its rows, and the label holder's answer in it.
    failed : when it last failed a whole order, instead of some rows.
    """

    number: int
    node: int | None
    state: str = DOWN
    key: str = ""
    order: Order | None = None
    sent: float = 0.0
    why: str = ""
    alignment: str = ""
    shown: NDArray[np.uint8] | None = None
    failed: float = -math.inf

    @classmethod
    def of_all(cls, parties: int, rows: RowsToPredict) -> list[PartyRecord]:
        """Return a record of each party, with the alignment of these rows."""
        found = [cls(number, None, alignment=rows.alignment) for number in range(parties)]
        if rows.shown is not None:
            who = range(parties) if rows.nodes is None else sorted(rows.nodes)
            for number, shown in zip(who, rows.shown, strict=True):
                found[number].shown = shown
        return found

    def reuse(self, every: Sequence[PartyRecord], run: str, config: RunConfig) -> ReuseOrder:
        """Return the order to use the rows of its alignment again, with all proofs of it."""
        proofs = np.zeros((len(every), 32), np.uint8)
        for each in every:
            if each.shown is not None and each.alignment == self.alignment:
                proof = proof_of(each.shown, each.alignment, run)
                proofs[each.number] = np.frombuffer(proof, np.uint8)
        about = json.dumps(config.values())
        return ReuseOrder(alignment=self.alignment, config=about, arrays={"proofs": proofs})
