"""Figures of a service for Prometheus, and of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vfl_flower.label_holder.run_metrics import Surroundings
from vfl_flower.transport.http.guard import STATUSES

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
_RULES = ("max-predictions-per-day", "max-predictions", "max-uploads")
_OTHER = "other"
_OUTCOMES = ("answered", "ending", "full", "new-ids", "unavailable", "failed")


class Metrics:
    """Counters, gauges and histograms of one service; no figure depends on a person."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self.answers = counter("vfl_http_answers", "Answers to HTTP calls.", ["status"])
        for status in STATUSES:
            self.answers.labels(str(status))
        self.requests = counter("vfl_requests", "Requests for scores.", ["outcome"])
        self.rows = counter("vfl_rows", "Ids in these requests.", ["outcome"])
        self.request_seconds = histogram("vfl_request_seconds", "Time of a request.")
        self.stage_seconds = histogram("vfl_stage_seconds", "Time by stage.", ["stage"])
        self.party_seconds = histogram(
            "vfl_party_seconds", "Time until a party's embeddings.", ["party"]
        )
        self._connected = gauge("vfl_party_connected", "Whether a party answers.", ["party"])
        self.missing = counter(
            "vfl_answers_missing_party", "Scores without a party.", ["party", "reason"]
        )
        self.inconsistent = counter(
            "vfl_inconsistent_scores", "Scores in which a party does not fit the others.", ["party"]
        )
        self._refusals = counter("vfl_refusals", "Refusals of parties.", ["rule"])
        for rule in (*_RULES, _OTHER):  # a counter that begins at its first event shows no increase
            self._refusals.labels(rule)
        for outcome in _OUTCOMES:
            self.requests.labels(outcome)
            self.rows.labels(outcome)
        self.queue_rows = gauge("vfl_queue_rows", "Ids that wait for their batch.")
        self._drift = gauge(
            "vfl_drift", "Population stability index of scores and embeddings.", ["of"]
        )
        self._drifting = gauge(
            "vfl_drifting_columns", "Columns of a party that drift.", ["party", "level"]
        )
        self._model = gauge("vfl_model_info", "The served model.", ["run", "strategy", "version"])

    def connected(self, number: int, now: bool) -> None:
        """Set whether a party answers."""
        self._connected.labels(str(number)).set(int(now))

    def refused(self, number: int, sentence: str) -> None:
        """Count a party's refusal by the rule in its sentence."""
        rule = next((each for each in _RULES if each in sentence), _OTHER)
        self._refusals.labels(rule).inc()

    def serves(self, run: str, strategy: str, version: str) -> None:
        """Name the model that is served now, which has no drift yet."""
        for each in (self._model, self._drift, self._drifting):
            each.clear()
        self._model.labels(run, strategy, version).set(1)

    def drifts(self, figures: Mapping[str, Any] | None) -> None:
        """Set the gauges of drift, from what `DriftWatch.figures` returned."""
        found = figures or {"scores": None, "embeddings": {}, "columns": {}}
        parts = {f"embeddings {name}": index for name, index in found["embeddings"].items()}
        for name, index in {"scores": found["scores"], **parts}.items():
            if index is not None:
                self._drift.labels(name).set(index)
        for party, levels in found["columns"].items():
            for level, number in (levels or {}).items():
                self._drifting.labels(party, level).set(number)

    def watch(self, surroundings: Surroundings) -> None:
        """Add the figures of the machine."""
        self._registry.register(surroundings)

    def exposition(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return bytes(generate_latest(self._registry))
