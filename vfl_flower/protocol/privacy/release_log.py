"""The record of a run's releases: on the disk before they leave, and counted.

The label holder keeps the log, and is trusted to keep it honestly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.accountant import Accountant
from vfl_flower.protocol.privacy.journal import (
    EMBED,
    EVALUATE,
    RECEIVED,
    TRAIN,
    Event,
    Journal,
    Mark,
    refused,
)
from vfl_flower.transport.messages import EmbedOrder, EvaluateOrder, Order, TrainOrder


class ReleaseLog:
    """Record every release of the kinds that an accountant counts."""

    def __init__(self, accountant: Accountant) -> None:
        self.accountant = accountant
        self._journal: Journal | None = None

    def ordered(self, party: int, order: Order) -> None:
        """Record what an order asks a party to upload, before it is sent."""
        if isinstance(order, TrainOrder):
            self._record(Event(TRAIN, party, order.epoch, order.first, order.steps))
        elif isinstance(order, EmbedOrder):
            self._record(Event(EMBED, party, rows=order.arrays["ids"]))
        elif isinstance(order, EvaluateOrder):
            self._record(Event(EVALUATE, party))

    def received(self, party: int, window: Window) -> None:
        """Record the rows that a party has uploaded."""
        self._record(Event(RECEIVED, party, len(window.lengths), rows=window.ids))

    def answered(self, group: Sequence[tuple[int, Window]]) -> bool:
        """Record the answers to a quorum's windows, by party, before they are sent.

        Returns
        -------
        Whether the budget allows them. Else parties must get answers that say nothing.
        """
        events = self.accountant.answers(group)
        for event in events or ():
            self._record(event)
        return events is not None

    def keep(self, path: Path, run: str = "", mark: Mark | None = None) -> None:
        """From now on write releases to a file, before they are counted.

        Count first what the file has: all that a run has released before it was cut short. Releases
        after its last checkpoint are among them, and will be made again. A new file begins with
        what the accountant has counted until now.

        Parameters
        ----------
        run : the Flower run that begins the file.
        mark : `mark` at the checkpoint that the run resumes from.

        Raises
        ------
        ConfigError
            If the file is not what the run has written, at least until that checkpoint.
        """
        is_new = not path.exists()
        if mark is not None and is_new:
            raise refused(path, "not there")
        self._journal = Journal(path, run)
        for event in self._journal.read(mark):
            self.accountant.count(event)
        for event in self.accountant.so_far() if is_new else ():
            self._journal.write(event)

    @property
    def mark(self) -> Mark | None:
        """How far the file is, for a checkpoint; None before there is a file."""
        return self._journal.mark if self._journal else None

    def _record(self, event: Event) -> None:
        if event.kind in self.accountant.counts:
            if self._journal:
                self._journal.write(event)
            self.accountant.count(event)
