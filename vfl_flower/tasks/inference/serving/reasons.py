"""Contributions and reasons of a request's scores, computed in another thread.

Parties are asked by the service's thread alone (`Asking.carry`): at most one message is out to a
party.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.tasks.inference import reasons
from vfl_flower.tasks.inference.reasons import Slopes
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.requests import Score, UnavailableError
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.messages import Arrays

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
