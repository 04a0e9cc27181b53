"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_parties_train_towers_of_their_own(capsys: Any) -> None:
    model = load("own_tower").main(epochs=1)
    said = capsys.readouterr().out
    assert said.startswith("accuracy 0.9") and "among the first 3 0.9" in said
    assert len(model.predict()) == 360
    assert model.evaluate().keys() == {"loss", "accuracy", "top_3"}


@pytest.mark.nightly
def test_photographs_and_a_table_are_learned_from_files() -> None:
    assert load("images/photographs").main() > 0.8


@pytest.mark.nightly
def test_notes_and_values_are_learned_from_files() -> None:
    assert load("text/notes").main() > 0.8
