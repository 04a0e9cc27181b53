"""Windows that are chosen by what exchanges and steps are measured to take."""

from __future__ import annotations

import math
from typing import Any

import pytest

from strategies.party_record import Seat, State
from strategies.step_budget import Plan
from strategies.window import Pace
from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol import estimators
from vfl_flower.protocol.schedule import ALL, ONE, Schedule
from vfl_flower.protocol.systems import resolve

PER_EPOCH, LONGEST = 1000, 32


class World:
    """Parties whose exchange of w steps lasts ``way + w * step`` seconds, and the pace of a run."""

    def __init__(self, way: float, step: float, parties: int = 2, coordinated: bool = True) -> None:
        self.now, self.way, self.step = 0.0, way, step
        schedule = Schedule(parties if coordinated else 1, coordinated, 8, LONGEST)
        self.seats = [Seat(party, party) for party in range(parties)]
        self.pace = Pace(schedule, PER_EPOCH, self.seats, lambda: self.now)
        self.plan = Plan(50, PER_EPOCH, parties)

    def turn(self, waits: float = 0.0) -> list[int]:
        """All parties' next windows; the clock then stands where all are answered."""
        windows = []
        for seat in self.seats:
            *_, steps = self.plan.window(seat.steps, self.pace.next(seat))
            self.pace.ordered(seat, steps)
            seat.exchange += 1
            seat.steps += steps
            windows.append(steps)
        self.now += self.way + self.step * max(windows) + waits
        return windows


def last(world: World, turns: int = 40) -> int:
    return [world.turn() for _ in range(turns)][-1][0]


@pytest.mark.parametrize("way", [0.0, 1e-4, 1e-3, 0.01, 0.1])
@pytest.mark.parametrize("step", [1e-4, 1e-3, 0.01])
def test_no_fixed_window_up_to_the_longest_is_quicker_by_a_tenth(way: float, step: float) -> None:
    chosen = last(World(way, step))
    of_step = {w: way / w + step for w in (1, 2, 4, 8, 16, 32, chosen)}
    assert of_step[chosen] <= 1.1 * min(of_step.values())
    shorter = chosen // 2
    assert chosen == 1 or of_step[shorter] > 1.0499 * step  # and none is longer than that takes


def test_parties_that_go_in_step_have_the_same_windows_throughout() -> None:
    world = World(0.01, 0.001, parties=3)
    windows = [world.turn(waits=0.05 * (turn % 3 == 0)) for turn in range(40)]
    assert all(len(set(each)) == 1 for each in windows)
    assert windows[0] == [1, 1, 1] and windows[-1] != [1, 1, 1]


def test_a_party_that_comes_late_to_a_window_has_that_of_the_others() -> None:
    world = World(0.01, 0.001)
    for _ in range(9):
        world.turn()
    first, second = world.seats
    before = world.pace.next(first)
    world.pace._choose = lambda: LONGEST  # type: ignore[method-assign]
    world.pace._measures = False
    world.pace.window = LONGEST
    assert world.pace.next(second) == before != LONGEST
    world.turn()
    assert world.turn() == [LONGEST, LONGEST]


def test_a_turn_after_another_message_is_not_measured() -> None:
    world, other = World(0.01, 0.001), World(0.01, 0.001)
    for turn in range(60):
        world.turn()
        if turn % 3 == 0:
            for seat in other.seats:
                seat.exchange += 1  # an evaluation, which takes long
            other.now += 5.0
        other.turn()
    assert other.pace.measured == pytest.approx(world.pace.measured)


def test_asynchronous_parties_are_given_one_once_all_are_measured() -> None:
    world = World(0.01, 0.001, coordinated=False)
    quick, slow = world.seats
    for _ in range(30):
        steps = world.pace.next(quick)
        world.pace.ordered(quick, steps)
        quick.exchange += 1
        world.now += 0.01 + 0.001 * steps
    assert world.pace.measured is None and world.pace.next(quick) == 8
    for _ in range(30):
        steps = world.pace.next(slow)
        world.pace.ordered(slow, steps)
        slow.exchange += 1
        world.now += 0.01 + 0.004 * steps
    assert world.pace.next(quick) == world.pace.next(slow) != 8


def test_a_party_that_fails_before_it_was_measured_is_not_waited_for() -> None:
    world = World(0.01, 0.001, coordinated=False)
    stays, fails = world.seats
    for number in range(30):
        if number == 5:
            fails.state = State.FAILED
        for seat in world.seats[: 1 + fails.alive]:
            steps = world.pace.next(seat)
            world.pace.ordered(seat, steps)
            seat.exchange += 1
        world.now += 0.01 + 0.001 * steps
    assert world.pace.measured == pytest.approx((0.01, 0.001))
    assert world.pace.next(stays) == LONGEST


def test_a_run_that_is_gone_on_with_keeps_what_was_chosen() -> None:
    world, again = World(0.01, 0.001), World(0.0, 0.001)
    chosen = last(world)
    again.pace.go_on_from(world.pace.kept())
    assert again.turn() == [chosen, chosen]
    assert again.pace.figures() == world.pace.figures()
    anew = World(0.0, 0.001)
    anew.pace.go_on_from({})  # of a checkpoint before anything was measured
    assert anew.turn() == [1, 1]


def schedule(measures: bool, **keys: Any) -> Schedule:
    config = resolve({name.replace("_", "-"): value for name, value in keys.items()})
    estimator = estimators.choose(config)(config)
    rule = ONE if "max_delay" in keys else ALL
    return Schedule.of(config, rule, 3, estimator, False, "cheap", measures)


def test_windows_that_are_given_or_of_a_simulation_are_as_they_were() -> None:
    assert (schedule(False).window, schedule(False).longest) == (8, 8)
    assert (schedule(True, window=4).window, schedule(True, window=4).longest) == (4, 4)
    assert (schedule(True).window, schedule(True).longest) == (8, LONGEST)
    assert schedule(True, strategy="syn-zoo").longest == 64
    assert schedule(True, strategy="vafl", max_delay=6).longest == 6
    fixed = Pace(schedule(False), PER_EPOCH, [Seat(0, 0)], lambda: math.nan)
    assert {fixed.next(Seat(0, 0)) for _ in range(3)} == {8}
    assert fixed.figures() == {"window": 8, "window_measured": None}
    with pytest.raises(ConfigError, match="max-delay = 6"):
        schedule(True, strategy="vafl", max_delay=6, window=7)
