"""The messenger: what is sent, taken, counted and refused."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Context, Error, Message

from strategies.turns import PartyRecord, Spread, State, Traffic
from strategies.vertical import strategy_of
from tests.strategy.parts import CHECKPOINT, EMBED, EVALUATE, REJOIN, ROWS, TRAIN, Parts
from vfl_flower import client_app
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import EvaluateOrder, TrainOrder, Turn, Upload
from vfl_flower.transport.wire import read_order


def test_a_message_is_counted_and_told_before_it_leaves() -> None:
    parts = Parts()
    record, parts.holder.steps, parts.post.clock = parts.records[1], 17, 2.5
    record.feedback = {"gradient": ROWS}
    message = parts.messenger.message(record, replace(TRAIN, exchange=1, arrays=record.feedback))
    assert record.in_flight and record.exchange == 1 and record.feedback == {}
    assert (record.ordered_at_step, record.sent_at_clock) == (17, 2.5)
    assert record.traffic == Traffic(bytes_down=12)
    ((party, order, left),) = parts.releases.orders
    assert (party, order, left) == (1, record.order, 0)
    assert parts.post.sent == [] and parts.messenger.out == {}
    parts.messenger.post([message])
    assert parts.post.sent == [message] and len(parts.messenger.out) == 1
    assert message.metadata.dst_node_id == 101 and message.metadata.ttl == 10.0
    assert read_order(message, TrainOrder).arrays["gradient"].tolist() == [0, 0, 0]


def test_only_orders_of_windows_set_the_step_by_which_staleness_is_counted() -> None:
    parts = Parts()
    parts.holder.steps = 17
    for order in (EVALUATE, EMBED, CHECKPOINT, REJOIN):
        parts.send(0, order)
        assert parts.records[0].ordered_at_step == 0


@pytest.mark.parametrize("order", [TRAIN, EMBED, EVALUATE, CHECKPOINT], ids=lambda o: o.kind)
def test_what_a_party_uploads_is_counted_by_what_it_answers(order: Turn, now: list[float]) -> None:
    parts = Parts()
    parts.records[1].out_of_step, parts.records[1].unserved = 2, order
    parts.send(1, order)
    sent = parts.records[1].traffic.bytes_down
    now[0], parts.post.clock = 3.0, 0.25
    arrays = {"embedding": ROWS}
    parts.post.answer(parts.upload(1, arrays=arrays, peak_memory_mb=55.0))
    record = parts.records[1]

    def use(mine: PartyRecord, served: Any, upload: Upload) -> Any:
        assert mine is record and served.exchange == 1 and served.kind == order.kind
        return upload.arrays["embedding"].tolist()

    assert parts.take(type(order), use) == [(1, [0, 0, 0])]
    assert (record.state, record.order, record.unserved) == (State.IDLE, None, None)
    assert record.out_of_step == 0 and parts.messenger.party_memory_mb == 55.0
    if order in (TRAIN, EMBED):
        assert record.traffic == Traffic(exchanges=1, bytes_up=12, bytes_down=sent)
        assert record.reply_seconds == Spread(3.0, 3.0, 1)
        assert record.reply_virtual_seconds == Spread(0.25, 0.25, 1)
    else:
        assert record.traffic == Traffic(evaluation_bytes=12, bytes_down=sent)
        assert record.reply_seconds == record.reply_virtual_seconds == Spread()
    assert parts.messenger.out == {}


def test_the_most_memory_that_any_party_has_told_of_is_kept() -> None:
    parts = Parts()
    for party, most in ((0, 20.0), (1, 70.0), (2, 30.0)):
        parts.send(party, EVALUATE)
        parts.post.answer(parts.upload(party, peak_memory_mb=most))
        parts.take(EvaluateOrder)
    assert parts.messenger.party_memory_mb == 70.0


@pytest.mark.parametrize(
    ("party", "exchange"), [(1, 1), (1, 3), (0, 2), (99, 2)], ids=["old", "new", "other", "none"]
)
def test_an_answer_with_another_number_or_of_another_party_is_refused(
    party: int, exchange: int
) -> None:
    parts = Parts()
    parts.records[1].exchange = 1
    parts.send(1, TRAIN)
    parts.post.answer(Upload(party=party, exchange=exchange, arrays={"embedding": ROWS}))
    used: list[Upload] = []
    sentence = (
        f"Party 1 answered as party {party} to message {exchange}, when message 2 of party 1 was "
        "due."
    )
    with pytest.raises(PartyError, match=f"^{re.escape(sentence)}$"):
        parts.take(TrainOrder, lambda mine, order, upload: used.append(upload))
    assert used == [] and parts.records[1].state is State.FAILED
    assert parts.records[1].traffic == Traffic()


def test_an_upload_that_cannot_be_used_is_not_counted() -> None:
    parts = Parts()
    parts.send(1, TRAIN)
    parts.post.answer(parts.upload(1, arrays={"embedding": ROWS}, peak_memory_mb=55.0))
    record = parts.records[1]

    def refuse(*sent: Any) -> None:
        raise VflError("is of another shape.")

    with pytest.raises(PartyError, match=r"^Party 1 is of another shape\.$"):
        parts.take(TrainOrder, refuse)
    assert record.traffic == Traffic() and record.reply_seconds == Spread()
    assert parts.messenger.party_memory_mb == 0


def test_answers_are_sorted_by_what_was_ordered_and_taken_once() -> None:
    parts = Parts()
    parts.send(0, TRAIN)
    parts.send(1, EVALUATE)
    parts.send(2, TRAIN)
    for number, party in enumerate((0, 1, 2)):
        parts.post.answer(parts.upload(party), number)
    train, evaluate, others = parts.messenger.gather()
    assert (len(train), len(evaluate), others) == (2, 1, [])
    twice = [*train, *evaluate, *train, *evaluate]

    def taken(kind: type[Turn]) -> list[int]:
        use = parts.messenger.take(kind, twice, lambda *sent: None)
        return [record.party for record, _ in use]

    assert taken(EvaluateOrder) == [1] and taken(TrainOrder) == [0, 2]
    assert taken(TrainOrder) == [] and parts.messenger.out == {}


def test_an_answer_to_an_earlier_message_is_not_taken_for_the_last(now: list[float]) -> None:
    parts = Parts({"on-party-failure": "continue"})
    parts.send(1, TRAIN)
    parts.fail(1, PartyError("Party 1", "is tired."))
    parts.send(1, REJOIN)
    parts.post.answer(parts.upload(1), 0)
    assert parts.messenger.gather() == ([], [], [])
    assert not parts.records[1].alive and now[0] > 10
    parts.send(1, REJOIN)
    parts.rejoin(1)
    assert parts.records[1].alive


def test_a_party_may_be_silent_until_its_time_is_up(now: list[float]) -> None:
    parts = Parts({"on-party-failure": "continue"})
    parts.messenger.post([])
    assert parts.messenger.gather() == ([], [], []) and now == [0.0]  # none was asked
    parts.send(0, TRAIN)
    now[0] = 5.0
    parts.send(1, TRAIN)
    parts.send(2, TRAIN)
    assert parts.messenger.gather() == ([], [], [])
    assert 10 < now[0] < 10.1  # after the first message, not the last
    assert [record.alive for record in parts.records] == [False, True, True]
    assert parts.heard.said == [("failed", 0, "Party 0 did not answer within 10 s.")]
    parts.post.answer(parts.upload(1), 1)
    assert len(parts.take(TrainOrder)) == 1 and now[0] < 10.1
    assert parts.messenger.gather() == ([], [], []) and 15 < now[0] < 15.1
    assert [record.alive for record in parts.records] == [False, True, False]
    assert not parts.messenger.out


class Busy(LocalGrid):
    """Says so if a party has a message while another is in flight to it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.in_flight: dict[str, int] = {}
        self.pushed = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            node = message.metadata.dst_node_id
            assert node not in self.in_flight.values(), f"node {node} has two messages"
            keys += super().push_messages([message])
            self.in_flight[keys[-1]] = node
            self.pushed += 1
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        for reply in replies:
            del self.in_flight[reply.metadata.reply_to_message_id]
        return replies


ONE_AT_A_TIME: list[dict[str, Any]] = [
    {"strategy": "split-nn"},
    {"strategy": "vafl"},
    {"strategy": "vafl-t", "quorum": 2, "max-delay": 4, "window": 2},
    {"strategy": "vafl", "on-party-failure": "continue", "eval-every": 0.25},
    {"strategy": "frozen"},
]


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", ONE_AT_A_TIME, ids=str)
def test_one_message_at_most_is_ever_in_flight_to_a_party(keys: dict[str, Any]) -> None:
    keys = {**keys, "dataset": "breast-cancer", "batch-size": 64, "epochs": 2}
    keys["delay"] = "exponential"
    config, served = resolve(keys), 0

    def client(message: Message, context: Context) -> Message:
        nonlocal served
        mine = context.node_config["partition-id"] == 1
        served += mine
        if mine and served % 7 == 6 and config.running.on_party_failure == "continue":
            return Message(Error(code=3, reason="node is gone"), reply_to=message)
        return client_app.app(message, context)

    failing: Any = client
    strategy = strategy_of(config)(config, load_labels(config))
    grid = Busy(failing, 3, keys, config)
    strategy.start(grid)
    assert grid.in_flight == {} and grid.pushed >= 3 * 3
