"""Callbacks: code of yours that runs while a system trains, at the label holder.

A callback can watch a run, stop it, and have it save a checkpoint. Option `observer` names one.
Ours are built the same way: `results.Results` writes files, `progress.Progress` shows where a run
stands, and `strategies.callbacks` has early stopping, the best model and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Parameters
    ----------
    done, planned : party steps answered, and to be answered at most, over all parties.
    steps_per_epoch : party steps of one epoch, over all parties.
    parties, failed : numbers of all parties, and of those that have failed and not come back.
    exchanges : messages that parties have answered during training.
    seconds : since the run began, interruptions left out.
    history : all entries so far, one for each evaluation.
    best : the entry with the least validation loss that can be restored; empty if there is none.
    may_stop_early : whether validation may end the run before its epochs are done.
    """

    done: int
    planned: int
    steps_per_epoch: int
    parties: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    exchanges: int = 0
    seconds: float = 0.0
    history: tuple[Mapping[str, Any], ...] = ()
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

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest history entry; empty before the first."""
        return self.history[-1] if self.history else {}


class TrainingRun(Protocol):
    """A run, as a callback sees it: where it stands, and what can be asked of it."""

    config: RunConfig
    can_save: bool

    @property
    def state(self) -> RunState:
        """Where the run stands now."""

    def stop(self, reason: str) -> None:
        """Order no more steps, and log why.

        Windows that are out are still answered. Then the model is evaluated a last time, the best
        model is restored if there are validation rows, and the run finishes as any other.
        """

    def save(self) -> None:
        """Save a checkpoint as soon as no message is out, to resume from.

        Raises
        ------
        ConfigError
            If not `can_save`: the run cannot be resumed, or has no results folder.
        """


class Callback:
    """Does nothing: override the events of interest.

    ``run`` is the run that trains. It is set before `began`.
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

    def returned(self, party: int) -> None:
        """Act on a party that goes on after a failure, or after it had lost its state."""

    def trained(self) -> None:
        """Act on the end of training: no step is left, and the last checkpoint is to come."""

    def saved(self) -> None:
        """Act on a checkpoint that has been saved."""

    def ended(self) -> None:
        """Act on the end of the run, whether it finished or failed."""


EVENTS = "began", "evaluated", "progressed", "failed", "returned", "trained", "saved", "ended"
"""The events of a run, which are methods of `Callback`."""


def listeners(callbacks: Iterable[Callback]) -> dict[str, list[Callable[..., None]]]:
    """Return, by event, the methods of these callbacks that do something."""
    found: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
    for callback in callbacks:
        for event, methods in found.items():
            method = getattr(callback, event, None)  # none, if it is no subclass of `Callback`
            if method and getattr(method, "__func__", None) is not getattr(Callback, event):
                methods.append(method)
    return found
