"""Seats: where a party is in its turns."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.party_record import FINAL, Seat, Spread, State, Traffic
from tests.strategy.parts import EMBED, EVALUATE, REJOIN, ROWS, TRAIN, seat_in


@pytest.mark.parametrize("state", [State.IDLE, State.AWAITS_QUORUM, State.DONE])
def test_a_party_that_has_answered_is_in_the_state_of_before_unless_another_is_named(
    state: State,
) -> None:
    seat = seat_in(state)
    seat.send(EVALUATE)
    assert (seat.state, seat.order, seat.exchange) == (State.IN_FLIGHT, EVALUATE, 1)
    assert seat.in_flight and seat.alive
    seat.rest()
    assert (seat.state, seat.order, seat.exchange) == (state, None, 1)
    assert not seat.in_flight
    seat.send(TRAIN)
    seat.rest(State.AWAITS_QUORUM)
    assert (seat.state, seat.order, seat.exchange) == (State.AWAITS_QUORUM, None, 2)


def test_a_message_in_flight_hides_no_window_that_awaits_its_quorum() -> None:
    seat = seat_in(State.IDLE)
    seat.send(TRAIN)
    assert not seat.awaits_quorum  # its upload is yet to come
    seat.rest(State.AWAITS_QUORUM)
    assert seat.awaits_quorum and not seat.in_flight
    seat.send(EMBED)
    assert seat.awaits_quorum and seat.in_flight
    seat.send(REJOIN)  # it could not serve that, for want of state
    seat.send(EMBED)
    assert (seat.state, seat.rests, seat.exchange) == (State.IN_FLIGHT, State.AWAITS_QUORUM, 4)
    seat.rest()
    assert seat.awaits_quorum and not seat.in_flight
    seat.take_feedback({"gradient": ROWS})
    assert seat.state is State.IDLE and not seat.awaits_quorum
    assert seat.feedback == {"gradient": ROWS}


@pytest.mark.parametrize("rests", [State.IDLE, State.AWAITS_QUORUM])
def test_a_failed_party_is_not_alive_until_it_has_come_back(rests: State) -> None:
    seat = seat_in(rests)
    seat.send(EMBED)
    seat.rest(State.FAILED)
    assert (seat.alive, seat.in_flight, seat.awaits_quorum, seat.order) == (
        False,
        False,
        False,
        None,
    )
    seat.take_feedback({"gradient": ROWS})  # of its last window, which counts all the same
    assert seat.state is State.FAILED
    seat.send(REJOIN)
    assert (seat.state, seat.alive, seat.in_flight) == (State.ASKED_BACK, False, True)
    assert not seat.awaits_quorum
    seat.rest(State.IDLE)
    assert (seat.state, seat.alive, seat.in_flight) == (State.IDLE, True, False)


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
    seat = seat_in(state)
    seat.evaluation_sent = evaluation
    seat.evaluated()
    assert (seat.evaluation, seat.state) == (evaluation, then)


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
def test_a_seat_goes_on_from_what_was_kept_of_it(
    state: State, evaluation: int, then: State
) -> None:
    seat = seat_in(state)
    seat.exchange, seat.steps, seat.asked_back, seat.surrogates = 12, 34, 2, "digest"
    seat.evaluation_sent = seat.evaluation = evaluation
    seat.traffic = Traffic(5, 600, 70, 8)
    for number, spread in enumerate((seat.reply_seconds, seat.staleness), 1):
        spread.add(number)
        spread.add(4.0)
    anew = Seat(1, 205)
    anew.go_on_from(json.loads(json.dumps(seat.kept())))
    assert anew.state is then
    assert anew == replace(seat, node_id=205, state=then)
    assert anew.figures() == seat.figures()


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_has_the_mean_and_the_most_of_its_numbers(numbers: list[float]) -> None:
    spread = Spread()
    for number in numbers:
        spread.add(number)
    assert spread.count == len(numbers) and spread.most == max(numbers)
    assert spread.mean == pytest.approx(np.mean(numbers), rel=1e-9, abs=1e-9)


def test_figures_of_a_seat_are_its_traffic_and_its_spreads() -> None:
    seat = Seat(1, 101, traffic=Traffic(5, 600, 70, 8))
    seat.staleness.add(1)
    seat.staleness.add(4)
    none = {"mean": 0.0, "most": 0.0}
    assert seat.figures() == {
        **{"party": 1, "exchanges": 5, "bytes_up": 600, "bytes_down": 70, "evaluation_bytes": 8},
        **{"reply_seconds": none, "reply_virtual_seconds": none},
        "staleness": {"mean": 2.5, "most": 4},
    }
