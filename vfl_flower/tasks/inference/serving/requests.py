"""Requests for scores on their way from the web to the service, and their answers.

Callers share the service fairly. A batch has at most `BATCH` units of work, and all callers that
wait get equal shares of it. So a large request is answered in pieces, over several batches, and a
small request waits for one batch at most. While small requests come, batches are smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.names import in_words
from vfl_flower.records.ledger import opened, today
from vfl_flower.tasks.inference.contribution_to_score import HOLDER
from vfl_flower.tasks.inference.serving.people import Person

Ids = Sequence[int | str | Person]

FAILED = "The service failed. Its log says why."
MOST_IDS = 10_000
"""Most ids of one request."""
BATCH = 2048
"""Most work of a batch, in ids of the alignment."""
_SMALL = BATCH // 8  # most ids of a small request, and work of a batch while such requests come
_LULL = 1.0  # seconds after a small request until batches are large again
_LAST_DAY = "day"  # name in the ledger of new ids
_NEW = 8  # the work of an id that the parties must find first, in ids of the alignment

UNKNOWN, REFUSED, FAULTY = "unknown", "refused", "faulty"
INCONSISTENT = "inconsistent"
"""Reasons, besides late and down, why a party's embedding is missing from a score."""

UNASKED = ("full", "new-ids", "ending", "withdrawn")
"""Outcomes of requests whose ids no party was asked about."""

Score = dict[str, Any]
"""The answer for one id: "prediction", "probabilities", "parties" used, and "missing" parties.

If scores are flagged, "inconsistent" is the party that does not fit the others, or None.
Contributions to the score can follow (`contribution_to_score.Explainer`)."""


class UnavailableError(VflError):
    """No answer now: an outcome for metrics and audit log, HTTP's status, and seconds to wait."""

    def __init__(
        self, sentence: str, outcome: str = "unavailable", status: int = 503, retry: int = 1
    ) -> None:
        super().__init__(sentence)
        self.outcome, self.status, self.retry = outcome, status, retry


class Answers(NamedTuple):
    """A model's scores for the ids of a request, and what adds contributions to them, slowly."""

    model: str
    scores: list[Score]
    explain: Sequence[Callable[[], None]] = ()


@dataclass(eq=False)
class Request:
    """The ids of one call, and its answer.

    explain : whether the answers need the contributions to the scores; ``columns`` for reasons.
    new, each : people outside the alignment, and the work for one of them.
    """

    name: str
    caller: str
    ids: Ids
    explain: bool | str = False
    answer: Future[Answers] = field(default_factory=Future)
    came: float = field(default_factory=time.monotonic)
    new: frozenset[int | str | Person] = frozenset()
    each: int = _NEW
    taken: int = 0
    _scores: list[Score] = field(default_factory=list)
    _explain: list[Callable[[], None]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """The number of ids that no batch has taken."""
        return len(self.ids) - self.taken

    @property
    def work(self) -> int:
        """The work that is left, at most."""
        return (len(self.ids) - self.taken) * (self.each if self.new else 1)

    def take(self, work: int) -> Piece:
        """Take the next ids, with at most so much work, but at least one id."""
        start, done = self.taken, 0
        if not self.new:
            self.taken += min(self.left, max(1, work))
            done = self.taken - start
        while self.new and self.left and (done < work or self.taken == start):
            one = self.each if self.ids[self.taken] in self.new else 1
            if self.taken > start and done + one > work:
                break
            self.taken, done = self.taken + 1, done + one
        return Piece(self, self.ids[start : self.taken], done)

    def add(self, model: str, scores: list[Score], explain: Callable[[], None] | None) -> None:
        """Add the scores of the next piece. Answer after the last one."""
        self._scores += scores
        self._explain += [explain] if explain else []
        if len(self._scores) == len(self.ids):
            with suppress(InvalidStateError):  # its caller has gone
                self.answer.set_result(Answers(model, self._scores, self._explain))

    def fail(self, error: Exception) -> None:
        """Answer that there are no scores. Take no further piece."""
        self.taken = len(self.ids)
        with suppress(InvalidStateError):  # its caller has gone, or has an answer
            self.answer.set_exception(error)


class Piece(NamedTuple):
    """Some ids of a request, which one batch scores."""

    request: Request
    ids: Ids
    work: int


class Queue:
    """Requests that wait for their batches; ``wake`` is called after each.

    most : most ids of a caller that wait. A request may take half of the places that its caller has
        left, so that large requests keep out no small ones.
    """

    def __init__(self, most: int, wake: Callable[[], None]) -> None:
        self._most, self._wake = most, wake
        self._lock = Lock()
        self._lines: dict[str, list[Request]] = {}  # by caller
        self._coming: dict[str, list[Request]] = {}  # by caller: places that are held for them
        self._small = -_LULL  # when the last small request came
        self.closed = False

    @property
    def ids(self) -> int:
        """The number of ids that wait."""
        with self._lock:
            return sum(each.left for line in self._lines.values() for each in line)

    @contextmanager
    def room(self, request: Request) -> Iterator[bool]:
        """Yield whether the request may wait. Hold its places until the block ends."""
        with self._lock:
            line = [*self._lines.get(request.caller, ()), *self._coming.get(request.caller, ())]
            waiting = sum(each.left for each in line)
            if has_room := not waiting or 2 * len(request.ids) <= self._most - waiting:
                self._coming.setdefault(request.caller, []).append(request)
        try:
            yield has_room
        finally:
            if has_room:
                with self._lock:
                    self._coming[request.caller].remove(request)

    def put(self, request: Request) -> bool:
        """Add a request; return whether the queue is still open."""
        with self._lock:
            if self.closed:
                return False
            self._lines.setdefault(request.caller, []).append(request)
            if len(request.ids) <= _SMALL:
                self._small = request.came
        self._wake()
        return True

    def take(self, begun: bool = False) -> list[Piece]:
        """Return the pieces of the next batch, the smallest first; only of ``begun`` requests."""
        pieces: list[Piece] = []
        with self._lock:
            self._lines = {
                caller: left
                for caller, line in self._lines.items()
                if (left := [each for each in line if each.left])
            }
            lines = {
                caller: wanted
                for caller, line in self._lines.items()
                if (wanted := [each for each in line if each.taken or not begun])
            }
            room = BATCH if time.monotonic() > self._small + _LULL else _SMALL
            works = [sum(each.work for each in line) for line in lines.values()]
            if sum(works) <= room:
                pieces = [each.take(each.work) for line in lines.values() for each in line]
                lines = {}
            share = _share(works, room) if lines else 0
            for caller, line in lines.items():
                taken = _pieces(line, min(share, room))
                room -= sum(piece.work for piece in taken)
                pieces += taken
                if taken:  # next time, the others come first
                    served = {piece.request: None for piece in taken}
                    waiting = [each for each in self._lines.pop(caller) if each not in served]
                    self._lines[caller] = [*waiting, *served]
        return sorted(pieces, key=lambda piece: len(piece.ids))

    def close(self) -> None:
        """Refuse further requests."""
        with self._lock:
            self.closed = True
        self._wake()


def _pieces(line: Sequence[Request], room: int) -> list[Piece]:
    """Take the next pieces of one caller's requests, with about so much work."""
    share, taken = _share([each.work for each in line], room), list[Piece]()
    for request in line:
        if room <= 0:
            break
        taken.append(request.take(min(share, room)))
        room -= taken[-1].work
    return taken


def _share(works: Sequence[int], room: int) -> int:
    """Return the largest equal share of the room: a smaller work leaves its rest to the others."""
    left = room
    for place, work in enumerate(sorted(works)):
        share = max(1, left // (len(works) - place))
        if work >= share:
            return share
        left -= work
    return room


def refusal_of(scores: Sequence[Score]) -> UnavailableError | None:
    """Return the refusal of a request, if a party that its scores need does not answer."""
    gone = {
        party: why
        for score in scores
        for party, why in score["missing"].items()
        if why != UNKNOWN and party != HOLDER
    }
    if not gone:
        return None
    who = ", ".join(f"party {party} ({why})" for party, why in sorted(gone.items()))
    return UnavailableError(
        in_words(f"The model needs all its parties, and these do not answer: {who}.")
    )


# --- new ids of a caller --------------------------------------------------------------------------


class NewIds:
    """Counts new ids by caller and day of UTC, in a file. After a restart, ids count again.

    Parties count each id for ever (`alignment.asked_ids`), so a caller may name few new ones. An id
    counts for each caller, so that nobody learns from the count what other callers ask about.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked: dict[str, set[int | str | bytes]] = {}  # by caller, since the service began
        self._day = 0
        try:
            if path.exists():
                with opened(path) as ledger:
                    self._day = ledger.count(_LAST_DAY)
        except VflError:
            raise ConfigError(
                f"{path} cannot be read, which counts the new ids of callers. Delete it."
            ) from None

    def count(self, caller: str, ids: Set[int | str | bytes], most: int) -> None:
        """Count new ids before parties are asked about them, or raise `UnavailableError`."""
        if today() > self._day:  # a clock that is set back must not start a new day
            self._day, self._asked = today(), {}
        new = ids - self._asked.get(caller, set())
        if not new:
            return
        with opened(self._path) as ledger:
            left = most - ledger.count(f"of {caller}", self._day)
            if len(new) > left:
                raise UnavailableError(
                    f"The request has {len(new)} ids that the alignment does not have, and this "
                    f"caller may ask about {max(0, left)} more today. Ask again tomorrow (UTC), or "
                    f"ask the label holder to raise new-ids-per-day = {most}.",
                    *("new-ids", 429, max(1, (self._day + 1) * 86400 - int(time.time()))),
                )
            ledger.add(f"of {caller}", len(new), self._day)
            ledger.write(_LAST_DAY, self._day)
        self._asked.setdefault(caller, set()).update(new)
