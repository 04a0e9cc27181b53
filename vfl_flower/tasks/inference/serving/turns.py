"""Threads that callers share fairly, one of them for contributions to scores."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from vfl_flower.config.errors import VflError
from vfl_flower.tasks.inference.serving.requests import UnavailableError

log = logging.getLogger("flwr")

T = TypeVar("T")

_MOST = 20  # requests of a caller that wait for contributions
_MANY = 2048  # ids of a call that the web's thread does not make itself


class Turns:
    """A thread that makes one call at a time. Callers that wait take turns, a call each.

    Only the web's thread uses it, but for `submit`.

    Parameters
    ----------
    name : name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first
        self._busy = False

    async def run(self, caller: str, call: Callable[[], T]) -> T:
        """Make a call in the thread, once it is the caller's turn; return what it returns."""
        if self._busy:
            await self._turn(caller)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._busy = False
            if self._lines:
                self._next()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Make a call after the one under way; may be called in any thread."""
        return self._thread.submit(call)

    def close(self) -> None:
        """End the thread, once no call comes any more."""
        self._thread.shutdown()

    async def _turn(self, caller: str) -> None:
        """Wait until the thread is free for this caller."""
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


class Explaining:
    """The requests that wait for contributions. Only the web's thread uses it."""

    def __init__(self) -> None:
        self._turns = Turns("contributions")
        self._requests = Counter[str]()  # by caller

    @contextmanager
    def counted(self, caller: str) -> Iterator[None]:
        """Count a request of a caller for contributions within the block.

        Raises
        ------
        UnavailableError
            If too many requests of the caller wait.
        """
        if self._requests[caller] >= _MOST:
            sentence = "Too many requests of this caller wait for contributions. Try again later."
            raise UnavailableError(sentence, "full", 429)
        self._requests[caller] += 1
        try:
            yield
        finally:
            self._requests[caller] -= 1

    async def run(self, caller: str, pieces: Sequence[Callable[[], None]]) -> None:
        """Compute the contributions of a request.

        Raises
        ------
        VflError
            If that fails.
        """
        for piece in pieces:
            try:
                await self._turns.run(caller, piece)
            except VflError:
                raise
            except Exception:
                log.exception("The service failed to explain scores.")
                raise VflError("The service failed. Its log says why.") from None


async def apart(call: Callable[..., T], ids: Sequence[int | str], *more: Any) -> T:
    """Make a call, in a thread if there are many ids: other callers do not wait for it."""
    if len(ids) > _MANY:
        return await asyncio.to_thread(call, ids, *more)
    return call(ids, *more)
