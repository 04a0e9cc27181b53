"""Ctrl-C and SIGTERM during training: a run keeps a checkpoint, and ends then."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from vfl_flower.config.errors import Interrupted, Terminated

_HINT = b"\nStopping at the next checkpoint; again, to stop without one.\n"


class Held:
    """A signal that has come, and waits until the run is at a moment where it can be kept."""

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def end(self, keep: Callable[[], None], epochs: float, folder: Path) -> None:
        """Keep a checkpoint and end the run, if a signal has come.

        Parameters
        ----------
        epochs, folder : how long the run has trained, and where its results are.

        Raises
        ------
        Interrupted, Terminated
            By Ctrl-C and SIGTERM.
        """
        if self.came is None:
            return
        keep()
        when = f"ended the run after {epochs:.3g} epochs."
        if self.came == signal.SIGINT:
            raise Interrupted(f"Ctrl-C {when}", str(folder))
        raise Terminated(f"SIGTERM {when}", str(folder))


@contextmanager
def signals_held() -> Iterator[Held]:
    """Hold the first Ctrl-C or SIGTERM until `Held.end`; the second has its usual effect.

    A handler that is not Python's or ours stays. So do all of them in another than the main thread,
    where Python allows no other.
    """
    held, before = Held(), dict[signal.Signals, Any]()

    def hold(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        held.came = signal.Signals(number)
        with suppress(OSError, ValueError, AttributeError):  # printing may be what it interrupts
            os.write(sys.stderr.fileno(), _HINT)

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(each)
            if handler in (signal.default_int_handler, signal.SIG_DFL, end_by_sigterm):
                before[each] = handler
        for each in before:
            signal.signal(each, hold)
    try:
        yield held
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end_by_sigterm(number: int, frame: FrameType | None) -> None:
    """End this process by an exception, so that Flower's processes end too."""
    raise Terminated
