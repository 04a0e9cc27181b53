"""Baseline `alone`: the best single party without the others.

Each party in turn trains with the label holder as if there were no other, and the one that reaches
the highest test accuracy is reported. What a system gains over it is what federating is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.split_nn import SplitNN
from strategies.vertical import Vertical


class Alone(Vertical):
    """Baseline: the best single party with the label holder, without the others."""

    name = "alone"
    axes = "sync · first-order · first-order server · identity · no privacy, one party at a time"

    def train(self) -> None:
        """`split-nn` with one party at a time; the best run becomes this one's."""
        config = replace(self.config, quorum=None, max_delay=0, on_party_failure="stop")
        self.runs = [SplitNN(config, self.labels, only=[seat.party]) for seat in self.seats]
        for run in self.runs:
            run.start(self.grid)
        self.best = max(self.runs, key=lambda run: run.history[-1]["test_accuracy"])
        self.holder, self.history = self.best.holder, self.best.history
        for entry in self.history:
            self.record(entry)

    def figures(self) -> dict[str, Any]:
        """Those of the best party, and the test accuracy of each."""
        accuracies = {
            str(run.seats[0].party): run.history[-1]["test_accuracy"] for run in self.runs
        }
        return {
            **self.best.figures(),
            "best_party": self.best.seats[0].party,
            "test_accuracy_of_party": accuracies,
        }
