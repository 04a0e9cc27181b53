"""Training, predicting, saving and loading from Python, with what is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch.utils.data import TensorDataset

import vfl_flower
from vfl_flower.data import memory
from vfl_flower.errors import ConfigError, VflError

CANCER: pd.DataFrame = load_breast_cancer(as_frame=True).frame
Y = CANCER.pop("target")
X = CANCER.to_numpy()
PARTS = [X[:, :10], X[:, 10:20], X[:, 20:]]
FRAMES = [CANCER.iloc[:, :10], CANCER.iloc[:, 10:20], CANCER.iloc[:, 20:]]
KEYS = {"epochs": 5}


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards() -> Any:
    yield
    assert memory._held == {}


@pytest.mark.parametrize(
    "features",
    [
        PARTS,
        FRAMES,
        [torch.tensor(part) for part in PARTS],
        [PARTS[0], FRAMES[1], torch.tensor(PARTS[2])],
    ],
    ids=["arrays", "frames", "tensors", "mixed"],
)
def test_whatever_holds_the_numbers_gives_the_same_model(features: list[Any]) -> None:
    model = vfl_flower.train(KEYS, features, Y)
    expected = vfl_flower.train(KEYS, PARTS, Y.tolist())
    assert [entry["test_loss"] for entry in model.history] == [
        entry["test_loss"] for entry in expected.history
    ]
    assert model.history[-1]["test_accuracy"] > 0.9


def test_what_is_predicted_is_in_the_order_of_the_rows() -> None:
    model = vfl_flower.train({**KEYS, "strategy": "vafl"}, PARTS, Y)
    order = np.random.default_rng(0).permutation(len(X))
    said, shuffled = model.predict(PARTS), model.predict([part[order] for part in PARTS])
    np.testing.assert_array_equal(said[order], shuffled)
    chances = model.predict_proba(PARTS)
    assert chances.shape == (len(X), 2) and np.allclose(chances.sum(1), 1)
    np.testing.assert_array_equal(chances.argmax(1), said)
    figures = model.evaluate(PARTS, Y)
    assert figures["accuracy"] == pytest.approx((said == Y).mean())
    assert {"loss", "accuracy", "auc"} == figures.keys()


def test_frames_with_ids_are_aligned_and_answered_by_id() -> None:
    generator = np.random.default_rng(1)
    ids = generator.permutation(100_000)[: len(X)]
    known = [generator.permutation(len(X))[:500] for _ in FRAMES]
    frames = [
        frame.iloc[rows].assign(customer=ids[rows])
        for frame, rows in zip(FRAMES, known, strict=True)
    ]
    labels = pd.Series(Y.to_numpy(), index=ids)
    model = vfl_flower.train(KEYS, frames, labels, id="customer")
    common = set(ids[known[0]]) & set(ids[known[1]]) & set(ids[known[2]])
    assert model.summary["parties"] == 3
    said = model.predict(frames, id="customer")
    assert set(said.index) == common and said.index.name == "customer"
    assert (said == labels[said.index]).mean() > 0.93


def test_columns_of_the_label_holders_own_take_part() -> None:
    own = CANCER.iloc[:, 20:].assign(label=Y)
    with_own = vfl_flower.train(KEYS, PARTS[:1], own)
    without = vfl_flower.train(KEYS, PARTS[:1], Y)
    assert with_own.history[-1]["test_loss"] < without.history[-1]["test_loss"]
    said = with_own.predict(PARTS[:1], own=own.drop(columns="label"))
    assert (said == Y).mean() > 0.95


def test_texts_and_gaps_are_prepared_as_the_training_rows_taught() -> None:
    frame = FRAMES[0].copy()
    frame.iloc[::7, 0] = np.nan
    frame["size"] = np.where(X[:, 3] > 500, "large", "small")
    keys = {**KEYS, "missing": "median", "text": "one-hot"}
    model = vfl_flower.train(keys, [frame, FRAMES[1]], Y)
    assert (model.predict([frame, FRAMES[1]]) == Y).mean() > 0.9
    with pytest.raises(VflError, match="missing values"):
        vfl_flower.train(KEYS, [frame.drop(columns="size"), FRAMES[1]], Y)


def test_numbers_and_named_classes_come_back_as_they_went_in() -> None:
    names = np.array(["benign", "malignant"])[Y]
    model = vfl_flower.train(KEYS, PARTS, names)
    assert set(model.predict(PARTS)) == {"benign", "malignant"}
    assert model.classes == ["benign", "malignant"]
    lengths = X[:, 2] * 10 + 5
    keys = {**KEYS, "target": "regression", "party-lr": 0.05, "server-lr": 0.05}
    model = vfl_flower.train(keys, [X[:, :2], X[:, 3:]], lengths)
    assert model.evaluate([X[:, :2], X[:, 3:]], lengths)["r2"] > 0.9


def test_images_and_torch_data_sets_are_features_too() -> None:
    digits = load_digits()
    halves = [digits.images[:, :, :4], digits.images[:, :, 4:]]
    model = vfl_flower.train({"epochs": 4, "bottom-model": "cnn"}, halves, digits.target)
    assert model.evaluate(halves, digits.target)["accuracy"] > 0.5
    scaled = torch.tensor(digits.data / 16 - 0.3, dtype=torch.float32)
    datasets = [TensorDataset(scaled[:, :32]), TensorDataset(scaled[:, 32:])]
    model = vfl_flower.train({"epochs": 10}, datasets, digits.target)
    assert model.evaluate(datasets, digits.target)["accuracy"] > 0.9


def test_a_model_that_is_saved_and_loaded_says_the_same(tmp_path: Path) -> None:
    model = vfl_flower.train(KEYS, PARTS, Y, out=tmp_path / "kept")
    model.save(tmp_path / "copy")
    for folder in ("kept", "copy"):
        loaded = vfl_flower.load(tmp_path / folder)
        np.testing.assert_array_equal(loaded.predict_proba(PARTS), model.predict_proba(PARTS))
        assert loaded.history == model.history
    with pytest.raises(ConfigError, match="is there already"):
        model.save(tmp_path / "copy")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        vfl_flower.load(tmp_path)


def test_without_a_folder_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = vfl_flower.train(KEYS, PARTS, Y)
    assert model.folder.exists()
    del model
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_by_name_is_divided_among_parties() -> None:
    model = vfl_flower.train({"dataset": "breast-cancer", **KEYS}, parties=3)
    assert model.summary["parties"] == 3
    assert len(model.predict()) == 114


def test_a_figure_of_held_out_rows_is_of_rows_that_were_not_trained_on() -> None:
    model = vfl_flower.train({**KEYS, "test-fraction": 0.5}, PARTS, Y)
    assert model.history[-1]["steps"] == 5 * -(-len(X) // 2 // 32)
    every = vfl_flower.train({**KEYS, "test-fraction": 0}, PARTS, Y)
    assert every.history[-1]["steps"] == 5 * -(-len(X) // 32)
    assert every.evaluate(PARTS, Y)["accuracy"] == pytest.approx(every.history[-1]["test_accuracy"])


@pytest.mark.parametrize(
    ("features", "labels", "more", "said"),
    [
        (PARTS, None, {}, "Labels are missing"),
        ([PARTS[0], PARTS[1][:9]], Y, {}, "Party 1 has 9 rows, and there are 569 labels"),
        ([PARTS[0][:, 0]], Y, {}, "at least two dimensions"),
        ([PARTS[0].astype(str)], Y, {}, "give numbers"),
        (PARTS, Y, {"engine": "ray"}, "cannot reach data of this process"),
        (PARTS, Y, {"id": "customer"}, "party 0 are no frame with a column 'customer'"),
        ([FRAMES[0].assign(k=1)], Y, {"id": "k"}, "whose id is already"),
        ([np.where(PARTS[0] > 1e3, np.nan, PARTS[0])], Y, {}, "missing or infinite"),
        (PARTS, np.ones(len(X)), {}, "at least two classes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_a_sentence(
    features: Any, labels: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(VflError) as error:
        vfl_flower.train(KEYS, features, labels, **more)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert "memory:" not in str(error.value)


def test_new_rows_must_have_the_columns_of_then() -> None:
    model = vfl_flower.train(KEYS, PARTS, Y)
    with pytest.raises(VflError, match="has 9 columns"):
        model.predict([PARTS[0][:, :9], *PARTS[1:]])
    with pytest.raises(ConfigError, match="parties"):
        model.predict(PARTS[:2])
