"""A run, once its parties are known: all its parts, and what came of it so far."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import MetricRecord

from strategies.adaptive_window import AdaptiveWindow
from strategies.enrolment import Member, check
from strategies.history import RESULTS, History
from strategies.messenger import Messenger
from strategies.party_record import FINAL, PartyRecord, State
from strategies.quorum import Waiting
from strategies.recovery import Recovery
from strategies.step_budget import StepBudget
from vfl_flower.config.provenance import peak_memory_mb
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.callbacks import RunState
from vfl_flower.label_holder.figures import TRANSPORTS
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.schedule import Schedule
from vfl_flower.protocol.systems import load_system
from vfl_flower.transport.base import Transport
from vfl_flower.transport.messages import SMALL, EmbedOrder, EvaluateOrder, RestoreOrder, TrainOrder

log = logging.getLogger("flwr")


class Run:
    """The parts of a run, which its strategy puts to work.

    Parameters
    ----------
    nodes : party -> who it is.
    history : of this run, which may have begun before its parties were known.
    nonce : under which parties keep their states (`Keeper`).

    Raises
    ------
    ConfigError
        If the schedule, the budget or the labels do not go together with these parties.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Mapping[int, Member],
        config: RunConfig,
        labels: Labels,
        history: History,
        nonce: str = "",
    ) -> None:
        rows, parties = len(labels.train), len(nodes)
        self.transport = transport
        self.config = config
        self.labels = labels
        self.records = [PartyRecord(party, nodes[party].node) for party in sorted(nodes)]
        self._by_party = {record.party: record for record in self.records}
        estimator, system = estimators.choose(config)(config), load_system(config.strategy)
        mechanism = mechanism_of(config)
        self.accountant = mechanism.accountant(rows, estimator)
        self.releases = mechanism.release_log(self.accountant)
        labels = mechanism.labels(labels, self.accountant)
        secret = mechanism.secret_batches
        costs = transport.cost, transport.measures
        self.schedule = Schedule.of(config, system.quorum, parties, estimator, secret, *costs)
        aggregation = aggregation_of(config)
        aggregation.agree(transport)
        self.abreast = aggregation.abreast  # whether all parties serve the same orders
        each = steps_per_epoch(config, rows)
        self.budget = StepBudget(config.training.epochs, each, parties, self.abreast)
        self.adaptive_window = AdaptiveWindow(self.schedule, self.budget.per_epoch, self.records)
        top_learns = config.models.top != "sum" or labels.features is not None
        self.budget.allowed = self.accountant.steps_allowed(
            self.budget.planned, parties, self.schedule.quorum, top_learns
        )
        self.history = history
        sizes = {party: nodes[party].size for party in sorted(nodes)}
        # Of the top model, whose steps answer a quorum each; a baseline's are mini-batches.
        per_epoch: float = self.budget.per_epoch
        if not system.baseline:
            per_epoch = self.budget.of_epoch / self.schedule.quorum
        noise = mechanism.scalar_noise(self.accountant)
        self.holder = LabelHolder(config, labels, sizes, noise, per_epoch)
        transport.expect(
            self._largest(estimator, rows, len(labels.test), max(sizes.values(), default=0))
        )
        self.waiting = Waiting(self.schedule.quorum, self.records, self.budget)
        self.messenger = Messenger(
            transport,
            self.records,
            self.releases,
            config.running.party_timeout,
            lambda: self.holder.steps,
        )
        self.recovery = Recovery(
            config,
            self.messenger,
            self.holder,
            self.budget,
            self.history,
            labels.outputs,
            lambda description: check(description, config, labels, parties, sizes),
            self.waiting.drop,
            nonce,
        )
        for callback in history.observers:
            callback.run = self

    @property
    def state(self) -> RunState:
        """Where the run stands, for callbacks."""
        best = self.history.best
        return RunState(
            done=self.budget.answered,
            planned=self.budget.limit,
            steps_per_epoch=self.budget.of_epoch,
            exchanges=sum(record.traffic.exchanges for record in self.records),
            last=self.history.last,
            best={} if best is None else self.history.entries[best],
            may_stop_early=bool(self.config.training.patience and self.labels.validation),
        )

    def _largest(
        self, estimator: Estimator, rows: int, test_rows: int, size: int
    ) -> dict[str, int]:
        """Bytes of an upload, at most, by the kind of its order."""
        row = 2 * 4 * (size + 1)  # with its id, and as much again for what a codec adds
        most = sampling_of(self.config, rows).most_rows(self.schedule.longest)
        return {
            TrainOrder.kind: SMALL
            + 4 * self.schedule.longest
            + estimator.uploads_per_row * row * most,
            EmbedOrder.kind: SMALL + row * rows,
            EvaluateOrder.kind: SMALL + row * test_rows,
        }

    def record_of_party(self, party: int) -> PartyRecord:
        """The record of a party."""
        return self._by_party[party]

    def log_summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s: %d parties, %d training rows; %s (quorum %d), windows of %d%s",
            self.config.strategy,
            self.config.data.called,
            len(self.records),
            len(self.labels.train),
            self.schedule.word,
            self.schedule.quorum,
            self.schedule.window,
            TRANSPORTS[self.transport.medium],
        )

    def next_window(self, record: PartyRecord) -> tuple[int, int, int]:
        """The window of a party's next turn: epoch, first step, steps."""
        epoch, first, steps = self.budget.window(record.steps, self.adaptive_window.next(record))
        self.adaptive_window.ordered(record, steps)
        return epoch, first, steps

    def holds(self, record: PartyRecord) -> bool:
        """Whether a party waits for the evaluation of others, after which all may have to stop.

        Without it some would have a window that others of a synchronous system have not. Where
        nobody stops by validation, that window is waited for, unless only sums are known.
        """
        together = bool(self.labels.validation) or self.abreast
        return self.schedule.coordinated and together and record.evaluation > self.history.recorded

    def evaluation(self, record: PartyRecord, number: int) -> EvaluateOrder:
        """A party's order for the evaluation of this number."""
        record.evaluation_sent = number
        record.surrogates = self.holder.links.digest(record.party)
        order = EvaluateOrder(exchange=record.exchange + 1, arrays=record.feedback)
        if not self.labels.validation:  # there is nothing to go back by
            return order
        return replace(order, number=number, best=record.best_evaluation, last=record.evaluation)

    # --- what came of it ------------------------------------------------------------------------

    def evaluate(self) -> MetricRecord:
        """A history entry: where the run stands, and how the model does on rows held out.

        If none before was better, it may be gone back to; if that is too long ago, training ends.
        """
        found = self.holder.evaluate()
        spent = self.history.spent(self.records, self.transport.clock)
        so_far = self.budget, self.holder.steps, spent, found.train_loss
        entry = self.history.record(*so_far, found.validation, found.test)
        if any(record.alive and not record.remembers for record in self.records):
            self.history.best = None  # who has come back meanwhile could not go back to it
        if self.history.last_is_best:
            self.holder.held_out.remember(self.holder.top)
            for record in self.records:
                record.best_evaluation = record.evaluation
        elif self.history.is_time_to_stop and not self.budget.all_ordered:
            best = self.history.entries[self.history.best or 0]["epoch"]
            log.info("Validation has not improved since epoch %g: training stops.", best)
            self.budget.stop()
            alive = [record for record in self.records if record.alive]
            if all(record.state is State.IDLE and not record.feedback for record in alive):
                self.history.recorded = FINAL  # nobody has anything to learn since
                for record in alive:
                    record.evaluation, record.state = FINAL, State.DONE
        return entry

    def restore(self) -> None:
        """Have the top model of the best evaluation; the parties' models are to be those too."""
        self.holder.held_out.restore(self.holder.top)
        self.history.restored = True

    def figures(self) -> dict[str, Any]:
        """The strategy's part of ``summary.json``."""
        return {
            "parties": len(self.records),
            **self.adaptive_window.figures(),
            "quorum": self.schedule.quorum,
            "schedule": self.schedule.word,
            "epochs": round(self.budget.epochs, 3),
            "steps": self.holder.steps,
            **self.history.spent(self.records, self.transport.clock),
            **dict.fromkeys(RESULTS),
            **{key: each for key, each in self.history.chosen.items() if _is_result(key)},
            "best_epoch": self.history.chosen.get("epoch") if self.history.restored else None,
            **({} if self.labels.unknown is None else {"unknown_rows": self.labels.unknown}),
            **self.accountant.figures(),
            "peak_memory_mb": round(max(self.messenger.party_memory_mb, peak_memory_mb()), 1),
            "failed_parties": [record.party for record in self.records if not record.alive],
            "by_party": [record.figures() for record in self.records],
        }


def restore_best(run: Run, wait_for: Callable[[Sequence[PartyRecord]], None]) -> None:
    """Have all go back to the best evaluation, if by validation rows there is one.

    Parameters
    ----------
    wait_for : waits until nothing is in flight to these parties.
    """
    if run.history.best is None:
        return
    last_is_best = run.history.last_is_best
    run.restore()
    if not last_is_best:
        alive = [record for record in run.records if record.alive]
        orders = (RestoreOrder(exchange=s.exchange + 1, number=s.best_evaluation) for s in alive)
        run.messenger.post(map(run.messenger.message, alive, orders))
        wait_for(alive)


def _is_result(key: str) -> bool:
    return key in RESULTS or key.startswith("test_")
