"""A thread that callers share fairly, and a thread apart for what is large."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

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
        await self._turn(caller)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._next()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Make a call after the one under way; may be called in any thread."""
        return self._thread.submit(call)

    def close(self) -> None:
        """End the thread, once no call comes any more."""
        self._thread.shutdown()

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


async def apart(call: Callable[..., T], ids: Sequence[int | str], *more: Any) -> T:
    """Make a call, in a thread if there are many ids: other callers do not wait for it."""
    if len(ids) > _MANY:
        return await asyncio.to_thread(call, ids, *more)
    return call(ids, *more)
