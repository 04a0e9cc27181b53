"""A run, once its parties are known: all its parts, and what came of it so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord

from strategies.enrolment import Member, check
from strategies.history import RESULTS, History
from strategies.mailbox import Mailbox
from strategies.plan import Plan
from strategies.quorum import Waiting
from strategies.recovery import Recovery
from strategies.seats import Seat
from vfl_flower.axes import estimators
from vfl_flower.axes.batches import most_rows, steps_per_epoch
from vfl_flower.axes.estimators.base import Estimator
from vfl_flower.axes.privacy.ledger import ledger_of
from vfl_flower.axes.schedule import Schedule
from vfl_flower.config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.figures import TRANSPORTS
from vfl_flower.holder.label_holder import LabelHolder
from vfl_flower.messages import SMALL, EmbedOrder, EvaluateOrder, TrainOrder
from vfl_flower.provenance import peak_memory_mb
from vfl_flower.runtimes.carrier import Carrier
from vfl_flower.systems import load_system

log = logging.getLogger("flwr")


class Run:
    """The parts of a run, which its strategy puts to work.

    Parameters
    ----------
    nodes : party -> who it is.
    history : of this run, which may have begun before its parties were known.

    Raises
    ------
    ConfigError
        If the schedule, the budget or the labels do not go together with these parties.
    """

    def __init__(
        self,
        carrier: Carrier,
        nodes: Mapping[int, Member],
        config: RunConfig,
        labels: Labels,
        history: History,
    ) -> None:
        rows, parties = len(labels.train), len(nodes)
        self.carrier = carrier
        self.config = config
        self.labels = labels
        self.seats = [Seat(party, nodes[party].node) for party in sorted(nodes)]
        estimator, system = estimators.choose(config)(config), load_system(config.strategy)
        self.ledger = ledger_of(config)(config, rows, estimator)
        labels = self.ledger.labels(labels)
        secret = self.ledger.secret_batches
        self.schedule = Schedule.of(config, system.quorum, parties, estimator, secret, carrier.cost)
        self.plan = Plan(config.training.epochs, steps_per_epoch(config, rows), parties)
        top_learns = config.models.top != "sum" or labels.features is not None
        self.plan.allowed = self.ledger.steps_allowed(
            self.plan.planned, parties, self.schedule.quorum, top_learns
        )
        self.history = history
        sizes = {party: nodes[party].size for party in sorted(nodes)}
        # Of the top model, whose steps answer a quorum each; a baseline's are mini-batches.
        per_epoch: float = self.plan.per_epoch
        if not system.baseline:
            per_epoch = self.plan.of_epoch / self.schedule.quorum
        self.holder = LabelHolder(config, labels, sizes, self.ledger.noise(), per_epoch)
        carrier.expect(
            self._largest(estimator, rows, len(labels.test), max(sizes.values(), default=0))
        )
        self.waiting = Waiting(self.schedule.quorum, self.seats, self.plan)
        self.mailbox = Mailbox(
            carrier,
            self.seats,
            self.ledger,
            config.running.party_timeout,
            lambda: self.holder.steps,
        )
        self.recovery = Recovery(
            config,
            self.mailbox,
            self.holder,
            self.plan,
            self.history,
            labels.outputs,
            lambda description: check(description, config, labels, parties, sizes),
            self.waiting.drop,
        )

    def _largest(
        self, estimator: Estimator, rows: int, test_rows: int, size: int
    ) -> dict[str, int]:
        """Bytes of an upload, at most, by the kind of its order."""
        row = 2 * 4 * (size + 1)  # with its id, and as much again for what a codec adds
        most = most_rows(self.config, rows, self.schedule.window)
        return {
            TrainOrder.kind: SMALL
            + 4 * self.schedule.window
            + estimator.uploads_per_row * row * most,
            EmbedOrder.kind: SMALL + row * rows,
            EvaluateOrder.kind: SMALL + row * test_rows,
        }

    def seat_of(self, party: int) -> Seat:
        """The seat of a party."""
        return next(seat for seat in self.seats if seat.party == party)

    def log_summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s: %d parties, %d training rows; %s (quorum %d), windows of %d%s",
            self.config.strategy,
            self.config.data.called,
            len(self.seats),
            len(self.labels.train),
            self.schedule.word,
            self.schedule.quorum,
            self.schedule.window,
            TRANSPORTS[self.carrier.transport],
        )

    # --- what came of it ------------------------------------------------------------------------

    def record(self) -> MetricRecord:
        """A history entry: where the run stands, and how the model does on the test rows."""
        metrics = self.holder.evaluate()
        spent = self.history.spent(self.seats, self.carrier.clock)
        of_training = self.holder.train_loss()
        return self.history.record(self.plan, self.holder.steps, spent, of_training, metrics)

    def figures(self) -> dict[str, Any]:
        """The strategy's part of ``summary.json``."""
        return {
            "parties": len(self.seats),
            "window": self.schedule.window,
            "quorum": self.schedule.quorum,
            "schedule": self.schedule.word,
            "epochs": round(self.plan.epochs, 3),
            "steps": self.holder.steps,
            **self.history.spent(self.seats, self.carrier.clock),
            **dict.fromkeys(RESULTS),
            **{key: self.history.last[key] for key in self.history.last if _is_result(key)},
            **self.ledger.figures(),
            "peak_memory_mb": round(max(self.mailbox.party_memory_mb, peak_memory_mb()), 1),
            "failed_parties": [seat.party for seat in self.seats if not seat.alive],
            "by_party": [seat.figures() for seat in self.seats],
        }


def _is_result(key: str) -> bool:
    return key in RESULTS or key.startswith("test_")
