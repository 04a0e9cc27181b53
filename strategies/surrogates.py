"""Initial surrogates of error feedback (EF-VFL, Algorithms 1 and 2, input)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strategies.party_record import PartyRecord
from strategies.run import Run
from vfl_flower.transport.messages import EmbedOrder


def begin_surrogates(run: Run, wait_for: Callable[[Sequence[PartyRecord]], None]) -> None:
    """Have each party upload C(H(x_0)) of all its training rows, before its first step.

    A resumed run does not ask again: both ends have restored their surrogates.

    Parameters
    ----------
    wait_for : waits until no message is out to these parties.
    """
    new = [record for record in run.records if not record.exchange]
    run.messenger.post(
        run.messenger.message(record, EmbedOrder(exchange=record.exchange + 1)) for record in new
    )
    wait_for(new)
