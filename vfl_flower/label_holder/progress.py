"""Progress of runs: one live line on a terminal or in a notebook, elsewhere one line an epoch.

`shown` decides for the runs that begin in its block, whatever engine they use. Without it a run
shows nothing. Flower's ServerApp runs in another process, which has no terminal: it writes where
the run stands to a file, and the process that submitted the run shows it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.figures import in_brief, reached, validated

_APART = 0.1  # seconds between two drawings of a line

# --- where a run stands -------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    epoch, epochs : done, and to do at most, on average over the parties.
    last, best : the last history entry, and the one with the least validation loss; or empty.
    rate : exchanges a second; none where no messages are sent.
    left : seconds to the end of the budget, if that can be told.
    early : whether the run may stop before that, by its validation loss.
    """

    epoch: float
    epochs: float
    last: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    left: float | None = None
    early: bool = False

    def words(self) -> list[str]:
        """All of it, in full."""
        said = [f"epoch {self.epoch:.4g} of {self.epochs:.4g}"]
        if self.last:
            said += [*filter(None, [validated(self.last, self.best)]), reached(self.last)]
        if self.rate:
            said.append(f"{_short(self.rate)} exchanges/s")
        if self.left is not None:
            said.append(f"{'at most ' * self.early}{clock(self.left)} left")
        return said

    def line(self, title: str, width: int) -> str:
        """All of it in so many characters, or what matters most of it.

        ``title`` comes first, and says which of several runs this is.
        """
        before = f"{title}: " if title else ""
        full = before + " | ".join(self.words())
        if len(full) <= width:
            return full
        epoch = f"epoch {int(self.epoch)}/{self.epochs:.4g}"
        loss, best, test = in_brief(self.last, self.best) if self.last else ("", "", "")
        rate = f"{_short(self.rate)} ex/s" if self.rate else ""
        left = "" if self.left is None else f"{'<' * self.early}{clock(self.left)} left"
        of_loss = f"{loss} ({best})" if best else loss
        for parts in ([of_loss, test, rate], [of_loss, test], [loss, test], [loss], []):
            found = before + "  ".join(filter(None, [epoch, *parts, left]))
            if len(found) <= width:
                return found
        return found[:width]


def _short(number: float) -> str:
    """A number in four characters or so."""
    if number >= 10_000:
        return f"{number / 1000:.0f}k"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 1:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress(Callback):
    """Tells where a run stands: at each evaluation, and between them ten times a second at most.

    Parameters
    ----------
    tell : is told.
    """

    def __init__(self, tell: Callable[[Standing], None]) -> None:
        self._tell = tell
        self._due = 0.0
        self._done, self._planned = 0, 0
        self._first: tuple[float, int, int] | None = None  # when, steps, exchanges

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Tell of it."""
        self._say(time.monotonic(), entry)

    def progressed(self, done: int, planned: int) -> None:
        """Tell of it, if that was not done just now."""
        self._done, self._planned = done, planned
        now = time.monotonic()
        if now >= self._due:
            self._say(now)

    def _say(self, now: float, entry: dict[str, Any] | None = None) -> None:
        self._due = now + _APART
        state = self.run.state
        if self._first is None and self._planned:
            self._first = now, self._done, state.exchanges
        rate = left = None
        if self._first and now > self._first[0]:
            since, done, before = self._first
            rate = (state.exchanges - before) / (now - since)
            if self._done > done:
                left = (now - since) * (self._planned - self._done) / (self._done - done)
        epochs = (self._planned or state.planned) / state.steps_per_epoch
        self._tell(
            Standing(
                epoch=min(self._done / state.steps_per_epoch, epochs),
                epochs=epochs,
                last=entry or state.last,
                best=state.best,
                rate=rate,
                left=left,
                early=state.may_stop_early,
            )
        )


# --- how it is shown ----------------------------------------------------------------------------


class Display:
    """A line that is drawn anew, where ``live``; elsewhere lines that stay, one an epoch."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.titles: list[str] = []  # which of several runs it is, from without inwards
        self._length = 0  # of what is drawn
        self._handle: Any = None  # of a notebook
        self._due = 0.0
        self._epoch = 0

    @property
    def title(self) -> str:
        """Which of several runs it is; empty where there is but one."""
        return ", ".join(self.titles)

    def show(self, standing: Standing) -> None:
        """Show where a run stands."""
        if self.live:
            self.draw(lambda width: standing.line(self.title, width))
        elif int(epoch := standing.last.get("epoch", 0)) > self._epoch:
            self._epoch = int(epoch)
            self.say(", ".join(standing.words()))

    def draw(self, line: Callable[[int], str]) -> None:
        """Draw a line of so many characters at most, if none was drawn just now."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _APART
            self._draw(line(shutil.get_terminal_size().columns - 1))

    def say(self, text: str) -> None:
        """Write a line that stays."""
        title = f"{self.title}: " if self.titles else ""
        print(f"{title}{text}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """Another run begins."""
        self._epoch = 0

    def erase(self) -> None:
        """Remove what is drawn."""
        if self._handle:
            self._handle.update({}, raw=True)
        elif self._length:
            print(f"\r{' ' * self._length}\r", end="", file=sys.stderr, flush=True)
        self._length = 0

    def _draw(self, text: str) -> None:
        if _in_notebook():
            display: Any = sys.modules["IPython"].display.display
            of_notebook = {"text/plain": text}
            if self._handle:
                self._handle.update(of_notebook, raw=True)
            else:
                self._handle = display(of_notebook, raw=True, display_id=True)
            return
        print(f"\r{text.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def filter(self, record: logging.LogRecord) -> bool:
        """Make way for what is logged; as a filter of a handler, let it pass."""
        self.erase()
        return True


_shown: ContextVar[Display | None] = ContextVar("shown", default=None)


@contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the progress of the runs that begin in this block.

    Parameters
    ----------
    progress : whether to; None: only where it can be a live line, on a terminal or in a notebook.
    """
    live = _in_notebook() or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    display = Display(live) if progress or (progress is None and live) else None
    handlers = logging.getLogger("flwr").handlers if live and display else []
    for handler in handlers:
        handler.addFilter(display.filter)  # type: ignore[union-attr]
    token = _shown.set(display)
    try:
        yield
    finally:
        _shown.reset(token)
        for handler in handlers:
            handler.removeFilter(display.filter)  # type: ignore[union-attr]
        if display:
            display.erase()


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Say of the runs in this block which of several they are."""
    display = _shown.get()
    if display:
        display.titles.append(title)
    try:
        yield
    finally:
        if display:
            display.titles.pop()


def say(words: Callable[[], Sequence[str]]) -> None:
    """Show these words: on the live line as far as there is room, elsewhere as a line."""
    if display := _shown.get():
        if display.live:
            display.draw(lambda width: " | ".join(words())[:width])
        else:
            display.say(", ".join(words()))


def _in_notebook() -> bool:
    """Whether what is displayed goes to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"


# --- between processes --------------------------------------------------------------------------

_FILE = ".progress"


def of_run(folder: Path) -> Progress | None:
    """What tells of the run in this folder, if anybody is to be told."""
    if display := _shown.get():
        display.begin()
        return Progress(display.show)
    if (folder / _FILE).exists():
        return Progress(lambda standing: _write(folder / _FILE, standing))
    return None


def _write(path: Path, standing: Standing) -> None:
    with suppress(OSError):  # of a full disk: the run goes on
        other = path.with_suffix(".new")
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(asdict(standing), file)
        other.replace(path)


@contextmanager
def from_elsewhere(folder: Path) -> Iterator[Callable[[], None]]:
    """Have another process tell of the run in this folder; gives what shows it, if it is new."""
    display, path = _shown.get(), folder / _FILE
    if not display:
        yield lambda: None
        return
    path.touch(0o600)
    display.begin()
    said = b""

    def look() -> None:
        nonlocal said
        with suppress(OSError):
            if (now := path.read_bytes()) and now != said:
                said = now
                display.show(Standing(**json.loads(now)))

    try:
        yield look
        look()
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(".new").unlink(missing_ok=True)
