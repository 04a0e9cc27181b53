"""The one exchange loop, which every system shares.

A party's turn is one Flower message: the feedback for its last window and the order for its next,
answered by its upload. The label holder waits for a quorum of uploads, answers them, and gives
those parties their next turn. At most one message is ever in flight to a party.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies.checkpoints import Checkpoints
from strategies.delay import refresh
from strategies.enrolment import enrol
from strategies.history import History
from strategies.party_record import FINAL, PartyRecord, State
from strategies.run import Run, restore_best
from vfl_flower.config.plugins import load_place
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import with_row_masks
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.checkpoint import Keeper
from vfl_flower.models.training import load_model, model_arrays
from vfl_flower.protocol.systems import load_system, sized
from vfl_flower.transport.base import transport_of
from vfl_flower.transport.messages import (
    Arrays,
    CheckpointOrder,
    EmbedOrder,
    EvaluateOrder,
    RejoinOrder,
    RestoreOrder,
    TrainOrder,
)
from vfl_flower.transport.wire import pack, unpack

_NOTHING = ArrayRecord(), ConfigRecord()


class Vertical(Strategy):
    """Vertical federated learning: the Flower Strategy that every system is a choice of.

    Parameters
    ----------
    config, labels : the resolved run configuration, and the label holder's labels. ``self.config``
        has what the rows decide besides (`vfl_flower.protocol.systems.sized`).
    observers : are told of evaluations, progress, failures and the end.
    keeper : where checkpoints are kept, and the one to go on from; without it, none are.
    """

    trains_parties: ClassVar[bool] = True  # whether the models of a run are at its parties
    keeps_checkpoints: ClassVar[bool] = True  # whether a run's model can be used
    can_resume: ClassVar[bool] = True  # and whether a run can be resumed before its end

    run: Run  # once its parties are known
    ready = False  # whether all that can be found wrong before training has been

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        observers: Sequence[Callback] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self.given = config  # without what the rows decide
        self.config = config = sized(config, len(labels.train))
        self.labels = labels
        when = config.training.patience, bool(config.running.grow)
        self.history = History(config.running.eval_every, observers, *when)  # its clock begins
        self.keeper = keeper if self.keeps_checkpoints else None
        self.nonce = keeper.nonce if keeper else ""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train with the parties of a grid until the epochs are done.

        Of Flower's other arguments only ``initial_arrays`` is used, the top model to start from.

        Raises
        ------
        ConfigError
            If the parties do not agree with each other or with the label holder.
        PartyError
            If a party fails, and the configuration does not say to go on without it.
        """
        transport, keeper = transport_of(grid), self.keeper
        nodes = enrol(transport, self.given, self.labels, keeper, self.nonce)
        self.labels = with_row_masks(self.labels, self.config, len(nodes))
        self.run = Run(transport, nodes, self.config, self.labels, self.history, self.nonce)
        if initial_arrays is not None:
            load_model(self.run.holder.top, unpack(initial_arrays))
        checkpoints = None
        if keeper:
            checkpoints = Checkpoints(keeper, self.run, self.given, self.drain, self.wait_for)
        self.ready = True
        self.summary()
        with checkpoints.held(self.can_resume) if checkpoints else nullcontext():
            with self.history.told():
                self.train(checkpoints)
            if checkpoints:
                checkpoints.keep(finished=True)
        metrics = self.history.records()
        return Result(arrays=pack(self.top_arrays()), evaluate_metrics_serverapp=metrics)

    def summary(self) -> None:
        """Log what is about to run."""
        self.run.log_summary()

    def figures(self) -> dict[str, Any]:
        """The strategy's part of ``summary.json``; empty if the parties did not agree."""
        return self.run.figures() if hasattr(self, "run") else {}

    def top_arrays(self) -> Arrays:
        """The top model's parameters so far; none before the parties have been enrolled."""
        return model_arrays(self.run.holder.top) if hasattr(self, "run") else {}

    # --- the loop -------------------------------------------------------------------------------

    def train(self, checkpoints: Checkpoints | None = None) -> None:
        """Give every party its turns, and answer every quorum, until all are done."""
        run = self.run
        while not all(record.state is State.DONE for record in run.records if record.alive):
            epoch = int(run.budget.epochs)
            run.messenger.post(run.recovery.ask_back())
            run.messenger.post(self.configure_evaluate(epoch, *_NOTHING, run.transport))
            run.messenger.post(self.configure_train(epoch, *_NOTHING, run.transport))
            replies = run.recovery.replies()
            # Evaluations first: a bounded delay waits for what is in flight.
            self.aggregate_evaluate(epoch, replies)
            self.aggregate_train(epoch, replies)
            self._record_if_all_are_in()  # a party that has failed is waited for no more
            if checkpoints:
                checkpoints.keep_if_due()
            run.history.progressed(run.budget.answered, run.budget.limit)
        restore_best(run, self.wait_for)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A turn for each idle party while steps are left: its feedback, and its next window."""
        run = self.run
        for record in run.records:
            if record.state is State.IDLE and not run.budget.all_ordered and not run.holds(record):
                opening = {} if record.steps else run.holder.estimator.opening(run.holder)
                epoch, first, steps = run.next_window(record)
                order = TrainOrder(
                    exchange=record.exchange + 1,
                    epoch=epoch,
                    first=first,
                    steps=steps,
                    coordinated=run.schedule.coordinated,
                    arrays={**record.feedback, **opening},
                )
                record.steps += steps
                yield run.messenger.message(record, order)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Write the uploads into the table; answer as many quorums as there are."""
        run = self.run
        self._receive(replies)
        for group in run.waiting.groups(partial(refresh, run, self.wait_for)):
            # Of all rows of the mini-batches: the top model's step is of those that a party lacks.
            answered = [(each.party, each.batches) for each in group]
            allowed = run.releases is None or run.releases.answered(answered)
            for arrival in group:
                record = run.record_of_party(arrival.party)
                record.staleness.add(run.holder.steps - record.ordered_at_step)
            answers = run.recovery.answer(group) if allowed else run.holder.silent(group)
            for party, feedback in answers.items():
                run.record_of_party(party).take_feedback(feedback)
            run.budget.answered += sum(len(arrival.window.lengths) for arrival in group)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """An evaluation for each idle party that is due for one, or has no steps left."""
        run = self.run
        number = FINAL if run.budget.all_ordered else run.history.due(run.budget)
        for record in run.records:
            if record.state is State.IDLE and record.evaluation < number:
                yield run.messenger.message(record, run.evaluation(record, number))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Write test embeddings into the test table; a history entry once all parties' are in."""
        run = self.run
        for record, _, message in run.messenger.answers_to(EvaluateOrder, replies):
            use = partial(run.holder.held_out.receive, record.party, record.surrogates)
            run.recovery.take(record, message, use)
            if not record.unserved:
                record.evaluated()
        return self._record_if_all_are_in()

    def _record_if_all_are_in(self) -> MetricRecord | None:
        """A history entry, once every party that is there has answered the evaluation."""
        run = self.run
        evaluated = min((record.evaluation for record in run.records if record.alive), default=0)
        if evaluated <= run.history.recorded:
            return None
        run.history.recorded = evaluated
        return run.evaluate()

    # --- replies --------------------------------------------------------------------------------

    def _receive(self, replies: Iterable[Message]) -> None:
        """Write uploads into the table; those of a window then await their quorum."""
        run = self.run
        for record, order, message in run.messenger.answers_to(TrainOrder, replies):
            receive = partial(run.holder.receive, record.party, order)
            arrival = run.recovery.take(record, message, receive)
            if arrival is not None:
                if run.releases:
                    run.releases.received(record.party, arrival.window)
                record.state = State.AWAITS_QUORUM
                run.waiting.add(arrival)
        for record, query, message in run.messenger.answers_to(EmbedOrder, replies):
            fresh = partial(run.holder.refresh, record.party, query.arrays["ids"])
            run.recovery.take(record, message, fresh)
        for record, kept, message in run.messenger.answers_to(CheckpointOrder, replies):
            run.recovery.take(record, message, partial(record.has_kept, kept.number))
        for record, _, message in run.messenger.answers_to(RestoreOrder, replies):
            run.recovery.take(record, message, lambda upload: None)
        for record, _, message in run.messenger.answers_to(RejoinOrder, replies):
            run.recovery.rejoin(record, message)

    def wait_for(self, records: Sequence[PartyRecord]) -> None:
        """Take replies until nothing is in flight to these parties."""
        while any(record.in_flight for record in records):
            replies = self.run.recovery.replies()
            self.aggregate_evaluate(int(self.run.budget.epochs), replies)
            self._receive(replies)

    def drain(self) -> None:
        """Wait until nothing is in flight, and answer all that has come."""
        self.run.waiting.draining = True
        self.wait_for(self.run.records)
        self.aggregate_train(int(self.run.budget.epochs), [])
        self._record_if_all_are_in()
        self.run.waiting.draining = False


def strategy_of(config: RunConfig) -> type[Vertical]:
    """The Strategy that runs the configured system."""
    found: type[Vertical] = load_place(load_system(config.strategy).strategy)
    return found
