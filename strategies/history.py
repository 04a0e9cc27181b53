"""Evaluations: when they are due, what they found, and who is told."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from flwr.app import MetricRecord

from strategies.party_record import PartyRecord, Traffic
from strategies.step_budget import StepBudget
from vfl_flower.config.errors import VflError
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.figures import reached, validated
from vfl_flower.label_holder.metrics import Metrics

log = logging.getLogger("flwr")

RESULTS = (
    "train_loss",
    *(f"{rows}_{name}" for rows in ("validation", "test") for name in Metrics(0.0).figures()),
)
"""What every entry says of the model."""


class History:
    """The entries of a run, one for each evaluation; and the seconds that it has taken.

    Parameters
    ----------
    every : epochs, or parts of one, between two evaluations.
    patience : epochs without a better evaluation on the validation rows, after which it is time to
        stop; 0: never.
    at_once : whether the first evaluation is of the models that a run begins by.
    """

    def __init__(
        self,
        every: float,
        observers: Sequence[Callback] = (),
        patience: float = 0,
        at_once: bool = False,
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self.recorded = 0  # number of the last evaluation that every party has answered
        self.best: int | None = None  # place of the entry with the least validation loss
        self.restored = False  # whether the models are of that entry again
        self._every = every
        self._patience = patience
        self._at_once = at_once
        self.observers = observers
        self._started_at = time.perf_counter()

    @property
    def last(self) -> dict[str, Any]:
        """The last entry; empty before the first."""
        return self.entries[-1] if self.entries else {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The entry that the models are of; empty before the first."""
        return self.entries[self.best] if self.restored and self.best is not None else self.last

    @property
    def last_is_best(self) -> bool:
        """Whether no evaluation before did as well as the last, on the validation rows."""
        return self.best == len(self.entries) - 1

    @property
    def is_time_to_stop(self) -> bool:
        """Whether the best evaluation is too many epochs ago."""
        if self.best is None or not self._patience:
            return False
        apart = self.last["epoch"] - self.entries[self.best]["epoch"]
        return bool(apart >= self._patience)

    @property
    def seconds(self) -> float:
        """Since the run began, interruptions left out."""
        return time.perf_counter() - self._started_at

    # --- when -----------------------------------------------------------------------------------

    def due(self, budget: StepBudget) -> int:
        """Number of the last evaluation that is due by the steps answered."""
        return self._number(budget.epochs)

    def is_due(self, epoch: int, last: int) -> bool:
        """Whether to evaluate after this epoch, where training is by whole epochs."""
        return self._number(epoch) > self._number(epoch - 1) or epoch == last

    def _number(self, epochs: float) -> int:
        return int(epochs / self._every * (1 + 1e-12)) + self._at_once

    def go_back(self, budget: StepBudget) -> int:
        """The number from which a party goes on that was away."""
        self.recorded = min(self.recorded, self.due(budget))  # the last may have been, without it
        return self.recorded

    # --- what -----------------------------------------------------------------------------------

    def record(
        self,
        budget: StepBudget,
        steps: int,
        spent: dict[str, Any],
        train_loss: float | None,
        validation: Metrics | None,
        test: Metrics,
    ) -> MetricRecord:
        """An entry: where the run stands, and how the model does on validation and test rows."""
        nothing = dict.fromkeys(Metrics(0.0).figures())
        chosen_by = validation.figures() if validation else nothing
        entry = {
            "epoch": round(budget.epochs, 3),
            "steps": steps,
            **spent,
            "train_loss": train_loss,
            **{f"validation_{name}": value for name, value in chosen_by.items()},
            **{f"test_{name}": value for name, value in test.figures().items()},
        }
        self.entries.append(entry)
        least = math.inf if self.best is None else self.entries[self.best]["validation_loss"]
        if validation and validation.loss < least:
            self.best = len(self.entries) - 1
        self.tell(entry)
        best = {} if self.best is None else self.entries[self.best]
        said = ", ".join(filter(None, [validated(entry, best), reached(entry)]))
        log.info("Epoch %s: %s", f"{entry['epoch']:g}", said)
        return _metric_record(entry)

    def spent(self, records: Sequence[PartyRecord], clock: float) -> dict[str, Any]:
        """Exchanges, bytes and seconds so far."""
        return {
            **asdict(sum((record.traffic for record in records), Traffic())),
            "seconds": round(self.seconds, 3),
            "virtual_seconds": round(clock, 3),
        }

    def records(self) -> dict[int, MetricRecord]:
        """The entries as Flower keeps them, by number of evaluation."""
        return {number: _metric_record(each) for number, each in enumerate(self.entries, 1)}

    # --- who is told ----------------------------------------------------------------------------

    def tell(self, entry: dict[str, Any]) -> None:
        """Tell observers of an evaluation."""
        for observer in self.observers:
            observer.evaluated(entry)

    def progressed(self, done: int, planned: int) -> None:
        """Tell observers that windows were answered."""
        for observer in self.observers:
            observer.progressed(done, planned)

    def failed(self, party: int, error: VflError) -> None:
        """Tell observers that a party has failed, without which the run goes on."""
        for observer in self.observers:
            observer.failed(party, error)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell observers at the end that the run is over, whatever comes of it."""
        try:
            yield
        finally:
            for observer in self.observers:
                observer.ended()

    # --- checkpoints ----------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        """What is needed to go on, in JSON."""
        kept = {name: getattr(self, name) for name in ("entries", "recorded", "best", "restored")}
        return {**kept, "seconds": self.seconds}

    def go_on_from(self, kept: dict[str, Any]) -> None:
        """Take over what `kept` gave."""
        self.entries, self.recorded = list(kept["entries"]), kept["recorded"]
        self.best, self.restored = kept["best"], kept["restored"]
        self._started_at -= kept["seconds"]


def _metric_record(entry: dict[str, Any]) -> MetricRecord:
    return MetricRecord({k: each for k, each in entry.items() if isinstance(each, int | float)})
