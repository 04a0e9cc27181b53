"""The one exchange loop, which every system shares: quorum, windows, delay bound, time-outs.

A party's turn is one Flower message: the feedback for its last window and the order for its next,
answered by its upload. The label holder waits for a quorum of uploads, answers them, and gives
those parties their next turn. All parties as quorum is synchronous VFL; one is VAFL's Algorithm 1;
t is its Algorithm 2. At most one message is ever in flight to a party, so no node serves two at
once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray
from tqdm import tqdm

from vfl_flower.axes.batches import steps_per_epoch
from vfl_flower.axes.codecs import check_memory, party_bytes
from vfl_flower.axes.privacy import accountant
from vfl_flower.config import RunConfig
from vfl_flower.data.sources import Labels
from vfl_flower.errors import ConfigError, OutOfStepError, PartyError, VflError
from vfl_flower.holder.checkpoint import Checkpoint, Keeper, check_states
from vfl_flower.holder.label_holder import Arrival, LabelHolder, Metrics
from vfl_flower.holder.results import TRANSPORTS, reached
from vfl_flower.models import embedding_size, load_model, model_arrays
from vfl_flower.provenance import code_digest, peak_memory_mb
from vfl_flower.records import (
    Arrays,
    CheckpointOrder,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    RejoinOrder,
    ResumeOrder,
    TrainOrder,
    Turn,
    Upload,
    pack,
    read_reply,
    to_message,
    unpack,
)
from vfl_flower.runtimes.carrier import ask_all, pull, push
from vfl_flower.runtimes.local import engine_of

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

O = TypeVar("O", bound=Turn)  # noqa: E741
T = TypeVar("T")

_WINDOWS = {  # what hides each runtime's cost, and costs no accuracy
    "first-order": {"local": 1, "stream": 8, "ray": 8, "supernodes": 16},
    "zeroth-order": {"local": 16, "stream": 64, "ray": 64, "supernodes": 64},
}
_EXCHANGES = 1000  # between two checkpoints, on SuperNodes
_TRIES = 3  # times that a party is brought into step for one turn
_FINAL = 1 << 30  # number of the evaluation after the last step


@dataclass
class Traffic:
    """Exchanges and array bytes of training, as sent; evaluations are counted apart."""

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    evaluation_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        mine, others = asdict(self), asdict(other)
        return Traffic(**{key: mine[key] + others[key] for key in mine})


@dataclass
class Spread:
    """Mean and most of numbers that come one by one, none of them below zero."""

    mean: float = 0.0
    most: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        """Take one more into account."""
        self.count += 1
        self.mean += (number - self.mean) / self.count
        self.most = max(self.most, number)


@dataclass
class Seat:
    """What the label holder keeps about one party between its messages."""

    party: int
    node_id: int
    exchange: int = 0  # number of the last message sent
    in_flight: Turn | None = None
    sent_at: float = 0.0
    sent_at_clock: float = 0.0  # virtual seconds
    ordered_at_step: int = 0  # of the label holder, when it ordered the last window
    traffic: Traffic = field(default_factory=Traffic)
    reply_seconds: Spread = field(default_factory=Spread)  # from order to reply, evaluations apart
    reply_virtual_seconds: Spread = field(default_factory=Spread)
    staleness: Spread = field(default_factory=Spread)  # label-holder steps from order to answer
    awaits_quorum: bool = False
    feedback: Arrays = field(default_factory=dict)  # for its last window, to go with its next turn
    steps: int = 0  # ordered so far
    evaluation_sent: int = 0  # number of the last evaluation that it was asked for
    surrogates: str = ""  # digest of what it should have had then
    evaluation: int = 0  # number of the last that it answered
    alive: bool = True
    asked_back: int = 0  # number of the evaluation at which a failed party was last asked back
    unserved: Turn | None = None  # what it could not serve for want of state: to be sent anew
    out_of_step: int = 0  # how often, since it last served a message

    @property
    def done(self) -> bool:
        """Whether it has answered its last message."""
        return self.evaluation == _FINAL

    @property
    def idle(self) -> bool:
        """Whether it is this party's turn."""
        return self.alive and not (self.done or self.in_flight or self.awaits_quorum)


class Vertical(Strategy):
    """Vertical federated learning: the Flower Strategy that every system is a choice of.

    A system is a subclass that says its choices on the five axes.

    Parameters
    ----------
    config : the resolved run configuration.
    labels : the label holder's labels.
    record : called with a history entry after every evaluation.
    keeper : where checkpoints are kept, and the one to go on from; without it, none are.
    """

    name: ClassVar[str]
    axes: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}  # of `RunConfig` fields whose key is "auto"
    trains_parties: ClassVar[bool] = True  # whether the models of a run are at its parties

    keeps_checkpoints: ClassVar[bool] = True  # whether a run can be resumed, and its model used

    holder: LabelHolder

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        record: Callable[[dict[str, Any]], None] = lambda entry: None,
        keeper: Keeper | None = None,
    ) -> None:
        self.config = config
        self.labels = labels
        self.record = record
        self.keeper = keeper if self.keeps_checkpoints else None
        self.ready = False  # whether all that can be found wrong before training has been
        self.kept_at = 0  # exchanges at the last checkpoint
        self.draining = False  # whether parties wait for their next turns
        self.seats: list[Seat] = []
        self.arrivals: list[Arrival] = []  # uploads that await their quorum
        self.history: list[dict[str, Any]] = []
        self.party_steps = 0  # steps answered, over all parties
        self.assigned = 0  # steps ordered, over all parties
        self.recorded = 0  # number of the last evaluation that every party has answered
        self.party_memory_mb = 0.0
        self.accountant = accountant(config, len(labels.train))
        self._waiting: dict[str, Seat] = {}  # message id -> its receiver
        self._started_at = time.perf_counter()

    @classmethod
    def serves_black_boxes(cls, config: RunConfig) -> bool:
        """Whether bottom models without a gradient can take part."""
        return config.estimator == "zeroth-order"

    def default_quorum(self, parties: int) -> int:
        """Uploads to wait for, where the configuration does not say: all, which is synchronous."""
        return parties

    # --- the loop -------------------------------------------------------------------------------

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

        The run configuration says what Flower's other arguments would; of them only
        ``initial_arrays``, the top model to start from, is used.

        Raises
        ------
        ConfigError
            If the parties do not agree with each other or with the label holder.
        PartyError
            If a party fails, and the configuration does not say to go on without it.
        """
        self.enrol(grid)
        if initial_arrays is not None:
            load_model(self.holder.top, unpack(initial_arrays))
        if self.keeper:
            self._open_checkpoints(self.keeper)
        self.ready = True
        self.summary()
        self.train()
        self._checkpoint(finished=True)
        return self.result()

    def train(self) -> None:
        """Give every party its turns, and answer every quorum, until all are done."""
        nothing = ArrayRecord(), ConfigRecord()
        with tqdm(total=self.budget, unit="step", disable=None, leave=False) as bar:
            while not all(seat.done for seat in self.seats if seat.alive):
                self._send(self._ask_back())
                self._send(self.configure_evaluate(self.epoch, *nothing, self.grid))
                self._send(self.configure_train(self.epoch, *nothing, self.grid))
                replies = self._replies()
                # Evaluations first: a bounded delay waits for what is in flight.
                self.aggregate_evaluate(self.epoch, replies)
                self.aggregate_train(self.epoch, replies)
                self._record_if_all_are_in()  # a party that has failed is waited for no more
                if self.exchanges >= self.kept_at + self.checkpoint_every > self.kept_at:
                    self._checkpoint()
                if self.history:
                    bar.set_postfix_str(reached(self.history[-1]))
                bar.total = self.budget
                bar.update(self.party_steps - bar.n)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A turn for each idle party while steps are left: its feedback, and its next window."""
        messages = []
        for seat in self.seats:
            if not seat.idle or self.assigned >= self.budget:
                continue
            epoch, first = divmod(seat.steps, self.steps_per_epoch)
            steps = min(self.window, self.steps_per_epoch - first, self.budget - self.assigned)
            to_begin_with = {} if seat.steps else self.holder.shared_labels()
            order = TrainOrder(
                exchange=seat.exchange + 1,
                epoch=epoch,
                first=first,
                steps=steps,
                coordinated=self.coordinated,
                arrays={**to_begin_with, **seat.feedback},
            )
            self.assigned += steps
            seat.steps += steps
            messages.append(self._message(seat, order))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Write the uploads into the table; answer as many quorums as there are."""
        self._receive(replies)
        while self.arrivals and len(self.arrivals) >= self._quorum_now():
            count = self._quorum_now()
            group, self.arrivals = self.arrivals[:count], self.arrivals[count:]
            group.sort(key=lambda arrival: arrival.party)
            self._refresh(group)
            # One whose party has lost its state meanwhile is answered no more.
            group = [arrival for arrival in group if self._seat_of(arrival.party).awaits_quorum]
            if not group:
                continue
            for arrival in group:
                self.accountant.answered(arrival.party, arrival.window)
                seat = self._seat_of(arrival.party)
                seat.staleness.add(self.holder.steps - seat.ordered_at_step)
            for party, feedback in self.holder.answer(group).items():
                seat = self._seat_of(party)
                seat.feedback = feedback
                seat.awaits_quorum = False
            self.party_steps += sum(len(arrival.window.lengths) for arrival in group)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """An evaluation for each idle party that is due for one, or has no steps left."""
        number = _FINAL if self.assigned >= self.budget else self._due
        messages = []
        for seat in self.seats:
            if seat.idle and seat.evaluation < number:
                seat.evaluation_sent = number
                seat.surrogates = self.holder.digest_for(seat.party)
                order = EvaluateOrder(exchange=seat.exchange + 1, arrays=seat.feedback)
                messages.append(self._message(seat, order))
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Write test embeddings into the test table; a history entry once all parties' are in."""
        for seat, _, message in self._answers_to(EvaluateOrder, replies):
            use = partial(self.holder.receive_test, seat.party, seat.surrogates)
            self._take(seat, message, use)
            if not seat.unserved:
                seat.evaluation = seat.evaluation_sent
        return self._record_if_all_are_in()

    @property
    def _due(self) -> int:
        """Number of the last evaluation that is due by the steps answered."""
        return self._evaluations(self.party_steps / self.steps_of_epoch)

    def _evaluations(self, epochs: float) -> int:
        """How many are due after so many epochs."""
        return int(epochs / self.config.eval_every * (1 + 1e-12))

    def is_due(self, epoch: int) -> bool:
        """Whether to evaluate after this epoch, for baselines that train by whole epochs."""
        new = self._evaluations(epoch) > self._evaluations(epoch - 1)
        return new or epoch == self.config.epochs

    def _record_if_all_are_in(self) -> MetricRecord | None:
        evaluated = min((seat.evaluation for seat in self.seats if seat.alive), default=0)
        if evaluated <= self.recorded:
            return None
        self.recorded = evaluated
        return self._record(self.holder.evaluate())

    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s: %d parties, %d training rows; %s (quorum %d), windows of %d%s",
            self.config.strategy,
            self.config.dataset,
            len(self.seats),
            len(self.labels.train),
            self.schedule,
            self.quorum,
            self.window,
            TRANSPORTS[self.transport],
        )

    # --- parties --------------------------------------------------------------------------------

    def enrol(self, grid: Grid) -> None:
        """Ask every node to describe itself, and refuse parties that do not agree."""
        self.grid = grid
        if self.engine != "supernodes":  # all in one memory: before any party takes some of it
            self._check_memory(len(list(grid.get_node_ids())))
        order: Order = DescribeOrder(outputs=self.labels.outputs)
        if self.keeper and self.keeper.found:
            order = ResumeOrder(run=self.keeper.found.run, number=self.keeper.found.number)
        found = ask_all(grid, order, Description, self.config)
        if self.keeper and self.keeper.found:
            check_states(self.keeper.found, found.values())
        if self.engine == "supernodes":
            self._check_memory(len(found))
        for description in found.values():
            self._check(description, len(found))
        self.seat({description.party: node for node, description in found.items()})

    def seat(self, nodes: Mapping[int, int]) -> None:
        """Prepare to train with these parties, given their nodes."""
        self.seats = [Seat(party, nodes[party]) for party in sorted(nodes)]
        self.quorum = self.config.quorum or self.default_quorum(len(self.seats))
        if self.quorum > len(self.seats):
            raise ConfigError(
                f"quorum = {self.quorum} can never be met by {len(self.seats)} parties: lower it."
            )
        self.coordinated = self.quorum == len(self.seats)
        if self.config.privacy == "scalar":
            if self.coordinated and len(self.seats) > 1:
                raise ConfigError(
                    "privacy = 'scalar' needs mini-batches that are secret, and those of a "
                    f"synchronous system are known to all {len(self.seats)} parties: lower the "
                    "quorum."
                )
            self.coordinated = False
        if self.config.labels == "shared" and not self.coordinated:
            raise ConfigError(
                "labels = 'shared' sends every upload on to all parties, which then step together: "
                f"it needs a synchronous system, with a quorum of all {len(self.seats)}."
            )
        if self.coordinated and self.config.on_party_failure == "continue":
            raise ConfigError(
                "on-party-failure = 'continue' needs a quorum below the number of parties, "
                f"{len(self.seats)}: a synchronous system waits for every one of them."
            )
        self.window = self._choose_window()
        self.steps_per_epoch = steps_per_epoch(self.config, len(self.labels.train))
        self.steps_of_epoch = self.steps_per_epoch * len(self.seats)  # over all parties
        self.planned = self.config.epochs * self.steps_of_epoch
        self.allowed = self.accountant.steps_allowed(self.planned)
        if self.allowed < self.planned:
            log.warning(
                "The privacy budget epsilon = %g allows %d of %d steps; the run stops there.",
                self.config.epsilon,
                self.allowed,
                self.planned,
            )
        if self.config.epsilon and (self.config.delta or 0) >= 1 / len(self.labels.train):
            log.warning(
                "delta = %g is not below one over the %d training rows, where epsilon says little.",
                self.config.delta,
                len(self.labels.train),
            )
        size = embedding_size(self.config, self.labels.outputs)
        sizes = {seat.party: size for seat in self.seats}
        self.holder = LabelHolder(self.config, self.labels, sizes, self.accountant.noise())

    def _check_memory(self, parties: int) -> None:
        """Say what surrogates take, and refuse what cannot fit."""
        shape = len(self.labels.train), embedding_size(self.config, self.labels.outputs)
        of_party = party_bytes(self.config, parties, shape)
        if not of_party:
            return
        here = 4 * shape[0] * shape[1] * parties  # the table
        if self.config.labels == "private" and self.config.downlink_surrogates:
            here *= 2
        notice.info(
            "Error feedback keeps surrogates of %d x %d numbers: %.1f MB a party, %.1f MB at the "
            "label holder",
            *shape,
            of_party / 1e6,
            here / 1e6,
        )
        together = self.engine != "supernodes"
        check_memory(
            "all parties' and the label holder's" if together else "the label holder's",
            here + parties * of_party * together,
        )

    def _check(self, description: Description, parties: int) -> None:
        """Refuse a party whose share of the columns, rows, ids or code do not fit the run."""
        rows = len(self.labels.train), len(self.labels.test)
        who = f"Party {description.party}"
        if description.parties != parties:
            raise ConfigError(
                f"{who} ({description.columns} columns) was started as one of "
                f"{description.parties} parties, but there are {parties} nodes: give all the same "
                "num-partitions, and start as many."
            )
        if (description.train_rows, description.test_rows) != rows:
            raise ConfigError(
                f"{who} has {description.train_rows} training and {description.test_rows} test "
                f"rows, the label holder {rows[0]} and {rows[1]}: align them first."
            )
        if description.ids_digest != self.labels.ids_digest:
            raise ConfigError(
                f"{who} has other sample ids than the label holder, or in another order: "
                "align them first."
            )
        size = embedding_size(self.config, self.labels.outputs)
        if description.embedding_size != size:
            raise ConfigError(
                f"{who} has embeddings of size {description.embedding_size}, where the run "
                f"configuration gives {size}: start all with the same configuration."
            )
        if description.code_digest != code_digest():
            raise ConfigError(
                f"{who} runs another version of this application's code: install the same on all, "
                "and stop a local SuperLink that was started from another checkout."
            )

    @property
    def budget(self) -> int:
        """Steps to order, over all parties: those planned, as far as the privacy budget allows."""
        return min(self.planned, self.allowed)

    @property
    def engine(self) -> str:
        """Which of the three runtimes carries the messages."""
        return engine_of(self.grid)

    @property
    def clock(self) -> float:
        """Virtual seconds, where the runtime has such a clock."""
        return float(getattr(self.grid, "clock", 0.0))

    @property
    def transport(self) -> str:
        """What carries them there: Flower's messages, a stream, or in process nothing."""
        return str(getattr(self.grid, "transport", "messages"))

    @property
    def schedule(self) -> str:
        """What the quorum makes it: sync, t-sync or async."""
        return "sync" if self.coordinated else "async" if self.quorum == 1 else "t-sync"

    @property
    def checkpoint_every(self) -> int:
        """Exchanges between two checkpoints; 0 for none but the last."""
        every = self.config.checkpoint_every
        return every if every is not None else _EXCHANGES if self.engine == "supernodes" else 0

    def _choose_window(self) -> int:
        runtime = "stream" if self.transport == "stream" else self.engine
        window = self.config.window or _WINDOWS[self.config.estimator][runtime]
        if self.config.max_delay and window > self.config.max_delay:
            if self.config.window:
                raise ConfigError(
                    f"window = {window} lets an embedding grow older than max-delay = "
                    f"{self.config.max_delay}: make the window smaller, or the delay larger."
                )
            window = self.config.max_delay
        return window

    def _seat_of(self, party: int) -> Seat:
        return next(seat for seat in self.seats if seat.party == party)

    def _quorum_now(self) -> int:
        """The quorum, or as many as can still come: fewer near the end, or after failures."""
        if self.draining:  # as many as there are
            return max(1, min(self.quorum, len(self.arrivals)))
        training = [
            seat
            for seat in self.seats
            if seat.alive
            and (
                seat.awaits_quorum
                or isinstance(seat.in_flight, TrainOrder)
                or self.assigned < self.budget
            )
        ]
        return max(1, min(self.quorum, len(training)))

    def _fail(self, seat: Seat, error: VflError) -> None:
        """Stop, or go on without a party, by its last embeddings."""
        seat.in_flight = seat.unserved = None
        seat.out_of_step = 0
        self._waiting = {key: other for key, other in self._waiting.items() if other is not seat}
        if not seat.alive:  # it was asked back, and does not come
            return
        seat.alive = False
        seat.asked_back = self._due
        if self.config.on_party_failure == "stop" or not any(s.alive for s in self.seats):
            raise error
        self.planned -= max(0, self.config.epochs * self.steps_per_epoch - seat.steps)
        log.warning("%s Going on without it, by its last embeddings.", error)

    def _ask_back(self) -> Iterator[Message]:
        """Once an evaluation, a failed party is asked whether it is there again."""
        for seat in self.seats:
            if not seat.alive and not seat.in_flight and seat.asked_back < self._due:
                seat.asked_back = self._due
                yield self._message(seat, self._rejoin_order(seat))

    def _rejoin_order(self, seat: Seat) -> RejoinOrder:
        known = self.holder.surrogate_of(seat.party)
        outputs = self.labels.outputs
        return RejoinOrder(exchange=seat.exchange + 1, outputs=outputs, arrays=known)

    def _bring_into_step(self, seat: Seat, error: OutOfStepError) -> None:
        """A party has an older state than it should: tell it what is known of it, and go on."""
        order = seat.in_flight
        seat.out_of_step += 1
        if self.config.labels == "shared" or seat.out_of_step > _TRIES:
            self._fail(seat, PartyError(f"Party {seat.party}", str(error)))
            return
        notice.warning(
            "Party %d %s It goes on from there; what it has learned since then is lost.",
            seat.party,
            str(error).removeprefix("failed: "),
        )
        seat.unserved = order
        self._send([self._message(seat, self._rejoin_order(seat))])

    def _rejoin(self, seat: Seat) -> None:
        """It has taken over what the label holder knows of it, and forgotten its last window."""
        self.holder.rejoined(seat.party)
        seat.awaits_quorum = False
        self.arrivals = [arrival for arrival in self.arrivals if arrival.party != seat.party]
        if seat.unserved:
            # Its feedback was for a window that the party does not know of any more.
            arrays = {
                key: seat.unserved.arrays[key] for key in seat.unserved.arrays if key == "ids"
            }
            order = replace(seat.unserved, exchange=seat.exchange + 1, arrays=arrays)
            seat.surrogates = self.holder.digest_for(seat.party)
            self._send([self._message(seat, order)])
            return
        seat.alive = True
        self.recorded = min(self.recorded, self._due)  # the last may have been, without it
        seat.evaluation = self.recorded
        self.planned += max(0, self.config.epochs * self.steps_per_epoch - seat.steps)
        notice.info("Party %d is back.", seat.party)

    # --- checkpoints ----------------------------------------------------------------------------

    def _checkpoint(self, finished: bool = False) -> None:
        """Wait until nothing is in flight; have the parties keep their states, and keep this one.

        Whoever is killed meanwhile has the last checkpoint left: parties keep two.
        """
        if not self.keeper:
            return
        self.draining = True
        self._wait_for(self.seats)
        self.aggregate_train(self.epoch, [])
        self._record_if_all_are_in()
        self.draining = False
        self.keeper.number += 1
        self._send(
            self._message(
                seat,
                CheckpointOrder(
                    exchange=seat.exchange + 1,
                    number=self.keeper.number,
                    arrays=seat.feedback,
                ),
            )
            for seat in self.seats
            if seat.alive
        )
        self._wait_for(self.seats)
        self.kept_at = self.exchanges
        of_holder, arrays = self.holder.state()
        Checkpoint(
            config=self.config,
            run=self.keeper.run,
            number=self.keeper.number,
            finished=finished,
            rows=self.keeper.rows,
            about_labels=self.labels.about,
            strategy={**self._state(), "holder": of_holder},
            arrays=arrays,
        ).save(self.keeper.folder)

    def _state(self) -> dict[str, Any]:
        """What the strategy must keep to go on, when nothing is in flight."""
        return {
            "seats": [
                {
                    **{name: getattr(seat, name) for name in _KEPT_OF_SEAT},
                    **{name: asdict(getattr(seat, name)) for name in _COUNTED_OF_SEAT},
                }
                for seat in self.seats
            ],
            "history": self.history,
            "uploads": self.accountant.uploads(),
            "timing": getattr(self.grid, "timing", None),
            "seconds": time.perf_counter() - self._started_at,
            **{name: getattr(self, name) for name in _KEPT},
        }

    def _open_checkpoints(self, keeper: Keeper) -> None:
        """Go on from the checkpoint that there is, and count what has been released since."""
        found = keeper.found
        if found:
            state = found.strategy
            for seat, kept in zip(self.seats, state["seats"], strict=True):
                for name in _KEPT_OF_SEAT:
                    setattr(seat, name, kept[name])
                for name, kind in _COUNTED_OF_SEAT.items():
                    setattr(seat, name, kind(**kept[name]))
            self.history = list(state["history"])
            if state["timing"] and hasattr(self.grid, "go_on_from"):
                self.grid.go_on_from(state["timing"])
            self._started_at -= state["seconds"]
            for name in _KEPT:
                setattr(self, name, state[name])
            self.kept_at = self.exchanges
            self.holder.go_on_from(state["holder"], found.arrays)
        if found or self.checkpoint_every:
            self.accountant.keep_journal(keeper.journal)
            again = self.accountant.released_steps() - self.party_steps
            if found and again > 0:  # else the run would release more than its budget
                self.allowed = min(self.planned, self.allowed) - again
                log.warning("%d steps were answered after the checkpoint, and count.", again)

    # --- messages -------------------------------------------------------------------------------

    def _message(self, seat: Seat, order: Turn) -> Message:
        """The message of a party's turn; from now on it is in flight."""
        seat.exchange += 1
        seat.in_flight = order
        seat.sent_at, seat.sent_at_clock = time.monotonic(), self.clock
        if isinstance(order, TrainOrder):
            seat.ordered_at_step = self.holder.steps
        seat.feedback = {}  # it goes with every order
        seat.traffic.bytes_down += order.nbytes
        self.accountant.ordered(seat.party, order)
        return to_message(order, seat.node_id, self.config.party_timeout)

    def _send(self, messages: Iterable[Message]) -> None:
        messages = list(messages)
        if messages:
            by_node = {seat.node_id: seat for seat in self.seats}
            for message, key in zip(messages, push(self.grid, messages), strict=True):
                self._waiting[key] = by_node[message.metadata.dst_node_id]

    def _replies(self) -> list[Message]:
        """The replies that are in, after waiting for one; a silent party has failed."""
        if not self._waiting:
            return []
        first_sent = min(seat.sent_at for seat in self._waiting.values())
        messages = pull(self.grid, self._waiting, first_sent + self.config.party_timeout)
        if not messages:
            silent = min(self._waiting.values(), key=lambda seat: seat.sent_at)
            cause = f"did not answer within {self.config.party_timeout:g} s."
            self._fail(silent, PartyError(f"Party {silent.party}", cause))
        return messages

    def _answers_to(
        self, kind: type[O], replies: Iterable[Message]
    ) -> Iterator[tuple[Seat, O, Message]]:
        """Those replies that answer an order of this kind, with their sender and that order."""
        for message in replies:
            seat = self._waiting.get(message.metadata.reply_to_message_id)
            if seat is not None and isinstance(seat.in_flight, kind):
                del self._waiting[message.metadata.reply_to_message_id]
                yield seat, seat.in_flight, message

    def _take(self, seat: Seat, message: Message, use: Callable[[Upload], T]) -> T | None:
        """What ``use`` makes of a party's answer to its last message; else the party has failed."""
        try:
            upload = read_reply(message, Upload)
            if (upload.party, upload.exchange) != (seat.party, seat.exchange):
                raise VflError(
                    f"answered as party {upload.party} to message {upload.exchange}, when message "
                    f"{seat.exchange} of party {seat.party} was due."
                )
            used = use(upload)
        except OutOfStepError as error:
            self._bring_into_step(seat, error)
            return None
        except VflError as error:
            self._fail(seat, PartyError(f"Party {seat.party}", str(error)))
            return None
        self.party_memory_mb = max(self.party_memory_mb, upload.peak_memory_mb)
        if isinstance(seat.in_flight, EvaluateOrder | CheckpointOrder):
            seat.traffic.evaluation_bytes += upload.nbytes
        else:
            seat.traffic.exchanges += 1
            seat.traffic.bytes_up += upload.nbytes
            seat.reply_seconds.add(time.monotonic() - seat.sent_at)
            seat.reply_virtual_seconds.add(self.clock - seat.sent_at_clock)
        seat.in_flight = seat.unserved = None
        seat.out_of_step = 0
        return used

    def _receive(self, replies: Iterable[Message]) -> None:
        """Write uploads into the table; those of a window then await their quorum."""
        for seat, order, message in self._answers_to(TrainOrder, replies):
            arrival = self._take(seat, message, partial(self.holder.receive, seat.party, order))
            if arrival is not None:
                self.accountant.received(seat.party, arrival.window)
                seat.awaits_quorum = True
                self.arrivals.append(arrival)
        for seat, query, message in self._answers_to(EmbedOrder, replies):
            ids = query.arrays["ids"]
            self._take(seat, message, partial(self.holder.refresh, seat.party, ids))
        for seat, _, message in self._answers_to(CheckpointOrder, replies):
            self._take(seat, message, lambda upload: None)
        for seat, _, message in self._answers_to(RejoinOrder, replies):
            try:
                description = read_reply(message, Description)
                if description.party != seat.party:
                    raise VflError(f"came back as party {description.party}.")
                self._check(description, len(self.seats))
            except ConfigError as error:  # which names the party
                self._fail(seat, error)
                continue
            except VflError as error:
                self._fail(seat, PartyError(f"Party {seat.party}", str(error)))
                continue
            seat.in_flight = None
            self._rejoin(seat)

    def _refresh(self, group: Sequence[Arrival]) -> None:
        """Bounded delay: ask late parties for fresh embeddings of the rows that are to be used."""

        def late() -> dict[int, NDArray[np.int32]]:
            return self.holder.too_old(group, [seat.party for seat in self.seats if seat.alive])

        # A node serves one message at a time, and what is in flight may bring what is needed.
        self._wait_for([self._seat_of(party) for party in late()])
        asked = [(self._seat_of(party), ids) for party, ids in late().items()]
        self._send(
            self._message(
                seat, EmbedOrder(exchange=seat.exchange + 1, arrays={"ids": ids, **seat.feedback})
            )
            for seat, ids in asked
        )
        self._wait_for([seat for seat, _ in asked])

    def _wait_for(self, seats: Sequence[Seat]) -> None:
        """Take replies until nothing is in flight to these parties."""
        while any(seat.in_flight for seat in seats):
            replies = self._replies()
            self.aggregate_evaluate(self.epoch, replies)
            self._receive(replies)

    # --- what came of it ------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs completed, on average over the parties."""
        return self.party_steps // self.steps_of_epoch

    def _record(self, metrics: Metrics) -> MetricRecord:
        """A history entry: where the run stands, and how the model does on the test rows."""
        entry = {
            "epoch": round(self.party_steps / self.steps_of_epoch, 3),
            "steps": self.holder.steps,
            **self.spent(),
            "train_loss": self.holder.train_loss(),
            **{f"test_{name}": value for name, value in asdict(metrics).items()},
        }
        self.history.append(entry)
        self.record(entry)
        log.info("Epoch %s: %s", f"{entry['epoch']:g}", reached(entry))
        return _metric_record(entry)

    @property
    def exchanges(self) -> int:
        """Exchanges so far, over all parties."""
        return sum(seat.traffic.exchanges for seat in self.seats)

    def spent(self) -> dict[str, Any]:
        """Exchanges, bytes and seconds so far."""
        return {
            **asdict(sum((seat.traffic for seat in self.seats), Traffic())),
            "seconds": round(time.perf_counter() - self._started_at, 3),
            "virtual_seconds": round(self.clock, 3),
        }

    def by_party(self) -> list[dict[str, Any]]:
        """What went to and from each party, how long it took to reply, and how stale that was."""

        def spread(of: Spread) -> dict[str, float]:
            return {"mean": round(of.mean, 6), "most": round(of.most, 6)}

        return [
            {
                "party": seat.party,
                **asdict(seat.traffic),
                "reply_seconds": spread(seat.reply_seconds),
                "reply_virtual_seconds": spread(seat.reply_virtual_seconds),
                "staleness": spread(seat.staleness),
            }
            for seat in self.seats
        ]

    def figures(self) -> dict[str, Any]:
        """The strategy's part of ``summary.json``."""
        if not hasattr(self, "holder"):
            return {}  # the parties did not agree
        last = self.history[-1] if self.history else {}
        return {
            "parties": len(self.seats),
            "window": self.window,
            "quorum": self.quorum,
            "schedule": self.schedule,
            "epochs": round(self.party_steps / self.steps_of_epoch, 3),
            "steps": self.holder.steps,
            **self.spent(),
            **{key: last.get(key) for key in _RESULTS},
            **self.accountant.figures(),
            "peak_memory_mb": round(max(self.party_memory_mb, peak_memory_mb()), 1),
            "failed_parties": [seat.party for seat in self.seats if not seat.alive],
            "by_party": self.by_party(),
        }

    def result(self) -> Result:
        """Flower's result: the top model's arrays, and the test metrics by number of evaluation."""
        metrics = {number: _metric_record(each) for number, each in enumerate(self.history, 1)}
        return Result(arrays=pack(self.top_arrays()), evaluate_metrics_serverapp=metrics)

    def top_arrays(self) -> Arrays:
        """The top model's parameters so far; none before the parties have been enrolled."""
        return model_arrays(self.holder.top) if hasattr(self, "holder") else {}


_KEPT = ("party_steps", "assigned", "planned", "recorded", "party_memory_mb")
_KEPT_OF_SEAT = (
    *("exchange", "steps", "evaluation_sent", "evaluation", "surrogates", "alive", "asked_back"),
    "party",
)
_COUNTED_OF_SEAT = {
    "traffic": Traffic,
    "reply_seconds": Spread,
    "reply_virtual_seconds": Spread,
    "staleness": Spread,
}
_RESULTS = ("train_loss", *(f"test_{each.name}" for each in fields(Metrics)))


def _metric_record(entry: dict[str, Any]) -> MetricRecord:
    return MetricRecord({key: value for key, value in entry.items() if value is not None})
