"""Callbacks: user code that runs at the label holder while a system trains.

A callback can watch a run, stop it, and make it save a checkpoint. The option `observer` names a
callback. The built-in callbacks use the same interface: `results.Results` writes files,
`progress.Progress` shows progress, and `strategies.callbacks` contains early stopping, the best
model and checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.transport.base import Transport


@dataclass(frozen=True)
class RunState:
    """Progress and figures of a run.

    Parameters
    ----------
    done, planned : party steps answered so far, and the most there can be, over all parties.
    steps_per_epoch : party steps of one epoch, over all parties.
    parties, failed : numbers of all parties, and of failed parties that have not returned.
    exchanges : messages that parties have answered during training.
    seconds : time since the run began, without interruptions.
    history : all entries so far, one for each evaluation.
    best : entry with the least validation loss that can be restored; empty before the first.
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
        """Return the epochs done, on average over the parties."""
        return self.done / self.steps_per_epoch

    @property
    def epochs(self) -> float:
        """Return the largest number of epochs, on average over the parties."""
        return self.planned / self.steps_per_epoch

    @property
    def last(self) -> Mapping[str, Any]:
        """Return the newest history entry; empty before the first."""
        return self.history[-1] if self.history else {}


class TrainingRun(Protocol):
    """A run as a callback sees it: its state, and the requests that it accepts.

    Another thread may read `state`, `costs` and `waits`. All else is for the methods of a callback.
    """

    config: RunConfig
    transport: Transport
    can_save: bool

    @property
    def state(self) -> RunState:
        """Return the current state of the run."""

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon spent so far; None if the run claims none."""

    def costs(self) -> list[dict[str, Any]]:
        """Return the cost of each party so far, as ``by_party`` of summary.json."""

    def waits(self) -> dict[int, float]:
        """Return the seconds since each party's message without an answer; 0 without one."""

    def stop(self, reason: str) -> None:
        """Order no more steps, and log the reason.

        The label holder still answers windows that are under way. Then the run evaluates the model
        a last time, restores the best model if there are validation rows, and finishes.
        """

    def save(self) -> None:
        """Save a checkpoint to resume from, as soon as no message is under way.

        Raises
        ------
        ConfigError
            If not `can_save`: the run cannot be resumed, or has no results folder.
        """


class Callback:
    """Base class of callbacks. It does nothing: override the events of interest.

    The run sets ``run`` before it calls `began`.
    """

    run: TrainingRun

    def began(self, folder: Path) -> None:
        """Act on the start or the resumption of a run, whose results folder is ``folder``."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Act on an evaluation and its history entry."""

    def progressed(self, done: int, planned: int) -> None:
        """Act on progress: ``done`` of ``planned`` steps are answered, over all parties."""

    def failed(self, party: int, error: VflError) -> None:
        """Act on a party's failure. The run continues without the party."""

    def returned(self, party: int) -> None:
        """Act on a party's return after a failure, or after it had lost its state."""

    def trained(self) -> None:
        """Act on the end of training, before the last checkpoint."""

    def saved(self) -> None:
        """Act on a saved checkpoint."""

    def ended(self) -> None:
        """Act on the end of the run, whether it finished or failed."""

    def written(self) -> None:
        """Act after the results are written, as far as they can be. The ServerApp tells it."""


EVENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))
"""Events of a run, each a method of `Callback`."""


def listeners(callbacks: Iterable[Callback]) -> dict[str, list[Callable[..., None]]]:
    """Return event -> methods of these callbacks that override the event."""
    found: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
    for callback in callbacks:
        for event, methods in found.items():
            method = getattr(callback, event, None)  # a callback need not subclass `Callback`
            if method and getattr(method, "__func__", None) is not getattr(Callback, event):
                methods.append(method)
    return found
