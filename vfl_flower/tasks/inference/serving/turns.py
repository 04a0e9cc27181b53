"""Threads that callers share fairly, and contributions and reasons of scores in one of them.

The service's thread alone asks parties for reasons (`Asking.carry`): at most one message is out to
a party.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.tasks.inference import reasons
from vfl_flower.tasks.inference.reasons import Slopes
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.requests import FAILED, Score, UnavailableError
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.messages import Arrays

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
        """Count a request within the block, or raise `UnavailableError` if too many wait."""
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
                raise VflError(FAILED) from None


async def apart(call: Callable[..., T], ids: Sequence[Any], *more: Any) -> T:
    """Make a call, in a thread if there are many ids: other callers do not wait for it."""
    if len(ids) > _MANY:
        return await asyncio.to_thread(call, ids, *more)
    return call(ids, *more)


# --- contributions and reasons of a request's scores ----------------------------------------------

Answers = tuple[dict[int, GivenReasons], dict[int, str]]

_SLOWER = 5  # times score-timeout: a party differentiates a thousand rows


class Explained(NamedTuple):
    """The scores of a request that are to be explained.

    places : place of each score among the scored rows, or -1.
    who : returns what names the person of a scored row to a party.
    """

    loaded: Loaded
    scored: ScoredRows
    places: list[int]
    scores: list[Score]
    who: Callable[[int, int], Arrays]

    def add(self, asking: Asking | None, request: str) -> None:
        """Add the contributions to the scores; with ``asking``, also reasons by columns."""
        loaded = self.loaded
        known = [at for at, each in enumerate(self.scores) if each["prediction"] is not None]
        rows = self.scored.at([self.places[at] for at in known])
        said = [self.scores[at]["prediction"] for at in known]
        found = loaded.explainer.explain(rows, said)
        for row, (at, contributions) in enumerate(zip(known, found, strict=True)):
            self.scores[at].update(contributions)
            if asking:
                ask = partial(self._ask, asking, f"{request}:{at}", self.places[at])
                given = rows.at([row]), self.scores[at], ask
                self.scores[at].update(reasons.of_score(loaded.explainer, *given))

    def _ask(self, asking: Asking, name: str, place: int, slopes: dict[int, Slopes]) -> Answers:
        return asking.ask(
            self.loaded,
            {party: each.order(name, **self.who(place, party)) for party, each in slopes.items()},
        )


class Asking:
    """The orders for reasons that wait for the service's thread, which ``wake`` wakes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting = SimpleQueue[tuple[Loaded, Mapping[int, ReasonsOrder], Future[Answers]]]()

    def ask(self, loaded: Loaded, orders: Mapping[int, ReasonsOrder]) -> Answers:
        """Return the parties' answers, and why others have given none; in any other thread."""
        answered = Future[Answers]()
        self._waiting.put((loaded, orders, answered))
        self._wake()
        try:
            return answered.result(loaded.config.running.party_timeout)
        except TimeoutError:
            raise UnavailableError("The service is ending.", "ending") from None

    def carry(self, current: Loaded) -> None:
        """Ask the parties for what waits."""
        while not self._waiting.empty():
            loaded, orders, answered = self._waiting.get()
            try:
                if loaded is not current:
                    raise UnavailableError("The model has changed since the score. Ask again.")
                until = time.monotonic() + _SLOWER * loaded.config.serving.score_timeout
                answered.set_result(loaded.parties.ask(orders, GivenReasons, until))
            except Exception as error:  # its caller gets it
                answered.set_exception(error)
