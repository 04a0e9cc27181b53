"""Baseline `local-only`: the best single party without the others.

Each party in turn trains with the label holder as if there were no other party. A label holder with
columns also trains without any party. The baseline reports the run with the least validation loss,
or without validation rows the least training loss: test rows choose nothing. The gain of a system
over this baseline is the gain of federating.
"""

from __future__ import annotations

from math import inf
from typing import Any

from strategies.baselines.frozen import Frozen
from strategies.hooks import CentralEvaluation, RoundLimit
from strategies.vertical import Vertical
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.progress import Progress
from vfl_flower.results.figures import main_metric
from vfl_flower.transport.messages import Arrays


class _Share(Callback):
    """Reports the progress of the whole baseline, after ``number`` of its ``of`` runs."""

    def __init__(self, whole: Vertical, number: int, of: int) -> None:
        self._whole, self._number, self._of = whole, number, of

    def progressed(self, done: int, planned: int) -> None:
        """Report the progress."""
        whole, steps = self._whole.run, self._whole.run.budget.planned
        share = (self._number + done / max(1, planned)) / self._of
        whole.budget.answered = round(share * steps)
        whole.tell("progressed", whole.budget.answered, steps)
        if whole.budget.stopped:
            self.run.stop("A callback ends the run")


class Alone(Vertical):
    """`split-nn` with one party at a time, or none; the best run becomes this one's."""

    # Callbacks hear of evaluations when all parties have trained. ``evaluate_fn`` sees the last top
    # model only. `stop` ends the baseline where a callback hears of progress.
    keeps_checkpoints = False

    def train(self) -> None:
        """Run each, and report the best."""
        alone = {"quorum": None, "max-delay": 0, "on-party-failure": "stop", "subsets": "off"}
        config, transport = self.config.with_values(alone), self.run.transport
        kinds: dict[int | str, type[Vertical]] = {
            record.party: Vertical for record in self.run.records
        }
        if self.labels.features is not None:
            kinds["label holder"] = Frozen  # it needs no party
        names = (who if isinstance(who, str) else f"party {who}" for who in kinds)
        progress = [each for each in self.callbacks if isinstance(each, Progress)]
        shown = [[each.of_part(f"{name} alone") for each in progress] for name in names]
        limits = [RoundLimit(each.rounds) for each in self.callbacks if type(each) is RoundLimit]
        runs = {
            who: kind(
                config, self.labels, [_Share(self, number, len(kinds)), *limits, *shown[number]]
            )
            for number, (who, kind) in enumerate(kinds.items())
        }
        self._finished: dict[int | str, Vertical] = {}
        for who, each in runs.items():
            nodes = {
                record.party: self.run.members[record.party]._replace(node=record.node_id)
                for record in self.run.records
                if record.party == who
            }
            run = each.prepare(transport, nodes)
            each.train()
            run.tell("trained")
            self._finished[who] = each
            if self.run.budget.stopped:
                break
        _, best = self._best()
        for entry in best.run.history.entries:
            self.history.entries.append(entry)
            for callback in self.callbacks:
                is_last = entry is best.run.history.entries[-1]
                if is_last or not isinstance(callback, CentralEvaluation):
                    callback.evaluated(entry)  # earlier top models are gone

    def assess(self) -> None:
        """Assess the model of the best party."""
        self.tested = self._best()[1].run.assess()

    def figures(self) -> dict[str, Any]:
        """Return the figures of the best party, and the test accuracy or R2 of each."""
        if not getattr(self, "_finished", None):
            return super().figures()
        who, best = self._best()
        figures = best.figures()
        metric = main_metric(figures)
        each = {str(m): run.run.history.chosen[metric] for m, run in self._finished.items()}
        figures |= {"began": self.history.began, "best_party": who, f"{metric}_of_party": each}
        figures.pop("test_by_parties", None)
        if self.run.holder.aggregation.any_subset:  # each party alone, on its own rows
            runs = {party: run for party, run in self._finished.items() if party != "label holder"}
            of_party = {
                str(m): each.run.history.chosen["test_by_party"] for m, each in runs.items()
            }
            figures["test_by_party"] = {m: found["0"] for m, found in of_party.items() if found}
        return figures

    def top_arrays(self) -> Arrays:
        """Return the top model of the best party's run."""
        if not getattr(self, "_finished", None):
            return super().top_arrays()
        return self._best()[1].top_arrays()

    def _best(self) -> tuple[int | str, Vertical]:
        """Return the party of the best run so far, and the run."""

        def reached(each: tuple[int | str, Vertical]) -> float:
            chosen = each[1].run.history.chosen
            if chosen["validation_loss"] is not None:
                return -float(chosen["validation_loss"])
            entries = reversed(each[1].run.history.entries)
            losses = (entry["train_loss"] for entry in entries if entry["train_loss"] is not None)
            return -float(next(losses, inf))

        return max(self._finished.items(), key=reached)
