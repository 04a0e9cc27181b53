"""Checkpoints: when one is kept, what is in it, and what goes on from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies.callbacks import PeriodicCheckpoints, callbacks_of
from strategies.checkpoints import Checkpoints
from strategies.turns import PartyRecord, State, StepBudget, Traffic
from tests.strategy.parts import LABELS, METRICS, ROWS, SPENT, Parts, Post, Warned
from vfl_flower.config.provenance import environment
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.tasks.drift import label_holder as drift
from vfl_flower.transport.messages import CheckpointOrder
from vfl_flower.transport.wire import read_order


class Paused:
    """A run that records the parties it waited for, and after how many messages."""

    def __init__(self, folder: Path, parts: Parts, found: Checkpoint | None = None) -> None:
        self.parts = parts
        self.waits: list[tuple[Any, int]] = []
        self.parts.run.figures = lambda: {"steps": 40}  # type: ignore[method-assign]
        self.keeper = Keeper(folder, "12", found)
        self.checkpoints = Checkpoints(
            self.keeper, parts.run, parts.config, self.drain, self.wait_for
        )

    def drain(self) -> None:
        self.waits.append(("all", len(self.parts.post.sent)))

    def wait_for(self, records: Sequence[PartyRecord]) -> None:
        self.waits.append(([record.party for record in records], len(self.parts.post.sent)))
        for record in records:
            record.rest()


def paused(
    folder: Path, keys: Mapping[str, Any] | None = None, found: Checkpoint | None = None
) -> tuple[Checkpoints, Parts, Paused]:
    parts = Parts({**(keys or {})})
    strategy = Paused(folder, parts, found)
    return strategy.checkpoints, parts, strategy


@pytest.mark.parametrize(
    ("simulated", "keys", "every"),
    [
        (True, {}, 0),
        (False, {}, 1000),
        (True, {"checkpoint-every": 5}, 5),
        (False, {"checkpoint-every": 0}, 0),
    ],
)
def test_checkpoints_are_so_many_exchanges_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    simulated: bool,
    keys: dict[str, Any],
    every: int,
) -> None:
    monkeypatch.setattr(Post, "simulated", simulated)
    checkpoints, parts, _ = paused(tmp_path, keys)
    parts.run.attach(callbacks_of(parts.run, [], lambda records: None))
    kept_at = []
    for exchanges in range(2500):
        parts.records[exchanges % 3].traffic.exchanges += 1
        if exchanges < 20 or exchanges % 100 > 97:
            parts.run.tell("progressed", exchanges, 2500)
        if parts.run.saving:
            checkpoints.save()
            kept_at.append(exchanges + 1)
    if every == 0:
        assert kept_at == []
    elif every == 1000:
        assert kept_at == [1000, 2000]
    else:
        assert kept_at[:5] == [5, 10, 15, 20, 99]
    assert checkpoints.keeper.number == len(kept_at)


def test_a_checkpoint_is_kept_by_all_who_are_there_when_nothing_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "shares", lambda holder, own: {})  # this holder has no model
    checkpoints, parts, strategy = paused(tmp_path, {"checkpoint-every": 5})
    parts.records[1].state = State.FAILED
    parts.records[2].feedback = {"gradient": ROWS}
    parts.budget.ordered, parts.budget.answered = 42, 37
    parts.messenger.party_memory_mb, parts.post.saved_clock = 9.0, [1.5]
    parts.history.record(parts.budget, 3, SPENT, 0.5, None, METRICS)
    checkpoints.save()
    assert strategy.waits == [("all", 0), ([0, 2], 2)]  # it is posted to both at once
    orders = [read_order(each, CheckpointOrder) for each in parts.post.sent]
    assert [each.metadata.dst_node_id for each in parts.post.sent] == [100, 102]
    assert [(each.exchange, each.number) for each in orders] == [(1, 1), (1, 1)]
    assert [list(each.arrays) for each in orders] == [[], ["gradient"]]
    assert parts.records[2].feedback == {}

    found = checkpoint.load(tmp_path)
    assert (found.run, found.number, found.finished) == (checkpoints.keeper.name, 1, False)
    assert found.config == parts.config
    assert found.about_labels == LABELS.about() | {"coverage": LABELS.coverage}
    assert found.strategy == {
        "seats": [record.state_dict() for record in parts.records],
        "history": {**parts.history.state_dict(), "seconds": found.strategy["history"]["seconds"]},
        "plan": {"planned": 120, "ordered": 42, "answered": 37, "stopped": False},
        "pace": parts.run.adaptive_window.state_dict(),
        "party_memory_mb": 9.0,
        "uploads": 7,
        "journal": [3, "abc"],
        "transcript": {"secrets": {}, "whole": True, "environment": environment()},
        "origin": checkpoints.keeper.name,
        "figures": None,
        "timing": [1.5],
        "holder": {"steps": 40},
        "drift": None,
    }
    assert [record["alive"] for record in found.strategy["seats"]] == [True, False, True]
    np.testing.assert_array_equal(found.arrays["table"], np.arange(4.0))
    checkpoints.save(finished=True)
    found = checkpoint.load(tmp_path)
    assert (found.number, found.finished) == (2, True)
    assert found.strategy["figures"] == {"steps": 40}  # for a summary that is not written yet


@pytest.mark.parametrize("every", [0, 5])
def test_there_is_one_before_anything_is_released_and_parties_are_not_asked_for_it(
    tmp_path: Path, every: int
) -> None:
    checkpoints, parts, strategy = paused(tmp_path, {"checkpoint-every": every})
    assert (tmp_path / checkpoint.FILE).exists() == (every > 0)
    assert parts.post.sent == [] and strategy.waits == []
    if every:
        found = checkpoint.load(tmp_path)
        assert (found.run, found.number, found.finished) == (checkpoints.keeper.name, 0, False)
        assert [record["exchange"] for record in found.strategy["seats"]] == [0, 0, 0]
    checkpoints.save()
    assert checkpoint.load(tmp_path).number == 1


def kept_run(folder: Path) -> Checkpoint:
    checkpoints, parts, _ = paused(folder)
    for record in parts.records:
        record.exchange, record.steps, record.traffic = 8, 14, Traffic(6, 600, 60, 6)
    parts.records[1].state = State.FAILED
    parts.budget.ordered, parts.budget.answered = 42, 37
    parts.messenger.party_memory_mb, parts.post.saved_clock = 9.0, [1.5]
    parts.history.record(parts.budget, 3, SPENT, 0.5, None, METRICS)
    checkpoints.save()
    return checkpoint.load(folder)


def test_all_parts_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    found = kept_run(tmp_path)
    pace = {"by_time": 16, "measured": [0.1, 0.2], "by_loss": 9.5, "jumps": [0.5, 0.1, 40, None]}
    found.strategy["pace"] = pace
    checkpoints, parts, strategy = paused(tmp_path, {"checkpoint-every": 5}, found)
    assert parts.run.adaptive_window.state_dict() == {**pace, "measured": (0.1, 0.2)}
    assert [record.state for record in parts.records] == [State.IDLE, State.FAILED, State.IDLE]
    # Each party has kept this checkpoint anew when it resumed, also one that was away before.
    assert [record.state_dict() for record in parts.records] == [
        {**record, "checkpoint": found.number} for record in found.strategy["seats"]
    ]
    assert [record.exchange for record in parts.records] == [9, 8, 9]
    assert parts.budget.state_dict() == {
        "planned": 120,
        "ordered": 42,
        "answered": 37,
        "stopped": False,
    }
    assert len(parts.history.entries) == 1 and parts.heard.said == []
    assert parts.messenger.party_memory_mb == 9.0 and parts.post.saved_clock == [1.5]
    assert parts.holder.loaded == (found.strategy["holder"], found.arrays)
    # Exchanges since that checkpoint count, and its number is taken.
    parts.run.attach([PeriodicCheckpoints(5)])
    parts.run.tell("began", tmp_path)
    parts.records[0].traffic.exchanges += 4
    parts.run.tell("progressed", 41, 120)
    assert not parts.run.saving
    parts.records[0].traffic.exchanges += 1
    parts.run.tell("progressed", 42, 120)
    assert parts.run.saving
    checkpoints.save()
    assert len(strategy.waits) == 2 and checkpoint.load(tmp_path).number == 2


def test_a_run_without_a_virtual_clock_goes_on_without_one(tmp_path: Path) -> None:
    found = kept_run(tmp_path)
    found.strategy["timing"] = None
    _, parts, _ = paused(tmp_path, found=found)
    assert parts.post.saved_clock is None


@pytest.mark.parametrize(("every", "journals"), [(0, 0), (5, 1)])
def test_releases_are_kept_on_disk_where_a_run_can_be_cut_short(
    tmp_path: Path, every: int, journals: int
) -> None:
    keys = {"checkpoint-every": every}
    checkpoints, parts, _ = paused(tmp_path, keys)
    file = tmp_path / "releases.journal"
    assert parts.releases.journals == [(file, checkpoints.keeper.run, None)] * journals
    assert parts.budget.limit == 120
    checkpoints, parts, _ = paused(tmp_path, keys, kept_run(tmp_path))
    assert parts.releases.journals == [(file, checkpoints.keeper.run, [3, "abc"])]


@pytest.mark.parametrize("allowed", [100, 1000])
def test_steps_that_were_answered_after_the_checkpoint_count_towards_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Warned, allowed: int
) -> None:
    found = kept_run(tmp_path)

    def go_on(released: int) -> StepBudget:
        parts = Parts()
        parts.budget.allowed, parts.releases.accountant.released = allowed, released
        Paused(tmp_path, parts, found)
        return parts.budget

    assert go_on(released=37).limit == min(allowed, 120) and warned() == []
    assert go_on(released=45).limit == min(allowed, 120) - 8
    assert warned() == ["8 steps were answered after the checkpoint, and count."]
