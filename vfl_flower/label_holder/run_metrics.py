"""Metrics of a training run in Prometheus' format, and the application that answers with them.

None shows labels of rows, ids or features. If noise protects labels, no metric follows from them
without the noise.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from vfl_flower.label_holder.callbacks import RunState, TrainingRun
from vfl_flower.transport.http.guard import STATUSES, Guard
from vfl_flower.transport.http.tokens import Tokens

_ROWS = ("train", "validation", "test")
_SHORTEST, _LONGEST = 1.0, 60.0  # seconds between two calls of Prometheus


class Surroundings(Collector):
    """Figures of the machine of a service or a training run, read when Prometheus asks."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self._folder, self._guard = folder, guard

    def collect(self) -> Iterator[Metric]:
        """Yield the room on the disk, and when the certificate expires."""
        with suppress(OSError):
            disk = os.statvfs(self._folder)
            free = disk.f_bavail * disk.f_frsize
            yield GaugeMetricFamily("vfl_results_free_bytes", "Room for results and logs.", free)
        if self._guard.certificate:
            end, text = self._guard.certificate.end, "When the certificate expires."
            yield GaugeMetricFamily("vfl_certificate_end_timestamp_seconds", text, end)


class RunMetrics(Collector):
    """The metrics of a run, which its observer sets, and Prometheus reads."""

    def __init__(self, run: TrainingRun, name: str) -> None:
        self._run, self._name = run, name
        self.failures: Counter[int] = Counter()  # by party
        self.answers = Counter(dict.fromkeys(STATUSES, 0))
        self.checkpoints, self.saved_at = 0, 0.0  # in Unix time
        self.epsilon: float | None = None
        self.over = False
        self._asked: deque[float] = deque(maxlen=5)

    def asked(self) -> None:
        """Note that somebody reads the metrics now."""
        self._asked.append(time.monotonic())

    @property
    def seconds_until_read(self) -> float:
        """Return the time in which each Prometheus reads again; 0 if nobody reads regularly."""
        asked = list(self._asked)  # another thread adds to it
        pauses = [second - first for first, second in itertools.pairwise(asked)]
        longest = max(pauses, default=0.0)
        if not _SHORTEST <= longest <= _LONGEST or time.monotonic() - asked[-1] > 2 * longest:
            return 0.0
        return 2 * longest  # two of them may read in turn

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its current value."""
        run, state = self._run, self._run.state
        info = GaugeMetricFamily("vfl_run_info", "The training run.", labels=["run", "strategy"])
        info.add_metric([self._name, run.config.strategy], 1)
        yield info
        over = GaugeMetricFamily(
            "vfl_run_over", "1 if the run has ended well, or was stopped.", labels=["run"]
        )
        over.add_metric([self._name], int(self.over))
        yield over
        yield CounterMetricFamily("vfl_steps", "Party steps answered.", state.done)
        yield GaugeMetricFamily("vfl_planned_steps", "Party steps of the whole run.", state.planned)
        yield GaugeMetricFamily("vfl_epoch", "Epochs done, as a mean of the parties.", state.epoch)
        yield GaugeMetricFamily(
            "vfl_run_seconds", "Time since the run began, without interruptions.", state.seconds
        )
        yield from self._of_parties(state)
        yield from _of_model(state)
        if self.epsilon is not None:
            yield GaugeMetricFamily("vfl_epsilon", "Epsilon spent.", self.epsilon)
        answers = CounterMetricFamily(
            "vfl_http_answers", "Answers to HTTP calls.", labels=["status"]
        )
        for status, number in self.answers.items():
            answers.add_metric([str(status)], number)
        yield answers
        yield CounterMetricFamily("vfl_checkpoints", "Checkpoints saved.", self.checkpoints)
        if self.checkpoints:
            yield GaugeMetricFamily(
                "vfl_checkpoint_timestamp_seconds", "Time of the last checkpoint.", self.saved_at
            )

    def _of_parties(self, state: RunState) -> Iterator[Metric]:
        party, text = ["party"], "1, or 0 from a party's failure to its return."
        takes_part = GaugeMetricFamily("vfl_party_in_training", text, labels=party)
        failures = CounterMetricFamily("vfl_failures", "Failures and refusals.", labels=party)
        exchanges = CounterMetricFamily("vfl_exchanges", "Messages answered.", labels=party)
        sent = CounterMetricFamily("vfl_bytes", "Array bytes.", labels=["party", "direction"])
        waits = GaugeMetricFamily(
            "vfl_party_wait_seconds", "Time since a message that has no answer.", labels=party
        )
        for number, seconds in self._run.waits().items():
            waits.add_metric([str(number)], seconds)
        for cost in self._run.costs():
            number, who = cost["party"], [str(cost["party"])]
            takes_part.add_metric(who, int(number not in state.failed))
            failures.add_metric(who, self.failures[number])
            exchanges.add_metric(who, cost["exchanges"])
            for direction in ("up", "down"):
                sent.add_metric([*who, direction], cost[f"bytes_{direction}"])
        yield from (takes_part, waits, failures, exchanges, sent)


def _of_model(state: RunState) -> Iterator[Metric]:
    """Yield the figures of the last evaluation, by their rows and names. Skip mappings."""
    loss = GaugeMetricFamily("vfl_loss", "Mean loss.", labels=["rows"])
    others = GaugeMetricFamily("vfl_metric", "Other figures.", labels=["name", "rows"])
    for key, figure in state.last.items():
        rows, _, name = key.partition("_")
        if rows not in _ROWS or not isinstance(figure, int | float):
            continue
        if name == "loss":
            loss.add_metric([rows], figure)
        else:
            others.add_metric([name, rows], figure)
    yield from (loss, others)


def app_of(metrics: RunMetrics, tokens: Tokens, folder: Path) -> Guard:
    """Return the application that answers ``GET /metrics`` for callers with a token."""
    registry = CollectorRegistry()
    registry.register(metrics)

    async def answer(call: Request) -> Response:
        metrics.asked()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def answered(status: int, caller: str) -> None:
        metrics.answers[status] += 1

    routes = Router([Route("/metrics", answer)], redirect_slashes=False)
    guard = Guard(routes, tokens, answered=answered)
    registry.register(Surroundings(folder, guard))
    return guard
