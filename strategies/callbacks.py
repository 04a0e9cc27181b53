"""Built-in callbacks: best model, early stopping, checkpoints, ending signals.

`callbacks_of` lists them with yours, in the order in which they hear of an event.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from strategies.run import Run
from strategies.turns import PartyRecord
from vfl_flower.config import errors
from vfl_flower.config.logs import log, notice
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.results.figures import reached, validated
from vfl_flower.transport.messages import RestoreOrder

_HINT = b"\nStopping at the next checkpoint; again, to stop without one.\n"
_SAVING = 8  # seconds that a run on nodes has for a last checkpoint: containers are killed after 10


def callbacks_of(
    run: Run,
    yours: Sequence[Callback],
    wait_for: Callable[[Sequence[PartyRecord]], None],
) -> list[Callback]:
    """Return a run's callbacks, in the order in which they hear of an event."""
    validates, patience = bool(run.labels.validation), run.config.training.patience
    found: list[Callback] = [BestModel(wait_for)] if validates else []
    found += [EpochLog(), *yours]
    found += [EarlyStopping(patience)] if validates and patience else []
    if run.can_save:
        found += [PeriodicCheckpoints(run.save_every)] if run.save_every else []
        found.append(EndBySignal())
    return found


class BestModel(Callback):
    """Remembers the best model on the validation rows, and restores it at the end."""

    run: Run

    def __init__(self, wait_for: Callable[[Sequence[PartyRecord]], None]) -> None:
        self._wait_for = wait_for

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Remember the model, at the parties too, if it is the best that all have copies of."""
        run, history = self.run, self.run.history
        best = history.best
        better = best is None or entry["validation_loss"] < history.entries[best]["validation_loss"]
        if better and all(record.remembers for record in run.records if record.alive):
            history.best = len(history.entries) - 1
            run.holder.held_out.remember(run.holder.top)
            for record in run.records:
                record.best_evaluation = record.evaluation

    def returned(self, party: int) -> None:
        """Forget the best model, if the party has lost its copy of it."""
        if not self.run.history.restored and not self.run.by_party[party].best_evaluation:
            self.run.history.best = None

    def trained(self) -> None:
        """Restore the best model, at the parties too."""
        run, history = self.run, self.run.history
        if history.best is None:
            return
        run.holder.held_out.restore(run.holder.top)
        history.restored = True
        if history.last_is_best:
            return
        # A baseline evaluates without its parties, so these have no copies.
        back = [record for record in run.records if record.alive and record.best_evaluation]
        run.messenger.post(
            run.messenger.message(
                record, RestoreOrder(exchange=record.exchange + 1, number=record.best_evaluation)
            )
            for record in back
        )
        self._wait_for(back)


class EpochLog(Callback):
    """Logs each evaluation."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Log the entry."""
        said = ", ".join(filter(None, [validated(entry, self.run.state.best), reached(entry)]))
        log.info("Epoch %s: %s", f"{entry['epoch']:g}", said)


class EarlyStopping(Callback):
    """Stops training once no evaluation has improved for so many epochs."""

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Stop, if the best evaluation is too long ago."""
        best = self.run.state.best
        if best and entry["epoch"] - best["epoch"] >= self._patience:
            self.run.stop(f"Validation has not improved since epoch {best['epoch']:g}")


class PeriodicCheckpoints(Callback):
    """Saves a checkpoint after every so many answered messages."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._saved_at = 0  # exchanges

    def began(self, folder: Path) -> None:
        """Count from here: a resumed run has just been saved."""
        self._saved_at = self.run.state.exchanges

    def progressed(self, done: int, planned: int) -> None:
        """Save a checkpoint, once enough messages were answered since the last."""
        if self.run.state.exchanges >= self._saved_at + self._every:
            self.run.save()

    def saved(self) -> None:
        """Count from here."""
        self._saved_at = self.run.state.exchanges


class EndBySignal(Callback):
    """Ends a run by Ctrl-C, SIGTERM or SIGHUP, once it has saved a checkpoint.

    A second signal has its usual effect, at once. A handler that belongs to other code stays. All
    handlers stay outside the main thread, where Python permits no change.

    On nodes, parties may be ending too. So the run ends after some seconds, with its last
    checkpoint. Further signals count from then on. Flower's messages would not pass any more.
    """

    run: Run

    def __init__(self) -> None:
        self._came: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def began(self, folder: Path) -> None:
        """Handle the signals. On nodes, say who can send one: the log may end with the run."""
        self._folder = folder
        if self.run.transport.engine == "supernodes":
            notice.info(
                "The label holder can end this run by `flwr stop %d`. It then keeps a checkpoint "
                "in %s.",
                *(self.run.transport.run.run_id, folder),
            )
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGINT, *errors.TERMINATING):
                handler = signal.getsignal(each)
                if handler in (signal.default_int_handler, signal.SIG_DFL, errors.terminate):
                    self._before[each] = handler
                    signal.signal(each, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Save the run; from now on, signals have their usual effect."""
        if self._came is not None:
            return
        self._came = signal.Signals(number)
        transport = self.run.transport
        on_nodes = transport.engine == "supernodes"
        if not on_nodes:
            self.ended()
        elif transport.medium == "messages":
            self._give_up()
        else:
            signal.signal(signal.SIGALRM, self._give_up)
            signal.alarm(_SAVING)
        self.run.save()
        if not on_nodes:  # there, another signal changes nothing
            with suppress(OSError, ValueError, AttributeError):  # it may interrupt a print
                os.write(sys.stderr.fileno(), _HINT)

    def saved(self) -> None:
        """End the run by `Interrupted` or `Terminated`, if Ctrl-C or another signal has come."""
        if self._came is None:
            return
        if self._before[self._came] is signal.default_int_handler:
            raise errors.Interrupted(f"Ctrl-C {self._when}", str(self._folder))
        raise errors.Terminated(self._came, self._sentence, str(self._folder))

    def _give_up(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End the run without a new checkpoint."""
        assert self._came is not None
        raise errors.Terminated(self._came, f"{self._sentence} Its last checkpoint is older.")

    @property
    def _when(self) -> str:
        return f"ended the run after {self.run.state.epoch:.3g} epochs."

    @property
    def _sentence(self) -> str:
        assert self._came is not None
        return f"{errors.signal_in_words(self._came)} {self._when}"

    def ended(self) -> None:
        """Restore the former handlers."""
        if signal.getsignal(signal.SIGALRM) == self._give_up:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for each, handler in self._before.items():
            signal.signal(each, handler)
