"""`observer='tensorboard'`: figures of evaluations, and nothing else, as TensorBoard reads them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder.tensorboard import TensorBoard

KEYS: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 3, "window": 8}


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_each_number_of_the_history_is_a_scalar_at_its_step_and_nothing_else(run: Start) -> None:
    finished = run(2, {**KEYS, "observer": "tensorboard", "presence": 0.8})
    assert any("test_by_party" in entry for entry in finished.history)  # which is no number
    found = events(finished.folder)
    for key, tag in {
        **{"test_accuracy": "test/accuracy", "train_loss": "train/loss"},
        **{"bytes_up": "spent/bytes_up", "epoch": "spent/epoch"},
    }.items():
        shown = [(each.step, each.value) for each in found.Scalars(tag)]
        assert shown == [
            (entry["steps"], pytest.approx(entry[key], rel=1e-6)) for entry in finished.history
        ]
    tags = found.Tags()
    assert {kind for kind, of in tags.items() if of} == {"scalars"}
    numbers = [v for v in finished.history[0].values() if isinstance(v, int | float)]
    assert len(tags["scalars"]) == len(numbers) - 1  # steps are the x axis
    assert not [tag for tag in tags["scalars"] if "by_part" in tag]


def test_it_is_its_owner_s_and_in_the_file_at_once(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.began(tmp_path)
    observer.evaluated({"steps": 5, "test_accuracy": 0.5})
    assert events(tmp_path).Scalars("test/accuracy")[0].value == 0.5  # while the run goes on
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    observer.ended()


def test_repeated_steps_replace_the_earlier_steps(tmp_path: Path) -> None:
    for figures in ({10: 0.1, 20: 0.2, 30: 0.3}, {20: 0.5}):  # cut short, and resumed from 10
        observer = TensorBoard()
        observer.began(tmp_path)
        for step, figure in figures.items():
            observer.evaluated({"steps": step, "test_accuracy": figure})
        observer.ended()
    shown = events(tmp_path).Scalars("test/accuracy")
    assert [(each.step, round(each.value, 3)) for each in shown] == [(10, 0.1), (20, 0.5)]


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError, match=r"pip install 'vfl-flower\[tensorboard\]'"):
        TensorBoard()
