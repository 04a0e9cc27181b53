"""The service: it takes requests in batches, asks the parties, and scores.

Requests that come together share a batch, and so one message to each party. A single request waits
for nobody. A large request takes several batches (`requests.Queue`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.tasks.inference.contribution_to_score import HOLDER
from vfl_flower.tasks.inference.predictions import predicted_columns
from vfl_flower.tasks.inference.serving import requests
from vfl_flower.tasks.inference.serving.embeddings import Embedded
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.metrics import Metrics
from vfl_flower.tasks.inference.serving.people import Person, identity
from vfl_flower.tasks.inference.serving.turns import Asking, Explained, Turns, apart
from vfl_flower.transport.http.guard import Refusals
from vfl_flower.transport.messages import Arrays

_WAITING = 40_000  # most ids of a caller that wait
_MORE = 256  # work of a batch for which parties get `score-timeout` once more
_APART = 30.0  # seconds between two alignments because of a party
_LOOK = 1.0  # seconds between two looks for a new version
_FIGURES = ("best_epoch", "epochs", "test_", "validation_")  # that `GET /v1/model` shows
_NO_SCORE: requests.Score = {"prediction": None, "probabilities": None, "parties": []}
_IDLE = 0.5  # seconds between two looks at parties while nobody asks


class Service:
    """Answers requests by the current version of a model, with a line in ``audit`` for each."""

    def __init__(
        self, load: Callable[[Metrics], Loaded], wake: Callable[[], None], audit: AuditLog
    ) -> None:
        self.metrics, self._audit, self.refusals = Metrics(), audit, Refusals(audit)
        self._load = load
        self.loaded = load(self.metrics)
        self.queue, self._asking = requests.Queue(_WAITING, wake), Asking(wake)
        self.metrics.queue_rows.set_function(lambda: self.queue.ids)
        self._new_ids = requests.NewIds(audit.path.with_name("serve.new-ids"))
        # A thread each: neither the web nor the scores wait for the disk.
        self._counting, self.recording = Turns("new ids"), Turns("audit lines", together=8)
        self._refusing = Future[None]()  # of the last calls that were refused
        self._refusing.set_result(None)
        self._looked = time.monotonic()
        self._aligned = -_APART
        self._tell()

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be answered now."""
        answers = self.loaded.any_subset or self.loaded.parties.all_answer
        return answers and self._audit.is_writable and not self.queue.closed

    def about(self) -> dict[str, Any]:
        """Return what the model is, for ``GET /v1/model``."""
        loaded, found = self.loaded, self.loaded.found
        figures: dict[str, Any] = found.strategy.get("figures") or {}
        said = {
            "model": loaded.name,
            "run": Path(loaded.config.model).name,
            "strategy": found.config.strategy,
            "finished": found.finished,
            "figures": {k: v for k, v in figures.items() if k.startswith(_FIGURES)},
            "classes": found.about_labels["classes"] or None,
            "threshold": found.threshold if len(found.about_labels["classes"]) == 2 else None,
            "ids": len(loaded.rows.ids),
            "parties": len(loaded.predictor.sizes),
            "parties_ready": loaded.parties.ready,
            "any_subset": loaded.any_subset,
            "people": None,  # columns of a person
            "explain_ids": 0,  # most ids of a request with contributions
            "drift": loaded.drift.latest,
            "withdrawn": dict(zip(("people", "of"), found.withdrawn, strict=True)),
        }
        if loaded.people and not loaded.releases.counts:
            said["people"] = loaded.people.columns
        if not loaded.explainer.refusal:
            said["explain_ids"] = min(loaded.explainer.most_ids, requests.MOST_IDS)
        epsilon = loaded.releases.epsilon
        return said | ({} if epsilon is None else {"epsilon": epsilon})

    async def answer(self, request: requests.Request) -> requests.Answers:
        """Take a request, and return its answers, or raise `VflError`."""
        with self.queue.room(request) as has_room:
            if not has_room:
                raise requests.UnavailableError(
                    "Too many ids of this caller wait for their scores. Try again in a second.",
                    *("full", 429),
                )
            loaded, most = self.loaded, self.loaded.config.serving.new_ids_per_day
            gone, people = loaded.found.withdrawn
            if gone > people * (limit := loaded.config.serving.max_withdrawn):
                raise requests.UnavailableError(
                    f"{gone} of the {people} people who trained the model have withdrawn, more "
                    f"than max-withdrawn = {limit:g} permits. Train a new model.",
                    "withdrawn",
                )
            by_rules = any(isinstance(one, Person) for one in request.ids[:1])
            if most and loaded.embeddings.can_find and by_rules == (loaded.people is not None):
                request.new = await apart(loaded.unknown, request.ids)
            if by_rules and loaded.parties.seeker:
                request.each *= len(loaded.parties.seeker.rules)
            if request.new and not self.queue.closed:
                new = {identity(one) for one in request.new}
                count = partial(self._new_ids.count, request.caller, new, most)
                await self._counting.run(request.caller, count)
            if not self.queue.put(request):
                raise requests.UnavailableError("The service is ending.", "ending")
        return await asyncio.wrap_future(request.answer)

    def close(self) -> None:
        """End the threads of this service, once no request comes any more."""
        self.loaded.parties.close()
        self._counting.close()
        self.recording.close()

    def line(
        self,
        ids: requests.Ids,
        request: str,
        caller: str,
        found: requests.Answers | None,
        outcome: str,
    ) -> Callable[[], None]:
        """Return what writes a request to the audit log, once, before it is answered."""
        asked = () if outcome in requests.UNASKED else ids  # else refused calls could fill the disk
        model, scores, explain = found or requests.Answers(self.loaded.name, [])
        used = Counter(chain.from_iterable(score["parties"] for score in scores))
        lines = [
            partial(
                self._audit.write,
                "score",
                request=request,
                caller=caller,
                number=len(ids),
                ids=self._audit.hashes([identity(one) for one in asked]),
                parties={str(party): used[party] for party in sorted(used)},
                model=model,
                outcome=outcome,
                **({"explain": True} if explain else {}),
            )
        ]

        def write() -> None:
            if lines:  # else it is written already
                lines.pop()()

        return write

    def _record_refusals(self) -> None:
        try:
            self.refusals.write()
        except VflError as error:
            log.error("%s", error)

    # --- the current version ----------------------------------------------------------------------

    def reload(self) -> None:
        """Load the current version. If it cannot be loaded, go on with the last one."""
        last = self.loaded
        last.parties.close()
        try:
            self.loaded = self._load(self.metrics)
        except VflError as error:
            last.is_known()  # do not try this version again
            last.parties.begin_again()
            notice.warning("The service goes on with model %s: %s", last.name, error)
            return
        self._tell()

    def _tell(self) -> None:
        loaded = self.loaded
        self.metrics.serves(
            Path(loaded.config.model).name, loaded.found.config.strategy, loaded.name
        )
        notice.info("Serving model %s, for %d ids.", loaded.name, len(loaded.rows.ids))

    def _look(self) -> None:
        """Load a new version, if there is one. Record refused calls."""
        now = time.monotonic()
        if now > self._looked + _LOOK:
            self._looked = now
            if self._refusing.done():
                self._refusing = self.recording.submit(self._record_refusals)
            parties_changed = self.loaded.parties.must_align and now > self._aligned + _APART
            if self.loaded.is_outdated or parties_changed:
                self._aligned = now
                while begun := self.queue.take(begun=True):  # one version answers a request
                    self._answer(begun)
                self.reload()

    # --- batches ----------------------------------------------------------------------------------

    def work(self) -> None:
        """Answer requests until the queue is closed and empty."""
        while True:
            self._look()
            self._asking.carry(self.loaded)
            batch = self.queue.take()
            if batch:
                self._answer(batch)
            elif self.queue.closed:
                self.recording.submit(self._record_refusals).result()
                return
            else:
                self.loaded.parties.look(_IDLE)

    def _answer(self, batch: list[requests.Piece]) -> None:
        """Score a batch, and answer each request that is complete."""
        began = time.monotonic()
        for request, ids, _ in batch:
            if request.taken == len(ids):  # its first piece
                self.metrics.stage_seconds.labels("queue").observe(began - request.came)
        try:
            self._score(batch)
        except Exception as error:  # answer all: nobody may wait for ever
            if not isinstance(error, VflError):
                log.exception("The service failed to score.")
                error = VflError(requests.FAILED)
            for request, _, _ in batch:
                request.fail(error)

    def _score(self, batch: list[requests.Piece]) -> None:
        began, loaded = time.monotonic(), self.loaded
        more = sum(piece.work for piece in batch) / _MORE
        until = began + loaded.config.serving.score_timeout * (1 + more)
        asked = loaded.rows_of([one for piece in batch for one in piece.ids])
        new, found = list[int | str | Person](), loaded.embeddings.no_ids
        if any(piece.request.new for piece in batch):
            counted = [one for request, ids, _ in batch for one in ids if one in request.new]
            unknown = np.flatnonzero(loaded.rows_of(counted) < 0).tolist()
            new = list(dict.fromkeys(counted[at] for at in unknown))
            # A party that is late here has half of the time left to give its aligned rows.
            found = loaded.embeddings.find(new, (until - began) / 2)
            until = max(until, time.monotonic() + (until - began) / 2)  # rules take turns
        matched = time.monotonic()
        self.metrics.stage_seconds.labels("match").observe(matched - began)
        rows, place = np.unique(asked, return_inverse=True)
        none = int(rows[0] < 0)  # the first place stands for the ids outside the alignment
        rows = rows[none:]
        if loaded.releases.counts:
            there = np.flatnonzero((found.places >= 0).any(axis=1)).tolist()
            loaded.releases.count(rows, [found.encoded[at] for at in there])
        embedded = loaded.embeddings.embed(rows, found, until)
        given = time.monotonic()
        self.metrics.stage_seconds.labels("party").observe(given - matched)
        own = np.zeros((len(embedded.given), loaded.rows.own.shape[1]), np.float32)
        own[: len(rows)] = loaded.rows.own[rows]
        for at, one in enumerate(new, len(rows)):
            own[at] = one.own if isinstance(one, Person) else 0
        scored = ScoredRows(embedded.blocks, own, embedded.given, embedded.blocks)
        known: NDArray[np.bool_] = np.all(embedded.given, axis=1)
        scores: list[requests.Score] = []
        if len(own):
            scored = loaded.predictor.score(embedded.blocks, own, embedded.given)
            known = scored.known if loaded.any_subset else known
            scores = self._scores(scored, known, embedded)
            for one, score in zip(new, scores[len(rows) :], strict=False):
                if isinstance(one, Person) and one.why and score["missing"]:
                    asked = score["missing"] if one.keys else {}
                    score["missing"] = {HOLDER: one.why, **asked}
        self.metrics.stage_seconds.labels("model").observe(time.monotonic() - given)
        of_new = dict(zip(new, range(len(rows), len(scores)), strict=False))
        who = partial(loaded.embeddings.person, rows, found)
        self._share_out(batch, place - none, of_new, scores, scored, who)
        keys = [*rows.tolist(), *found.encoded]
        if not known.all():
            keys = [keys[at] for at in np.flatnonzero(known).tolist()]
            scored = scored.at(known)
        # After the answers, which need not wait for it.
        if keys and loaded.drift.watch(keys, scored):
            self.metrics.drifts(loaded.drift.latest)

    def _share_out(
        self,
        batch: Sequence[requests.Piece],
        places: NDArray[np.int64],
        of_new: Mapping[int | str | Person, int],
        scores: list[requests.Score],
        scored: ScoredRows,
        who: Callable[[int, int], Arrays],
    ) -> None:
        """Give each request of a batch its scores, from the place of each id or new person."""
        loaded = self.loaded
        unknown = dict.fromkeys(map(str, range(len(loaded.predictor.sizes))), requests.UNKNOWN)
        nobody_asked = {HOLDER: requests.UNKNOWN}  # the parties were not asked
        without = ({**_NO_SCORE, "missing": why} for why in (nobody_asked, unknown))
        scores = [*scores, *without]  # at -2 and -1
        ends = np.cumsum([len(piece.ids) for piece in batch])
        for (request, ids, _), mine in zip(batch, np.split(places, ends), strict=False):
            own: list[int] = mine.tolist()
            if of_new:
                pairs = zip(ids, own, strict=True)
                own = [row if row >= 0 else of_new.get(one, -1) for one, row in pairs]
            if -1 in own:
                pairs = zip(ids, own, strict=True)
                own = [-2 if row == -1 and loaded.lacks(one) else row for one, row in pairs]
            answers = [scores[row] for row in own]
            refusal = None
            if not loaded.any_subset and any(score["missing"] for score in answers):
                refusal = requests.refusal_of(answers)
            explain = None
            if request.explain:
                answers = [dict(each) for each in answers]  # other requests share them
                asking = self._asking if request.explain == "columns" else None
                add = Explained(loaded, scored, own, answers, who).add
                explain = partial(add, asking, request.name)
            request.fail(refusal) if refusal else request.add(loaded.name, answers, explain)

    def _scores(
        self, rows: ScoredRows, known: NDArray[np.bool_], embedded: Embedded
    ) -> list[requests.Score]:
        """Return the answer for each aligned row, and for each id outside the alignment."""
        columns = predicted_columns(rows.outputs, self.loaded.found)
        scores: list[requests.Score] = [
            {"prediction": one} for one in columns.pop("prediction").tolist()
        ]
        if columns:
            names = [name.removeprefix("probability_") for name in columns]
            chances = np.stack(list(columns.values()), 1).tolist()
            for score, of_row in zip(scores, chances, strict=True):
                score["probabilities"] = dict(zip(names, of_row, strict=True))
        by_party = [embedded.why(party) for party in range(rows.given.shape[1])]
        if rows.suspects is not None:
            for row, party in enumerate(rows.suspects.tolist()):
                scores[row]["inconsistent"] = party if party >= 0 else None
                if party >= 0:
                    self.metrics.inconsistent.labels(str(party)).inc()
                    if not rows.given[row, party]:  # the score leaves it out
                        by_party[party][row] = requests.INCONSISTENT
        for party, whys in enumerate(by_party):
            for why, number in Counter(filter(None, whys)).items():
                self.metrics.missing.labels(str(party), why).inc(number)
        shared: dict[tuple[str, ...], requests.Score] = {}  # by rows with the same parties
        of_rows: list[tuple[str, ...]] = list(zip(*by_party, strict=True))
        of_rows = of_rows or [()] * len(scores)  # without any party
        for score, reasons in zip(scores, of_rows, strict=True):
            if reasons not in shared:
                missing = {str(party): why for party, why in enumerate(reasons) if why}
                parties = [party for party, why in enumerate(reasons) if not why]
                shared[reasons] = {"parties": parties, "missing": missing}
            score.update(shared[reasons])
        for row in np.flatnonzero(~known).tolist():
            scores[row] = {**_NO_SCORE, "missing": scores[row]["missing"]}
        return scores
