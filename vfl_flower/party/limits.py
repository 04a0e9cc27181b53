"""What a party's own rules limit, and the counts that it keeps for them.

Counts lie in files beside the party's states. The party writes a count to the disk before it
computes what it counts. So a count is never too low: not if the process is killed, and not if the
party goes on from an older state. Only the loss of the folder loses the counts.
"""

from __future__ import annotations

import logging
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
"""Numbers of things, ascending, and how often each was counted: [2, n]."""


class Limits:
    """Limits of a party's rules ``max-epochs`` and ``max-uploads`` in a run.

    Parameters
    ----------
    refuse : makes the error, from what the party refuses and why.
    path : file in which the party counts the uploads of each of its rows: in a run, in all runs
        that go on from it, and in predictions with their models.
    """

    def __init__(
        self, rules: Rules, refuse: Callable[[str], ConfigError] = ConfigError, path: Path = Path()
    ) -> None:
        self.epochs, self.uploads = rules.max_epochs, rules.max_uploads
        self._refuse = refuse
        self._path = path

    def begin(self) -> None:
        """Begin to count at zero, unless uploads of this run have been counted."""
        if self.uploads is not None and not self._path.exists():
            add(self._path, np.zeros(0, np.uint64), 0, self.uploads)

    def go_on(self) -> None:
        """Raise `ConfigError` if earlier uploads have not been counted."""
        if self.uploads is not None and not self._path.exists():
            raise self._refuse(
                "to go on, since it has no count of its uploads until now: its rule is "
                f"max-uploads = {self.uploads}"
            )

    def check_steps(self, steps: int, of_epoch: int) -> None:
        """Raise `ConfigError` if these are more mini-batches than a model may train on."""
        if self.epochs is not None and steps > self.epochs * of_epoch:
            raise self._refuse(
                f"step {steps}, of {of_epoch} an epoch: its rule is max-epochs = {self.epochs}"
            )

    def count(self, rows: NDArray[Any], places: Any = slice(None), times: int = 1) -> None:
        """Count uploads of ``rows[places]``, each ``times`` times.

        Raises
        ------
        ConfigError
            If a row has too many uploads; then none is counted.
        """
        if self.uploads is not None and not add(self._path, rows[places], times, self.uploads):
            raise self._refuse(
                "to upload a row once more than it allows: its rule is max-uploads = "
                f"{self.uploads}"
            )


def count_predictions(context: Context, rules: Rules, rows: int) -> None:
    """Count rows that a party embeds for predictions, with all its models and in all runs.

    Raises
    ------
    ConfigError
        If its rule ``max-predictions`` leaves fewer rows; then none is counted.
    """
    most, party = rules.max_predictions, context.node_config.get("partition-id")
    path = state_file.place(context).with_name(f"party-{party}.predictions")
    if most is not None and not add(path, np.zeros(1, np.uint64), rows, most):
        raise refused(context, f"to predict {rows} rows: its rule is max-predictions = {most}")


# --- counts on disk -----------------------------------------------------------------------------


def add(path: Path, things: NDArray[Any], times: int, most: int) -> bool:
    """Add to the counts of things, unless one would pass ``most``; return whether it added.

    A thing is a number of 64 bits. It may occur several times.

    Raises
    ------
    VflError
        If the file is damaged, or the disk refuses.
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
            counts[1, np.searchsorted(counts[0], new)] += (often * times).astype(np.uint64)
            if counts[1].max(initial=0) > most:
                return False
            write_sealed(path, counts.astype("<u8").tobytes())
    except (OSError, ValueError, VflError) as error:
        log.warning("The party's counts in %s cannot be kept: %s", path, error)
        raise VflError("cannot keep count of what it gives away: its own log says why.") from None
    return True
