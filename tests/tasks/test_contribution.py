"""Shapley values of parties: their sum, and the runs that have them."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tests.conftest import nightly
from tests.organisations import ID, Organisations, cancer, cut
from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import run_local
from vfl_flower.results.report.read import read
from vfl_flower.results.report.segments import worth
from vfl_flower.tasks.inference.contribution import FILE, contribution, outputs_of
from vfl_flower.tasks.inference.rows import labels_of

KEYS: dict[str, Any] = {
    **{"strategy": "vafl", "align": "any", "epochs": 10, "noise-seed": 0},
    **{"party-lr": 0.05, "server-lr": 0.05},
}


def with_noise() -> pd.DataFrame:
    """The columns of two parties that know something, and of one that has noise."""
    table = cancer(columns=20)
    noise = np.random.default_rng(0).standard_normal((len(table), 10))
    for column in range(10):
        table[f"noise{column}"] = noise[:, column]
    return table


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    organisations = cut(tmp_path_factory.mktemp("clinic"), with_noise(), parties=3, known=0.8)
    organisations.run("run", KEYS)
    return organisations


@pytest.mark.nightly
def test_values_average_over_all_orders_and_add_up_to_the_whole_gain(clinic: Organisations) -> None:
    folder = clinic.folder / "run"
    figures = contribution(folder)
    found = checkpoint.load(folder)
    labels = labels_of(found).tested
    outputs = outputs_of(found, labels)

    def auc(parties: set[int]) -> float:
        said = outputs(tuple(party in parties for party in range(3)))
        return float(roc_auc_score(labels.test, said[:, 0]))

    for party, each in enumerate(figures["parties"]):
        gains = [
            auc({*order[: order.index(party)], party}) - auc(set(order[: order.index(party)]))
            for order in permutations(range(3))
        ]
        assert each["party"] == party and each["value"] == pytest.approx(np.mean(gains), abs=1e-9)
    total = sum(each["value"] for each in figures["parties"])
    assert total == pytest.approx(figures["all"] - figures["nobody"], abs=1e-12)
    assert figures["nobody"] == 0.5 and figures["all"] > 0.9
    assert json.loads((folder / FILE).read_text()) == figures


def test_a_party_of_noise_is_told_from_others(clinic: Organisations) -> None:
    first, second, noise = contribution(clinic.folder / "run")["parties"]
    assert min(each["value"] - each["margin"] for each in (first, second)) > 0.05
    assert abs(noise["value"]) < noise["margin"]
    section = worth(read([clinic.folder / "run"]))
    assert section
    _, first, *_, third, _, _ = section.in_terminal().splitlines()
    assert "not above zero" not in first and third.split()[1] == "2" and "not above zero" in third


def test_parties_have_values_before_they_train(clinic: Organisations) -> None:
    clinic.run("before", {**KEYS, "strategy": "frozen", "subsets": "sampled"})
    assert json.loads((clinic.folder / "before" / "summary.json").read_text())["exchanges"] == 3
    first, _, noise = contribution(clinic.folder / "before")["parties"]
    assert first["value"] - first["margin"] > 0.2 > noise["value"] + noise["margin"]


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["auc", nightly("accuracy"), nightly("log-loss")])
def test_random_orders_come_close_and_say_how_close(clinic: Organisations, metric: str) -> None:
    exact = contribution(clinic.folder / "run", metric)
    drawn = contribution(clinic.folder / "run", metric, exact=1)
    assert exact["orders"] is None and drawn["orders"] == 200
    for one, other in zip(exact["parties"], drawn["parties"], strict=True):
        assert other["value"] == pytest.approx(one["value"], abs=0.02)
        assert other["margin"] >= 0.5 * one["margin"]
    total = sum(each["value"] for each in drawn["parties"])
    assert total == pytest.approx(drawn["all"] - drawn["nobody"], abs=1e-9)


@pytest.mark.nightly
def test_numbers_are_judged_by_r2(tmp_path: Path) -> None:
    table = cancer(columns=6).assign(label=lambda each: 3 * each["f0"] + each["f5"])
    organisations = cut(tmp_path, table, parties=2, known=0.9)
    organisations.run("run", {**KEYS, "target": "regression", "party-lr": 0.02, "server-lr": 0.02})
    figures = contribution(tmp_path / "run")
    assert figures["metric"] == "r2" and figures["all"] > 0.5 > figures["nobody"]
    with pytest.raises(ConfigError, match="Choose r2"):
        contribution(tmp_path / "run", "auc")


@pytest.mark.nightly
def test_what_cannot_be_told_is_said(clinic: Organisations, tmp_path: Path) -> None:
    whole = {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "whole")}
    run_local(2, whole)
    with pytest.raises(ConfigError, match="needs all its parties"):
        contribution(tmp_path / "whole")
    any_subset = {**whole, "subsets": "sampled", "out": str(tmp_path / "any")}
    run_local(2, any_subset)
    assert len(contribution(tmp_path / "any")["parties"]) == 2
    before = clinic.labels.read_text()
    try:
        frame = pd.read_csv(clinic.labels)
        frame[ID] = frame[ID].to_numpy()[::-1]
        frame.to_csv(clinic.labels, index=False)
        with pytest.raises(
            ConfigError,
            match=r"has changed since the model was trained: it has other rows, classes or values",
        ):
            contribution(clinic.folder / "run")
    finally:
        clinic.labels.write_text(before)
