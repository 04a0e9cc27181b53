"""Fresh embeddings outside a party's turns: at the beginning, and if they are too old."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.run import Run
from strategies.turns import PartyRecord
from vfl_flower.protocol.ends import Arrival
from vfl_flower.transport.messages import EmbedOrder


def refresh(
    run: Run, wait_for: Callable[[Sequence[PartyRecord]], None], group: Sequence[Arrival]
) -> None:
    """Ask late parties for fresh embeddings of the rows that a quorum's answer uses.

    This bounds the delay (VAFL, section 2.3).
    """
    holder = run.holder
    uploads = [(each.party, each.window) for each in group if not each.coordinated]

    def late() -> list[tuple[PartyRecord, NDArray[np.int32]]]:
        alive = [record.party for record in run.records if record.alive]
        old = holder.table.too_old(uploads, alive, holder.steps)
        return [(run.by_party[party], ids) for party, ids in old.items()]

    # A node serves one message at a time, and the message in flight may bring the embeddings.
    wait_for([record for record, _ in late()])
    asked = late()
    run.messenger.post(
        run.messenger.message(
            record, EmbedOrder(exchange=record.exchange + 1, arrays={"ids": ids, **record.feedback})
        )
        for record, ids in asked
    )
    wait_for([record for record, _ in asked])


def begin_surrogates(run: Run, wait_for: Callable[[Sequence[PartyRecord]], None]) -> None:
    """Have each party upload C(H(x_0)) of all its training rows, before its first step.

    These are the initial surrogates of error feedback (EF-VFL, Algorithms 1 and 2, input). A
    resumed run does not ask again: both ends have restored their surrogates.
    """
    new = [record for record in run.records if not record.exchange]
    run.messenger.post(
        run.messenger.message(record, EmbedOrder(exchange=record.exchange + 1)) for record in new
    )
    wait_for(new)
