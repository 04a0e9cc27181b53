"""Drift: the population stability index of columns, embeddings and scores."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from tests.organisations import ID, Organisations, cut, read
from vfl_flower.data import drift as measure
from vfl_flower.data.drift import Watch, drift_of, stability_index
from vfl_flower.data.split import divide
from vfl_flower.label_holder import checkpoint, results
from vfl_flower.label_holder.predictor import Predictor

Array = NDArray[Any]

ROWS = 1500
SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


def people(rows: int, seed: int, shift: float = 0.0, first: int = 0) -> pd.DataFrame:
    """A table with numbers, few numbers, texts and missing values; two columns may shift."""
    generator = np.random.default_rng(seed)
    columns = {f"f{n}": generator.standard_normal(rows) for n in range(6)}
    columns["f1"] = generator.integers(0, 4, rows).astype(float)
    columns["f4"] += shift
    table = pd.DataFrame(columns)
    table.loc[generator.random(rows) < 0.1 + 0.2 * (shift > 0), "f0"] = np.nan
    table["f2"] = generator.choice(["red", "green", "blue"], rows, p=[0.6, 0.3, 0.1])
    label = (table["f3"] + table["f4"] + generator.standard_normal(rows) > shift).astype(int)
    return table.assign(**{ID: np.arange(first, first + rows), "label": label})


WORDS = {"missing": "median", "text": "one-hot"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Party 0 has the columns f0 to f2, with texts and missing values, party 1 the others."""
    organisations = cut(tmp_path_factory.mktemp("drift"), people(ROWS, 0), known=1.0)
    organisations.words = [WORDS, {}]
    with patch.object(results, "draw_curves", lambda histories, path: None):
        organisations.run("run", SHORT)
    return organisations


def new(trained: Organisations, folder: Path, table: pd.DataFrame) -> Organisations:
    """The same organisations with other rows."""
    of_rows = cut(folder, table, known=1.0)
    of_rows.words = trained.words
    return of_rows


def predicted(
    trained: Organisations, folder: Path, table: pd.DataFrame, **keys: Any
) -> dict[str, Any]:
    """The figures of a prediction of these rows."""
    of_rows = new(trained, folder, table)
    given = {"model": str(trained.folder / "run"), "dataset": f"files:{of_rows.labels}"}
    out = folder / "scores.csv"
    from vfl_flower.launch.engines import predict_local

    predict_local({**given, "out": str(out), **keys}, of_rows.node_configs)
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return found


def table_of(trained: Organisations, party: int) -> pd.DataFrame:
    """The table that a party writes for itself."""
    (path,) = (trained.folder / "run").glob(f"*-party-{party}.drift.csv")
    assert path.stat().st_mode & 0o077 == 0
    return pd.read_csv(path, index_col="column")


# --- the index ----------------------------------------------------------------------------------


def by_hand(then: Array, now: Array) -> float:
    """The index of a column, by its text book and nothing of this package."""
    missing = [pd.isna(each) for each in (then, now)]
    if then.dtype.kind == "f":
        known = np.sort(then[~missing[0]])
        values = np.unique(known)
        if len(values) > 10:
            values = np.unique([known[int(np.ceil(k * len(known) / 10)) - 1] for k in range(1, 10)])
            values = np.append(values, np.inf)
        bins = [
            np.where(gap, -1, sum(each > edge for edge in values[:-1]))
            for each, gap in zip((then, now), missing, strict=True)
        ]
    else:
        bins = [np.where(gap, "none", each) for each, gap in zip((then, now), missing, strict=True)]
    index = 0.0
    for value in set(bins[0].tolist()) | set(bins[1].tolist()):
        p, q = (max(float(np.mean(each == value)), 1e-4) for each in bins)
        index += (q - p) * np.log(q / p)
    return index


def test_a_partys_indices_equal_numpy_on_joined_data(
    trained: Organisations, tmp_path: Path
) -> None:
    later = people(700, 1, shift=1.5, first=10_000)
    found = predicted(trained, tmp_path / "new", later)["drift"]
    everyone = people(ROWS, 0).set_index(ID)
    kept = checkpoint.load(trained.folder / "run")
    places, _, _ = divide(kept.config.data, len(kept.rows))
    ids = read(trained.labels)[ID].to_numpy()[kept.rows[places]]
    checked = 0
    for party, names in enumerate((["f0", "f1", "f2"], ["f3", "f4", "f5"])):
        table = table_of(trained, party)
        assert list(table.index) == names
        for name in names:
            then, now = everyone.loc[ids, name].to_numpy(), later[name].to_numpy()
            raw = by_hand(then, now)
            row = table.loc[name]
            assert (row["training_rows"], row["new_rows"]) == (len(then), 700)
            bins = {"f0": 11, "f1": 4, "f2": 3}.get(name, 10)
            chance = (bins - 1) * (1 / len(then) + 1 / len(now))
            assert row["index"] == pytest.approx(max(0.0, raw - chance), abs=1e-9)
            checked += raw > 0.1
        levels = table["level"].value_counts()
        reported = {level: int(levels.get(level, 0)) for level in ("moderate", "large")}
        assert found["columns"][str(party)] == reported
    assert checked >= 2
    assert table_of(trained, 1).loc["f4", "level"] == "large"
    assert table_of(trained, 0).loc["f0", "bin"] == "missing"


def test_indices_of_scores_and_embeddings_equal_numpy(
    trained: Organisations, tmp_path: Path
) -> None:
    later = people(700, 1, shift=1.5, first=10_000)
    found = predicted(trained, tmp_path / "new", later)["drift"]
    kept = checkpoint.load(trained.folder / "run")
    held_out = kept.arrays["test_table.rows"]
    predictor = Predictor(kept, 0)
    with torch.no_grad():
        then = predictor.top(torch.from_numpy(held_out))[:, 0].numpy().astype(float)
    table = read(tmp_path / "new" / "scores.csv")
    chance = table["probability_1"].to_numpy()
    now = np.log(chance) - np.log1p(-chance)
    raw = by_hand(then, now)
    less = 9 * (1 / len(then) + 1 / len(now))
    assert found["rows"] == 700 and raw > 0.3
    assert found["scores"] == pytest.approx(raw - less, abs=2e-6)  # of rounded figures
    assert found["embeddings"]["1"] > 0.25 > found["embeddings"]["0"] >= 0


def test_an_empty_bin_has_the_least_share() -> None:
    then, now = np.array([500, 500, 0]), np.array([250, 250, 500])
    expected = 2 * (0.25 - 0.5) * np.log(0.5) + (0.5 - 1e-4) * np.log(0.5 / 1e-4)
    assert stability_index(then, now) == pytest.approx(expected, abs=1e-12)
    assert drift_of(then, now).level == "large"


@pytest.mark.parametrize(("freedom", "chance"), [(1, 1e-3), (3, 1e-4), (9, 1e-5), (20, 1e-3)])
def test_the_bound_of_chance_is_that_of_scipy(freedom: int, chance: float) -> None:
    exact = chi2.isf(chance, freedom)
    assert exact < measure._chi_square(freedom, chance) * 1.01
    assert measure._chi_square(freedom, chance) < 1.15 * exact


# --- false alarms -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [200, 1000, 5000])
def test_rows_of_the_same_distribution_do_not_warn_and_a_shift_is_found(rows: int) -> None:
    generator = np.random.default_rng(rows)
    held_out = Watch.learn((str(n), generator.standard_normal(500)) for n in range(20))
    false, found, values = 0, 0, []
    for _ in range(100):
        held_out.clear()
        held_out.add((str(n), generator.standard_normal(rows)) for n in range(20))
        drifts = held_out.drifts().values()
        values.append(np.mean([each.value for each in drifts]))
        false += any(each.level for each in drifts)
        held_out.clear()
        held_out.add(("0", generator.standard_normal(rows) + 0.8) for _ in range(1))
        found += bool(held_out.drifts()["0"].level)
    assert false <= 2
    assert found >= 99
    assert np.mean(values) < 0.02  # where the plain index is 0.06 at 200 rows


def test_without_the_correction_200_rows_would_warn() -> None:
    generator = np.random.default_rng(0)
    watch = Watch.learn((str(n), generator.standard_normal(500)) for n in range(20))
    watch.add((str(n), generator.standard_normal(200)) for n in range(20))
    plain = [stability_index(each.then, each.now) for each in watch._columns.values()]
    assert max(plain) > 0.1


def test_a_model_warns_of_drift_and_not_of_new_rows(
    trained: Organisations, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = predicted(trained, tmp_path / "same", people(300, 5, first=10_000))["drift"]
    assert "Drift is" not in caplog.text and "drift moderately" not in caplog.text
    assert max(found["scores"], *found["embeddings"].values()) < 0.1
    assert found["columns"] == {party: {"moderate": 0, "large": 0} for party in "01"}
    with caplog.at_level(logging.INFO):
        predicted(trained, tmp_path / "other", people(300, 6, shift=1.5, first=20_000))
    warned = [each for each in caplog.messages if each.startswith("Drift is large")]
    assert len(warned) == 1 and "the scores (" in warned[0]
    assert "1 column of party 1" in warned[0]
    of_party = [each for each in caplog.messages if each.startswith("Of the 3 columns")]
    assert len(of_party) == 2 and not any("f4" in each for each in caplog.messages)


# --- reports of a party -------------------------------------------------------------------------


def test_a_party_that_refuses_reports_nothing_and_predicts_the_same(
    trained: Organisations, tmp_path: Path
) -> None:
    later = people(300, 6, shift=1.5, first=20_000)
    open_ = predicted(trained, tmp_path / "open", later)
    trained.words = [WORDS, {"refuse": "explain,drift"}]
    try:
        closed = predicted(trained, tmp_path / "closed", later)
    finally:
        trained.words = [WORDS, {}]
    assert open_["drift"]["columns"]["1"] == {"moderate": 0, "large": 1}
    assert closed["drift"]["columns"] == {**open_["drift"]["columns"], "1": None}
    scores = [(tmp_path / each / "scores.csv").read_bytes() for each in ("open", "closed")]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("rule", "reports"), [({"min-rows": 301}, False), ({"min-rows": 300}, True)]
)
def test_a_report_needs_the_partys_least_rows(
    trained: Organisations, tmp_path: Path, rule: dict[str, Any], reports: bool
) -> None:
    trained.words = [WORDS, rule]
    try:
        if not reports:
            rule["min-rows"] = 300  # the alignment itself needs so many
        found = predicted(trained, tmp_path / "new", people(300, 6, first=20_000))["drift"]
    finally:
        trained.words = [WORDS, {}]
    assert found["columns"]["0"] is not None
