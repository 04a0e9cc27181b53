"""Requests for scores on their way from the web to the service, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

Ids = Sequence[int | str]

MOST_IDS = 10_000
"""Most ids of one request."""

Score = dict[str, Any]
"""The answer for one id: "prediction", "probabilities", "parties" used, and "missing" parties.

Contributions to the score can follow (`contribution_to_score.Explainer`)."""


class Answers(NamedTuple):
    """The answers of one request.

    model : the model's version.
    scores : an answer for each id.
    explain : adds the contributions to the scores, if the request asks for them. It may take long.
    """

    model: str
    scores: list[Score]
    explain: Callable[[], None] | None = None


@dataclass(eq=False)
class Request:
    """The ids of one call, and where its answer goes.

    answer : is called once, from the service's thread, with the answers, or with the reason why
        there are none.
    explain : whether the answers need the contributions to the scores.
    """

    name: str
    caller: str
    ids: Ids
    answer: Callable[[Answers | Exception], None]
    explain: bool = False
    came: float = field(default_factory=time.monotonic)


class Queue:
    """Requests that wait for their batch.

    Parameters
    ----------
    most : most ids that wait; further requests are refused.
    wake : is called after each request.
    """

    def __init__(self, most: int, wake: Callable[[], None]) -> None:
        self._most, self._wake = most, wake
        self._lock = Lock()
        self._waiting: list[Request] = []
        self.ids = 0
        self.closed = False

    def put(self, request: Request) -> bool:
        """Add a request; return whether there was room for it."""
        with self._lock:
            if self.closed or (self.ids and self.ids + len(request.ids) > self._most):
                return False
            self._waiting.append(request)
            self.ids += len(request.ids)
        self._wake()
        return True

    def take(self, most: int) -> list[Request]:
        """Return the next requests, with at most so many ids, but at least one request."""
        with self._lock:
            taken, ids = 0, 0
            for request in self._waiting:
                if taken and ids + len(request.ids) > most:
                    break
                taken, ids = taken + 1, ids + len(request.ids)
            found, self._waiting = self._waiting[:taken], self._waiting[taken:]
            self.ids -= ids
        return found

    def close(self) -> None:
        """Refuse further requests."""
        with self._lock:
            self.closed = True
        self._wake()
