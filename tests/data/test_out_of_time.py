"""Out of time: the newest periods are held out, and figures, lineage and outcomes are by period."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import brier_score_loss, roc_auc_score

from tests.organisations import (
    ID,
    Organisations,
    Recorder,
    cancer,
    cut,
    forget_alignments,
    read,
    write,
)
from vfl_flower import train
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.frames import periods_of
from vfl_flower.data.labels import Labels
from vfl_flower.data.split import divide, newest
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.results import TESTED
from vfl_flower.launch.engines import run_local
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.model_card import FILES
from vfl_flower.results.report.features import drifts
from vfl_flower.results.report.segments import rates
from vfl_flower.tasks.inference.evaluation import evaluate
from vfl_flower.tools.cli import main

pytestmark = [pytest.mark.usefixtures("elsewhere"), pytest.mark.xdist_group("out_of_time")]

SHORT = {"epochs": 1, "party-lr": 0.02, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
TIMED: dict[str, Any] = {"epochs": 1, "time": "month", "split": "time"}
BY_TIME = {**SHORT, "time": "month", "split": "time", "min-segment": 20}


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Organisations whose label holder has days of twelve months; labels left out differ."""
    table = cancer(columns=8)
    found = cut(tmp_path_factory.mktemp("months"), table)
    days = np.random.default_rng(5).integers(1, 361, len(table))
    months = [f"2025-{1 + day // 30:02d}-{1 + day % 28:02d}" for day in np.minimum(days, 359)]
    write(read(found.labels).assign(month=months), found.labels)
    return found


@pytest.fixture(scope="module")
def folder(organisations: Organisations) -> Path:
    """The results of a run by time, with predictions of all people."""
    forget_alignments()
    out: Path = organisations.run("run", BY_TIME).folder
    organisations.predict("run")
    return out


def months_of(organisations: Organisations, run: str) -> tuple[Any, Any]:
    """Return the months of the rows that trained or chose the model, and of the test rows."""
    found = checkpoint.load(organisations.folder / run)
    train, test, validation = divide(found.config.data, len(found.rows))
    months = read(organisations.labels)["month"].str[:7].to_numpy()[found.rows]
    return months[np.append(train, test[:validation])], months[test[validation:]]


def index_of(then: Any, now: Any) -> float:
    """Return the population stability index of deciles."""
    edges = np.unique(np.quantile(then, np.arange(1, 10) / 10, method="inverted_cdf"))
    counts = (np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) for x in (then, now))
    p, q = (np.maximum(each / each.sum(), 1e-4) for each in counts)
    return float(((q - p) * np.log(q / p)).sum())


# --- periods and the split ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "due"),
    [
        (["2025-01-31", "2024-12-01", "31.1.2025"], ["2025-01", "2024-12", "2025-01"]),
        (["2025-02", "2025-01"], ["2025-02", "2025-01"]),
        (["1969-12-31T23:00:00", "1970-01-01"], ["1969-12", "1970-01"]),
        (pd.to_datetime(["2025-01-31", "2025-02-01"]), ["2025-01", "2025-02"]),
        ([2, 10, 0], ["02", "10", "00"]),
        ([202412.0, 202501.0], ["202412", "202501"]),
        (["2025-13-01"], None),
        (["2025-13"], None),
        (["01/02/2025"], None),
        (["2025-01-01", "soon"], None),
        (["2025-01-01", None], None),
        ([1.5, 2.0], None),
        ([1.0, np.nan], None),
        ([1.0, np.inf], None),
        ([-1, 2], None),
        ([True, False], None),
    ],
)
def test_periods_are_months_or_whole_numbers_in_order(values: Any, due: list[str] | None) -> None:
    found = periods_of(pd.Series(values))
    assert (None if found is None else found.tolist()) == due


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.95])
@pytest.mark.parametrize("periods", [2, 3, 12])
def test_whole_newest_periods_are_held_out(fraction: float, periods: int) -> None:
    data = DataConfig(time="month", split="time", test_fraction=fraction)
    for rows in (40, 301):
        month = np.random.default_rng(rows).integers(0, periods, rows)
        month[:periods] = np.arange(periods)
        at, held_out = newest(data, month)
        assert sorted(at) == list(range(rows))
        train, test, validation = divide(data, rows, held_out)
        older = np.append(train, test[:validation])
        assert month[at][older].max() < month[at][test[validation:]].min()
        sizes = sorted(int((month >= first).sum()) for first in range(1, periods))
        due = min(sizes, key=lambda each: abs(each - fraction * rows))
        assert held_out == len(test) - validation == due
        assert newest(data, month[at])[0].tolist() == list(range(rows))  # they stay
        # Control: the same places without the exchange mix the periods.
        assert month[older].max() >= month[test[validation:]].min()


def test_one_period_is_refused() -> None:
    with pytest.raises(ConfigError, match="has one period"):
        newest(DataConfig(time="month"), np.ones(9))


def test_the_share_of_test_rows_holds_out_exactly_these() -> None:
    for rows in range(2, 130):
        for tested in range(1, rows):
            labels = Labels(np.zeros(rows - tested), np.zeros(tested), (), "")
            assert math.ceil(labels.share_tested * rows) == tested


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"split": "time"}, "Set time"),
        ({"split": "time", "time": "month", "test-fraction": 0.0}, "test-fraction above 0"),
        ({"split": "time", "time": "month", "align": "ids"}, "align = 'psi' or 'any'"),
        ({"time": "month", "dataset": "digits"}, "Leave time out"),
    ],
)
def test_options_of_time_that_contradict_are_refused(keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"dataset": "files:a.csv", **keys})


@pytest.mark.parametrize("bad", ["soon", "2025-02-30", ""])
def test_a_column_of_time_is_refused_before_parties_are_asked(
    organisations: Organisations, tmp_path: Path, bad: str
) -> None:
    table = read(organisations.labels)
    table.loc[3, "month"] = bad
    write(table, tmp_path / "bad.csv")
    with pytest.raises(ConfigError, match="other values than dates") as error:
        organisations.run("bad", {**BY_TIME, "dataset": f"files:{tmp_path / 'bad.csv'}"})
    assert "month" not in (error.value.outside or "")


# --- runs ---------------------------------------------------------------------------------------


def test_no_newer_period_trains_or_chooses_a_model(
    organisations: Organisations, folder: Path
) -> None:
    older, tested = months_of(organisations, "run")
    assert older.max() < tested.min() and tested.max() == "2025-12"
    assert len(np.unique(older)) == 12 - len(np.unique(tested))
    # The alignment is used again, and a random split has its own.
    organisations.run("again", BY_TIME)
    organisations.run("random", {**BY_TIME, "split": "random"})
    assert months_of(organisations, "again")[0].max() == older.max()
    mixed, test = months_of(organisations, "random")
    assert mixed.max() == test.max() == "2025-12"
    share = json.loads((folder / "summary.json").read_text())["config"]["test-fraction"]
    assert share == pytest.approx(len(tested) / (len(tested) + len(older)))


@pytest.mark.parametrize(
    "keys",
    [
        {"align": "any", "strategy": "vafl"},
        {"privacy": "labels", "epsilon": 4.0},
    ],
)
def test_time_meets_partial_rows_noise_and_other_systems(
    organisations: Organisations, keys: dict[str, Any]
) -> None:
    out = "-".join(map(str, keys))
    summary = organisations.run(out, {**BY_TIME, **keys}).summary
    older, tested = months_of(organisations, out)
    assert older.max() < tested.min()
    covered = summary["coverage"]
    hides = "privacy" in keys  # a digest of the file, or a rate, would tell labels
    assert ("sha256" in covered["file"]) is not hides and ("labels" in covered) is not hides


@pytest.mark.nightly
def test_a_rerun_by_time_is_equal(organisations: Organisations, folder: Path) -> None:
    again = {"rerun": str(folder), "out": str(organisations.folder / "rerun")}
    run = run_local(2, again, node_configs=organisations.node_configs)
    assert run.summary["rerun"]["differs"] == []


def test_figures_by_period_and_their_drift_follow_from_the_results_folder(
    organisations: Organisations, folder: Path
) -> None:
    table, summary = read(folder / TESTED), json.loads((folder / "summary.json").read_text())
    found = summary["assessment"]
    auc = roc_auc_score(table["label"], table["probability_1"])
    assert found["figures"]["auc"]["value"] == pytest.approx(auc, abs=1e-9)
    by_month = found["segments"]["month"]
    assert by_month["rows"] == table["month"].value_counts().sort_index().to_dict()
    assert by_month["figures"] and "differences" not in by_month
    for name, figures in by_month["figures"].items():
        part = table[table["month"] == name]
        auc = roc_auc_score(part["label"], part["probability_1"])
        assert figures["auc"]["value"] == pytest.approx(auc, abs=1e-9)
    labels = read(organisations.labels).set_index(ID).loc[table["id"], "label"]
    assert labels.tolist() == table["label"].tolist()
    assert (folder / TESTED).stat().st_mode & 0o777 == 0o600
    card = (folder / FILES[0]).read_text()
    assert "By month" in card and "the newest, by column month" in card


def test_frames_in_python_are_held_out_by_time(organisations: Organisations) -> None:
    labels, parties = read(organisations.labels), list(map(read, organisations.files))
    model = train(parties, labels, id=ID, expert={"min-segment": 20}, **TIMED)
    tested = read(model.folder / TESTED)["month"]
    assert tested.max() == "2025-12" and len(tested) == model.summary["data"]["rows"]["test"]
    share = model.summary["config"]["test-fraction"]
    others = model.summary["data"]["rows"]
    assert len(tested) == math.ceil(share * sum(others.values())) and tested.nunique() < 6


def test_a_table_of_drift_says_where_chance_explains_an_index() -> None:
    words = {(0.2, 0.15): "moderate, or chance", (0.3, 0.15): "moderate"}
    for (raw, value), word in (words | {(0.2, 0.05): "small", (0.9, 0.8): "large"}).items():
        found = {"score": {"raw": raw, "value": value, "chance": 0.25}}
        assert drifts(found, "").bodies[0][0][2] == word


# --- people -------------------------------------------------------------------------------------


def test_a_run_tells_its_file_and_the_labels_of_people_left_out(
    organisations: Organisations, folder: Path
) -> None:
    covered = json.loads((folder / "summary.json").read_text())["coverage"]
    table = read(organisations.labels)
    rows = checkpoint.load(folder).rows
    assert (
        covered["file"]["rows"] == len(table) and covered["file"]["columns"] == table.shape[1] - 1
    )
    used = table.index.isin(rows)
    for who, part in (("aligned", table[used]), ("left_out", table[~used])):
        due = part["label"].value_counts(normalize=True)
        assert covered["labels"][who] == pytest.approx({str(n): s for n, s in due.items()})
    shown = rates(covered).bodies[0]
    assert [row[0] for row in shown] == ["0", "1"] and f"{used.sum():,}" in str(covered["aligned"])
    assert "not at party 0" in (folder / FILES[0]).read_text()
    predicted = json.loads((folder / "predictions.json").read_text())["coverage"]
    assert predicted["file"] == covered["file"] and predicted["labels"] == covered["labels"]
    figures = json.loads((folder / "predictions.json").read_text())["assessment"]["segments"]
    assert len(figures["month"]["rows"]) == 12 and figures["month"]["drift"] == {}  # few rows
    # Few people left out have no rate.
    forget_alignments()
    few = organisations.run("few", {**BY_TIME, "min-segment": int((~used).sum()) + 1}).summary
    assert few["coverage"]["labels"] == {} and rates(few["coverage"]).filled.bodies == []


def test_the_digest_of_a_partys_file_stays_in_its_log(
    organisations: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, heard = hashlib.sha256(organisations.files[1].read_bytes()), Recorder()
    client: Any = heard
    logged: list[str] = []
    monkeypatch.setattr(logs.log, "info", lambda text, *of: logged.append(text % of))
    run = organisations.run("heard", BY_TIME, client)
    told = b"".join(heard.sent) + (run.folder / "summary.json").read_bytes()
    assert digest.digest() not in told and digest.hexdigest().encode() not in told
    assert any(digest.hexdigest() in line for line in logged)  # the control
    assert hashlib.sha256(organisations.labels.read_bytes()).hexdigest().encode() in told


# --- outcomes -----------------------------------------------------------------------------------


def outcomes(organisations: Organisations, path: Path, label: Any = None) -> pd.DataFrame:
    """Write a file of labels with gaps and strangers; return the people with a label."""
    table = read(organisations.labels)[[ID, "label", "month"]].sample(frac=0.8, random_state=1)
    table["label"] = table["label"].astype(object if label else float)
    table["label"] = table["label"].map(label) if label else table["label"]
    table.iloc[:9, 1] = None
    strangers = pd.DataFrame({ID: [-1, -2], "label": table["label"].iloc[9], "month": "2026-01-01"})
    write(pd.concat([table, strangers]), path)
    return table.iloc[9:]


def test_figures_of_outcomes_equal_scikit_learns(
    organisations: Organisations, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    known = outcomes(organisations, tmp_path / "labels.csv")  # 0.0 and 1.0 are 0 and 1
    assert main(["evaluate", str(folder), "--labels", str(tmp_path / "labels.csv")]) == 0
    found = json.loads((folder / "predictions.evaluation.json").read_text())
    said = read(folder / "predictions.csv")
    joined = said.merge(known, on=ID)
    people, figures = found["people"], found["assessment"]["figures"]
    assert people["in the file of labels"] == len(known) + 11 and people["in both"] > len(joined)
    assert people["in the figures"] == len(joined) == found["assessment"]["rows"]
    auc = roc_auc_score(joined["label"], joined["probability_1"])
    brier = brier_score_loss(joined["label"], joined["probability_1"])
    assert figures["auc"]["value"] == pytest.approx(auc, abs=1e-9)
    assert figures["brier"]["value"] == pytest.approx(brier, abs=1e-9)
    by_month = found["assessment"]["segments"]["month"]
    assert by_month["rows"] == joined["month"].str[:7].value_counts().sort_index().to_dict()
    then = read(folder / TESTED)["probability_1"]
    due = index_of(then, said["probability_1"])
    assert list(found["drift"]) == ["probability_1"]  # the other probability says the same
    assert found["drift"]["probability_1"]["raw"] == pytest.approx(due, abs=1e-9) and due > 0
    shown = capsys.readouterr().out
    assert "test rows of training" in shown and f"{auc:.4f}" in shown and "By month" in shown
    assert "outcomes" in (folder / "predictions.evaluation.html").read_text()


def test_outcomes_that_do_not_fit_are_refused(
    organisations: Organisations, folder: Path, tmp_path: Path
) -> None:
    known, path, said = outcomes(organisations, tmp_path / "a.csv"), tmp_path / "a.csv", None
    for table, sentence in (
        (known.assign(label="yes"), "never seen"),
        (known.assign(**{ID: -known[ID]}), "has no id of"),
        (pd.concat([known, known[:1]]), "repeat"),
        (known, "has no column 'probability_1'"),
    ):
        write(table, path)
        if table is known:  # predictions of another model
            said = tmp_path / "said.csv"
            write(read(folder / "predictions.csv").rename(columns={"probability_1": "p"}), said)
        with pytest.raises(ConfigError, match=sentence):
            evaluate(folder, str(path), said, {})


def test_outcomes_of_people_whose_labels_noise_protects_count_in_no_figure(
    organisations: Organisations, tmp_path: Path
) -> None:
    """Without noise they count: the outcomes above are the control."""
    keys = {"privacy": "labels", "epsilon": 4.0}
    run = organisations.run("noise", {**SHORT, "time": "month", **keys})
    organisations.predict("noise")
    known = outcomes(organisations, tmp_path / "labels.csv")
    found = evaluate(run.folder, str(tmp_path / "labels.csv"), None, {})[1]
    of_run = checkpoint.load(run.folder)
    _, test, validation = divide(of_run.config.data, len(of_run.rows))
    tested = read(organisations.labels)[ID].to_numpy()[of_run.rows[test[validation:]]]
    joined = read(run.folder / "predictions.csv").merge(known, on=ID)
    due = joined[joined[ID].isin(tested)]
    assert found["people"]["in the figures"] == len(due) < len(joined)
    auc = roc_auc_score(due["label"], due["probability_1"])
    assert found["assessment"]["figures"]["auc"]["value"] == pytest.approx(auc, abs=1e-9)


@pytest.mark.parametrize("target", ["regression", "words"])
def test_outcomes_of_numbers_and_of_several_classes(tmp_path: Path, target: str) -> None:
    table = cancer(columns=4, rows=300)
    number = table["f0"] + np.random.default_rng(0).normal(size=300)
    words = pd.cut(number, 3, labels=["low", "mid", "high"]).astype(str)
    organisations = cut(
        tmp_path, table.assign(label=number if target == "regression" else words), known=1
    )
    keys = {"target": "regression"} if target == "regression" else {}
    run = organisations.run("run", {**SHORT, **keys})
    organisations.predict("run")
    found = evaluate(run.folder, str(organisations.labels), None, {})[1]
    joined = read(run.folder / "predictions.csv").merge(read(organisations.labels), on=ID)
    figures = found["assessment"]["figures"]
    if target == "regression":
        rmse = math.sqrt(((joined["prediction"] - joined["label"]) ** 2).mean())
        rank = spearmanr(joined["prediction"], joined["label"]).statistic
        assert figures["rmse"]["value"] == pytest.approx(rmse)
        assert figures["spearman"]["value"] == pytest.approx(rank)
    else:
        right = (joined["prediction"] == joined["label"]).mean()
        assert figures["accuracy"]["value"] == pytest.approx(right)
    assert found["people"]["in the figures"] == len(joined) == 300
