"""Baseline `alone`: the best single party without the others.

Each party in turn trains with the label holder as if there were no other, and the one that reaches
the highest test accuracy is reported; so it is chosen on the test rows, in its own favour. What a
system gains over it is what federating is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.split_nn import SplitNN
from strategies.vertical import Vertical
from vfl_flower.errors import ConfigError
from vfl_flower.records import Arrays


class Alone(Vertical):
    """Baseline: the best single party with the label holder, without the others."""

    name = "alone"
    axes = "sync · first-order · first-order server · identity · no privacy, one party at a time"

    runs: tuple[Vertical, ...] = ()  # those that are finished

    def train(self) -> None:
        """`split-nn` with one party at a time; the best run becomes this one's."""
        if self.config.privacy == "scalar":
            raise ConfigError(
                "strategy = 'alone' is a baseline without scalar noise: leave `privacy` out."
            )
        config = replace(self.config, quorum=None, max_delay=0, on_party_failure="stop")
        for seat in self.seats:
            run = SplitNN(config, self.labels)
            run.grid = self.grid
            run.seat({seat.party: seat.node_id})
            run.train()
            self.runs = (*self.runs, run)
        for entry in self._best().history:
            self.record(entry)

    def figures(self) -> dict[str, Any]:
        """Those of the best party, and the test accuracy of each."""
        best = self._best()
        figures = super().figures() if best is self else best.figures()
        return {
            **figures,
            "best_party": best.seats[0].party if self.runs else None,
            "test_accuracy_of_party": {
                str(run.seats[0].party): run.history[-1]["test_accuracy"] for run in self.runs
            },
        }

    def top_arrays(self) -> Arrays:
        """The top model that the best party has trained."""
        best = self._best()
        return super().top_arrays() if best is self else best.top_arrays()

    def _best(self) -> Vertical:
        """The best run so far; this one, which trains nothing, if there is none yet."""
        return max(self.runs, key=lambda run: run.history[-1]["test_accuracy"], default=self)
