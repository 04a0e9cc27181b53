"""A run with known parties: its parts, its progress and its figures."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord

from strategies.adaptive_window import AdaptiveWindow
from strategies.enrolment import Member, check
from strategies.history import RESULTS, History, metric_record
from strategies.messenger import Messenger
from strategies.transcript import Transcript
from strategies.turns import FINAL, PartyRecord, State, StepBudget, UnansweredUploads
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.provenance import peak_memory_mb, utc_now
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.bins import check_segments
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.about_data import data_of
from vfl_flower.label_holder.callbacks import Callback, RunState, listeners
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.held_out import no_better
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.schedule import Schedule
from vfl_flower.protocol.system import System, load_system
from vfl_flower.results.figures import TRANSPORTS
from vfl_flower.transport import messages
from vfl_flower.transport.base import Transport


class Run:
    """The parts of a run, which its strategy uses, from parties with nodes and embedding sizes.

    The history may begin before its parties are known. Raise `ConfigError` if the schedule, the
    budget or the labels do not fit these parties.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Mapping[int, Member],
        config: RunConfig,
        labels: Labels,
        history: History,
        nonce: str = "",
        again: Checkpoint | None = None,
    ) -> None:
        rows, parties = len(labels.train), len(nodes)
        self.transport, self.config, self.labels = transport, config, labels
        self.members, self.history = nodes, history
        ordered = sorted(nodes.items())
        self.records = [PartyRecord(party, of.node, of.columns, of.name) for party, of in ordered]
        self.by_party = {record.party: record for record in self.records}
        self.attach(())
        self.rerun: dict[str, Any] | None = None  # how the run compares with the one it repeats
        self.saving = self.can_save = False  # whether a checkpoint has been asked for, and may be
        self.save_every = config.running.exchanges_apart(transport.simulated)  # 0: never
        estimator, mechanism = estimators.choose(config)(config), mechanism_of(config)
        system = load_system(config.strategy)
        self.accountant = mechanism.accountant(rows, estimator)
        self.releases = mechanism.release_log(self.accountant)
        labels = mechanism.labels(labels, self.accountant)
        self.data = data_of(labels, mechanism)
        in_step = self._plan(system, estimator, mechanism, labels)
        sizes = {party: of.size for party, of in ordered}
        # Steps of the top model: each answers a quorum. In a baseline, each is a mini-batch.
        budget, quorum = self.budget, self.schedule.quorum
        per_epoch = budget.per_epoch if system.baseline else budget.of_epoch / quorum
        noise = mechanism.scalar_noise(self.accountant)
        # With this noise, no label may decide what a message holds.
        self.adaptive_window = AdaptiveWindow(self.schedule, self.records, by_loss=noise is None)
        longest = min(self.schedule.longest, self.budget.per_epoch)  # no window crosses an epoch
        most_rows = sampling_of(config, rows).most_rows(longest)
        monotone = [party for party, of in nodes.items() if of.monotone]
        about = per_epoch, most_rows if in_step else 0, monotone
        self.holder = LabelHolder(config, labels, sizes, noise, *about)
        self.assessment: dict[str, Any] | None = None  # of the trained model on the test rows
        transport.expect(self._largest(estimator, rows, most_rows, len(labels.test), sizes))
        self.transcript = Transcript.of(self.holder, again)
        self.waiting = UnansweredUploads(self.schedule.quorum, self.records, self.budget)
        rejoin = messages.RejoinOrder(exchange=0, outputs=labels.outputs, nonce=nonce)
        self.messenger = Messenger(
            *(config, transport, self.records, self.holder, self.releases, self.budget),
            *(self.waiting, history, self.tell, rejoin),
            lambda description: check(description, config, labels, parties, sizes, monotone),
            self.transcript,
        )

    def _plan(
        self, system: System, estimator: Estimator, mechanism: Mechanism, labels: Labels
    ) -> bool:
        """Set the schedule and the budget of steps, after the parties have agreed.

        Return whether all parties serve the same orders: an answer is then for one window of all.
        """
        config, transport, parties = self.config, self.transport, len(self.records)
        secret = mechanism.secret_batches
        costs = transport.cost, transport.measures
        each = steps_per_epoch(config, len(labels.train))
        self.schedule = Schedule.of(config, system.quorum, parties, estimator, secret, each, *costs)
        aggregation_of(config).agree(transport)
        in_step = self.schedule.coordinated and not system.baseline
        every, first = config.running.eval_every, bool(config.running.grow)
        self.budget = StepBudget(config.training.epochs, each, parties, in_step, every, first)
        top_learns = config.models.top != "sum" or labels.features is not None
        self.budget.allowed = self.accountant.steps_allowed(
            self.budget.planned, parties, self.schedule.quorum, top_learns
        )
        columns = max((each.columns for each in self.members.values()), default=0)
        self.accountant.warn(self.budget.limit // max(1, parties), columns, labels.outputs)
        config.assessment.check_rows(len(labels.classes), labels.validation)
        config.assessment.check_flags(labels.compared)
        check_segments(labels.segments)
        return in_step

    def _largest(
        self, estimator: Estimator, rows: int, most_rows: int, tests: int, sizes: Mapping[int, int]
    ) -> dict[str, int]:
        """Return the most bytes of an upload, by the kind of its order."""
        row = (
            2 * 4 * (max(sizes.values(), default=0) + 1)
        )  # with its id, and as much again for what a codec adds
        return {
            messages.TrainOrder.kind: messages.SMALL
            + 4 * self.schedule.longest
            + estimator.uploads_per_row * row * most_rows,
            messages.EmbedOrder.kind: messages.SMALL + row * rows,
            messages.EvaluateOrder.kind: messages.SMALL + row * tests,
        }

    def log_summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s: %d parties, %d training rows; %s (quorum %d), windows of %s%s",
            self.config.strategy,
            self.config.data.called,
            len(self.records),
            len(self.labels.train),
            self.schedule.word,
            self.schedule.quorum,
            self.schedule.windows,
            TRANSPORTS[self.transport.medium],
        )

    # --- callbacks ------------------------------------------------------------------------------

    def attach(self, callbacks: Iterable[Callback]) -> None:
        """Attach callbacks, which hear of events in this order."""
        self.callbacks = list(callbacks)
        self.listeners = listeners(self.callbacks)
        for callback in self.callbacks:
            callback.run = self

    def tell(self, event: str, *what: Any) -> None:
        """Tell callbacks of an event."""
        for hear in self.listeners[event]:
            hear(*what)

    @contextmanager
    def told(self, folder: Path | None) -> Iterator[None]:
        """Tell callbacks that the run begins, and that it has ended, even if it fails."""
        with ExitStack() as stack:
            for hear in self.listeners["ended"]:
                stack.callback(hear)
            if folder:
                self.tell("began", folder)
            yield

    @property
    def state(self) -> RunState:
        """Progress of the run."""
        best = self.history.best
        return RunState(
            done=self.budget.answered,
            planned=self.budget.limit,
            steps_per_epoch=self.budget.of_epoch,
            parties=tuple(self.by_party),
            failed=tuple(record.party for record in self.records if not record.alive),
            exchanges=sum(record.traffic.exchanges for record in self.records),
            seconds=self.history.seconds,
            history=tuple(self.history.entries),
            best={} if best is None else self.history.entries[best],
            may_stop_early=bool(self.config.training.patience and self.labels.validation),
        )

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon spent so far; None if the run claims none."""
        spent: float | None = self.accountant.figures()["epsilon"]
        return spent

    def costs(self) -> list[dict[str, Any]]:
        """Return the cost of each party so far."""
        return [record.figures() for record in self.records]

    def waits(self) -> dict[int, float]:
        """Return the seconds since each party's message without an answer; 0 without one."""
        now = time.monotonic()
        return {each.party: now - each.sent_at if each.in_flight else 0.0 for each in self.records}

    def stop(self, reason: str) -> None:
        """Order no more steps, and log why."""
        if self.budget.left > 0:
            log.info("%s: training stops.", reason)
            self.budget.stopped = True

    def save(self) -> None:
        """Save a checkpoint as soon as no message is out; refuse if this run cannot be resumed."""
        if not self.can_save:
            raise ConfigError(
                f"This run of strategy = {self.config.strategy!r} keeps no checkpoints before its "
                "end: call `save` if `can_save` is true."
            )
        self.saving = True

    # --- evaluations ----------------------------------------------------------------------------

    def evaluation(self, record: PartyRecord, number: int) -> messages.EvaluateOrder:
        """Return a party's order for the evaluation of this number."""
        record.evaluation_sent = number
        record.surrogates = self.holder.links.digest(record.party)
        order = messages.EvaluateOrder(exchange=record.exchange + 1, arrays=record.feedback)
        if not self.labels.validation:  # no party restores a model
            return order
        return replace(order, number=number, best=record.best_evaluation, last=record.evaluation)

    def evaluate_if_answered(self) -> MetricRecord | None:
        """Evaluate the model, once every party that is there has answered the evaluation."""
        answered = min((record.evaluation for record in self.records if record.alive), default=0)
        if answered <= self.history.recorded:
            return None
        self.history.recorded = answered
        return self.evaluate()

    def evaluate(self) -> MetricRecord:
        """Add a history entry: progress, and the model's figures on held-out rows."""
        found = self.holder.evaluate()
        spent = self.history.spent(self.records, self.transport.clock)
        so_far = self.budget, self.holder.steps, spent, found.train_loss
        entry = self.history.record(*so_far, found.validation, found.test)
        self.tell("evaluated", entry)
        if self.budget.stopped:
            alive = [record for record in self.records if record.alive]
            if all(record.state is State.IDLE and not record.feedback for record in alive):
                self.history.recorded = FINAL  # no party has learned since
                for record in alive:
                    record.evaluation, record.state = FINAL, State.DONE
        return metric_record(entry)

    def assess(self) -> dict[str, Any]:
        """Calibrate the trained model, choose its threshold, and assess it on the test rows.

        Warn if the model is no better than one answer for all rows. Return columns of these rows.
        """
        from vfl_flower.label_holder.assessment.of_model import of_run  # lazy: scikit-learn is slow

        if sentence := no_better(self.holder.held_out, self.holder.top):
            notice.warning("%s", sentence)
        self.holder.calibrate()
        self.assessment, columns = of_run(self.holder, self.labels)
        return columns

    def figures(self) -> dict[str, Any]:
        """Return the strategy's part of ``summary.json``."""
        return {
            "began": self.history.began,
            "ended": utc_now(),
            "parties": len(self.records),
            "data": self.data,
            **self.adaptive_window.figures(),
            "quorum": self.schedule.quorum,
            "schedule": self.schedule.word,
            "epochs": round(self.budget.epochs, 3),
            "steps": self.holder.steps,
            **self.history.spent(self.records, self.transport.clock),
            **self.results(),
            "assessment": self.assessment,
            "best_epoch": self.history.chosen.get("epoch") if self.history.restored else None,
            **self._covered(),
            **({"rerun": self.rerun} if self.rerun else {}),
            **self.accountant.figures(),
            "peak_memory_mb": round(max(self.messenger.party_memory_mb, peak_memory_mb()), 1),
            "failed_parties": [record.party for record in self.records if not record.alive],
            "by_party": [
                {**cost, "columns": of.columns, "embedding_size": of.size}
                | ({"monotone": True} if of.monotone else {})
                for cost in self.costs()
                for of in (self.members[cost["party"]],)
            ],
        }

    def results(self) -> dict[str, Any]:
        """Return the figures of the trained model on held-out rows."""
        chosen = self.history.chosen
        found = {key: chosen[key] for key in chosen if key in RESULTS or key.startswith("test_")}
        return dict.fromkeys(RESULTS) | found

    def _covered(self) -> dict[str, Any]:
        """Return which people of the label holder's file the run covers, if it has a file."""
        found = self.labels.coverage
        if found is None:
            return {}
        unknown = {"unknown_rows": found["asked"] - found["aligned"]}
        return {"coverage": found, **(unknown if self.config.data.align == "any" else {})}
