"""Drift: the population stability index of columns, embeddings and scores."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from scipy.stats import chi2

from tests.fleet import until
from tests.organisations import ID, Organisations, cut, read
from tests.serving import served
from vfl_attacks.features import drift_counts
from vfl_flower.config.errors import VflError
from vfl_flower.data import drift as measure
from vfl_flower.data import tables
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.drift import Watch, Window, columns_of, drift_of
from vfl_flower.data.on_disk import LargeTable
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.split import divide
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.party import state_file
from vfl_flower.party.state_file import Saved
from vfl_flower.tasks.drift.label_holder import DriftWatch
from vfl_flower.tasks.drift.party import DriftReports
from vfl_flower.tasks.inference.model import Predictor

pytestmark = pytest.mark.xdist_group("drift")  # its tests share a trained model

Array = NDArray[Any]

ROWS = 1500
SHORT = {"epochs": 6, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8, "noise-seed": 0}
WORDS: Any = {"missing": "median", "text": "one-hot"}


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


@dataclass
class Trained:
    """A trained model, and a prediction of 700 people. Two of their columns have shifted."""

    organisations: Organisations
    later: pd.DataFrame
    found: dict[str, Any]
    tables: list[pd.DataFrame]
    messages: list[str]
    scores: pd.DataFrame

    @property
    def run(self) -> Path:
        return self.organisations.folder / "run"

    def new(self, folder: Path, table: pd.DataFrame, refuse: str = "") -> Organisations:
        """The organisations with other people; party 1 may refuse a task."""
        of_people = cut(folder, table, known=1.0)
        of_people.words = [WORDS, {"refuse": refuse}]
        return of_people


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Party 0 has the columns f0 to f2, with texts and missing values, party 1 the others."""
    folder = tmp_path_factory.mktemp("drift")
    organisations = cut(folder, people(ROWS, 0), known=1.0)
    organisations.words = [WORDS, {}]
    organisations.run("run", SHORT)
    later = people(700, 1, shift=1.5, first=10_000)
    made = Trained(organisations, later, {}, [], [], pd.DataFrame())
    made.found = predicted(made, made.new(folder / "later", later), made.messages)
    for party in range(2):
        (path,) = made.run.glob(f"*-party-{party}.drift.csv")
        assert path.stat().st_mode & 0o077 == 0
        made.tables.append(pd.read_csv(path, index_col="column"))
    made.scores = read(folder / "later" / "scores.csv")
    return made


def predicted(made: Trained, of_people: Organisations, log: list[str]) -> dict[str, Any]:
    """Return the drift of these people; add warnings to the log."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    given = {"model": str(made.run), "dataset": f"files:{of_people.labels}"}
    out, heard, logger = of_people.folder / "scores.csv", Heard(30), logging.getLogger("flwr")
    logger.addHandler(heard)
    before = logger.level
    logger.setLevel(logging.WARNING)
    with patch.object(logger, "disabled", False):
        predict_local({**given, "out": str(out)}, of_people.node_configs)
    logger.setLevel(before)
    logger.removeHandler(heard)
    return json.loads(out.with_suffix(".json").read_text())["drift"]


# --- the index ----------------------------------------------------------------------------------


def by_hand(then: Array, now: Array) -> float:
    """The index of a column, by its definition and nothing of this package."""
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


def test_a_partys_indices_equal_numpy_on_joined_data(trained: Trained) -> None:
    everyone, kept = people(ROWS, 0).set_index(ID), checkpoint.load(trained.run)
    places, _, _ = divide(kept.config.data, len(kept.rows))
    ids = read(trained.organisations.labels)[ID].to_numpy()[kept.rows[places]]
    shifted = 0
    for party, names in enumerate((["f0", "f1", "f2"], ["f3", "f4", "f5"])):
        table = trained.tables[party]
        assert list(table.index) == names
        for name in names:
            then, now = everyone.loc[ids, name].to_numpy(), trained.later[name].to_numpy()
            raw, row = by_hand(then, now), table.loc[name]
            assert (row["training_rows"], row["new_rows"]) == (len(then), 700)
            assert row["plain_index"] == pytest.approx(raw, abs=1e-9)
            bins = {"f0": 11, "f1": 4, "f2": 3}.get(name, 10)
            chance = (bins - 1) * (1 / len(then) + 1 / len(now))
            assert row["index"] == pytest.approx(max(0.0, raw - chance), abs=1e-9)
            shifted += raw > 0.1
        counts = table["level"].value_counts()
        reported = {level: int(counts.get(level, 0)) for level in ("moderate", "large")}
        assert trained.found["columns"][str(party)] == reported
    assert shifted == 2
    assert trained.tables[1].loc["f4", "level"] == "large"
    assert trained.tables[0].loc["f0", "bin"] == "missing"


def test_the_index_of_scores_equals_numpy_on_the_held_out_rows(trained: Trained) -> None:
    kept = checkpoint.load(trained.run)
    held_out = torch.from_numpy(kept.arrays["test_table.rows"])
    with torch.no_grad():
        then = Predictor(kept, 0).top(held_out)[:, 0].numpy().astype(float)
    chance = trained.scores["probability_1"].to_numpy()
    raw = by_hand(then, np.log(chance) - np.log1p(-chance))
    less = 9 * (1 / len(then) + 1 / 700)
    assert trained.found["rows"] == 700 and raw > 0.15
    assert trained.found["scores"] == pytest.approx(raw - less, abs=1e-6)  # it is rounded
    indices = trained.found["embeddings"]
    assert indices["1"] > 0.25 > indices["0"] >= 0


def test_an_empty_bin_has_the_least_share() -> None:
    then, now = np.array([500, 500, 0]), np.array([250, 250, 500])
    expected = 2 * (0.25 - 0.5) * np.log(0.5) + (0.5 - 1e-4) * np.log(0.5 / 1e-4)
    assert drift_of(then, now).raw == pytest.approx(expected, abs=1e-12)
    assert drift_of(then, now).level() == "large"


@pytest.mark.parametrize(("freedom", "chance"), [(1, 1e-3), (3, 1e-4), (9, 1e-5), (20, 1e-3)])
def test_the_bound_of_chance_is_that_of_scipy(freedom: int, chance: float) -> None:
    exact = chi2.isf(chance, freedom)
    assert 0.99 * exact < measure._chi_square(freedom, chance) < 1.15 * exact


# --- false alarms -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "shift"), [(200, 1.0), (1000, 0.5), (5000, 0.5)])
def test_rows_of_the_same_distribution_do_not_warn_and_a_shift_is_found(
    rows: int, shift: float
) -> None:
    generator = np.random.default_rng(rows)
    watch = Watch.learn(columns_of(generator.standard_normal((500, 20))))
    false, found, values, plain = 0, 0, [], []
    for _ in range(40):
        watch.clear()
        same = generator.standard_normal((rows, 20))
        watch.add(columns_of(same))
        drifts = watch.drifts()
        values.append(np.mean([each.value for each in drifts.values()]))
        plain.append(max(each.raw for each in drifts.values()))
        false += any(each.level() for each in drifts.values())
        watch.clear()
        watch.add(columns_of(same[:, :1] + shift))
        found += bool(watch.drifts()["0"].level())
    assert false <= 1
    assert found >= 38
    assert np.mean(values) < 0.02
    assert rows > 200 or max(plain) > 0.1  # the control: without the correction, they would warn


def test_a_model_warns_of_drift_and_not_of_new_people(trained: Trained, tmp_path: Path) -> None:
    large, *_ = sorted(each for each in trained.messages if each.startswith("Drift is "))
    assert large.startswith("Drift is large (population stability index above 0.25): the scores (")
    assert "1 column of party 1" in large and "the embeddings of party 1 (" in large
    of_parties = [each for each in trained.messages if each.startswith("Of the 3 columns")]
    assert len(of_parties) == 2 and not re.search(r"\bf4\b", "\n".join(trained.messages))
    log: list[str] = []
    found = predicted(trained, trained.new(tmp_path, people(300, 5, first=20_000)), log)
    assert log == []
    assert max(found["scores"], *found["embeddings"].values()) < 0.1
    assert found["columns"] == {party: {"moderate": 0, "large": 0} for party in "01"}


def test_the_label_holders_own_columns_have_a_table_beside_the_predictions(tmp_path: Path) -> None:
    organisations = cut(tmp_path / "train", people(600, 0)[[ID, "label", "f4", "f3", "f5"]], 1, 1)
    organisations.run("run", {**SHORT, "epochs": 1})
    later = people(300, 1, shift=1.5, first=10_000)[[ID, "label", "f4", "f3", "f5"]]
    new, out = cut(tmp_path / "new", later, 1, 1, known=1.0), tmp_path / "scores.csv"
    organisations.files = new.files
    organisations.predict("run", new.labels, out=str(out))
    found = json.loads(out.with_suffix(".json").read_text())["drift"]
    assert found["columns"] == {
        "0": {"moderate": 0, "large": 0},
        "own": {"moderate": 0, "large": 1},
    }
    table = pd.read_csv(out.with_suffix(".drift.csv"), index_col="column")
    assert table["level"].to_dict() == {"f4": "large"}


# --- reports of a party -------------------------------------------------------------------------


def test_a_party_that_refuses_reports_nothing_and_predicts_the_same(
    trained: Trained, tmp_path: Path
) -> None:
    assert trained.found["columns"]["1"] == {"moderate": 0, "large": 1}
    found = predicted(trained, trained.new(tmp_path, trained.later, "explain,drift"), [])
    assert found == {**trained.found, "columns": {**trained.found["columns"], "1": None}}
    pd.testing.assert_frame_equal(read(tmp_path / "scores.csv"), trained.scores)


def test_a_run_with_noise_on_embeddings_has_no_reports(tmp_path: Path) -> None:
    keys = {**SHORT, "noise-seed": -1, "epochs": 1, "dataset": "breast-cancer"}
    keys["test-fraction"] = 0.5
    noise = {"privacy": "perturbed-embedding", "embedding-noise": 2.0}
    for name, more in (("plain", {}), ("noisy", noise)):
        out = str(tmp_path / name)
        run_local(2, {**keys, **more, "out": out})
        scores = predict_local({"model": out})
        columns = json.loads(scores.with_suffix(".json").read_text())["drift"]["columns"]
        assert [each is None for each in columns.values()] == [bool(more)] * 2
        assert len(list((tmp_path / name).glob("*.drift.csv"))) == 2  # each party's own table


Node = Callable[..., DriftReports]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Makes the reports of a real node with two columns."""

    def made(**rules: Any) -> DriftReports:
        folder = tmp_path / "states"
        words = {"partition-id": 0, "num-partitions": 2, "states": str(folder), **rules}
        context = Context(1, 1, words, RecordDict(), {})
        shares = Watch.learn(columns_of(np.random.default_rng(0).standard_normal((5000, 2))))
        state_file.keep_shares(context, FeatureBlock(np.zeros(0), np.zeros(0), "", shares=shares))
        return DriftReports(context, Saved(context.state, 1), "1-ab")

    return made


def asked(reports: DriftReports, who: Iterable[int]) -> list[int] | None:
    """The report on these people, whose second column has shifted far."""
    names = np.array(list(who), np.uint64)

    def rows(places: Array, names: list[str]) -> Iterator[tuple[str, Array]]:
        of_rows = np.random.default_rng(1).standard_normal((10_000, 2))[places] + [0, 3]
        return ((name, of_rows[:, int(name)]) for name in names)

    report = reports.of_prediction(names, names.astype(np.int64), rows).get("drift")
    return None if report is None else report.tolist()


def test_a_node_reports_on_a_row_once_a_day_and_on_few_rows_never(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(node(), range(199)) is None
    assert asked(node(), range(300)) == [0, 1]
    assert asked(node(), range(300)) is None  # another process of the same party
    assert asked(node(), range(101, 499)) is None  # 199 others
    assert asked(node(), range(101, 500)) == [0, 1]  # 200 others
    assert asked(node(**{"min-rows": 401}), range(1000, 1400)) is None
    assert asked(node(**{"min-rows": 400}), range(1000, 1400)) == [0, 1]
    assert asked(node(refuse="drift"), range(2000, 2300)) is None
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert asked(node(), range(300)) == [0, 1]


def test_a_clock_that_is_set_back_lets_nobody_report_on_a_row_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, days = time.time(), 0
    monkeypatch.setattr(time, "time", lambda: now + 86400 * days)
    for days, rows, reports in (
        (0, range(300), True),
        (-1, range(300), False),
        (0, range(300), False),
        (-1, range(300, 600), True),
        (0, range(100, 600), False),
        (1, range(300), True),  # the control
    ):
        assert (asked(node(), rows) is not None) == reports, (days, rows)


def test_counts_near_a_threshold_are_drawn_by_chance() -> None:
    watch = Watch.learn(columns_of(np.random.default_rng(0).standard_normal((5000, 1))))
    watch.add(columns_of(np.random.default_rng(1).standard_normal((5000, 1)) + 0.335))
    (drift,) = watch.drifts().values()
    assert 0.09 < drift.value < 0.11
    exact = {watch.levels() for _ in range(50)}
    hidden = {watch.levels(hidden=True) for _ in range(50)}
    assert len(exact) == 1 and hidden == {(0, 0), (1, 0)}


def test_reports_that_are_none_are_refused(trained: Trained) -> None:
    drift = DriftWatch(checkpoint.load(trained.run), {0: slice(0, 4), 1: slice(4, 8)})
    for report in (
        np.array([1, 2], np.int64),
        np.array([1], np.int32),
        np.array([-1, 0], np.int32),
        np.array([0.5, 1]),
    ):
        with pytest.raises(VflError, match="'drift' is not two numbers of columns"):
            drift.take(1, {"drift": report})
    drift.take(1, {})
    assert drift.columns == {}


def test_a_model_without_shares_has_no_drift(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    found = checkpoint.load(trained.run)
    of_old = {name: each for name, each in found.strategy.items() if name != "drift"}
    with caplog.at_level(logging.INFO, "flwr.notice"):
        drift = DriftWatch(replace(found, strategy=of_old), {0: slice(0, 4), 1: slice(4, 8)})
    assert "There is no drift of scores and embeddings, since" in caplog.text
    known = np.ones((300, 2), bool)
    own = np.zeros((300, 0), np.float32)
    drift.count(ScoredRows(torch.ones(300, 8), own, known, torch.ones(300, 1)))
    assert drift.figures() is None
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
    assert asked(DriftReports(context, Saved(RecordDict(), 1), "1-ab"), range(300)) is None


def test_of_masked_sums_only_the_sum_has_an_index(trained: Trained) -> None:
    drift = DriftWatch(checkpoint.load(trained.run), {0: slice(0, 4), 1: slice(0, 4)})
    figures = drift.figures()
    assert figures is not None and figures["embeddings"] == {"sum": None}


@pytest.mark.parametrize("columns_at_once", [1, 100])
def test_a_table_on_the_disk_has_the_same_raw_columns(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, columns_at_once: int
) -> None:
    monkeypatch.setattr(tables, "_AT_ONCE", 8 * ROWS * columns_at_once)
    file, places = trained.organisations.files[0], np.array([5, 0, 77, 1400])
    sources = [kind(str(file), ID, **WORDS, party=0) for kind in (OwnFile, LargeTable)]
    for names in (None, ["f2", "f0"]):
        memory, disk = (list(each.raw_columns(places, names)) for each in sources)
        assert [name for name, _ in memory] == (names or ["f0", "f1", "f2"])
        for (name, values), (other, read_again) in zip(memory, disk, strict=True):
            assert name == other and values.dtype == read_again.dtype
            pd.testing.assert_series_equal(pd.Series(values), pd.Series(read_again))


def test_few_rows_of_a_table_are_read_once_however_often_they_are_asked_for(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service asks for a row at a time."""
    learnt, source = (
        OwnFile(str(trained.organisations.files[0]), ID, **WORDS, party=0) for _ in range(2)
    )
    preparation = learnt.learn(np.arange(100))
    reads: list[list[str]] = []
    read = OwnFile._read

    def counted(self: OwnFile, names: list[str], texts: Any = ()) -> Any:
        reads.append(names)
        return read(self, names, texts)

    monkeypatch.setattr(OwnFile, "_read", counted)
    monkeypatch.setattr(tables, "_AT_ONCE", 8 * ROWS)  # one column of all rows
    monkeypatch.setattr(tables, "_FEW", 10)
    some = [source.rows(np.array([row]), preparation) for row in (3, 4, 3)]
    whole = source.rows(np.arange(ROWS), preparation)
    np.testing.assert_array_equal(np.concatenate(some), whole[[3, 4, 3]])
    assert len(reads) == 1 + len(source.feature_names)
    list(source.raw_columns(np.array([3])))
    assert len(reads) == 1 + len(source.feature_names)


# --- a service ----------------------------------------------------------------------------------


def test_a_service_counts_each_row_once_and_tells_of_drift(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_people = trained.new(tmp_path / "new", trained.later)
    keys = {"dataset": f"files:{of_people.labels}"}
    with served(trained.run, tmp_path, keys, of_people.node_configs) as some:

        def drift() -> dict[str, Any]:
            return some.http.get("/v1/model").json()["drift"]

        assert drift()["scores"] is None and drift()["rows"] == 0
        some.ask(*range(10_000, 10_150))
        for one in range(10_140, 10_190):
            some.ask(one)
        assert drift()["scores"] is None  # 190 people
        some.ask(*range(10_185, 10_205))
        until(lambda: drift()["rows"] == 205, seconds=10)
        assert drift()["embeddings"]["1"] > 0.25
        assert drift()["columns"]["1"] == {"moderate": 0, "large": 1}
        some.ask(*range(10_000, 10_205))
        some.ask(*range(10_205, 10_450))
        until(lambda: drift()["rows"] == 450, seconds=10)
        text = some.http.get("/metrics").text
    assert 'vfl_drifting_columns{level="large",party="1"} 1.0' in text
    assert 'vfl_drift{of="embeddings 1"} ' in text and 'vfl_drift{of="scores"} ' in text
    large = [each for each in caplog.messages if each.startswith("Drift is large")]
    assert large and len(set(large)) == len(large) <= 2  # at most one each, as they are found


def test_a_window_is_due_at_200_rows_and_each_time_it_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, due = Window(), []
    for row in range(6000):
        window.new([row, row // 2])
        if window.is_due:
            assert not window.step()
            due.append(row + 1)
    assert due == [200, 400, 800, 1600, 2600, 3600, 4600, 5600]
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert window.new(list(range(5600))) == []
    window.new(range(6000, 7000))
    assert window.is_due and window.step()  # a new day has begun
    assert window.new([0]) == [0]


# --- what reports tell the label holder -----------------------------------------------------------


def test_chosen_groups_reveal_columns_in_a_simulation_and_not_at_a_real_node() -> None:
    generator = np.random.default_rng(0)
    block = generator.standard_normal((2500, 6)).astype(np.float32)
    embeddings = np.tanh(block @ generator.standard_normal((6, 4))).astype(np.float32)
    exact, of_node = drift_counts(block, embeddings, 250, generator)
    assert exact.success > 0.5
    assert abs(of_node.success) < 0.05
