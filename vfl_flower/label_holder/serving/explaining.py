"""Contributions to scores, computed in a separate thread: other requests do not wait for them.

A request computes them in pieces. Callers that wait take turns, a piece each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from vfl_flower.config.errors import VflError
from vfl_flower.label_holder.contribution_to_score import Explainer, ScoredRows
from vfl_flower.label_holder.serving.requests import Score, UnavailableError

log = logging.getLogger("flwr")

_MOST = 20  # requests of a caller that wait for contributions


class Explaining:
    """The requests that wait for contributions. Only the web's thread uses it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "contributions")
        self._requests = Counter[str]()  # by caller
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first
        self._busy = False

    @contextmanager
    def counted(self, caller: str, explains: bool) -> Iterator[None]:
        """Count a request of a caller within the block, if it asks for contributions.

        Raises
        ------
        UnavailableError
            If too many requests of the caller wait.
        """
        if explains and self._requests[caller] >= _MOST:
            sentence = "Too many requests of this caller wait for contributions. Try again later."
            raise UnavailableError(sentence, "full", 429)
        self._requests[caller] += explains
        try:
            yield
        finally:
            self._requests[caller] -= explains

    async def run(self, caller: str, pieces: Sequence[Callable[[], None]]) -> None:
        """Compute the contributions of a request.

        Raises
        ------
        VflError
            If that fails.
        """
        for piece in pieces:
            await self._turn(caller)
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, piece)
            except VflError:
                raise
            except Exception:
                log.exception("The service failed to explain scores.")
                raise VflError("The service failed. Its log says why.") from None
            finally:
                self._next()

    async def _turn(self, caller: str) -> None:
        """Wait until the thread is free for this caller."""
        if not self._busy:
            self._busy = True
            return
        waits = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(waits)
        try:
            await waits
        except asyncio.CancelledError:
            if waits.done() and not waits.cancelled():  # its turn had come
                self._next()
            raise

    def _next(self) -> None:
        """Give the thread to the next caller that waits."""
        self._busy = False
        while self._lines and not self._busy:
            caller, line = next(iter(self._lines.items()))
            del self._lines[caller]
            waits = line.popleft()
            if line:
                self._lines[caller] = line
            if not waits.done():
                self._busy = True
                waits.set_result(None)


def add_contributions(
    explainer: Explainer, scored: ScoredRows, places: list[int], scores: list[Score]
) -> None:
    """Add the contributions to scores.

    Parameters
    ----------
    places : place of each score among the scored rows, or -1.
    """
    known = [number for number, each in enumerate(scores) if each["prediction"] is not None]
    rows = scored.at([places[number] for number in known])
    found = explainer.explain(rows, [scores[number]["prediction"] for number in known])
    for number, contributions in zip(known, found, strict=True):
        scores[number].update(contributions)
