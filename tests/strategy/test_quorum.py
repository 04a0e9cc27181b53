"""Quorums: who is answered, and when."""

from collections.abc import Iterable

import pytest

from strategies.turns import PartyRecord, State, StepBudget, UnansweredUploads
from tests.strategy.parts import EMBED, EVALUATE, TRAIN, arrival, record_in
from vfl_flower.transport.messages import Turn


def waiting_for(quorum: int, states: Iterable[State] = (State.IDLE,) * 4) -> UnansweredUploads:
    """Parties in these states, with all their steps ahead of them."""
    records = [PartyRecord(party, 100 + party, state=state) for party, state in enumerate(states)]
    return UnansweredUploads(
        quorum, records, StepBudget(epochs=4, per_epoch=10, parties=len(records))
    )


def groups(waiting: UnansweredUploads, *parties: int) -> list[list[int]]:
    """Return the groups that were answered once these parties have arrived."""
    for party in parties:
        waiting.arrivals.append(arrival(party))
    return [[each.party for each in group] for group in waiting.groups()]


def test_a_group_is_of_those_who_came_first_in_the_order_of_parties() -> None:
    waiting = waiting_for(2)
    assert groups(waiting, 3) == []
    assert groups(waiting, 1) == [[1, 3]]
    assert groups(waiting, 2, 0, 3, 1, 2) == [[0, 2], [1, 3]]
    assert groups(waiting, 0) == [[0, 2]]
    assert groups(waiting) == []


def test_what_comes_while_a_group_is_made_ready_is_of_the_next() -> None:
    waiting, found = waiting_for(2), []
    for party in (2, 0, 1):
        waiting.arrivals.append(arrival(party))
    for group in waiting.groups():
        found.append([each.party for each in group])
        if len(found) == 1:
            waiting.arrivals.append(arrival(3))
    assert found == [[0, 2], [1, 3]]


def test_nobody_is_answered_while_a_group_is_made_ready() -> None:
    waiting = waiting_for(2)
    waiting.held = True
    assert groups(waiting, 2, 0, 1) == []
    waiting.held = False
    assert groups(waiting) == [[0, 2]]


def in_flight(party: int, order: Turn, rests: State = State.IDLE) -> PartyRecord:
    return PartyRecord(party, 100 + party, state=State.IN_FLIGHT, rests=rests, order=order)


NEAR_THE_END: dict[str, tuple[PartyRecord, int]] = {
    # Another party, and how many can still come with it: one has, and one is about to.
    "done": (record_in(State.DONE), 2),
    "idle": (record_in(State.IDLE), 2),
    "being evaluated": (in_flight(1, EVALUATE), 2),
    "training": (in_flight(1, TRAIN), 3),
    "awaiting its quorum": (record_in(State.AWAITS_QUORUM), 3),
    "asked for rows meanwhile": (in_flight(1, EMBED, State.AWAITS_QUORUM), 3),
}


@pytest.mark.parametrize(("other", "most"), NEAR_THE_END.values(), ids=list(NEAR_THE_END))
def test_near_the_end_no_more_are_waited_for_than_can_still_come(
    other: PartyRecord, most: int
) -> None:
    records = [record_in(State.AWAITS_QUORUM), other, in_flight(2, TRAIN)]
    budget = StepBudget(epochs=4, per_epoch=10, parties=3)
    waiting = UnansweredUploads(3, records, budget)
    assert groups(waiting, 0, 2) == []  # while steps are left, the other will have some
    budget.ordered = budget.limit
    assert groups(waiting) == ([[0, 2]] if most == 2 else [])


@pytest.mark.parametrize("state", [State.FAILED, State.ASKED_BACK])
def test_parties_that_have_failed_are_waited_for_no_more(state: State) -> None:
    waiting = waiting_for(3, [State.AWAITS_QUORUM, state, State.AWAITS_QUORUM])
    assert groups(waiting, 0) == []
    assert groups(waiting, 2) == [[0, 2]]


def test_if_all_have_failed_what_came_is_answered() -> None:
    assert groups(waiting_for(2, [State.FAILED] * 2), 1, 0) == [[1], [0]]


def test_draining_answers_all_that_has_come_still_by_quorums() -> None:
    waiting = waiting_for(3)
    waiting.draining = True
    assert groups(waiting) == []
    assert groups(waiting, 1) == [[1]]
    assert groups(waiting, 3, 2, 1, 0) == [[1, 2, 3], [0]]
    waiting.draining = False
    assert groups(waiting, 0) == []


def test_a_party_that_has_lost_its_state_is_answered_no_more() -> None:
    waiting = waiting_for(3)
    assert groups(waiting, 0, 1) == []
    waiting.drop(1)
    assert groups(waiting, 2) == []
    assert groups(waiting, 3) == [[0, 2, 3]]


@pytest.mark.parametrize(
    ("lost", "answered"),
    [
        ([0], [[2], [1, 3]]),
        ([1], [[0, 2]]),  # which was to be in the next group
        ([0, 2], [[], [1, 3]]),
    ],
    ids=str,
)
def test_a_party_may_lose_its_state_while_its_group_is_made_ready(
    lost: list[int], answered: list[list[int]]
) -> None:
    waiting = waiting_for(2)
    for party in (0, 2, 1, 3):
        waiting.arrivals.append(arrival(party))

    found = []
    for group in waiting.groups():
        while lost:
            waiting.drop(lost.pop())
        found.append([each.party for each in group])
    assert found == answered
