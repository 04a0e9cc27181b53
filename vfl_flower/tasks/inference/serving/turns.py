"""Threads that callers share fairly, one of them for contributions to scores."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.tasks.inference.serving.requests import UnavailableError

T = TypeVar("T")
_Call = tuple[Callable[[], Any], asyncio.Future[Any]]

_MOST = 20  # requests of a caller that wait for contributions
_MANY = 2048  # ids of a call that the web's thread does not make itself


class Turns:
    """A thread that makes calls, one after the other. Callers that wait take turns, a call each.

    Only the web's thread uses it, but for `submit`. Short calls are made ``together``, since each
    change of threads takes longer than they do.
    """

    def __init__(self, name: str, together: int = 1) -> None:
        self._thread, self._together = ThreadPoolExecutor(1, name), together
        self._lines: dict[str, deque[_Call]] = {}  # by caller, the next one first
        self._busy = False

    async def run(self, caller: str, call: Callable[[], T]) -> T:
        """Make a call in the thread, once it is the caller's turn; return what it returns."""
        made: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append((call, made))
        if not self._busy:
            self._next()
        return await made

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Make a call after those under way; may be called in any thread."""
        return self._thread.submit(call)

    def close(self) -> None:
        """End the thread, once no call comes any more."""
        self._thread.shutdown()

    def _next(self) -> None:
        """Give the thread to the next callers that wait."""
        calls = list[_Call]()
        while self._lines and len(calls) < self._together:
            caller, line = next(iter(self._lines.items()))
            del self._lines[caller]
            call, made = line.popleft()
            if line:
                self._lines[caller] = line
            if not made.done():  # else its caller has gone
                calls.append((call, made))
        self._busy = bool(calls)
        if calls:
            loop = asyncio.get_running_loop()
            outcomes = loop.run_in_executor(self._thread, _outcomes, calls)
            outcomes.add_done_callback(partial(self._made, calls))

    def _made(self, calls: Sequence[_Call], outcomes: asyncio.Future[list[Any]]) -> None:
        for (_, made), (value, error) in zip(calls, outcomes.result(), strict=True):
            if made.done():  # its caller has gone
                continue
            if error is None:
                made.set_result(value)
            else:
                made.set_exception(error)
        self._next()


def _outcomes(calls: Sequence[_Call]) -> list[tuple[Any, Exception | None]]:
    """Make calls; return the value or the error of each."""
    outcomes: list[tuple[Any, Exception | None]] = []
    for call, _ in calls:
        try:
            outcomes.append((call(), None))
        except Exception as error:  # its caller gets it
            outcomes.append((None, error))
    return outcomes


class Explaining:
    """The requests that wait for contributions. Only the web's thread uses it."""

    def __init__(self) -> None:
        self._turns = Turns("contributions")
        self._requests = Counter[str]()  # by caller

    @contextmanager
    def counted(self, caller: str) -> Iterator[None]:
        """Count a caller's request within the block, or raise `UnavailableError`: many wait."""
        if self._requests[caller] >= _MOST:
            sentence = "Too many requests of this caller wait for contributions. Try again later."
            raise UnavailableError(sentence, "full", 429)
        self._requests[caller] += 1
        try:
            yield
        finally:
            self._requests[caller] -= 1

    async def run(self, caller: str, pieces: Sequence[Callable[[], None]]) -> None:
        """Compute the contributions of a request, or raise `VflError`."""
        for piece in pieces:
            try:
                await self._turns.run(caller, piece)
            except VflError:
                raise
            except Exception:
                log.exception("The service failed to explain scores.")
                raise VflError("The service failed. Its log says why.") from None


async def apart(call: Callable[..., T], ids: Sequence[Any], *more: Any) -> T:
    """Make a call, in a thread if there are many ids: other callers do not wait for it."""
    if len(ids) > _MANY:
        return await asyncio.to_thread(call, ids, *more)
    return call(ids, *more)
