"""The record of a run's releases: written to disk and counted before they leave.

The label holder keeps the log, and is trusted to keep it honestly.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy import journal
from vfl_flower.protocol.privacy.accountant import Accountant
from vfl_flower.transport import messages


class ReleaseLog:
    """Record every release of the kinds that an accountant counts."""

    def __init__(self, accountant: Accountant) -> None:
        self.accountant = accountant
        self._journal: journal.Journal | None = None

    def ordered(self, party: int, order: messages.Order) -> None:
        """Record the uploads that an order asks a party for, before it is sent."""
        if isinstance(order, messages.TrainOrder):
            self._record(journal.Event(journal.TRAIN, party, order.epoch, order.first, order.steps))
        elif isinstance(order, messages.EmbedOrder):
            ids = order.arrays.get("ids")  # none: all rows
            rows = np.arange(self.accountant.rows, dtype=np.int32) if ids is None else ids
            self._record(journal.Event(journal.EMBED, party, rows=rows))
        elif isinstance(order, messages.EvaluateOrder):
            self._record(journal.Event(journal.EVALUATE, party))
        elif not isinstance(
            order, messages.CheckpointOrder | messages.RejoinOrder | messages.RestoreOrder
        ):
            raise TypeError(f"{type(order).__name__} may upload rows that nobody counts.")

    def received(self, party: int, window: Window) -> None:
        """Record the rows that a party has uploaded."""
        self._record(journal.Event(journal.RECEIVED, party, len(window.lengths), rows=window.ids))

    def permits_answers(self, group: Sequence[tuple[int, Window]]) -> bool:
        """Record the answers to a quorum's windows, if the budget allows them."""
        events = self.accountant.events_within_budget(group)
        for event in events or ():
            self._record(event)
        return events is not None

    def keep(
        self,
        path: Path,
        run: str = "",
        mark: journal.Mark | None = None,
        second: Path | None = None,
    ) -> None:
        """Write all further releases to a file of ``run``, before they are counted.

        First count all events in the file: a resumed run makes those after its checkpoint ``mark``
        again. A new file begins with the events counted until now.
        """
        is_new = not path.exists()
        if mark is not None and is_new:
            raise journal.refused(path, "missing")
        self._journal = journal.Journal(path, run, second)
        for event in self._journal.read(mark):
            self.accountant.count(event)
        for event in self.accountant.so_far() if is_new else ():
            self._journal.write(event)

    @property
    def mark(self) -> journal.Mark | None:
        """Return the position in the file, for a checkpoint; None before `keep`."""
        return self._journal.mark if self._journal else None

    def _record(self, event: journal.Event) -> None:
        if event.kind in self.accountant.counts:
            if self._journal:
                self._journal.write(event)
            self.accountant.count(event)
