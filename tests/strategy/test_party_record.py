"""Party records: the state of a party between its messages."""

import json
from dataclasses import replace

import numpy as np
import pytest

from strategies.turns import FINAL, PartyRecord, Spread, State, Traffic
from tests.strategy.parts import EMBED, EVALUATE, REJOIN, ROWS, TRAIN, record_in


@pytest.mark.parametrize("state", [State.IDLE, State.AWAITS_QUORUM, State.DONE])
def test_a_party_that_has_answered_is_in_the_state_of_before_unless_another_is_named(
    state: State,
) -> None:
    record = record_in(state)
    record.send(EVALUATE)
    assert (record.state, record.order, record.exchange) == (State.IN_FLIGHT, EVALUATE, 1)
    assert record.in_flight and record.alive
    record.rest()
    assert (record.state, record.order, record.exchange) == (state, None, 1)
    assert not record.in_flight
    record.send(TRAIN)
    record.rest(State.AWAITS_QUORUM)
    assert (record.state, record.order, record.exchange) == (State.AWAITS_QUORUM, None, 2)


def test_a_message_in_flight_hides_no_window_that_awaits_its_quorum() -> None:
    record = record_in(State.IDLE)
    record.send(TRAIN)
    assert not record.awaits_quorum  # its upload is yet to come
    record.rest(State.AWAITS_QUORUM)
    assert record.awaits_quorum and not record.in_flight
    record.send(EMBED)
    assert record.awaits_quorum and record.in_flight
    record.send(REJOIN)  # it could not serve that, for want of state
    record.send(EMBED)
    assert (record.state, record.rests) == (State.IN_FLIGHT, State.AWAITS_QUORUM)
    assert record.exchange == 4
    record.rest()
    assert record.awaits_quorum and not record.in_flight
    record.take_feedback({"gradient": ROWS})
    assert record.state is State.IDLE and not record.awaits_quorum
    assert record.feedback == {"gradient": ROWS}


@pytest.mark.parametrize("rests", [State.IDLE, State.AWAITS_QUORUM])
def test_a_failed_party_is_not_alive_until_it_has_come_back(rests: State) -> None:
    record = record_in(rests)
    record.send(EMBED)
    record.rest(State.FAILED)
    assert not (record.alive or record.in_flight or record.awaits_quorum or record.order)
    record.take_feedback({"gradient": ROWS})  # of its last window, which counts all the same
    assert record.state is State.FAILED
    record.send(REJOIN)
    assert (record.state, record.alive, record.in_flight) == (State.ASKED_BACK, False, True)
    assert not record.awaits_quorum
    record.rest(State.IDLE)
    assert (record.state, record.alive, record.in_flight) == (State.IDLE, True, False)


@pytest.mark.parametrize(
    ("state", "evaluation", "then"),
    [
        (State.IDLE, 3, State.IDLE),
        (State.IDLE, FINAL, State.DONE),
        (State.FAILED, FINAL, State.FAILED),
    ],
)
def test_a_party_is_done_when_it_has_answered_the_last_evaluation(
    state: State, evaluation: int, then: State
) -> None:
    record = record_in(state)
    record.evaluation_sent = evaluation
    record.evaluated()
    assert (record.evaluation, record.state) == (evaluation, then)


@pytest.mark.parametrize(
    ("state", "evaluation", "then"),
    [
        (State.IDLE, 2, State.IDLE),
        (State.DONE, FINAL, State.DONE),
        (State.FAILED, 2, State.FAILED),
        (State.FAILED, FINAL, State.FAILED),
        (State.ASKED_BACK, 2, State.FAILED),  # nobody waits for its answer any more
    ],
)
def test_a_party_record_continues_from_its_saved_state(
    state: State, evaluation: int, then: State
) -> None:
    record = record_in(state)
    record.exchange, record.steps, record.asked_back, record.surrogates = 12, 34, 2, "digest"
    record.evaluation_sent = record.evaluation = evaluation
    record.traffic = Traffic(5, 600, 70, 8)
    for number, spread in enumerate((record.reply_seconds, record.staleness), 1):
        spread.add(number)
        spread.add(4.0)
    anew = PartyRecord(1, 205)
    anew.load_state_dict(json.loads(json.dumps(record.state_dict())))
    assert anew.state is then
    assert anew == replace(record, node_id=205, state=then)
    assert anew.figures() == record.figures()


@pytest.mark.parametrize("count", [1, 2, 300])
def test_a_spread_has_the_mean_and_the_most_of_its_numbers(count: int) -> None:
    spread, numbers = Spread(), np.random.default_rng(0).uniform(0, 1e6, count).tolist()
    for number in numbers:
        spread.add(number)
    assert spread.count == count and spread.most == max(numbers)
    assert spread.mean == pytest.approx(np.mean(numbers), rel=1e-9)


def test_figures_of_a_party_record_are_its_traffic_and_its_spreads() -> None:
    record = PartyRecord(1, 101, traffic=Traffic(5, 600, 70, 8))
    record.staleness.add(1)
    record.staleness.add(4)
    none = {"mean": 0.0, "most": 0.0}
    assert record.figures() == {
        **{"party": 1, "exchanges": 5, "bytes_up": 600, "bytes_down": 70, "evaluation_bytes": 8},
        **{"reply_seconds": none, "reply_virtual_seconds": none},
        "staleness": {"mean": 2.5, "most": 4},
    }
