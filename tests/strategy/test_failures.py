"""Parties that fail, come back, or have an older state than they should."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message

from strategies.turns import FINAL, State
from tests.strategy.parts import (
    CHECKPOINT,
    EMBED,
    EVALUATE,
    FITS,
    REJOIN,
    ROWS,
    TRAIN,
    Parts,
    Warned,
    arrival,
)
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.transport.messages import Description, RejoinOrder, TrainOrder, Turn
from vfl_flower.transport.wire import read_order

STOP, CONTINUE = {"on-party-failure": "stop"}, {"on-party-failure": "continue"}
TIRED = PartyError("Party 1", "is tired.")


def test_a_party_that_fails_stops_the_run() -> None:
    parts = Parts(STOP)
    parts.send(1, TRAIN)
    parts.records[1].unserved, parts.records[1].out_of_step = TRAIN, 2
    with pytest.raises(PartyError, match=r"^Party 1 is tired\.$"):
        parts.fail(1, TIRED)
    assert parts.records[1].state is State.FAILED and not parts.messenger.out
    assert parts.records[1].unserved is None and parts.records[1].out_of_step == 0
    assert parts.heard.said == [] and parts.budget.planned == 120


def test_a_run_goes_on_without_a_party_and_without_its_steps(warned: Warned) -> None:
    parts = Parts(CONTINUE)
    parts.budget.answered, parts.records[1].steps = 65, 15
    parts.send(0, TRAIN)
    parts.send(1, TRAIN)
    parts.fail(1, TIRED)
    record = parts.records[1]
    assert record.state is State.FAILED and record.asked_back == 2  # at the evaluation that was due
    assert parts.budget.planned == 120 - 25
    assert parts.heard.said == [("failed", 1, "Party 1 is tired.")]
    assert warned() == ["Party 1 is tired. The run continues without it, with its last embeddings."]
    assert [node for node, _ in parts.messenger.out.values()] == [100]
    record.send(REJOIN)
    parts.messenger.fail(record, TIRED)  # it does not come back: nothing more is told
    assert record.state is State.FAILED and record.asked_back == 2
    assert parts.budget.planned == 120 - 25 and len(parts.heard.said) == len(warned()) == 1


def test_a_run_cannot_go_on_without_any_party() -> None:
    parts = Parts(CONTINUE)
    for record in (parts.records[0], parts.records[2]):
        parts.messenger.fail(record, TIRED)
    with pytest.raises(PartyError, match=r"^Party 1 is tired\.$"):
        parts.fail(1, TIRED)
    assert parts.budget.planned == 40  # of the last one, whose end is that of the run


@pytest.mark.parametrize("kind", ["failure", "error of Flower", "not of use"])
def test_a_party_that_answers_nothing_of_use_has_failed(kind: str) -> None:
    parts = Parts(CONTINUE)
    parts.send(1, TRAIN)
    sentence = "Party 1 failed: is tired."
    if kind == "failure":
        parts.post.fail("is tired.")
    elif kind == "error of Flower":
        error = Error(code=3, reason="is tired.")
        parts.post.due.append(Message(error, reply_to=parts.post.sent[-1]))
    else:
        parts.post.answer(parts.upload(1))
        sentence = "Party 1 has no rows."

    def use(*sent: Any) -> None:
        raise VflError("has no rows.")

    assert parts.take(TrainOrder, use) == []
    assert parts.heard.said == [("failed", 1, sentence)]
    assert parts.records[1].state is State.FAILED and len(parts.post.sent) == 1


def test_a_failed_party_is_asked_back_once_an_evaluation() -> None:
    parts = Parts(CONTINUE)
    parts.records[1].steps, parts.budget.answered = 10, 30
    parts.fail(1, TIRED)

    def asked() -> list[int]:
        before = len(parts.post.sent)
        parts.messenger.ask_back()
        return [each.metadata.dst_node_id - 100 for each in parts.post.sent[before:]]

    assert asked() == []  # it has failed since the last evaluation
    parts.budget.answered = 59
    assert asked() == []
    parts.budget.answered = 60
    assert asked() == [1] and asked() == []
    order = read_order(parts.last[1], RejoinOrder)
    assert (order.exchange, order.outputs) == (1, 1)
    np.testing.assert_array_equal(order.arrays["embedding"], [1, 1])
    parts.budget.answered = 90
    assert asked() == []  # it may answer yet
    parts.rejoin(1, replace(FITS, party=0))
    assert parts.records[1].state is State.FAILED and parts.holder.back == []
    assert asked() == [1]
    parts.rejoin(1, replace(FITS, party=0))
    assert asked() == []  # it has been, at this evaluation


def test_a_party_that_comes_back_goes_on_with_its_steps_and_the_evaluations_to_come() -> None:
    parts = Parts(CONTINUE)
    record = parts.records[1]
    record.steps, parts.budget.answered, parts.history.recorded = 15, 65, 2
    record.rests = State.AWAITS_QUORUM  # it failed when it was asked for fresh embeddings
    parts.messenger.fail(record, TIRED)
    parts.budget.answered, parts.history.recorded = 95, FINAL
    parts.waiting.arrivals += [arrival(0), arrival(1)]
    parts.messenger.ask_back()
    parts.rejoin(1)
    assert [each.party for each in parts.waiting.arrivals] == [0]
    assert record.state is State.IDLE and record.order is None
    assert parts.checked == [parts.describe(1)]
    assert parts.holder.back == [1]
    assert record.evaluation == parts.history.recorded == 3
    assert parts.budget.planned == 120 and not parts.messenger.out
    assert len(parts.heard.said) == 1  # of its failure


def refuse(description: Description) -> None:
    raise ConfigError("Party 1 has other rows.")


@pytest.mark.parametrize("how", ["fails", "has lost more", "is another party", "does not fit"])
def test_a_party_that_does_not_come_back_as_it_should_has_still_failed(how: str) -> None:
    parts = Parts(CONTINUE)
    parts.fail(1, TIRED)
    parts.budget.answered = 30
    parts.messenger.ask_back()
    if how in ("fails", "has lost more"):
        parts.post.fail("is tired.", out_of_step=how == "has lost more")
    else:
        parts.post.answer(parts.describe(2 if how == "is another party" else 1))
    if how == "does not fit":
        parts.messenger._check = refuse
    record = parts.records[1]
    parts.messenger.use(parts.messenger.gather().others)
    assert record.state is State.FAILED and not parts.messenger.out
    assert parts.holder.back == []
    assert parts.budget.planned == 80 and len(parts.heard.said) == 1


@pytest.mark.parametrize(
    ("came", "error", "sentence"),
    [
        (2, PartyError, r"^Party 1 came back as party 2\.$"),
        (1, ConfigError, r"^Party 1 has other rows\.$"),
    ],
)
def test_a_party_that_is_brought_into_step_as_another_fails_with_a_sentence(
    came: int, error: type[VflError], sentence: str
) -> None:
    parts = Parts(STOP)
    parts.send(1, TRAIN)
    parts.take_failure(1, "has no state of this run.", out_of_step=True)
    parts.messenger._check = refuse
    with pytest.raises(error, match=sentence):
        parts.rejoin(1, parts.describe(came))
    assert parts.records[1].state is State.FAILED


ROWS_ASKED_FOR = replace(EMBED, arrays={"ids": np.arange(3), "gradient": ROWS})


@pytest.mark.parametrize(
    ("order", "rests", "then"),
    [
        (replace(TRAIN, arrays={"gradient": ROWS}), State.IDLE, State.IDLE),
        (replace(EVALUATE, arrays={"gradient": ROWS}), State.IDLE, State.IDLE),
        (replace(CHECKPOINT, number=8), State.DONE, State.DONE),
        # The window that awaited its quorum is one that the party does not know of any more.
        (ROWS_ASKED_FOR, State.AWAITS_QUORUM, State.IDLE),
    ],
    ids=["train", "evaluate", "checkpoint", "embed"],
)
def test_a_party_with_an_older_state_is_told_what_is_known_and_gets_its_message_again(
    order: Turn, rests: State, then: State, warned: Warned
) -> None:
    parts = Parts()
    record = parts.records[1]
    record.state, record.exchange = rests, 4
    parts.send(1, order)
    parts.take_failure(1, "got message 5 after message 2.", out_of_step=True)
    assert warned() == [
        "Party 1 has an older state (got message 5 after message 2). It continues from that state, "
        "and loses what it has learned since."
    ]
    parts.waiting.arrivals += [arrival(0), arrival(1)]
    party, message = parts.last
    rejoin = read_order(message, RejoinOrder)
    assert (party, rejoin.exchange) == (1, 6) and record.in_flight and record.alive
    np.testing.assert_array_equal(rejoin.arrays["embedding"], [1, 1])

    parts.rejoin(1)
    assert parts.holder.back == [1] and [each.party for each in parts.waiting.arrivals] == [0]
    party, message = parts.last
    again = read_order(message, type(order))
    assert (party, again.exchange) == (1, 7) and record.surrogates == "digest of 1"
    assert {**vars(again), "arrays": 0, "exchange": 0} == {
        **vars(order),
        "arrays": 0,
        "exchange": 0,
    }
    assert list(again.arrays) == ["ids"] * ("ids" in order.arrays)  # and no feedback

    parts.post.answer(parts.upload(1))
    assert len(parts.take(type(order))) == 1
    assert record.state is then and record.unserved is None and record.out_of_step == 0
    assert parts.heard.said == [] and parts.budget.planned == 120


def test_a_party_is_brought_into_step_three_times_at_most_for_one_message() -> None:
    parts = Parts(CONTINUE)
    parts.send(1, TRAIN)
    for _ in range(3):
        parts.take_failure(1, "has no state of this run.", out_of_step=True)
        assert parts.records[1].alive
        parts.rejoin(1)
    parts.take_failure(1, "has no state of this run.", out_of_step=True)
    assert parts.records[1].state is State.FAILED and not parts.messenger.out
    assert parts.heard.said == [("failed", 1, "Party 1 failed: has no state of this run.")]
    assert len(parts.holder.back) == 3 and len(parts.post.sent) == 1 + 2 * 3


def test_a_message_that_was_served_begins_the_count_anew() -> None:
    parts = Parts(STOP)
    for _ in range(3):
        parts.send(1, TRAIN)
        for _ in range(3):
            parts.take_failure(1, "has no state of this run.", out_of_step=True)
            parts.rejoin(1)
        parts.post.answer(parts.upload(1))
        assert len(parts.take(TrainOrder)) == 1
    assert parts.records[1].alive and len(parts.holder.back) == 9


def test_where_all_have_what_each_has_sent_nobody_is_brought_into_step() -> None:
    parts = Parts(STOP)
    parts.holder.estimator.broadcasts = True
    parts.send(1, TRAIN)
    with pytest.raises(PartyError, match=r"^Party 1 failed: has no state of this run\.$"):
        parts.take_failure(1, "has no state of this run.", out_of_step=True)
    assert len(parts.post.sent) == 1
