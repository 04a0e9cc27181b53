"""Windows that follow the time of exchanges and the training loss."""

import json
import math
from typing import Any

import numpy as np
import pytest

from strategies.adaptive_window import AdaptiveWindow, LossJumps
from strategies.turns import PartyRecord, State, StepBudget
from vfl_flower.config.errors import ConfigError
from vfl_flower.launch.engines import run_local
from vfl_flower.protocol import estimators
from vfl_flower.protocol.schedule import FEW_STEPS, Schedule
from vfl_flower.protocol.system import ALL, ONE
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid

pytestmark = pytest.mark.usefixtures("elsewhere")

PER_EPOCH, LONGEST = 1000, 16


class World:
    """Parties whose exchange of w steps lasts ``way + w * step`` seconds, and the pace of a run."""

    def __init__(
        self,
        way: float,
        step: float,
        parties: int = 2,
        coordinated: bool = True,
        by_loss: bool = False,
    ) -> None:
        self.now, self.way, self.step = 0.0, way, step
        schedule = Schedule(parties if coordinated else 1, coordinated, 1, LONGEST, measures=True)
        self.records = [PartyRecord(party, party) for party in range(parties)]
        self.adaptive_window = AdaptiveWindow(
            schedule, self.records, by_loss, clock=lambda: self.now
        )
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
    """Return the window at the end; the end of an epoch may cut the very last one."""
    return max([world.turn() for _ in range(turns)][-2:])[0]


@pytest.mark.parametrize("way", [0.0, 1e-4, 1e-3, 0.01, 0.1])
@pytest.mark.parametrize("step", [1e-4, 1e-3, 0.01])
def test_no_fixed_window_up_to_the_longest_is_quicker_by_a_tenth(way: float, step: float) -> None:
    chosen = last(World(way, step))
    of_step = {w: way / w + step for w in (1, 2, 4, 8, LONGEST, chosen)}
    assert of_step[chosen] <= 1.1 * min(of_step.values())
    shorter = chosen // 2
    assert chosen == 1 or of_step[shorter] > 1.0499 * step  # and none is longer than that takes


def test_no_measured_window_is_longer_than_the_bound_on_delays() -> None:
    asynchronous = schedule(True, strategy="vafl", max_delay=4)
    assert asynchronous.measures and asynchronous.longest == 4
    records = [PartyRecord(0, 0)]
    window = AdaptiveWindow(asynchronous, records)
    for _ in range(100):
        assert window.next(records[0]) <= 4
        window.ordered(records[0], 1)
        records[0].exchange += 1
        window.answered([1.0])
    assert window.next(records[0]) == 4


def test_parties_that_go_in_step_have_the_same_windows_throughout() -> None:
    world = World(0.01, 0.001, parties=3)
    windows = [world.turn(waits=0.05 * (turn % 3 == 0)) for turn in range(40)]
    assert all(len(set(each)) == 1 for each in windows)
    assert windows[0] == [1, 1, 1] and windows[-1] != [1, 1, 1]


def test_a_party_that_comes_late_to_a_window_has_that_of_the_others() -> None:
    records = [PartyRecord(party, party) for party in range(2)]
    window = AdaptiveWindow(Schedule(2, True, 1, LONGEST), records)
    first, second = records
    assert window.next(first) == 1
    for _ in range(100):
        window.answered([1.0])
    assert window.next(second) == 1
    for record in records:
        record.steps += 1
    assert [window.next(record) for record in records] == [LONGEST, LONGEST]


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
    assert world.adaptive_window.measured is None and world.adaptive_window.next(quick) == LONGEST
    for _ in range(30):
        steps = world.adaptive_window.next(slow)
        world.adaptive_window.ordered(slow, steps)
        slow.exchange += 1
        world.now += 0.01 + 0.004 * steps
    both = [world.adaptive_window.next(record) for record in (quick, slow)]
    assert world.adaptive_window.measured and both == [LONGEST, LONGEST]


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
    return Schedule.of(config, rule, 3, estimator, False, PER_EPOCH, "cheap", measures)


def test_windows_that_are_given_or_of_a_simulation_are_as_they_were() -> None:
    assert (schedule(False).window, schedule(False).longest) == (1, 8)
    assert (schedule(True, window=4).window, schedule(True, window=4).longest) == (4, 4)
    assert (schedule(True).window, schedule(True).longest) == (1, LONGEST)
    zeroth = schedule(True, strategy="syn-zoo")
    assert (zeroth.window, zeroth.longest) == (16, 64)
    assert schedule(True, strategy="vafl", max_delay=6).longest == 6
    given = schedule(False, window=8)
    fixed = AdaptiveWindow(given, [PartyRecord(0, 0)], clock=lambda: math.nan)
    assert not fixed.active and given.windows == "8" and schedule(True).windows == f"1 to {LONGEST}"
    assert fixed.figures() == {"window": 8, "window_measured": None}
    with pytest.raises(ConfigError, match="max-delay = 6"):
        schedule(True, strategy="vafl", max_delay=6, window=7)


def test_windows_of_few_steps_an_epoch_do_not_depend_on_the_runtime() -> None:
    for keys, wanted in (({}, 1), ({"strategy": "syn-zoo"}, 16)):
        config = resolve(keys)
        given = config, ALL, 3, estimators.choose(config)(config), False
        for per_epoch in (FEW_STEPS, FEW_STEPS + 1):
            costs = (("free", False), ("cheap", False), ("cheap", True))
            longest = {Schedule.of(*given, per_epoch, *cost).longest for cost in costs}
            # The control: with more steps, windows differ.
            assert longest == {wanted} if per_epoch == FEW_STEPS else len(longest) > 1
        # A message of some seconds is worth a longer window.
        assert Schedule.of(*given, FEW_STEPS, "dear").longest > wanted


@pytest.mark.parametrize(("jump", "then"), [(0.0, [8, 8, 9]), (9.0, [4, 4, 4])])
def test_a_run_goes_on_from_the_window_that_it_has_measured(jump: float, then: list[int]) -> None:
    world, windows = World(0.1, 0.001, by_loss=True), []
    for turn in range(9):
        windows.append(world.turn()[0])
        world.adaptive_window.answered([1.0 + jump * (turn == 4)] * windows[-1])
    assert windows == [1, 1, 1, 8, 8, 8, *then]


# --- the loss -------------------------------------------------------------------------------------


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    """Losses that fall from 1 to 0.4, with noise."""
    drawn = np.random.default_rng(seed).normal(0, noise, steps)
    return list(np.linspace(1, 0.4, steps) + drawn)


def by_loss(coordinated: bool = True) -> AdaptiveWindow:
    return AdaptiveWindow(Schedule(1, coordinated, 1, LONGEST), [PartyRecord(0, 0)])


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_windows_grow_to_the_longest_while_the_loss_falls_with_noise(noise: float) -> None:
    window, losses = by_loss(), falling(4000, noise)
    while losses and window.window < LONGEST:
        window.answered([losses.pop(0) for _ in range(min(window.window, len(losses)))])
    assert window.window == LONGEST


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_jump_of_the_loss_beyond_its_noise_halves_windows(noise: float) -> None:
    window, losses = by_loss(), falling(4000, noise)
    while window.window < LONGEST:
        window.answered([losses.pop(0) for _ in range(window.window)])
    window.answered([each + 5 * noise + 0.1 for each in losses[:LONGEST]])
    assert window.window == LONGEST // 2
    window.answered([math.nan] * 8)  # a party whose upload poisoned the loss
    assert window.window == int(1.07 * LONGEST / 2)
    for _ in range(10):  # each time higher: it never falls below the shortest
        window.answered([losses[0] * 10])
        losses[0] *= 10
    assert window.window == 1


def test_a_resumed_run_has_the_windows_that_it_would_have_had() -> None:
    whole, losses = by_loss(), falling(400, 0.1)
    for _ in range(20):
        whole.answered([losses.pop(0) for _ in range(whole.window)])
    again = by_loss()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(20):
        some = [losses.pop(0) for _ in range(whole.window)]
        whole.answered(some)
        again.answered(some)
        assert whole.window == again.window


def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run in process have the windows of messages between nodes."""
    monkeypatch.setattr(LocalGrid, "cost", "dear")


def test_windows_that_follow_the_loss_learn_what_long_windows_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: dict[str, Any] = {"strategy": "split-nn", "dataset": "digits", "bottom-model": "mlp"}
    keys |= {"epochs": 3, "batch-size": 32, "party-lr": 0.01, "server-lr": 0.01, "noise-seed": 0}
    keys |= {"optimizer": "adam", "validation-fraction": 0.0, "eval-every": 3}
    one, sixteen = (run_local(2, {**keys, "window": window}).summary for window in (1, 16))
    dear(monkeypatch)
    adaptive = run_local(2, keys).summary
    assert sixteen["test_loss"] > 3 * one["test_loss"]
    assert adaptive["test_loss"] < 2 * one["test_loss"]
    exchanges = [each["by_party"][0]["exchanges"] for each in (sixteen, adaptive, one)]
    assert exchanges[0] < exchanges[1] < 0.7 * exchanges[2]


def test_noise_on_scalars_leaves_windows_independent_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(LossJumps, "jumps", lambda self, losses: heard.append(losses))
    dear(monkeypatch)
    keys = {"dataset": "breast-cancer", "epochs": 1, "batch-size": 4}
    run_local(2, {**keys, "strategy": "dpzv", "epsilon": 1.0})
    assert not heard
    run_local(2, {**keys, "strategy": "asyrevel"})
    assert heard
