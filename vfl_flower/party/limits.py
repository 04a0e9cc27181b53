"""Limits of a party's own rules, and the counts that they need.

Counts lie in files beside the party's states. The party writes a count to disk before it computes
what it counts. So a count is never too low, even if the process is killed or the party continues
from an older state. Only the loss of the folder loses the counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import alone_in, make_folder, unsealed, write_sealed
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import state_file
from vfl_flower.transport.node import refused

log = logging.getLogger("flwr")

Counts = NDArray[np.uint64]
"""Counted numbers, ascending, and their counts: [2, n]."""


class Limits:
    """Limits of a party's rules ``max-epochs`` and ``max-uploads`` in a run.

    Parameters
    ----------
    refuse : builds the error from the refused action and the reason.
    path : file that counts the uploads of each row of the party. It covers a run, all runs that
        continue it, and predictions with their models.
    """

    def __init__(
        self, rules: Rules, refuse: Callable[[str], ConfigError] = ConfigError, path: Path = Path()
    ) -> None:
        self.epochs, self.uploads = rules.max_epochs, rules.max_uploads
        self._refuse = refuse
        self._path = path

    def begin(self) -> None:
        """Start the count at zero, unless the file has counts of this run's uploads."""
        if self.uploads is not None and not self._path.exists():
            add(self._path, np.zeros(0, np.uint64), 0, self.uploads)

    def go_on(self) -> None:
        """Raise `ConfigError` if earlier uploads were not counted."""
        if self.uploads is not None and not self._path.exists():
            raise self._refuse(
                "to continue, since it has no count of its earlier uploads: its rule is "
                f"max-uploads = {self.uploads}"
            )

    def check_steps(self, steps: int, of_epoch: int) -> None:
        """Raise `ConfigError` if the model may not train on so many mini-batches."""
        if self.epochs is not None and steps > self.epochs * of_epoch:
            raise self._refuse(
                f"step {steps}, of {of_epoch} an epoch: its rule is max-epochs = {self.epochs}"
            )

    def count(self, rows: NDArray[Any], places: Any = slice(None), times: int = 1) -> None:
        """Count uploads of ``rows[places]``, each ``times`` times.

        Raises
        ------
        ConfigError
            If a row has too many uploads. Then no row is counted.
        """
        if self.uploads is not None and not add(self._path, rows[places], times, self.uploads):
            raise self._refuse(
                "to upload a row more often than it allows: its rule is max-uploads = "
                f"{self.uploads}"
            )


class PredictionBudget:
    """Counts the rows that a party embeds for predictions, over all its models and runs.

    Its rules ``max-predictions`` and ``max-predictions-per-day`` limit them. A service asks for few
    rows at a time, so the party writes counts of `_AHEAD` rows ahead to the disk. `close` gives the
    rest back. After a crash, the count may be too high by that many.
    """

    def __init__(self, context: Context, rules: Rules) -> None:
        self._context = context
        party = context.node_config.get("partition-id")
        path = state_file.place(context).with_name(f"party-{party}.predictions")
        self._limits = [
            (path, rules.max_predictions, "max-predictions", False),
            (
                path.with_name(f"{path.name}-by-day"),
                rules.max_predictions_per_day,
                "max-predictions-per-day",
                True,
            ),
        ]
        self._ahead = {name: (0, 0) for *_, name, _ in self._limits}  # name -> day, rows left

    def take(self, rows: int) -> None:
        """Count rows before they are embedded.

        Raises
        ------
        ConfigError
            If a rule leaves fewer rows. The sentence names the rule.
        """
        for path, most, name, daily in self._limits:
            day = int(time.time()) // 86400 if daily else 0
            then, left = self._ahead[name]
            left = left if then == day else 0
            if most is None or rows <= left:
                self._ahead[name] = day, left - (0 if most is None else rows)
                continue
            thing = np.full(1, day, np.uint64)
            for more in (max(rows - left, min(_AHEAD, most // 100)), rows - left):
                if add(path, thing, more, most):
                    break
            else:
                raise refused(self._context, f"to predict {rows} rows: its rule is {name} = {most}")
            self._ahead[name] = day, left + more - rows

    def close(self) -> None:
        """Give back the rows that were counted ahead."""
        for path, most, name, _ in self._limits:
            day, left = self._ahead[name]
            if most is not None and left:
                add(path, np.full(1, day, np.uint64), -left, most)
            self._ahead[name] = day, 0


_AHEAD = 1000


def count_predictions(context: Context, rules: Rules, rows: int) -> None:
    """Count the rows of one prediction, as `PredictionBudget` does."""
    budget = PredictionBudget(context, rules)
    budget.take(rows)
    budget.close()


# --- counts on disk -----------------------------------------------------------------------------


def add(path: Path, things: NDArray[Any], times: int, most: int) -> bool:
    """Add to counts, unless a count would exceed ``most``. Return whether it added.

    Parameters
    ----------
    things : numbers of 64 bits to count. A number may occur several times.
    times : how often to count each. A negative number gives back what was counted ahead.

    Raises
    ------
    VflError
        If the file is damaged or cannot be written.
    """
    try:
        make_folder(path.parent)
        with alone_in(path.parent):
            kept = np.frombuffer(unsealed(path) if path.exists() else b"", "<u8")
            counts: Counts = kept.reshape(2, -1).astype(np.uint64)
            new, often = np.unique(things.astype(np.uint64), return_counts=True)
            places = np.searchsorted(counts[0], new)
            there = places < counts.shape[1]
            there[there] = counts[0, places[there]] == new[there]
            if not there.all():
                first = np.stack([new[~there], np.zeros_like(new[~there])])
                counts = np.insert(counts, places[~there], first, axis=1)
            changed = np.searchsorted(counts[0], new)
            counts[1, changed] = (counts[1, changed].astype(np.int64) + often * times).clip(0)
            if counts[1, changed].max(initial=0) > most and times > 0:
                return False
            write_sealed(path, counts.astype("<u8").tobytes())
    except (OSError, ValueError, VflError) as error:
        log.warning("The party's counts in %s cannot be kept: %s", path, error)
        raise VflError("cannot count what it releases. See its own log.") from None
    return True
