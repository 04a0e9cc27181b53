"""Ends a run whose SuperLink has gone: Flower's calls would wait for it without end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from vfl_flower.config.errors import senders
from vfl_flower.config.logs import notice
from vfl_flower.transport.base import Transport

_LOOK = 0.5  # seconds between two looks at the time without an answer
_APART = 2.0  # seconds between two questions
_SILENT = 4.0  # seconds without an answer, after which nobody waits for Flower's calls
_TOLD = 8.0
_GONE = 20.0
_AGAIN = 5.0  # seconds between two signals: each ends one of Flower's calls


@contextmanager
def watched(transport: Transport) -> Iterator[None]:
    """Within the block, end this process by SIGTERM if its SuperLink stays silent.

    ``transport.silent`` says whether the SuperLink has not answered for some seconds. Seconds in
    which this process stands still do not count.
    """
    silent, over = [0.0], Event()

    def ask() -> None:
        while not over.wait(_APART):
            with suppress(Exception):  # a refusal is an answer too
                list(transport.get_node_ids())
            silent[0] = 0.0

    def look() -> None:
        told = False
        while not over.wait(_LOOK):
            silent[0] += _LOOK
            transport.silent = silent[0] >= _SILENT
            if told and not transport.silent:
                notice.info("The SuperLink answers again.")
            elif not told and silent[0] >= _TOLD:
                notice.warning(
                    "The SuperLink has not answered for %g s. Without an answer, the run ends in "
                    "%g s.",
                    *(_TOLD, _GONE - _TOLD),
                )
            told = silent[0] >= _TOLD or (told and transport.silent)
            if silent[0] >= _GONE:
                senders[signal.SIGTERM] = f"A SuperLink that did not answer for {_GONE:g} s"
                os.kill(os.getpid(), signal.SIGTERM)
                over.wait(_AGAIN)

    for each in (ask, look):
        Thread(target=each, daemon=True).start()
    try:
        yield
    finally:
        over.set()
