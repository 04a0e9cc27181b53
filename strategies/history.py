"""The history of a run: an entry for each evaluation."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flwr.app import MetricRecord

from strategies.turns import PartyRecord, StepBudget, Traffic
from vfl_flower.config.provenance import utc_now
from vfl_flower.label_holder.metrics import Metrics

RESULTS = (
    "train_loss",
    *(f"{rows}_{name}" for rows in ("validation", "test") for name in Metrics(0.0).figures()),
)
"""Figures of the model in every entry."""

_SAVED = ("entries", "recorded", "best", "restored")


class History:
    """The entries of a run, when it began, and the seconds that it has taken."""

    def __init__(self) -> None:
        self.began = utc_now()
        self.entries: list[dict[str, Any]] = []
        self.asked = 0  # number of the last evaluation that parties were asked for
        self.recorded = 0  # number of the last evaluation that every party has answered
        self.best: int | None = None  # place of the entry of the best model, which is remembered
        self.restored = False  # whether the models are of that entry again
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
        """Whether the last evaluation is of the best model."""
        return self.best == len(self.entries) - 1

    @property
    def seconds(self) -> float:
        """Seconds since the run began, interruptions left out."""
        return time.perf_counter() - self._started_at

    def record(
        self,
        budget: StepBudget,
        steps: int,
        spent: dict[str, Any],
        train_loss: float | None,
        validation: Metrics | None,
        test: Metrics,
    ) -> dict[str, Any]:
        """Add an entry: progress, and the model's figures on held-out rows."""
        nothing = dict.fromkeys(Metrics(0.0).figures())
        chosen_by = validation.figures() if validation else nothing
        self.entries.append(
            {
                "epoch": round(budget.epochs, 3),
                "steps": steps,
                **spent,
                "train_loss": train_loss,
                **{f"validation_{name}": value for name, value in chosen_by.items()},
                **{f"test_{name}": value for name, value in test.figures().items()},
            }
        )
        return self.last

    def spent(self, records: Sequence[PartyRecord], clock: float) -> dict[str, Any]:
        """Return exchanges, bytes and seconds so far."""
        return {
            **asdict(sum((record.traffic for record in records), Traffic())),
            "seconds": round(self.seconds, 3),
            "virtual_seconds": round(clock, 3),
        }

    def records(self) -> dict[int, MetricRecord]:
        """Return the entries as Flower keeps them, by number of evaluation."""
        return {number: metric_record(each) for number, each in enumerate(self.entries, 1)}

    # --- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        state = {name: getattr(self, name) for name in _SAVED}
        return {**state, "began": self.began, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in _SAVED:
            setattr(self, name, state[name])
        self.began = state.get("began", self.began)  # 0.2.0 saved none
        self.entries = list(self.entries)
        self.asked = self.recorded
        self._started_at -= state["seconds"]


def metric_record(entry: dict[str, Any]) -> MetricRecord:
    """Return the numbers of a history entry."""
    return MetricRecord({k: each for k, each in entry.items() if isinstance(each, int | float)})
