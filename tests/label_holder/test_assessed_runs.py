"""Runs, predictions and Python assess a model; the threshold stays with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics
from sklearn.datasets import load_breast_cancer, load_diabetes

import vfl_flower
from tests.conftest import trained
from tests.organisations import ID, Organisations, cancer, cut, read, write
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.assessment import threshold, two_classes
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.predictions import in_words

pytestmark = pytest.mark.usefixtures("elsewhere")

CANCER: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 1, "party-lr": 0.02}
SHORT = {"epochs": 1, "party-lr": 0.02, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
NAMES = {"auc", "gini", "ks", "average_precision", "brier", "ece", "accuracy", "precision"}
NAMES |= {"recall", "f1", "flagged"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Organisations whose label holder has a column of regions, and no feature."""
    table = cancer(columns=8, rows=400)
    found = cut(tmp_path_factory.mktemp("segments"), table, known=1)
    regions = np.array(["north", "south", "east"])[np.arange(400) % 3]
    regions[:4] = "far"
    write(read(found.labels).assign(region=regions), found.labels)
    return found


@pytest.fixture(scope="module")
def by_region(organisations: Organisations) -> dict[str, Any]:
    """The assessment of a run with segments."""
    keys = {"segments": "region", "min-segment": 10, "threshold": "f1"}
    return organisations.run("run", {**SHORT, **keys}).summary["assessment"]


def values(assessment: dict[str, Any]) -> dict[str, float]:
    return {name: each["value"] for name, each in assessment["figures"].items()}


# --- one assessment everywhere ------------------------------------------------------------------


def test_a_run_predict_and_python_give_the_figures_of_joined_data(tmp_path: Path) -> None:
    run = run_local(3, {**CANCER, "threshold": "cost:4", "out": str(tmp_path / "run")})
    assessment = run.summary["assessment"]
    path = predict_local({"model": str(run.folder), "out": str(tmp_path / "said.parquet")})
    said, table = json.loads(path.with_suffix(".json").read_text()), read(path)
    true, chance = load_labels(resolve(CANCER)).tested.test == 1, table["probability_1"]
    at = assessment["threshold"]["value"]
    assert assessment["threshold"]["rule"] == "cost:4" and 0 < at != 0.5
    assert table["prediction"].tolist() == (chance > at).astype(int).tolist()
    assert values(assessment)["auc"] == pytest.approx(metrics.roc_auc_score(true, chance), abs=1e-9)
    due = metrics.brier_score_loss(true, chance)
    assert values(assessment)["brier"] == pytest.approx(due, abs=1e-9)
    matrix = metrics.confusion_matrix(true, chance > at).tolist()
    assert assessment["confusion"] == {"classes": ["0", "1"], "counts": matrix}
    assert values(assessment).keys() == NAMES and assessment["rows"] == len(table) == 114
    assert assessment["positives"] == true.sum() and assessment["segments"] == {}
    # `vfl predict` and Python have the same, also by flat names.
    assert values(said["assessment"]) == pytest.approx(values(assessment), abs=1e-9)
    flat = {name: said[name] for name in NAMES}
    assert flat == pytest.approx(values(assessment), abs=1e-6)
    model = vfl_flower.load(run.folder)
    assert model.assess() == said["assessment"]
    assert model.evaluate().keys() == {*NAMES, "loss"}
    assert (model.predict() == table["prediction"]).all()


def test_the_threshold_is_that_of_validation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, ...]] = []
    chosen = threshold.chosen

    def heard(*given: Any) -> float:
        found.append(given)
        return chosen(*given)

    monkeypatch.setattr(threshold, "chosen", heard)
    labels = load_labels(resolve(CANCER))
    run_local(2, {**CANCER, "threshold": "f1"})
    (_, chance, positive, kept), *_ = found
    assert positive.tolist() == (labels.test[: labels.validation] == 1).tolist() and kept == 1
    assert len(chance) == labels.validation > 0
    # With noise on labels, their randomised labels choose, and no true one.
    keys = {"privacy": "labels", "epsilon": 1.0, "noise-seed": 2}
    strategy, _ = trained(2, {**CANCER, "threshold": "f1", **keys})
    (_, _, noisy, kept), *_ = found[1:]
    held_out = strategy.run.holder.held_out
    assert noisy.tolist() == (held_out.labels[: labels.validation] == 1).tolist()
    assert 0.6 < (noisy == positive).mean() < 0.85 and kept == kept_share(1.0, 2)
    assessment = strategy.figures()["assessment"]
    assert assessment["positives"] == (labels.tested.test == 1).sum()


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["local-only", "frozen", "centralised", "several classes"])
def test_baselines_and_several_classes_are_assessed(strategy: str) -> None:
    several = strategy == "several classes"
    keys = {"dataset": "digits", "epochs": 1} if several else {**CANCER, "strategy": strategy}
    summary = run_local(2, keys).summary
    found = summary["assessment"]
    assert values(found)["accuracy"] == pytest.approx(summary["test_accuracy"])
    assert np.array(found["confusion"]["counts"]).sum() == found["rows"]
    assert ("threshold" in found) is not several
    if several:
        assert list(found["curves"]) == ["calibration"]
    else:
        assert values(found)["auc"] == pytest.approx(summary["test_auc"], abs=1e-6)


def test_numbers_are_assessed() -> None:
    x, y = load_diabetes(return_X_y=True)
    model = vfl_flower.train([x[:, :5], x[:, 5:]], y, target="regression", epochs=1)
    found = model.summary["assessment"]
    assert values(found)["rmse"] == pytest.approx(model.summary["test_rmse"], rel=1e-5)
    assert values(found)["r2"] == pytest.approx(model.summary["test_r2"], abs=1e-5)
    said = model.predict([x[:, :5], x[:, 5:]])
    due = {"mae": metrics.mean_absolute_error(y, said), "bias": (said - y).mean()}
    again = values(model.assess([x[:, :5], x[:, 5:]], y))
    assert {name: again[name] for name in due} == pytest.approx(due, rel=1e-4)


def test_without_rows_to_test_there_is_no_assessment() -> None:
    model = vfl_flower.train({**CANCER, "test-fraction": 0.0, "threshold": "f1"})
    assert model.summary["assessment"] is None
    assert checkpoint.load(model.folder).threshold != 0.5  # validation rows have chosen it


def test_a_checkpoint_without_a_threshold_predicts_by_half() -> None:
    model = vfl_flower.train({**CANCER, "threshold": 0.8})
    found = checkpoint.load(model.folder)
    assert found.threshold == 0.8
    holder = {name: each for name, each in found.strategy["holder"].items() if name != "threshold"}
    then = replace(found, strategy={**found.strategy, "holder": holder})
    assert then.threshold == 0.8
    by_rule = then.config.with_values({"threshold": "f1"})
    assert replace(then, config=by_rule).threshold == 0.5  # the run was interrupted


# --- segments -----------------------------------------------------------------------------------


def test_segments_come_from_the_label_holders_file(
    organisations: Organisations, by_region: dict[str, Any]
) -> None:
    found = by_region["segments"]["region"]
    assert sum(found["rows"].values()) == by_region["rows"] == 80
    assert set(found["figures"]) == {"north", "south", "east"}
    assert found["figures"]["north"].keys() >= {"auc", "ks", "recall"}
    assert "differences" in found
    for name in found["rows"].keys() - found["figures"]:
        assert name == "far" and "fewer than min-segment = 10" in found["left_out"][name]
    # The column is no feature: the label holder has none.
    about = checkpoint.load(organisations.folder / "run").about_labels
    assert about["preparation"] is None


@pytest.mark.nightly
def test_new_rows_have_segments_if_their_file_has_the_column(
    organisations: Organisations, by_region: dict[str, Any]
) -> None:
    out = organisations.folder / "new.parquet"
    table = organisations.predict("run", out=str(out)).set_index(ID)
    found = json.loads(out.with_suffix(".json").read_text())["assessment"]
    labels = read(organisations.labels).set_index(ID).loc[table.index]
    north = labels["region"].to_numpy() == "north"
    chance, true = (each.to_numpy()[north] for each in (table["probability_1"], labels["label"]))
    due = two_classes.figures(chance, true == 1, by_region["threshold"]["value"])
    north_figures = found["segments"]["region"]["figures"]["north"]
    assert {name: pytest.approx(each) for name, each in due.items()} == north_figures
    assert found["segments"]["region"]["left_out"].keys() == {"far"}
    # Another file may lack the column; but not one that the user names.
    without = organisations.folder / "without.csv"
    write(read(organisations.labels).drop(columns="region"), without)
    out = organisations.folder / "without.parquet"
    organisations.predict("run", without, out=str(out))
    assert json.loads(out.with_suffix(".json").read_text())["assessment"]["segments"] == {}
    with pytest.raises(ConfigError, match=r"no column 'region', which `segments` names"):
        out = organisations.folder / "refused.parquet"
        organisations.predict("run", without, out=str(out), segments="region")


def test_too_many_segments_are_refused_before_parties_are_asked(
    organisations: Organisations, by_region: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, many = read(organisations.labels), organisations.folder / "many.csv"
    names = [f"region {number}" for number in range(len(table))]
    write(table.assign(region=names), many)
    monkeypatch.setattr(TrainedModel, "ask", lambda *given: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="'region' has more than 100 values"):
        organisations.predict("run", many, out=str(organisations.folder / "many.parquet"))


def test_python_takes_segments_from_a_frame_of_labels() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    own = pd.DataFrame({"label": y, "age": np.arange(len(y)) % 60})
    parts = [x[:, :5], x[:, 5:10]]
    model = vfl_flower.train(parts, own, segments="age", expert={"min-segment": 5}, epochs=1)
    found = model.summary["assessment"]["segments"]["age"]
    assert next(iter(found["rows"])).startswith("<= ") and len(found["rows"]) == 5
    assert model.assess(parts, own)["segments"]["age"]["rows"].keys() != {}
    assert model.assess(parts, y)["segments"] == {}
    with pytest.raises(
        ConfigError, match="labels has no column 'age', which `segments` names: it has"
    ):
        vfl_flower.train(parts, y, segments="age", epochs=1)
    with pytest.raises(ConfigError, match="names the label column 'label'"):
        vfl_flower.train(parts, own, segments="label", epochs=1)
    names = own.assign(name=[f"n{at}" for at in range(len(y))])
    with pytest.raises(ConfigError, match="Column 'name' has more than 100 values"):
        vfl_flower.train(parts, names, segments="name", epochs=1)


# --- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "numbers": (
        {"target": "regression", "threshold": 0.3},
        "threshold = '0.3' is for two classes, and target = 'regression' has none",
    ),
    "no validation rows": (
        {"threshold": "f1", "validation-fraction": 0.0},
        "threshold = 'f1' is chosen on validation rows, and there are none",
    ),
    "validation rows that epsilon does not cover": (
        {"strategy": "dpzv", "epsilon": 1.0, "threshold": "rate:0.1"},
        "threshold = 'rate:0.1' is chosen on validation rows, and there are none",
    ),
    "segments of a divided data set": (
        {"segments": "region"},
        "segments = 'region' names columns of the label holder's file, and dataset = 'digits' is",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_options_are_refused_in_a_sentence(name: str) -> None:
    keys, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        resolve(keys)
    assert str(error.value).startswith(said) and str(error.value).endswith(".")


def test_a_threshold_that_does_not_fit_the_labels_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="is for two classes, and the labels have 10"):
        run_local(2, {"dataset": "digits", "threshold": "f1"})
    x, y = load_breast_cancer(return_X_y=True)
    with pytest.raises(ConfigError, match="is chosen on validation rows, and there are none"):
        vfl_flower.train([x[:150, :5], x[:150, 5:]], y[:150], threshold="f1")


def test_labels_of_one_class_are_not_assessed_and_missing_labels_get_a_sentence(
    organisations: Organisations, by_region: dict[str, Any]
) -> None:
    missing, out = (organisations.folder / name for name in ("missing.csv", "missing.parquet"))
    write(read(organisations.labels).assign(label=np.nan), missing)
    organisations.predict("run", missing, out=str(out))
    said = json.loads(out.with_suffix(".json").read_text())
    assert "assessment" not in said and "accuracy" not in said
    x, y = load_breast_cancer(return_X_y=True)
    model = vfl_flower.train([x[:, :5], x[:, 5:]], y, epochs=1)
    parts = [x[y == 1][:, :5], x[y == 1][:, 5:]]
    assert model.evaluate(parts, y[y == 1]).keys() == {"accuracy", "loss"}
    with pytest.raises(ConfigError, match="The rows with labels have one class only"):
        model.assess(parts, y[y == 1])
    with pytest.raises(ConfigError, match="Labels are missing"):
        model.assess(parts)


def test_predict_says_gini_and_ks_of_two_classes() -> None:
    found = {"gini": 0.5, "ks": 0.25, "auc": 0.75, "loss": 0.1, "accuracy": 0.9, "brier": 0.2}
    assert in_words(found) == ": accuracy 0.9000, AUC 0.7500, Gini 0.5000, KS 0.2500, loss 0.1000"
