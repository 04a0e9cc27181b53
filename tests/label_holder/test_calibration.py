"""Calibration: equal to scikit-learn's, right under noise and class weights, kept in a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss

import vfl_flower
from tests.conftest import Start
from tests.releases import learned_from
from tests.serving import served
from tests.strategy.test_checkpoint import interrupted, resumed
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels, with_row_masks
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.calibration import LEAST, fit, probabilities, scores
from vfl_flower.launch.engines import Finished, predict_local, run_local
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.model import Predictor

Array = NDArray[Any]
ROWS, WEIGHT = 2500, 6.0
METHODS = {"platt": "sigmoid", "isotonic": "isotonic"}
QUICK: dict[str, Any] = {
    **{"bottom-model": "linear", "top-model": "sum", "batch-size": 64, "epochs": 8},
    **{"party-lr": 0.1, "server-lr": 0.1, "validation-fraction": 0.4},
}


@pytest.fixture(autouse=True)
def without_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))


# --- the functions ------------------------------------------------------------------------------


class Outputs(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """For scikit-learn, a classifier whose decision function is the outputs' scores."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.classes_ = np.arange(classes)

    def fit(self, outputs: Array, labels: Array) -> Outputs:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, outputs: Array) -> Array:
        return probabilities(torch.from_numpy(outputs), None).argmax(1)

    def decision_function(self, outputs: Array) -> Array:
        found = np.stack(scores(torch.from_numpy(outputs)), 1)
        return found[:, 0] if self.classes == 2 else found


def drawn(classes: int, rows: int = 400, seed: int = 0) -> tuple[Array, Array]:
    """Outputs [R, C] that are three times too large, and labels [R]."""
    generator = np.random.default_rng(seed)
    z = generator.normal(size=(rows, 1 if classes == 2 else classes))
    chances = probabilities(torch.from_numpy(z), None)
    labels = (chances.cumsum(1) < generator.random((rows, 1))).sum(1)
    return (3 * z).astype(np.float32), labels


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_equal_what_scikit_learn_finds(classes: int, method: str) -> None:
    outputs, labels = drawn(classes)
    new = 2 * drawn(classes, seed=1)[0]  # also outside the range of the fit
    known = CalibratedClassifierCV(FrozenEstimator(Outputs(classes)), method=METHODS[method])
    expected = known.fit(outputs, labels).predict_proba(new)
    kept = fit(method, torch.from_numpy(outputs), torch.from_numpy(labels))
    found = probabilities(torch.from_numpy(new), json.loads(json.dumps(kept)))
    assert found.dtype == np.float64 and found.shape == (400, classes)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    plain = probabilities(torch.from_numpy(new), None)
    assert np.abs(found - plain).mean() > 0.05  # control


@pytest.mark.parametrize("method", METHODS)
def test_a_number_added_to_all_outputs_of_a_row_changes_nothing(method: str) -> None:
    outputs, labels = map(torch.from_numpy, drawn(3))
    shift = torch.linspace(-9, 9, len(outputs))[:, None]
    kept = fit(method, outputs.double(), labels)
    found = probabilities(outputs.double(), kept)
    moved = probabilities(outputs.double() + shift, fit(method, outputs.double() + shift, labels))
    np.testing.assert_allclose(moved, found, atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_fit_to_noisy_labels_comes_near_the_true_probabilities(classes: int, method: str) -> None:
    outputs, labels = drawn(classes, rows=20_000)
    kept, generator = kept_share(1.0, classes), np.random.default_rng(2)
    other = (labels + generator.integers(1, classes, len(labels))) % classes
    noisy = np.where(generator.random(len(labels)) < kept, labels, other)
    given = torch.from_numpy(outputs), torch.from_numpy(noisy)
    true = probabilities(torch.from_numpy(outputs / 3), None)

    def error(kept: float) -> float:
        found = probabilities(given[0], fit(method, *given, kept))
        return float(np.abs(found - true).mean())

    assert error(kept) < 0.04
    assert error(1.0) > 0.09  # control: noise read as if it were true
    assert np.abs(probabilities(given[0], None) - true).mean() > 0.09  # control: no calibration


def test_platts_slope_stays_near_the_true_one_on_few_noisy_rows() -> None:
    kept, slopes = kept_share(1.0, 2), []
    for seed in range(20):  # by likelihood alone, one slope would be above 1,000
        generator = np.random.default_rng(seed)
        z = 2 * generator.normal(size=(150, 1))
        labels = (generator.random(150) < 1 / (1 + np.exp(-z[:, 0]))).astype(int)
        noisy = np.where(generator.random(150) < kept, labels, 1 - labels)
        slopes += fit("platt", torch.from_numpy(z), torch.from_numpy(noisy), kept)["slope"]
    assert 0.5 < np.median(slopes) < 1.5 and max(slopes) < 3  # true: 1


def test_the_class_shares_of_an_unknown_row_stay() -> None:
    outputs, labels = map(torch.from_numpy, drawn(2))
    kept, known = fit("platt", outputs, labels), np.arange(len(outputs)) % 2 == 0
    found = probabilities(outputs, kept, known)
    np.testing.assert_array_equal(found[known], probabilities(outputs, kept)[known])
    np.testing.assert_array_equal(found[~known], probabilities(outputs, None)[~known])


# --- a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finished, Array]]:
    """A run with class weights, and the true probability of class 1 of each row."""
    folder, generator = tmp_path_factory.mktemp("weighted"), np.random.default_rng(0)
    x = generator.standard_normal((ROWS, 6)).astype(np.float32)
    true = 1 / (1 + np.exp(1.5 - x[:, 0] - x[:, 3]))
    np.savez(folder / "data.npz", X=x, y=(generator.random(ROWS) < true).astype(int))
    keys = {**QUICK, "dataset": f"npz:{folder / 'data.npz'}", "calibrate": "platt"}
    keys |= {"class-weights": f"1,{WEIGHT:g}", "out": str(folder / "run")}
    yield run_local(2, keys), true


def outputs_of(run: Finished) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Array]:
    """Outputs and labels of validation rows, outputs of test rows, and the test rows' ids."""
    found = checkpoint.load(run.folder)
    labels, rows = load_labels(found.config), torch.from_numpy(found.arrays["test_table.rows"])
    assert labels.test_places is not None
    parties = len(found.strategy["holder"]["sizes"])
    present = np.ones((len(rows), parties), bool)
    outputs = Predictor(found, 0).outputs(rows, np.zeros((len(rows), 0), np.float32), present)
    first, truth = labels.validation, torch.from_numpy(labels.test)
    return outputs[:first], truth[:first], outputs[first:], labels.test_places[first:]


def test_class_weights_bias_probabilities_and_calibration_mends_them(
    weighted: tuple[Finished, Array],
) -> None:
    run, true = weighted
    given, labels, outputs, ids = outputs_of(run)
    kept = checkpoint.load(run.folder).calibration
    assert kept == fit("platt", given, labels)
    before, after = probabilities(outputs, None)[:, 1], probabilities(outputs, kept)[:, 1]
    assert (before - true[ids]).mean() > 0.2
    assert abs((after - true[ids]).mean()) < 0.03 and np.abs(after - true[ids]).mean() < 0.04
    assert kept is not None and kept["slope"][0] == pytest.approx(1, abs=0.3)
    # Weights w of class 1 multiply its odds by w, which the offset takes back.
    assert kept["offset"][0] == pytest.approx(-np.log(WEIGHT), abs=0.4)


def test_predict_serve_and_python_give_calibrated_probabilities(
    weighted: tuple[Finished, Array], tmp_path: Path
) -> None:
    run, _ = weighted
    *_, outputs, _ = outputs_of(run)
    expected = probabilities(outputs, checkpoint.load(run.folder).calibration)
    out = tmp_path / "p.csv"
    table = pd.read_csv(predict_local({"model": str(run.folder), "out": str(out)}))
    chances = table[["probability_0", "probability_1"]].to_numpy()
    np.testing.assert_allclose(chances, expected, atol=1e-6)
    np.testing.assert_array_equal(table["prediction"], expected.argmax(1))
    figures = json.loads(out.with_suffix(".json").read_text())
    labels = load_labels(checkpoint.load(run.folder).config)
    truth = labels.test[labels.validation :]
    assert figures["accuracy"] == pytest.approx((table["prediction"] == truth).mean(), abs=1e-6)
    assert figures["loss"] == pytest.approx(log_loss(truth, chances), abs=1e-6)
    assert figures["loss"] < run.summary["test_loss"] - 0.05  # control: of the outputs
    np.testing.assert_allclose(vfl_flower.load(run.folder).predict_proba(), chances, atol=1e-9)
    with served(run.folder, tmp_path) as found:
        answers = found.ask(*table["id"][:20].tolist())
    scored = [each["probabilities"]["1"] for each in answers]
    np.testing.assert_allclose(scored, expected[:20, 1], atol=1e-6)


def test_a_grown_run_fits_anew_and_an_older_checkpoint_has_no_calibration(
    weighted: tuple[Finished, Array], run: Start
) -> None:
    grown = run(2, {"grow": str(weighted[0].folder), "epochs": 1, "calibrate": "isotonic"})
    given, labels, *_ = outputs_of(grown)
    assert checkpoint.load(grown.folder).calibration == fit("isotonic", given, labels)
    found = checkpoint.load(weighted[0].folder)
    del found.strategy["holder"]["calibration"]  # as in a file of an older version
    assert found.calibration is None


def test_noisy_labels_calibrate_a_run_as_true_labels_do(
    weighted: tuple[Finished, Array], run: Start
) -> None:
    _, true = weighted
    keys = {"dataset": weighted[0].summary["dataset"], "class-weights": f"1,{WEIGHT:g}"}
    private = {"privacy": "labels", "epsilon": 2.0, "noise-seed": 0}
    noisy = run(2, {**QUICK, **keys, **private, "calibrate": "platt"})
    given, labels, outputs, ids = outputs_of(noisy)
    found = checkpoint.load(noisy.folder)
    kept, drawn = found.calibration, learned_from(found.config, load_labels(found.config))[0]
    noisy_labels = torch.from_numpy(drawn.test[: drawn.validation])
    assert kept == fit("platt", given, noisy_labels, kept_share(2.0, 2))
    assert kept != fit("platt", given, labels, kept_share(2.0, 2))  # control: true labels
    bias = (probabilities(outputs, kept)[:, 1] - true[ids]).mean()
    assert abs(bias) < 0.05
    assert (probabilities(outputs, None)[:, 1] - true[ids]).mean() > 0.15  # control


def test_a_resumed_run_has_the_calibration_of_a_whole_run_and_an_interrupted_one_has_none(
    run: Start, tmp_path: Path
) -> None:
    keys = {"dataset": "breast-cancer", "bottom-model": "linear", "epochs": 3, "calibrate": "platt"}
    keys |= {"checkpoint-every": 3, "window": 15}
    whole = run(3, keys)
    folder = interrupted(tmp_path / "cut", keys, 2)
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match="was interrupted before it fitted calibrate = 'platt'"):
        predict_local({"model": str(tmp_path / "copy"), "out": str(tmp_path / "p.csv")})
    again = checkpoint.load(resumed(folder).folder)
    assert again.calibration == checkpoint.load(whole.folder).calibration is not None


def test_rows_are_fitted_with_the_parties_that_have_them(run: Start) -> None:
    keys = {"dataset": "breast-cancer", "bottom-model": "linear", "epochs": 2, "presence": 0.7}
    found = checkpoint.load(run(3, {**keys, "calibrate": "platt"}).folder)
    labels = load_labels(found.config)
    masks = with_row_masks(labels, found.config, 3).present
    assert masks is not None and not masks[1].all()
    rows = torch.from_numpy(found.arrays["test_table.rows"])
    none, truth = np.zeros((len(rows), 0), np.float32), torch.from_numpy(labels.test)
    first = labels.validation

    def fitted(present: Array) -> dict[str, Any]:
        outputs = Predictor(found, 0).outputs(rows, none, present)
        return fit("platt", outputs[:first], truth[:first])

    assert found.calibration == fitted(masks[1])
    assert found.calibration != fitted(np.ones_like(masks[1]))  # control


# --- refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regression": ({"target": "regression"}, "has no classes"),
    "no validation rows": ({"validation-fraction": 0.0}, "with validation-fraction = 0 there are"),
    "noise on scalars": ({"strategy": "dpzv", "noise-multiplier": 1.0}, "with privacy = 'scalar'"),
    "another method": ({"calibrate": "beta"}, "calibrate = 'beta'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_cannot_be_calibrated_is_refused_by_its_options(name: str) -> None:
    keys, match = REFUSED[name]
    with pytest.raises(ConfigError, match=match):
        resolve({"calibrate": "platt", **keys})
    resolve({**keys, "calibrate": "none"})  # control


@pytest.mark.parametrize(
    ("ones", "privacy", "match"),
    [
        (0, {}, f"at least {LEAST} validation rows of each class, but one class has 0"),
        (9, {}, "but one class has [0-9]\\."),
        (
            150,
            {"privacy": "labels", "epsilon": 0.3, "noise-seed": 0},
            "worth as many without noise",
        ),
    ],
)
def test_too_few_validation_rows_of_a_class_end_a_run_before_training(
    ones: int, privacy: dict[str, Any], match: str, run: Start, tmp_path: Path
) -> None:
    y = np.zeros(400, int)
    y[: max(ones, 2)] = 1
    if ones == 0:  # none of them may be a validation row
        labels = _labels_of(tmp_path, y)
        y[:] = 0
        y[labels.places[:2]] = 1
    _labels_of(tmp_path, y)
    keys = {"dataset": f"npz:{tmp_path / 'few.npz'}", "epochs": 1, "calibrate": "isotonic"}
    with pytest.raises(ConfigError, match=match):
        run(2, {**keys, **privacy})
    assert run(2, {**keys, **privacy, "calibrate": "none"}).summary["failure"] is None  # control


def _labels_of(folder: Path, y: Array) -> Any:
    x = np.random.default_rng(0).standard_normal((len(y), 4)).astype(np.float32)
    np.savez(folder / "few.npz", X=x, y=y)
    return load_labels(resolve({"dataset": f"npz:{folder / 'few.npz'}"}))
