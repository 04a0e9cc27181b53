"""Parts of a run, and small fakes of what they have to do with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Message

from strategies.history import History
from strategies.messenger import Messenger
from strategies.party_record import PartyRecord, State
from strategies.recovery import Recovery
from strategies.step_budget import StepBudget
from vfl_flower.config.errors import VflError
from vfl_flower.config.provenance import code_digest
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.metrics import Metrics
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.privacy.accountant import Accountant
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.release_log import ReleaseLog
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
        self.kept_timing: list[Any] | None = None

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

    @property
    def timing(self) -> list[Any] | None:
        return self.kept_timing

    def go_on_from(self, timing: list[Any]) -> None:
        assert timing, "there was no clock"
        self.kept_timing = timing

    def answer(self, payload: Payload, number: int = -1) -> None:
        """The answer to the message of this number has come; to the last, unless it is said."""
        self.due.append(to_reply(payload, self.sent[number]))

    def fail(self, sentence: str, out_of_step: bool = False) -> None:
        """The last message could not be served."""
        self.due.append(to_failure(sentence, self.sent[-1], out_of_step))


class Uploads(Accountant):
    """Seven uploads of a record."""

    def uploads(self) -> int:
        return 7


class Told(ReleaseLog):
    """What is told of orders, and how many messages had left by then."""

    def __init__(self, post: Post) -> None:
        super().__init__(Uploads(resolve({}), 6, FirstOrder(resolve({}))))
        self.post = post
        self.orders: list[tuple[int, Order, int]] = []
        self.journals: list[tuple[Path, str, Mark | None]] = []

    def ordered(self, party: int, order: Order) -> None:
        self.orders.append((party, order, len(self.post.sent)))

    def keep(self, path: Path, run: str = "", mark: Mark | None = None) -> None:
        self.journals.append((path, run, mark))

    @property
    def mark(self) -> Mark | None:
        return [3, "abc"] if self.journals else None


class Heard(Callback):
    """What observers are told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def evaluated(self, entry: dict[str, Any]) -> None:
        self.said.append(("evaluated", entry))

    def progressed(self, done: int, planned: int) -> None:
        self.said.append(("progressed", done, planned))

    def failed(self, party: int, error: VflError) -> None:
        self.said.append(("failed", party, str(error)))

    def ended(self) -> None:
        self.said.append(("ended",))


class Holder:
    """The label holder, as far as recovery and checkpoints know it."""

    def __init__(self) -> None:
        self.estimator = SimpleNamespace(broadcasts=False)
        self.aggregation = SimpleNamespace(abreast=False)
        self.back: list[int] = []  # parties that have come back
        self.loaded: tuple[Any, Any] | None = None
        self.links = SimpleNamespace(
            surrogate=lambda party: {"embedding": np.full(2, party, np.float32)},
            digest=lambda party: f"digest of {party}",
            begin_again=self.back.append,
        )

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
        self.history = History(self.config.running.eval_every, [self.heard])
        self.steps = 0  # of the label holder
        timeout = self.config.running.party_timeout
        self.messenger = Messenger(
            self.post, self.records, self.releases, timeout, lambda: self.steps
        )
        self.checked: list[Description] = []
        self.dropped: list[int] = []
        holder: Any = self.holder
        self.recovery = Recovery(
            self.config,
            self.messenger,
            holder,
            self.budget,
            self.history,
            LABELS.outputs,
            self.checked.append,
            self.dropped.append,
        )

    def send(self, party: int, order: Turn) -> None:
        record = self.records[party]
        self.messenger.post(
            [self.messenger.message(record, replace(order, exchange=record.exchange + 1))]
        )

    def come(self, kind: type[Turn]) -> tuple[PartyRecord, Turn, Message]:
        """The one answer to an order of this kind that is in."""
        (found,) = self.messenger.answers_to(kind, self.messenger.replies())
        return found

    def upload(self, party: int, **more: Any) -> Upload:
        return Upload(party=party, exchange=self.records[party].exchange, **more)

    def describe(self, party: int) -> Description:
        return replace(FITS, party=party, exchange=self.records[party].exchange)

    def take_failure(self, party: int, sentence: str, out_of_step: bool = False) -> None:
        """The party's message could not be served, which recovery is told of."""
        self.post.fail(sentence, out_of_step)
        order = self.records[party].order
        assert order is not None
        record, _, message = self.come(type(order))
        assert self.recovery.take(record, message, lambda upload: upload) is None

    def rejoin(self, party: int, answer: Description | None = None) -> None:
        """The party answers that it goes on."""
        self.post.answer(answer or self.describe(party))
        record, _, message = self.come(RejoinOrder)
        self.recovery.rejoin(record, message)

    @property
    def last(self) -> tuple[int, Message]:
        """To whom the last message went."""
        return self.post.sent[-1].metadata.dst_node_id - 100, self.post.sent[-1]


FITS = Description(
    party=1,
    parties=3,
    train_rows=6,
    test_rows=2,
    columns=5,
    embedding_size=32,
    alignment="rows",
    code_digest=code_digest(),
    exchange=0,
)
TRAIN = TrainOrder(exchange=0, epoch=0, first=0, steps=5, coordinated=False)
EVALUATE, EMBED = EvaluateOrder(exchange=0), EmbedOrder(exchange=0, arrays={"ids": np.arange(3)})
CHECKPOINT = CheckpointOrder(exchange=0, number=1)
REJOIN = RejoinOrder(exchange=0, outputs=1)
METRICS = Metrics(loss=0.5, accuracy=0.75)
SPENT = {"exchanges": 6, "seconds": 1.5}

Warned = Callable[[], list[str]]


def record_in(state: State, rests: State = State.IDLE) -> PartyRecord:
    return PartyRecord(1, 101, state=state, rests=rests)
