"""The exchange loop that every system shares.

A party's turn is one Flower message: the feedback for its last window, and the order for its next.
The party answers with its upload. The label holder waits for a quorum of uploads, answers them, and
gives those parties their next turn. At most one message is in flight to a party.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies import hooks
from strategies.callbacks import callbacks_of
from strategies.checkpoints import Checkpoints
from strategies.enrolment import Member, enrol
from strategies.fresh_embeddings import begin_surrogates, refresh
from strategies.history import History
from strategies.messenger import Replies
from strategies.run import Run
from strategies.turns import FINAL, PartyRecord, State
from vfl_flower.config.plugins import load_place
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import with_row_masks
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.checkpoint import Keeper
from vfl_flower.models.training import load_model, model_arrays
from vfl_flower.protocol.system import load_system
from vfl_flower.protocol.systems import sized
from vfl_flower.transport.base import Transport, transport_of
from vfl_flower.transport.messages import Arrays, EvaluateOrder, TrainOrder
from vfl_flower.transport.wire import pack, unpack

_NOTHING = ArrayRecord()


class Vertical(Strategy):
    """Vertical federated learning: the Flower Strategy that runs every system.

    **Flower's hooks.** Subclass this class, override a hook, and call ``super()`` in it. A round
    lasts from one evaluation to the next (option ``eval-every``), and ``arrays`` is the label
    holder's top model. `configure_train` and `configure_evaluate` give a message to each idle
    party. The loop calls them whenever a party may have its turn, many times a round. Read the
    messages, or replace their content; send all of them, and no others. The run would wait for a
    party that you leave out: choose parties by ``quorum``. The loop calls `aggregate_train`
    whenever uploads are in, and `aggregate_evaluate` while it awaits an evaluation. Both may get no
    reply, and none gets the fresh embeddings for a bounded delay. Pass all replies on to
    ``super()``, which returns the top model and metrics after a step or an evaluation. The arrays
    that you return become the top model. The `Result` has your metrics.

    **Limits.** No arrays reach the parties, since each party owns its bottom model. So
    ``initial_arrays`` are only the top model's. Parties learn by the run configuration, and each
    may refuse parts of it. So ``train_config`` and ``evaluate_config`` reach `configure_train` and
    `configure_evaluate`, but no message: ``super()`` refuses them.

    Parameters
    ----------
    config, labels : resolved run configuration, and labels. ``self.config`` also has the values
        that the rows decide (`vfl_flower.protocol.systems.sized`).
    callbacks : hear of evaluations, progress, failures and the end, and can stop or save the run.
    keeper : folder of the checkpoints, and the one to resume from. Without it, none are saved.
    """

    trains_parties: ClassVar[bool] = True  # whether parties train bottom models
    keeps_checkpoints: ClassVar[bool] = True  # whether a run keeps its model
    can_resume: ClassVar[bool] = True  # whether a run can resume before its end

    run: Run  # once its parties are known
    ready = False  # whether all checks before training are done
    tested: Mapping[str, Any] = MappingProxyType({})  # columns of the test rows, once assessed

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        callbacks: Sequence[Callback] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self.given = config  # without values that the rows decide
        self.config = config = sized(config, len(labels.train))
        self.labels = labels
        self.callbacks = list(callbacks)
        self.history = History()
        self.folder = keeper.folder if keeper else None
        self.keeper = keeper if self.keeps_checkpoints else None
        self.nonce = keeper.nonce if keeper else ""
        self.checkpoints: Checkpoints | None = None
        self.result = Result()
        self.train_config, self.evaluate_config = ConfigRecord(), ConfigRecord()
        # Arrays and metrics are made for hooks that somebody overrides, and for no others.
        self.hooked = hooks.overrides(type(self), Vertical)

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

        Parameters
        ----------
        initial_arrays : the top model to start from.
        num_rounds : rounds after which training stops, if its epochs are not done before; 0: none.
            Windows that are out then are still answered, and evaluated in one more round.
        timeout : seconds that a party may stay silent, in place of option ``party-timeout``.
        train_config, evaluate_config : are given to `configure_train` and `configure_evaluate`.
        evaluate_fn : is called with round 0 before training, and with each round and its top model.

        Returns
        -------
        Result
            The top model, and metrics by round. Training metrics are the last that
            `aggregate_train` returned, and evaluation metrics come from `aggregate_evaluate`. The
            server's metrics are the label holder's history, with the results of ``evaluate_fn``.

        Raises
        ------
        ConfigError
            If the parties do not agree with each other or with the label holder.
        PartyError
            If a party fails, and the configuration does not say to continue without it.
        """
        if timeout:
            self.given = self.given.with_values({"party-timeout": timeout})
            self.config = self.config.with_values({"party-timeout": timeout})
        self.train_config = train_config or ConfigRecord()
        self.evaluate_config = evaluate_config or ConfigRecord()
        found = self.result.evaluate_metrics_serverapp
        if num_rounds:
            self.callbacks.append(hooks.RoundLimit(num_rounds))
        central = evaluate_fn and hooks.CentralEvaluation(evaluate_fn, self._arrays, found)
        if central:
            self.callbacks.append(central)
        transport = transport_of(grid)
        nodes = enrol(transport, self.given, self.labels, self.keeper, self.nonce)
        self.labels = with_row_masks(self.labels, self.config, len(nodes))
        run = self.prepare(transport, nodes)
        if initial_arrays is not None:
            load_model(run.holder.top, unpack(initial_arrays))
        if self.keeper:
            self.checkpoints = self.keep_in(self.keeper)
        self.ready = True
        self.summary()
        with run.told(self.folder):
            if central and not run.history.entries:
                central.evaluate(0)
            if self.config.estimator.initial_surrogates != "zero":
                begin_surrogates(run, self.wait_for)
            self.train()
            run.tell("trained")
            self.assess()
            self.finish()
        result, entries = self.result, run.history.records()
        result.arrays = self._arrays()
        result.evaluate_metrics_clientapp = {**entries, **result.evaluate_metrics_clientapp}
        for number, entry in entries.items():
            found[number] = MetricRecord({**entry, **found.get(number, {})})
        return result

    def prepare(self, transport: Transport, nodes: dict[int, Member]) -> Run:
        """Make the run with these parties, and attach its callbacks."""
        again = self.keeper.again if self.keeper else None
        about = self.config, self.labels, self.history, self.nonce, again
        self.run = Run(transport, nodes, *about)
        self.run.can_save = bool(self.keeper) and self.can_resume
        self.run.attach(callbacks_of(self.run, self.callbacks, self.wait_for))
        return self.run

    def keep_in(self, keeper: Keeper) -> Checkpoints:
        """Resume the run from a found checkpoint, if there is one; return its checkpoints."""
        return Checkpoints(keeper, self.run, self.given, self.drain, self.wait_for)

    def summary(self) -> None:
        """Log what is about to run."""
        self.run.log_summary()

    def figures(self) -> dict[str, Any]:
        """Return the strategy's part of ``summary.json``; empty without parties."""
        return self.run.figures() if hasattr(self, "run") else {}

    def top_arrays(self) -> Arrays:
        """Return the top model's parameters so far; empty without parties."""
        return model_arrays(self.run.holder.top) if hasattr(self, "run") else {}

    def _arrays(self) -> ArrayRecord:
        return pack(self.top_arrays())

    # --- the loop -------------------------------------------------------------------------------

    def train(self) -> None:
        """Give every party its turns, and answer every quorum, until all are done."""
        run, history, grid = self.run, self.run.history, self.run.transport
        while not all(record.state is State.DONE for record in run.records if record.alive):
            if any(record.state is State.FAILED for record in run.records):
                run.messenger.ask_back()
            number, arrays = len(history.entries) + 1, self._arrays() if self.hooked else _NOTHING
            due = FINAL if run.budget.left <= 0 else run.budget.evaluation
            if due > history.recorded:
                history.asked = due
                run.messenger.post(
                    self.configure_evaluate(number, arrays, self.evaluate_config, grid)
                )
            run.messenger.post(self.configure_train(number, arrays, self.train_config, grid))
            if self.hooked:
                hooks.check_sent(run)
            self.take(run.messenger.gather())
            if history.asked > history.recorded:  # a failed party no longer delays an evaluation
                run.evaluate_if_answered()
            for progressed in run.listeners["progressed"]:
                progressed(run.budget.answered, run.budget.limit)
            if run.saving and self.checkpoints:
                self.checkpoints.save()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Give each idle party its feedback and its next window, while steps are left."""
        if config:
            hooks.refuse_config("train_config", config)
        run, window = self.run, self.run.adaptive_window
        # After an evaluation, a run may stop or write a checkpoint. Parties in step wait for it, so
        # that none has a window more than the others.
        together = run.schedule.coordinated
        for record in run.records:
            if record.state is not State.IDLE or run.budget.left <= 0:
                continue
            if together and record.evaluation > run.history.recorded:
                continue
            opening = {} if record.steps else run.holder.estimator.opening(run.holder, record.party)
            longest = window.next(record) if window.active else run.schedule.longest
            if run.transcript.repeats:
                longest = run.transcript.steps(record.party, record.exchange + 1)
            epoch, first, steps = run.budget.window(record.steps, longest)
            if window.active:
                window.ordered(record, steps)
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
        run, holder, before = self.run, self.run.holder, self.run.holder.steps
        window = run.adaptive_window
        uploads = run.messenger.take(
            TrainOrder, replies, lambda party, *sent: holder.receive(party.party, *sent)
        )
        for record, arrival in uploads:
            if run.releases:
                run.releases.received(record.party, arrival.window)
            record.state = State.AWAITS_QUORUM
            run.waiting.arrivals.append(arrival)
        for group in run.waiting.groups():
            if holder.table.max_delay:
                refresh(run, self.wait_for, group)
            if group:
                known = len(holder.losses)
                run.messenger.answer(group)
                if window.active and (new := holder.losses[known:]):
                    window.answered([each for part in new for each in part.tolist()])
        if not self.hooked or holder.steps == before:
            return None, None
        metrics = MetricRecord({"steps": holder.steps})
        for losses in holder.losses[-1:]:
            metrics["train_loss"] = float(losses.mean())
        return self._arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each idle party that owes an evaluation for embeddings of the test rows."""
        if config:
            hooks.refuse_config("evaluate_config", config)
        run = self.run
        for record in run.records:
            if record.state is State.IDLE and record.evaluation < run.history.asked:
                yield run.messenger.message(record, run.evaluation(record, run.history.asked))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Write test embeddings into the test table; add a history entry once all are in."""
        held_out = self.run.holder.held_out
        uploads = self.run.messenger.take(
            EvaluateOrder,
            replies,
            lambda party, _, upload: held_out.receive(party.party, party.surrogates, upload),
        )
        for record, _ in uploads:
            record.evaluated()
        return self.run.evaluate_if_answered()

    # --- replies --------------------------------------------------------------------------------

    def take(self, replies: Replies) -> None:
        """Hand replies to Flower's hooks.

        Evaluations come first: a bounded delay waits for what is in flight.
        """
        run, history, (train, evaluate, others) = self.run, self.run.history, replies
        if evaluate or history.asked > history.recorded:
            number = len(history.entries) + 1
            metrics = self.aggregate_evaluate(number, evaluate)
            if metrics is not None:
                self.result.evaluate_metrics_clientapp[number] = metrics
        if others:
            run.messenger.use(others)
        if train or (run.waiting.arrivals and not run.waiting.held):
            self._learn(train)
        if self.hooked:
            hooks.check_taken(run, [*train, *evaluate])

    def _learn(self, replies: list[Message]) -> None:
        """Hand uploads to Flower's hook, and take what it returns."""
        number = len(self.history.entries) + 1
        arrays, metrics = self.aggregate_train(number, replies)
        if arrays is not None:
            load_model(self.run.holder.top, unpack(arrays))
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics

    def wait_for(self, records: Sequence[PartyRecord]) -> None:
        """Wait until no message is out to these parties; answer no quorum meanwhile."""
        waiting = self.run.waiting
        before, waiting.held = waiting.held, True
        while any(record.in_flight for record in records):
            self.take(self.run.messenger.gather())
        waiting.held = before

    def drain(self) -> None:
        """Wait until no message is out, and answer all arrivals."""
        self.run.waiting.draining = True
        self.wait_for(self.run.records)
        self._learn([])
        self.run.evaluate_if_answered()
        self.run.waiting.draining = False

    def assess(self) -> None:
        """Calibrate and assess the trained model."""
        self.tested = self.run.assess()

    def finish(self) -> None:
        """Save the trained model."""
        if self.checkpoints:
            self.checkpoints.save(finished=True)


def strategy_of(config: RunConfig) -> type[Vertical]:
    """Return the Strategy of the configured system."""
    found: type[Vertical] = load_place(load_system(config.strategy).flower_strategy)
    return found
