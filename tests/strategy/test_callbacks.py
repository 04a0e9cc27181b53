"""Callbacks: a user's own watch a run, stop it and save it; ours are built the same way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.callbacks import BestModel, EarlyStopping, EpochLog, callbacks_of
from tests.conftest import ALL_ROWS
from tests.strategy.parts import METRICS, SPENT, Heard, Parts
from vfl_flower.config.errors import ConfigError, PartyError
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.callbacks import Callback, RunState, listeners
from vfl_flower.label_holder.metrics import Metrics
from vfl_flower.launch.engines import Finished, run_local

KEYS = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 6, "window": 5, "strategy": "vafl"}
KEYS |= {"party-lr": 0.2, "server-lr": 0.2}


def run(folder: Path, *callbacks: Callback, **keys: Any) -> Finished:
    more = {key.replace("_", "-"): value for key, value in keys.items()}
    return run_local(2, {**KEYS, **more, "out": str(folder)}, observers=callbacks)


class Watch(Callback):
    """Notes the state of its run at each evaluation."""

    def __init__(self) -> None:
        self.states: list[RunState] = []
        self.heard: list[str] = []

    def began(self, folder: Path) -> None:
        self.heard.append(f"began in {folder.name}")
        assert self.run.state.done == 0 and self.run.state.history == ()

    def evaluated(self, entry: dict[str, Any]) -> None:
        assert self.run.state.last is entry
        self.states.append(self.run.state)

    def trained(self) -> None:
        self.heard.append("trained")

    def saved(self) -> None:
        self.heard.append("saved")

    def ended(self) -> None:
        self.heard.append("ended")


class StopAfter(Watch):
    """Stops its run at an evaluation, or after so many steps."""

    def __init__(self, epoch: int = 0, steps: int = 0) -> None:
        super().__init__()
        self.epoch, self.steps = epoch, steps

    def evaluated(self, entry: dict[str, Any]) -> None:
        super().evaluated(entry)
        if self.epoch and entry["epoch"] >= self.epoch:
            self.run.stop("It is good enough")

    def progressed(self, done: int, planned: int) -> None:
        if self.steps and done >= self.steps:
            self.run.stop("It is good enough")


class SaveAt(Watch):
    """Asks for a checkpoint at an evaluation; then has the run fail, if it is told to."""

    def __init__(self, epoch: int, fails: bool = False) -> None:
        super().__init__()
        self.epoch, self.fails = epoch, fails

    def evaluated(self, entry: dict[str, Any]) -> None:
        super().evaluated(entry)
        if entry["epoch"] == self.epoch:
            self.run.save()

    def saved(self) -> None:
        super().saved()
        if self.fails:
            raise RuntimeError("The power is gone.")


# --- a callback of a user -----------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "ef-vfl", "frozen", "centralised"])
def test_a_callback_reads_the_state_of_its_run_and_stops_it(tmp_path: Path, strategy: str) -> None:
    stop = StopAfter(epoch=2)
    stopped = run(tmp_path / "stopped", stop, strategy=strategy)
    assert stopped.summary["failure"] is None
    assert 2 <= stopped.history[-1]["epoch"] < 3 and stop.heard[-1] == "ended"
    assert checkpoint.load(stopped.folder).finished
    if strategy != "vafl":  # its parties may be a window ahead
        whole = run(tmp_path / "whole", strategy=strategy, epochs=2)
        assert [each["test_loss"] for each in stopped.history] == [
            each["test_loss"] for each in whole.history
        ]
    control = run(tmp_path / "control", watch := Watch(), strategy=strategy)
    assert [state.last["epoch"] for state in watch.states] == [1, 2, 3, 4, 5, 6]
    if strategy not in ("split-nn", "vafl"):
        return
    last = watch.states[-1]
    assert (last.epoch, last.epochs, last.done) == (6, 6, last.planned)
    assert last.exchanges == control.summary["exchanges"] and last.seconds > 0
    assert last.parties == (0, 1) and last.failed == () and not last.may_stop_early
    assert len(last.history) == 6 and last.best == {}
    assert watch.heard == ["began in control", "trained", "saved", "ended"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "frozen", "centralised", "local-only"])
def test_a_run_that_is_stopped_between_evaluations_is_evaluated_a_last_time(
    tmp_path: Path, strategy: str
) -> None:
    stop = StopAfter(steps=40)  # of 180
    finished = run(tmp_path / "run", stop, strategy=strategy, eval_every=4.0)
    assert finished.summary["failure"] is None and finished.summary["test_loss"] is not None
    (entry,) = finished.history
    assert entry["epoch"] < 4 and [state.last for state in stop.states] == [entry]


@pytest.mark.nightly
def test_a_callback_saves_a_run_that_is_resumed_from_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power"):
        run(tmp_path / "run", SaveAt(2, fails=True))
    found = checkpoint.load(tmp_path / "run")
    assert not found.finished and len(found.strategy["history"]["entries"]) == 2
    resumed = run_local(2, {"resume": str(tmp_path / "run")})
    saved = run(tmp_path / "saved", watch := SaveAt(2))
    assert watch.heard == ["began in saved", "saved", "trained", "saved", "ended"]
    for one, other in zip(resumed.history, saved.history, strict=True):
        assert one["test_loss"] == other["test_loss"]
    # The control: without it there is no checkpoint before the end.
    with pytest.raises(RuntimeError, match="power"):
        run(tmp_path / "control", SaveAt(7, fails=True))
    assert checkpoint.load(tmp_path / "control").finished


@pytest.mark.parametrize("strategy", ["frozen", "centralised", "local-only"])
def test_a_run_that_cannot_be_resumed_refuses_to_save(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"'{strategy}' keeps no checkpoints before its end"):
        run(tmp_path / "run", SaveAt(2 if strategy != "local-only" else 6), strategy=strategy)


def test_a_callback_hears_the_end_of_a_run_that_fails(tmp_path: Path) -> None:
    class Fails(Watch):
        def evaluated(self, entry: dict[str, Any]) -> None:
            raise RuntimeError("It is broken.")

    broken, other = Fails(), Watch()
    with pytest.raises(RuntimeError, match="broken"):
        run(tmp_path / "run", broken, other)
    assert broken.heard == other.heard == ["began in run", "ended"]


def test_what_is_no_subclass_hears_of_what_it_has_methods_for() -> None:
    heard: list[Any] = []
    other: Any = SimpleNamespace(evaluated=heard.append)
    found = listeners([Callback(), other, Heard()])
    assert [len(found[event]) for event in ("evaluated", "progressed", "returned")] == [2, 1, 0]
    found["evaluated"][0]({"epoch": 1})
    assert heard == [{"epoch": 1}]


# --- ours ---------------------------------------------------------------------------------------


def test_callbacks_hear_of_an_event_in_their_order_and_of_what_they_override() -> None:
    parts = Parts({"on-party-failure": "continue"})
    one, other = Heard(), Heard()
    parts.run.attach([one, EpochLog(), other])
    assert one.run is other.run is parts.run
    with pytest.raises(ValueError), parts.run.told(None):
        parts.run.tell("progressed", 45, 120)
        entry = parts.history.record(parts.budget, 17, SPENT, 0.25, None, METRICS)
        parts.run.tell("evaluated", entry)
        parts.fail(1, PartyError("Party 1", "is tired."))
        raise ValueError
    assert one.said == other.said
    assert one.said == [
        ("progressed", 45, 120),
        ("evaluated", entry),
        ("failed", 1, "Party 1 is tired."),
        ("ended",),
    ]


def evaluated(parts: Parts, *losses: float) -> None:
    for loss in losses:
        parts.budget.answered += 30
        entry = parts.history.record(parts.budget, 3, SPENT, None, Metrics(loss), METRICS)
        for record in parts.records:
            record.evaluation += 1
        parts.run.tell("evaluated", entry)


def test_the_best_model_is_remembered_and_restored_at_the_parties_that_have_it() -> None:
    parts = Parts()
    waited: list[Any] = []
    parts.run.attach([BestModel(waited.append)])
    evaluated(parts, 0.5, 0.4, 0.4, 0.6)
    assert parts.history.best == 1 and parts.holder.remembered == 2
    assert [record.best_evaluation for record in parts.records] == [2, 2, 2]
    parts.run.tell("trained")
    assert parts.history.restored and parts.holder.restored == 1
    assert len(parts.post.sent) == 3 and waited == [parts.records]


def test_where_the_last_model_is_the_best_no_party_is_asked_to_go_back() -> None:
    parts = Parts()
    parts.run.attach([BestModel(lambda records: None)])
    parts.run.tell("trained")
    assert not parts.history.restored and parts.holder.restored == 0  # there is none
    evaluated(parts, 0.5, 0.4)
    parts.run.tell("trained")
    assert parts.history.restored and parts.post.sent == []


@pytest.mark.parametrize("patience", [2.0, 3.0])
def test_training_stops_once_no_evaluation_was_better_for_so_long(
    patience: float, warned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr")
    parts = Parts()
    parts.run.attach([BestModel(lambda records: None), EarlyStopping(patience)])
    evaluated(parts, 0.5, 0.4, 0.6)
    assert not parts.budget.stopped
    evaluated(parts, 0.7)
    assert parts.budget.stopped == (patience == 2)
    evaluated(parts, 0.8)
    said = [each.getMessage() for each in caplog.records]
    assert said == ["Validation has not improved since epoch 2: training stops."]


def test_a_run_has_the_callbacks_that_it_needs() -> None:
    def names(parts: Parts, can_save: bool) -> list[str]:
        parts.run.can_save = can_save
        found = callbacks_of(parts.run, [parts.heard], lambda records: None)
        return [type(each).__name__ for each in found]

    assert names(Parts(), False) == ["EpochLog", "Heard"]
    assert names(Parts(), True) == ["EpochLog", "Heard", "EndBySignal"]
    periodic = Parts({"checkpoint-every": 5})
    assert names(periodic, True) == ["EpochLog", "Heard", "PeriodicCheckpoints", "EndBySignal"]
