"""Callbacks: code that runs while a system trains, at the label holder.

Option `observer` names one. `results.Results` writes files and `progress.Progress` shows where a
run stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vfl_flower.config.errors import VflError


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Parameters
    ----------
    done, planned : party steps answered, and to be answered at most, over all parties.
    steps_per_epoch : party steps of one epoch, over all parties.
    exchanges : messages that parties have answered during training.
    last, best : the newest history entry, and the one with the least validation loss; or empty.
    may_stop_early : whether validation may end the run before its epochs are done.
    """

    done: int
    planned: int
    steps_per_epoch: int
    exchanges: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    may_stop_early: bool = False

    @property
    def epoch(self) -> float:
        """Epochs done, on average over the parties."""
        return self.done / self.steps_per_epoch

    @property
    def epochs(self) -> float:
        """Epochs to be done at most, on average over the parties."""
        return self.planned / self.steps_per_epoch


class TrainingRun(Protocol):
    """A run, as a callback sees it."""

    @property
    def state(self) -> RunState:
        """Where the run stands now."""


class Callback:
    """Does nothing: override the events of interest.

    ``run`` is the run that trains. It is set before training begins.
    """

    run: TrainingRun

    def began(self, folder: Path) -> None:
        """Act on a run that begins or resumes, whose results come into this folder."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Act on an evaluation, which gave this history entry."""

    def progressed(self, done: int, planned: int) -> None:
        """Act on progress: so many of the planned steps, over all parties, have been answered."""

    def failed(self, party: int, error: VflError) -> None:
        """Act on a party's failure; the run goes on without it."""

    def ended(self) -> None:
        """Act on the end of the run, whether it finished or failed."""
