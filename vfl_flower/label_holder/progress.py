"""Progress of runs: a live line on a terminal or in a notebook, else plain lines.

`shown` shows the progress of runs that begin in its block, with any engine. Outside such a block,
runs show nothing. Flower's ServerApp runs in another process without a terminal. It writes its
progress to a file, and the process that submitted the run shows it.
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

from vfl_flower.config import logs
from vfl_flower.config.logs import notice
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.results.figures import in_brief, reached, validated
from vfl_flower.results.terminal import in_notebook

_APART = 0.1  # seconds between two drawings of a line

# --- state of a run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """Progress of a run, for display."""

    epoch: float  # epochs done, on average over the parties
    epochs: float  # the most there can be
    last: Mapping[str, Any] = field(default_factory=dict)  # history entry
    best: Mapping[str, Any] = field(default_factory=dict)  # entry with the least validation loss
    rate: float | None = None  # exchanges per second; None if the run sends no messages
    left: float | None = None  # seconds to the end of the budget, if known
    early: bool = False  # whether the validation loss may stop the run before that
    part: str = ""  # name of the part of the run that trains, if it has parts

    def words(self) -> list[str]:
        """Return the whole progress as phrases."""
        said = [self._before + f"epoch {self.epoch:.4g} of {self.epochs:.4g}"]
        if self.last:
            said += [*filter(None, [validated(self.last, self.best)]), reached(self.last)]
        if self.rate:
            said.append(f"{_short(self.rate)} exchanges/s")
        if self.left is not None:
            said.append(f"{'at most ' * self.early}{clock(self.left)} left")
        return said

    @property
    def _before(self) -> str:
        return f"{self.part}: " if self.part else ""

    def line(self, title: str, width: int) -> str:
        """Return the title and the most important parts, in at most ``width`` characters."""
        before = f"{title}: " if title else ""
        full = before + " | ".join(self.words())
        if len(full) <= width:
            return full
        before += self._before
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
    """Format a number in about four characters."""
    if number >= 10_000:
        return f"{number / 1000:.0f}k"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 1:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress(Callback):
    """Report a part of a run at each evaluation, and every 0.1 seconds at most between them."""

    def __init__(self, tell: Callable[[Standing], None], part: str = "") -> None:
        self._tell, self._part = tell, part
        self._has_parts = False
        self._due = 0.0
        self._done, self._planned = 0, 0
        self._first: tuple[float, int, int] | None = None  # time, steps, exchanges

    def of_part(self, part: str) -> Progress:
        """Return the progress of a part of the run. From now on, only parts are reported."""
        self._has_parts = True
        return Progress(self._tell, part)

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Report the new history entry."""
        self._say(time.monotonic(), entry)

    def progressed(self, done: int, planned: int) -> None:
        """Report progress, unless a report was made just now."""
        self._done, self._planned = done, planned
        now = time.monotonic()
        if now >= self._due:
            self._say(now)

    def _say(self, now: float, entry: dict[str, Any] | None = None) -> None:
        if self._has_parts:
            return
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
                part=self._part,
            )
        )


# --- display ------------------------------------------------------------------------------------


class Display:
    """Show one line that is redrawn if ``live``, else one permanent line an epoch."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.titles: list[str] = []  # names of the run, from the outer to the inner block
        self._length = 0  # of the line on screen
        self._handle: Any = None  # display handle in a notebook
        self._due = 0.0
        self._said = "", 0  # part of the run, and epoch

    @property
    def title(self) -> str:
        """Return the name that tells this run from others; empty for a single run."""
        return ", ".join(self.titles)

    def show(self, standing: Standing) -> None:
        """Show the progress of a run."""
        if self.live:
            self.draw(lambda width: standing.line(self.title, width))
        elif (said := (standing.part, int(standing.last.get("epoch", 0)))) != self._said and said[
            1
        ]:
            self._said = said
            self.say(", ".join(standing.words()))

    def draw(self, line: Callable[[int], str]) -> None:
        """Draw a line, unless one was drawn just now. ``line`` takes the largest width."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _APART
            self._draw(line(shutil.get_terminal_size().columns - 1))

    def say(self, text: str) -> None:
        """Write a permanent line, which is a log record if records are JSON lines."""
        title = f"{self.title}: " if self.titles else ""
        if logs.as_json():
            notice.info("%s", title + text)
        else:
            _print(f"{title}{text}\n")

    def begin(self) -> None:
        """Reset the display for another run."""
        self._said = "", 0

    def erase(self) -> None:
        """Remove the live line."""
        if self._handle:
            self._handle.update({}, raw=True)
        elif self._length:
            _print(f"\r{' ' * self._length}\r")
        self._length = 0

    def _draw(self, text: str) -> None:
        if in_notebook():
            display: Any = sys.modules["IPython"].display.display
            of_notebook = {"text/plain": text}
            if self._handle:
                self._handle.update(of_notebook, raw=True)
            else:
                self._handle = display(of_notebook, raw=True, display_id=True)
            return
        _print(f"\r{text.ljust(self._length)}")
        self._length = len(text)

    def filter(self, record: logging.LogRecord) -> bool:
        """Erase the live line before a log record, and let the record pass."""
        self.erase()
        return True


def _print(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed must not stop the run
        print(text, end="", file=sys.stderr, flush=True)


_shown: ContextVar[Display | None] = ContextVar("shown", default=None)


@contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the progress of runs in this block; by default on a terminal or in a notebook only."""
    live = in_notebook() or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
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
    """Prefix the progress of runs in this block with a title."""
    display = _shown.get()
    if display:
        display.titles.append(title)
    try:
        yield
    finally:
        if display:
            display.titles.pop()


def say(words: Callable[[], Sequence[str]]) -> None:
    """Show phrases on the live line, as far as they fit, or as a permanent line."""
    if display := _shown.get():
        if display.live:
            display.draw(lambda width: " | ".join(words())[:width])
        else:
            display.say(", ".join(words()))


# --- progress of another process ----------------------------------------------------------------

_FILE = ".progress"


def of_run(folder: Path) -> Progress | None:
    """Return the callback that reports this folder's run, if anybody listens."""
    if display := _shown.get():
        display.begin()
        return Progress(display.show)
    if (folder / _FILE).exists():
        return Progress(lambda standing: _write(folder / _FILE, standing))
    return None


def _write(path: Path, standing: Standing) -> None:
    with suppress(OSError):  # a full disk must not stop the run
        other = path.with_suffix(".new")
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(asdict(standing), file)
        other.replace(path)


@contextmanager
def from_elsewhere(folder: Path) -> Iterator[Callable[[], None]]:
    """Let another process report this folder's run. Yield a function that shows it."""
    display, path = _shown.get(), folder / _FILE
    if not display:
        yield lambda: None
        return
    path.unlink(missing_ok=True)  # of a run that was killed
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
