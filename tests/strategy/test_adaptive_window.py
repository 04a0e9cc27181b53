"""Windows that are chosen by what exchanges and steps are measured to take."""

from __future__ import annotations

import math
from typing import Any

import pytest

from strategies.adaptive_window import AdaptiveWindow
from strategies.party_record import PartyRecord, State
from strategies.step_budget import StepBudget
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
        self.records = [PartyRecord(party, party) for party in range(parties)]
        self.adaptive_window = AdaptiveWindow(schedule, PER_EPOCH, self.records, lambda: self.now)
        self.budget = StepBudget(50, PER_EPOCH, parties)

    def turn(self, waits: float = 0.0) -> list[int]:
        """All parties' next windows; the clock then stands where all are answered."""
        windows = []
        for record in self.records:
            *_, steps = self.budget.window(record.steps, self.adaptive_window.next(record))
            self.adaptive_window.ordered(record, steps)
            record.exchange += 1
            record.steps += steps
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
    first, second = world.records
    before = world.adaptive_window.next(first)
    world.adaptive_window._choose = lambda: LONGEST  # type: ignore[method-assign]
    world.adaptive_window._measures = False
    world.adaptive_window.window = LONGEST
    assert world.adaptive_window.next(second) == before != LONGEST
    world.turn()
    assert world.turn() == [LONGEST, LONGEST]


def test_a_turn_after_another_message_is_not_measured() -> None:
    world, other = World(0.01, 0.001), World(0.01, 0.001)
    for turn in range(60):
        world.turn()
        if turn % 3 == 0:
            for record in other.records:
                record.exchange += 1  # an evaluation, which takes long
            other.now += 5.0
        other.turn()
    assert other.adaptive_window.measured == pytest.approx(world.adaptive_window.measured)


def test_asynchronous_parties_are_given_one_once_all_are_measured() -> None:
    world = World(0.01, 0.001, coordinated=False)
    quick, slow = world.records
    for _ in range(30):
        steps = world.adaptive_window.next(quick)
        world.adaptive_window.ordered(quick, steps)
        quick.exchange += 1
        world.now += 0.01 + 0.001 * steps
    assert world.adaptive_window.measured is None and world.adaptive_window.next(quick) == 8
    for _ in range(30):
        steps = world.adaptive_window.next(slow)
        world.adaptive_window.ordered(slow, steps)
        slow.exchange += 1
        world.now += 0.01 + 0.004 * steps
    assert world.adaptive_window.next(quick) == world.adaptive_window.next(slow) != 8


def test_a_party_that_fails_before_it_was_measured_is_not_waited_for() -> None:
    world = World(0.01, 0.001, coordinated=False)
    stays, fails = world.records
    for number in range(30):
        if number == 5:
            fails.state = State.FAILED
        for record in world.records[: 1 + fails.alive]:
            steps = world.adaptive_window.next(record)
            world.adaptive_window.ordered(record, steps)
            record.exchange += 1
        world.now += 0.01 + 0.001 * steps
    assert world.adaptive_window.measured == pytest.approx((0.01, 0.001))
    assert world.adaptive_window.next(stays) == LONGEST


def test_a_run_that_is_gone_on_with_keeps_what_was_chosen() -> None:
    world, again = World(0.01, 0.001), World(0.0, 0.001)
    chosen = last(world)
    again.adaptive_window.load_state_dict(world.adaptive_window.state_dict())
    assert again.turn() == [chosen, chosen]
    assert again.adaptive_window.figures() == world.adaptive_window.figures()
    anew = World(0.0, 0.001)
    anew.adaptive_window.load_state_dict({})  # of a checkpoint before anything was measured
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
    fixed = AdaptiveWindow(schedule(False), PER_EPOCH, [PartyRecord(0, 0)], lambda: math.nan)
    assert {fixed.next(PartyRecord(0, 0)) for _ in range(3)} == {8}
    assert fixed.figures() == {"window": 8, "window_measured": None}
    with pytest.raises(ConfigError, match="max-delay = 6"):
        schedule(True, strategy="vafl", max_delay=6, window=7)
