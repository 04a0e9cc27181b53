"""Contributions to scores, computed in a separate thread: other requests do not wait for them.

A request computes them in pieces. Callers that wait take turns, a piece each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vfl_flower.config.errors import VflError
from vfl_flower.tasks.inference.contribution_to_score import Explainer, ScoredRows
from vfl_flower.tasks.inference.serving.requests import Score, UnavailableError
from vfl_flower.tasks.inference.serving.turns import Turns

log = logging.getLogger("flwr")

_MOST = 20  # requests of a caller that wait for contributions


class Explaining:
    """The requests that wait for contributions. Only the web's thread uses it."""

    def __init__(self) -> None:
        self._turns = Turns("contributions")
        self._requests = Counter[str]()  # by caller

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
            try:
                await self._turns.run(caller, piece)
            except VflError:
                raise
            except Exception:
                log.exception("The service failed to explain scores.")
                raise VflError("The service failed. Its log says why.") from None


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
