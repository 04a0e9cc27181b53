"""The budget: windows of steps, within epochs and the budget; when evaluations are due."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies.turns import StepBudget


@given(
    epochs=st.integers(1, 3),
    per_epoch=st.integers(1, 5),
    parties=st.integers(1, 3),
    longest=st.integers(1, 6),
    allowed=st.integers(0, 50),
    chance=st.randoms(use_true_random=False),
)
def test_windows_never_cross_an_epoch_or_the_budget(
    epochs: int, per_epoch: int, parties: int, longest: int, allowed: int, chance: random.Random
) -> None:
    budget = StepBudget(epochs, per_epoch, parties)
    budget.allowed = allowed
    done = [0] * parties
    while budget.left > 0:
        party = chance.randrange(parties)  # the next party
        epoch, first, steps = budget.window(done[party], longest)
        assert epoch * per_epoch + first == done[party]  # it goes on where its last one ended
        assert 1 <= steps <= longest and first + steps <= per_epoch
        done[party] += steps
        assert budget.ordered == sum(done)
    assert budget.ordered == budget.limit == min(allowed, epochs * per_epoch * parties)


@given(st.integers(0, 60))
def test_nobody_takes_the_steps_of_a_party_that_is_gone_and_it_takes_them_when_it_is_back(
    done: int,
) -> None:
    budget = StepBudget(epochs=4, per_epoch=10, parties=3)
    budget.without(done)
    assert budget.planned == 2 * 40 + min(done, 40)
    budget.with_again(done)
    assert budget.planned == 3 * 40


def test_epochs_are_passes_of_all_parties() -> None:
    budget = StepBudget(epochs=4, per_epoch=10, parties=3)
    budget.answered = 45
    assert budget.epochs == 1.5
    budget = StepBudget(epochs=4, per_epoch=10, parties=0)  # the label holder alone
    budget.answered = 15
    assert (budget.epochs, budget.planned) == (1.5, 40)


def test_a_plan_goes_on_from_what_was_kept_of_it() -> None:
    budget = StepBudget(epochs=4, per_epoch=10, parties=3)
    budget.without(5)
    budget.ordered, budget.answered = 42, 37
    anew = StepBudget(epochs=4, per_epoch=10, parties=3)
    anew.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert (anew.planned, anew.ordered, anew.answered) == (85, 42, 37)
    assert anew.window(20, 16) == (2, 0, 10)


@pytest.mark.parametrize("allowed", [1, 7, 12, 25, 31, 120])
def test_parties_abreast_are_ordered_the_same_steps_whatever_a_budget_leaves(allowed: int) -> None:
    budget, others = (
        StepBudget(epochs=4, per_epoch=10, parties=3, abreast=each) for each in (True, False)
    )
    done = [0, 0, 0]
    budget.allowed = others.allowed = allowed
    while budget.left > 0:
        windows = [budget.window(each, 8) for each in done]
        assert windows[0] == windows[1] == windows[2]
        done = [each + windows[0][2] for each in done]
    assert done == [min(40, allowed // 3)] * 3
    assert allowed != 12 or [others.window(0, 8)[2] for _ in done] == [8, 4, 0]  # else it is not so


@pytest.mark.one_by_day
@pytest.mark.parametrize("every", ["0.1", "0.25", "0.3", "0.7", "1", "1.5", "3"])
@example(parties=1, per_epoch=10, answered=3)
@given(parties=st.integers(1, 7), per_epoch=st.integers(1, 50), answered=st.integers(0, 2000))
def test_evaluations_are_due_by_the_steps_answered(
    every: str, parties: int, per_epoch: int, answered: int
) -> None:
    budget = StepBudget(100, per_epoch, parties, eval_every=float(every))
    budget.answered = answered
    # As fractions are, not as floats: 0.3 / 0.1 is below 3 there.
    wanted = Fraction(answered, per_epoch * parties) // Fraction(every)
    assert budget.evaluation == wanted


@pytest.mark.parametrize(
    ("every", "epochs"),
    [
        (0.25, [1, 2, 3, 4, 5]),
        (1.0, [1, 2, 3, 4, 5]),
        (1.5, [2, 3, 5]),
        (2.0, [2, 4, 5]),
        (9.0, [5]),
    ],
)
def test_where_training_is_by_whole_epochs_evaluations_come_after_them(
    every: float, epochs: list[int]
) -> None:
    budget = StepBudget(5, 10, 3, eval_every=every)
    assert [epoch for epoch in range(1, 6) if budget.evaluates_after(epoch, 5)] == epochs
    budget.stopped = True
    assert budget.evaluates_after(1, 5)  # which is the last, then
