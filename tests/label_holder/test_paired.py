"""Paired tests of models on the same people: DeLong, McNemar, and what the federation adds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from tests.conftest import nightly, of_words
from tests.organisations import ID, Organisations, cancer, change, cut
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.split import divide
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.results.report import report
from vfl_flower.tasks.inference.paired import FILE, _tested, difference, paired
from vfl_flower.tools.cli import main

Array = NDArray[Any]
KEYS: dict[str, Any] = {"epochs": 1, "batch-size": 64, "bottom-hidden": 8, "top-hidden": 8}
KEYS["columns"] = "f0,f1,f2"


def scored(chance: Array, labels: Array) -> Scored:
    return Scored(np.stack([1 - chance, chance], 1), labels, (0, 1))


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["other"]: each for each in json.loads((folder / FILE).read_text())["tests"]}


# --- the tests themselves -----------------------------------------------------------------------


def delong(one: Array, other: Array, labels: Array) -> tuple[float, float]:
    """The difference and its variance, by the kernel of each pair of rows, as in the paper."""
    parts = []
    for scores in (one, other):
        apart = scores[labels == 1][:, None] - scores[labels == 0][None]
        kernel = (apart > 0) + 0.5 * (apart == 0)
        parts.append((kernel.mean(), kernel.mean(1), kernel.mean(0)))
    variance = 0.0
    for at in (1, 2):  # S10 and S01: covariances over the rows of a class
        s = np.cov(parts[0][at], parts[1][at])
        variance += (s[0, 0] + s[1, 1] - 2 * s[0, 1]) / len(parts[0][at])
    return float(parts[0][0] - parts[1][0]), variance


@pytest.mark.parametrize("digits", [1, 6])  # the first has many equal scores
def test_a_difference_of_aucs_is_delong_s(digits: int) -> None:
    generator = np.random.default_rng(digits)
    y = (generator.random(90) < 0.3).astype(np.int64)
    one = (0.3 + 0.3 * y + 0.2 * generator.standard_normal(90)).clip(0, 1).round(digits)
    other = (0.5 * one + 0.2 * generator.random(90)).round(digits)
    found, (value, variance) = difference(scored(one, y), scored(other, y)), delong(one, other, y)
    assert found["value"] == pytest.approx(value, abs=1e-12)
    assert value == pytest.approx(roc_auc_score(y, one) - roc_auc_score(y, other), abs=1e-12)
    assert found["high"] - value == pytest.approx(1.96 * math.sqrt(variance), rel=1e-9)
    assert found["p"] == pytest.approx(2 * norm.sf(abs(value) / math.sqrt(variance)), rel=1e-9)
    back = difference(scored(other, y), scored(one, y))
    assert back["value"] == -found["value"] and back["p"] == found["p"]
    same = difference(scored(one, y), scored(one, y))
    assert same["value"] == 0 and same["p"] == same["p_of_decisions"] == 1


def test_few_people_are_never_sure_and_decisions_are_tested_by_mcnemar_s_exact_test() -> None:
    for rows in (6, 20):  # without any error of one model, DeLong's variance is 0
        labels = np.arange(rows) % 2
        one, other = scored(labels * 0.5 + 0.2, labels), scored(np.full(rows, 0.5), labels)
        found = difference(one, other)
        assert found["value"] == 0.5
        assert found["p"] == pytest.approx(2.0 ** (1 - rows))
        assert 0 < found["low"] < 0.5 < found["high"]
        equal = difference(one, one)
        assert (equal["low"], equal["high"], equal["p"]) == (0, 0, 1)
    # About each of 12 people, one model alone is right: the first model about 10 of them. The
    # p-value is the chance of at least 10, or at most 2.
    y = np.r_[np.ones(50, np.int64), np.zeros(50, np.int64)]
    right = 0.3 + 0.4 * y
    first, second = right.copy(), right.copy()
    first[[0, 60]] = 1 - first[[0, 60]]
    second[10:20] = 1 - second[10:20]
    found = difference(scored(first, y), scored(second, y))
    assert (found["only_one"], found["only_other"]) == (10, 2)
    due = 2 * sum(math.comb(12, k) for k in range(3)) / 2**12
    assert found["p_of_decisions"] == pytest.approx(due, rel=1e-12)


def test_numbers_and_several_classes_have_the_interval_of_a_bootstrap() -> None:
    generator = np.random.default_rng(1)
    y = generator.standard_normal(400)
    one, other = (y + s * generator.standard_normal(400) for s in (0.5, 0.7))
    k = generator.integers(0, 3, 400)
    right, wrong = np.eye(3)[k], np.eye(3)[(k + 1) % 3]
    by_class = [np.where(generator.random((400, 1)) < s, right, wrong) for s in (0.8, 0.7)]

    def r2(said: Array, rows: Array) -> float:
        return 1 - float(np.square(said - y)[rows].mean() / y[rows].var())

    def accuracy(said: Array, rows: Array) -> float:
        return float((said.argmax(1) == k)[rows].mean())

    every = np.arange(400)
    cases = ((r2, (one, other), y, ()), (accuracy, by_class, k, (0, 1, 2)))
    for figure, said, labels, classes in cases:
        found = difference(*(Scored(each, labels, classes) for each in said))
        due = figure(said[0], every) - figure(said[1], every)
        assert found["value"] == pytest.approx(due, abs=1e-12)
        draws = [generator.integers(0, 400, 400) for _ in range(1500)]
        spread = np.std([figure(said[0], rows) - figure(said[1], rows) for rows in draws])
        assert found["high"] - found["value"] == pytest.approx(1.96 * spread, rel=0.1)
        assert ("p_of_decisions" in found) == bool(classes) and found["p"] < 0.05


# --- runs ---------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "split-nn": {},
    "calibrated": {"calibrate": "platt", "threshold": "f1"},
    "masks": {"aggregation": "secure", "combine": "mean"},
    "partial rows": {"align": "any", "strategy": "vafl"},
    "surrogates": {"strategy": "ef-vfl"},
    "frozen": {"strategy": "frozen"},
    "centralised": {"strategy": "centralised"},
    "noise": {"privacy": "perturbed-embedding"},
    "noise on labels": {"privacy": "labels", "epsilon": 2.0},
}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    found = cut(tmp_path_factory.mktemp("bank"), cancer(), own=3, suffixes=(".csv", ".csv"))
    found.run("a", KEYS)
    return found


@pytest.mark.parametrize(
    "name", [each if each in ("calibrated", "masks") else nightly(each) for each in CASES]
)
def test_the_folder_alone_gives_the_figures_of_the_run(name: str, bank: Organisations) -> None:
    run = bank.run(name, {**KEYS, **CASES[name]})
    *_, rows = _tested(run.folder)
    of = run.summary["assessment"]
    assert rows.figures()["auc"]["value"] == pytest.approx(of["figures"]["auc"]["value"], abs=1e-9)
    (right, _), (_, also) = of["confusion"]["counts"]
    assert int(((rows.said[:, 1] > rows.threshold) == rows.labels).sum()) == right + also
    paired([run.folder])
    tests = kept(run.folder)
    assert all(each["pairs"] == len(rows) for each in tests.values())
    assert ("logistic regression alone" in tests) == (name != "noise on labels")


def test_own_models_learn_from_the_training_rows_of_the_run(bank: Organisations) -> None:
    paired([bank.folder / "a"])
    found = checkpoint.load(bank.folder / "a")
    table = pd.read_csv(bank.labels)
    train, held_out, first = divide(found.config.data, len(found.rows))
    people = table.iloc[found.rows]
    x, y = people[["f0", "f1", "f2"]].to_numpy(), people["label"].to_numpy()
    x = (x - x[train].mean(0)) / x[train].std(0)
    model = LogisticRegression(max_iter=1000).fit(x[train], y[train])
    test = held_out[first:]
    auc = roc_auc_score(y[test], model.predict_proba(x[test])[:, 1])
    of = json.loads((bank.folder / "a" / "summary.json").read_text())["assessment"]["figures"]
    due = of["auc"]["value"] - auc
    tests = kept(bank.folder / "a")
    assert list(tests) == ["logistic regression alone", "gradient boosting alone"]
    assert tests["logistic regression alone"]["value"] == pytest.approx(due, abs=1e-6)
    assert tests["logistic regression alone"]["pairs"] == len(test)


def test_runs_are_compared_on_the_people_whom_both_held_out(bank: Organisations) -> None:
    held_out = {}
    fewer = bank.folder / "fewer.csv"
    pd.read_csv(bank.labels)[:400].to_csv(fewer, index=False)
    bank.run("fewer", {**KEYS, "dataset": f"files:{fewer}"})
    for name, file in (("a", bank.labels), ("fewer", fewer)):
        found = checkpoint.load(bank.folder / name)
        _, test, first = divide(found.config.data, len(found.rows))
        held_out[name] = set(pd.read_csv(file)[ID].to_numpy()[found.rows[test[first:]]])
    paired([bank.folder / "a", bank.folder / "fewer"])
    both = held_out["a"] & held_out["fewer"]
    assert kept(bank.folder / "a")["fewer"]["pairs"] == len(both) < len(held_out["fewer"])
    others = pd.read_csv(bank.labels)
    others.assign(**{ID: others[ID] + 10**7}).to_csv(fewer, index=False)  # the file has changed
    with pytest.raises(ConfigError, match="has changed since the model was trained"):
        paired([bank.folder / "a", bank.folder / "fewer"])


def test_runs_on_other_people_or_labels_are_refused(bank: Organisations, tmp_path: Path) -> None:
    other = cut(tmp_path, cancer(rows=200), own=3)
    for each in (other.labels, *other.files):
        change(each, lambda table: table.assign(**{ID: table[ID] + 10**7}))
    other.run("b", KEYS)
    flipped = tmp_path / "flipped.csv"
    table = pd.read_csv(bank.labels)
    table.assign(label=1 - table["label"]).to_csv(flipped, index=False)
    bank.run("flipped", {**KEYS, "dataset": f"files:{flipped}"})
    for folder in (tmp_path / "b", bank.folder / "flipped"):
        with pytest.raises(ConfigError, match="have no test rows in common, or other labels"):
            paired([bank.folder / "a", folder])
    with pytest.raises(ConfigError, match="has no test rows"):
        bank.run("none", {**KEYS, "test-fraction": 0.0})
        paired([bank.folder / "none"])


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["classes", "regression"])
def test_several_classes_and_numbers_have_models_beside_them(target: str, tmp_path: Path) -> None:
    table = cancer(9)
    number = 3 * table["f0"] + table["f5"]
    label = number if target == "regression" else pd.cut(number, 3, labels=False)
    parties = cut(tmp_path, table.assign(label=label), own=3)
    run = parties.run("a", {**KEYS, **({"target": target} if target == "regression" else {})})
    paired([run.folder])
    tests = kept(run.folder)
    assert {each["metric"] for each in tests.values()} == {"r2" if target[0] == "r" else "accuracy"}
    assert ("linear regression alone" in tests) == (target == "regression")


@of_words
def test_the_command_compares_finished_runs_and_the_page_shows_the_tests(
    bank: Organisations, capsys: pytest.CaptureFixture[str]
) -> None:
    bank.run("b", {**KEYS, "strategy": "vafl"})
    a, b = (str(bank.folder / each) for each in "ab")
    assert main(["compare", b, a]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("b above a "))
    test = kept(bank.folder / "b")["a"]
    assert f"{test['value']:.4f}" in row and f"{test['low']:.4f} to {test['high']:.4f}" in row
    assert f"{test['only_one']} : {test['only_other']}" in row
    assert "b above gradient boosting alone" in said
    page = report([bank.folder / "b"])
    assert "b above gradient boosting alone" in page and "is the federation" in page
    assert main(["compare", b, a, "-c", "epochs=3"]) == 1
    assert "Finished runs keep their options" in capsys.readouterr().err
