"""Baseline `alone`: the best single party without the others.

Each party in turn trains with the label holder as if there were no other, and so does the label
holder without any, if it has columns of its own. The run that reaches the highest test accuracy, or
for regression R2, is reported; so it is chosen on the test rows, in its own favour. What a system
gains over it is what federating is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.frozen import Frozen
from strategies.split_nn import SplitNN
from strategies.vertical import Vertical
from vfl_flower.errors import ConfigError
from vfl_flower.holder.results import main_metric
from vfl_flower.records import Arrays


class Alone(Vertical):
    """Baseline: the best single party with the label holder, without the others."""

    name = "alone"
    keeps_checkpoints = False
    axes = "sync · first-order · first-order server · identity · no privacy, one party at a time"

    runs: tuple[tuple[int | str, Vertical], ...] = ()  # those that are finished, and whose

    def train(self) -> None:
        """`split-nn` with one party at a time, or none; the best run becomes this one's."""
        if self.config.privacy == "scalar":
            raise ConfigError(
                "strategy = 'alone' is a baseline without scalar noise: leave `privacy` out."
            )
        config = replace(self.config, quorum=None, max_delay=0, on_party_failure="stop")
        for seat in self.seats:
            run: Vertical = SplitNN(config, self.labels)
            run.grid = self.grid
            run.seat({seat.party: seat.node_id})
            run.train()
            self.runs = (*self.runs, (seat.party, run))
        if self.labels.features is not None:
            run = Frozen(config, self.labels)  # which needs no messages where there is no party
            run.grid = self.grid
            run.seat({})
            run.steps_of_epoch = run.steps_per_epoch
            run.train()
            self.runs = (*self.runs, ("label holder", run))
        for entry in self._best()[1].history:
            self.record(entry)

    def figures(self) -> dict[str, Any]:
        """Those of the best party, and the test accuracy or R2 of each."""
        best, run = self._best()
        figures = super().figures() if run is self else run.figures()
        metric = main_metric(figures)
        return {
            **figures,
            "best_party": best,
            f"{metric}_of_party": {str(party): run.history[-1][metric] for party, run in self.runs},
        }

    def top_arrays(self) -> Arrays:
        """The top model that the best party has trained."""
        _, run = self._best()
        return super().top_arrays() if run is self else run.top_arrays()

    def _best(self) -> tuple[int | str | None, Vertical]:
        """Whose run is the best so far; this one, which trains nothing, if there is none yet."""

        def reached(each: tuple[int | str | None, Vertical]) -> float:
            last = each[1].history[-1]
            return float(last[main_metric(last)])

        return max(self.runs, key=reached, default=(None, self))
