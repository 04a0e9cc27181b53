"""Parts of a run, and small fakes of what they have to do with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from strategies.adaptive_window import AdaptiveWindow
from strategies.history import History
from strategies.messenger import Messenger
from strategies.run import Run
from strategies.transcript import Transcript
from strategies.turns import PartyRecord, State, StepBudget, UnansweredUploads
from vfl_flower.config.errors import VflError
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.metrics import Metrics
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.ends import Arrival, Reading
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.privacy.accountant import Accountant
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.schedule import Schedule
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.base import Transport
from vfl_flower.transport.flower_internals import set_message_id
from vfl_flower.transport.messages import (
    CheckpointOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    Payload,
    RejoinOrder,
    TrainOrder,
    Turn,
    Upload,
)
from vfl_flower.transport.wire import to_failure, to_reply

ROWS = np.zeros(3, np.float32)  # 12 bytes
LABELS = Labels(
    np.zeros(6, np.int64), np.zeros(2, np.int64), ("no", "yes"), "ids", alignment="rows"
)


class Post(Transport):
    """A transport that keeps what is sent; parties answer when a test says so."""

    engine, transport, cost = "local", "none", "free"

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.due: list[Message] = []
        self.saved_clock: list[Any] | None = None

    def get_node_ids(self) -> list[int]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            self.sent.append(message)
            keys.append(f"message-{len(self.sent)}")
            set_message_id(message, keys[-1])
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        found = [each for each in self.due if each.metadata.reply_to_message_id in wanted]
        self.due = [each for each in self.due if each not in found]
        return found

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def state_dict(self) -> list[Any] | None:
        return self.saved_clock

    def load_state_dict(self, state: list[Any]) -> None:
        assert state, "there was no clock"
        self.saved_clock = state

    def answer(self, payload: Payload, number: int = -1) -> None:
        """The answer to the message of this number has come; to the last, unless it is said."""
        self.due.append(to_reply(payload, self.sent[number]))

    def fail(self, sentence: str, out_of_step: bool = False) -> None:
        self.due.append(to_failure(sentence, self.sent[-1], out_of_step))


class Uploads(Accountant):
    """Seven uploads of a record."""

    def uploads(self) -> int:
        return 7


class Told(ReleaseLog):
    """Records orders, and how many messages had left when each was recorded."""

    def __init__(self, post: Post) -> None:
        super().__init__(Uploads(resolve({}), 6, FirstOrder(resolve({}))))
        self.post = post
        self.orders: list[tuple[int, Order, int]] = []
        self.journals: list[tuple[Path, str, Mark | None]] = []

    def ordered(self, party: int, order: Order) -> None:
        self.orders.append((party, order, len(self.post.sent)))

    def keep(
        self, path: Path, run: str = "", mark: Mark | None = None, second: Path | None = None
    ) -> None:
        self.journals.append((path, run, mark))

    @property
    def mark(self) -> Mark | None:
        return [3, "abc"] if self.journals else None


class Heard(Callback):
    """Records the events of callbacks."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def evaluated(self, entry: dict[str, Any]) -> None:
        self.said.append(("evaluated", entry))

    def progressed(self, done: int, planned: int) -> None:
        self.said.append(("progressed", done, planned))

    def failed(self, party: int, error: VflError) -> None:
        self.said.append(("failed", party, str(error)))

    def trained(self) -> None:
        self.said.append(("trained",))

    def saved(self) -> None:
        self.said.append(("saved",))

    def ended(self) -> None:
        self.said.append(("ended",))


class Holder:
    """The label holder, as far as the messenger, callbacks and checkpoints know it."""

    def __init__(self) -> None:
        self.steps = 0
        self.top = None
        self.refreshed: list[int] = []
        self.remembered = self.restored = 0
        self.held_out = self
        self.estimator = SimpleNamespace(broadcasts=False)
        self.aggregation = SimpleNamespace(abreast=False)
        self.back: list[int] = []  # parties that have come back
        self.loaded: tuple[Any, Any] | None = None
        self.links = SimpleNamespace(
            surrogate=lambda party: {"embedding": np.full(2, party, np.float32)},
            digest=lambda party: f"digest of {party}",
            begin_again=self.back.append,
        )

    def remember(self, top: None) -> None:
        self.remembered += 1

    def restore(self, top: None) -> None:
        self.restored += 1

    def refresh(self, party: int, ids: Any, upload: Upload) -> None:
        self.refreshed.append(party)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"steps": 40}, {"table": np.arange(4.0)}

    def load_state_dict(self, scalars: Any, arrays: Any) -> None:
        self.loaded = scalars, arrays


@dataclass
class Parts:
    """Parts of a run of three parties, 10 steps an epoch, for 4 epochs, without a label holder."""

    keys: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = resolve({"strategy": "vafl", "party-timeout": 10.0, **self.keys})
        self.post, self.holder = Post(), Holder()
        self.records = [PartyRecord(party, 100 + party) for party in range(3)]
        self.releases, self.heard = Told(self.post), Heard()
        self.budget = StepBudget(epochs=4, per_epoch=10, parties=3)
        self.history = History()
        self.waiting = UnansweredUploads(2, self.records, self.budget)
        self.checked: list[Description] = []
        self.run = run = Run.__new__(Run)  # of these parts alone
        run.saving, run.can_save = False, True
        run.save_every = self.config.running.exchanges_apart(self.post.simulated)
        run.config, run.labels, run.transport = self.config, LABELS, self.post
        run.records, run.by_party = self.records, dict(enumerate(self.records))
        run.budget, run.history, run.releases = self.budget, self.history, self.releases
        run.accountant = self.releases.accountant
        holder: Any = self.holder
        run.holder, run.waiting = holder, self.waiting
        run.transcript = Transcript(hides=True)
        schedule = Schedule(3, True, 8, 32)
        run.adaptive_window = AdaptiveWindow(schedule, self.records)
        run.attach([self.heard])
        self.messenger = run.messenger = Messenger(
            self.config,
            self.post,
            self.records,
            holder,
            self.releases,
            self.budget,
            self.waiting,
            self.history,
            run.tell,
            RejoinOrder(exchange=0, outputs=LABELS.outputs, nonce="a run"),
            self.check,
            run.transcript,
        )

    def check(self, description: Description) -> None:
        self.checked.append(description)

    def send(self, party: int, order: Turn) -> None:
        record = self.records[party]
        self.messenger.post(
            [self.messenger.message(record, replace(order, exchange=record.exchange + 1))]
        )

    def take(self, kind: type[Turn], use: Use = lambda *sent: None) -> list[tuple[int, Any]]:
        """Use the answers that are in to orders of this kind, and return the outcomes by party."""
        messages = [each for kinds in self.messenger.gather() for each in kinds]
        found = self.messenger.take(kind, messages, use)
        return [(record.party, used) for record, used in found]

    def upload(self, party: int, **more: Any) -> Upload:
        return Upload(party=party, exchange=self.records[party].exchange, **more)

    def describe(self, party: int) -> Description:
        return replace(FITS, party=party, exchange=self.records[party].exchange)

    def take_failure(self, party: int, sentence: str, out_of_step: bool = False) -> None:
        """The party's message could not be served."""
        self.post.fail(sentence, out_of_step)
        order = self.records[party].order
        assert order is not None
        assert self.take(type(order)) == []

    def rejoin(self, party: int, answer: Description | None = None) -> None:
        """The party answers that it goes on."""
        self.post.answer(answer or self.describe(party))
        self.messenger.use(self.messenger.gather().others)

    def fail(self, party: int, error: VflError) -> None:
        self.messenger.fail(self.records[party], error)

    @property
    def last(self) -> tuple[int, Message]:
        """The node that the last message went to."""
        return self.post.sent[-1].metadata.dst_node_id - 100, self.post.sent[-1]


FITS = Description(
    party=1,
    parties=3,
    train_rows=6,
    test_rows=2,
    columns=5,
    embedding_size=32,
    alignment="rows",
    exchange=0,
)
TRAIN = TrainOrder(exchange=0, epoch=0, first=0, steps=5, coordinated=False)
EVALUATE, EMBED = EvaluateOrder(exchange=0), EmbedOrder(exchange=0, arrays={"ids": np.arange(3)})
CHECKPOINT = CheckpointOrder(exchange=0, number=1)
REJOIN = RejoinOrder(exchange=0, outputs=1)
METRICS = Metrics(loss=0.5, accuracy=0.75)
SPENT = {"exchanges": 6, "seconds": 1.5}

Warned = Callable[[], list[str]]
Use = Callable[[PartyRecord, Any, Upload], Any]


def arrival(party: int) -> Arrival:
    """Three rows of a party, in the table."""
    window = Window(np.arange(3, dtype=np.int32), np.array([3], np.int32))
    return Arrival(party, window, False, Reading(torch.zeros(3, 1), ()), window)


def record_in(state: State, rests: State = State.IDLE) -> PartyRecord:
    return PartyRecord(1, 101, state=state, rests=rests)
