"""Predictions of a trained model by id, and refused predictions."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch

import vfl_flower
from tests.full_disk import full_after
from tests.organisations import (
    ID,
    Organisations,
    cancer,
    change,
    common,
    contents,
    cut,
    read,
    small,
    write,
)
from tests.releases import accountant_of, epsilon
from vfl_flower.config.csv_text import restored, write_csv
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import KEYS
from vfl_flower.data import on_disk, table_file
from vfl_flower.data.ids import encode_ids
from vfl_flower.data.on_disk import LargeTable
from vfl_flower.data.own_files import OwnFile
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.results import Results
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import load_model
from vfl_flower.party import state_file
from vfl_flower.party.state import load_about
from vfl_flower.protocol.privacy.journal import EVALUATE, Event, Journal
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.systems import resolve
from vfl_flower.records import second_count
from vfl_flower.records.ledger import Ledger, opened
from vfl_flower.tasks.inference import rows
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.releases import UploadCount

SHORT = {"epochs": 3, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


def summary_of(path: Path) -> dict[str, Any]:
    """Return the summary that `predict` writes beside its table."""
    return json.loads(path.with_suffix(".json").read_text())


def by_hand(organisations: Organisations, out: str, labels: Path) -> tuple[list[Any], Any]:
    """Ids that all have, and the outputs of the run's models for them."""
    folder = organisations.folder / out
    found = checkpoint.load(folder)
    config = found.config
    parties = len(organisations.files)
    outputs = max(1, len(found.about_labels["classes"]))
    outputs = 1 if outputs == 2 else outputs
    new = Organisations(organisations.folder, labels, organisations.files)
    ids = common(new)

    def columns(path: Path, preparation: dict[str, Any]) -> Any:
        frame = read(path).set_index(ID).loc[ids]
        raw = frame[list(preparation["numbers"])].to_numpy(np.float64)
        scaled = (raw - np.array(preparation["mean"])) / np.array(preparation["deviation"])
        return torch.from_numpy(scaled.astype(np.float32))

    blocks = []
    with torch.no_grad():
        for number in range(parties):
            kept = folder / f"run-{found.run}-party-{number}-checkpoint-{found.number}.state"
            about = json.loads(load_about(state_file.read(kept)))
            x = columns(organisations.files[number], about["preparation"])
            bottom = build_bottom(config, number, x[0], 4)
            with np.load(folder / f"party-{number}.npz") as file:
                load_model(bottom, dict(file))
            blocks.append(bottom(x))
        own = 0
        if found.about_labels["preparation"]:
            blocks.append(columns(labels, found.about_labels["preparation"]))
            own = blocks[-1].shape[1]
        top = build_top(config, [4] * parties, outputs, own)
        with np.load(folder / "top.npz") as file:
            load_model(top, dict(file))
        return ids, top(torch.cat(blocks, dim=1)).double()


# --- what it says -------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn"},
        {"strategy": "vafl", "delay": "poisson"},
        {"strategy": "ef-vfl", "codec": "top-k", "labels": "shared"},
        {"strategy": "cascaded", "top-model": "sum"},
        {"strategy": "frozen", "bottom-model": "cnn", "bottom-hidden": 2},
    ],
    ids=lambda keys: keys["strategy"],
)
def test_test_rows_of_a_data_set_do_as_the_run_says(tmp_path: Path, keys: dict[str, Any]) -> None:
    run = run_local(4, {"epochs": 1, **keys, "out": str(tmp_path / "run")})
    path = predict_local({"model": str(run.folder)})
    assert path == run.folder / "predictions.csv"
    found, table = summary_of(path), read(path)
    for name in ("accuracy", "loss", "auc"):
        assert found[name] == run.summary[f"test_{name}"]
    assert found["rows"] == len(table) == 360
    assert found["drift"]["scores"] < 0.1  # near 0, since the held-out rows are test rows too
    chances = table.drop(columns=["id", "prediction"])
    assert list(chances) == [f"probability_{number}" for number in range(10)]
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    np.testing.assert_array_equal(chances.to_numpy().argmax(1), table["prediction"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Organisations that have trained a model of two classes, and new rows of the label holder."""
    table = cancer(columns=9, rows=260)
    organisations = cut(tmp_path_factory.mktemp("trained"), table, own=3)
    everyone = read(organisations.labels)
    write(everyone[:180], organisations.labels)
    write(everyone[180:].sample(frac=1, random_state=0), organisations.folder / "new.csv")
    organisations.run("run", SHORT)
    return organisations


@pytest.fixture
def organisations(tmp_path: Path, trained: Organisations) -> Organisations:
    """A copy of them, whose files a test may change."""
    return trained.copy(tmp_path / "copy")


def test_predictions_are_the_models_outputs_by_id(organisations: Organisations) -> None:
    new = organisations.folder / "new.csv"
    table = organisations.predict("run", new)
    ids, outputs = by_hand(organisations, "run", new)
    in_file = [each for each in read(new)[ID].tolist() if each in set(ids)]
    assert table[ID].tolist() == in_file and 40 < len(ids) < 80
    table = table.set_index(ID).loc[ids].reset_index()
    chances = outputs[:, 0].sigmoid().numpy()
    np.testing.assert_allclose(table["probability_1"], chances, atol=1e-6)
    np.testing.assert_allclose(table["probability_0"], 1 - chances, atol=1e-6)
    np.testing.assert_array_equal(table["prediction"], chances > 0.5)
    labels = read(new).set_index(ID).loc[ids, "label"].to_numpy()
    found = summary_of(organisations.folder / "run" / "predictions.csv")
    assert found["accuracy"] == pytest.approx(np.mean((chances > 0.5) == labels))
    assert found["rows"] == len(ids)


def test_people_who_trained_the_model_are_counted(
    organisations: Organisations, caplog: pytest.LogCaptureFixture
) -> None:
    table = organisations.predict("run", organisations.labels)
    found = summary_of(organisations.folder / "run" / "predictions.csv")
    held_out = math.ceil(KEYS["test-fraction"].default * len(table))
    assert found["training_rows"] == len(table) - held_out > 0
    assert f"{found['training_rows']} of these {len(table)} people trained or" in caplog.text
    caplog.clear()
    out = organisations.folder / "new-people.csv"
    organisations.predict("run", organisations.folder / "new.csv", out=str(out))
    assert "training_rows" not in summary_of(out) and "trained or chose" not in caplog.text


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["prediction", "parties", "id"])
def test_an_id_column_that_is_called_as_another_of_ours_is_id(name: str, tmp_path: Path) -> None:
    features = np.random.default_rng(0).standard_normal((60, 2))
    frames = [pd.DataFrame({name: range(60), "x": column}) for column in features.T]
    model = vfl_flower.train(
        {"epochs": 1}, frames, frames[0].assign(label=features[:, 0] > 0)[[name, "label"]], id=name
    )
    said = model.predict(frames, id=name)
    assert said.index.name == name and said.index.tolist() == list(range(60))


def test_parquet_holds_the_same_as_csv(organisations: Organisations) -> None:
    new = organisations.folder / "new.csv"
    csv = organisations.predict("run", new)
    out = organisations.folder / "deeper" / "scores.parquet"
    parquet = organisations.predict("run", new, out=str(out))
    assert out.exists() and out.with_suffix(".json").exists()
    pd.testing.assert_frame_equal(csv, parquet, check_exact=False)
    assert [path.name for path in out.parent.iterdir() if "new" in path.name] == []


FORMULAS = [
    *("=HYPERLINK(1)", "+49", "-5", "@SUM(1)", "\t=1", "\r=1", "\n=1", "'=1", "''-5", "＝1"),
    *("'quoted", "a=1", "", "x\n=1", "x\r=1", "é", "'"),
]


def test_no_text_of_a_csv_file_is_a_formula_and_all_come_back() -> None:
    numbers = np.linspace(-5, 5, len(FORMULAS))
    frame = pd.DataFrame({"id": FORMULAS, "=1+1": numbers, "-2": pd.Categorical(FORMULAS)})
    frame["mixed"] = [*FORMULAS[:-2], -7, None]

    def cells(write: Any) -> list[str]:
        file = io.BytesIO()
        write(file)
        text = io.StringIO(file.getvalue().decode(), newline="")
        return [cell for line in csv.reader(text) for cell in line]

    def formulas(cells: list[str]) -> set[str]:
        begin = {cell for cell in cells if cell[:1] and cell[0] in "=+-@\t\r\n＝"}
        return begin - {str(each) for each in (*numbers, -7)}

    assert formulas(cells(lambda file: frame.to_csv(file, index=False))) >= {*FORMULAS[:5], "-2"}
    assert not formulas(cells(lambda file: write_csv(file, frame)))  # above, the control
    file = io.BytesIO()
    write_csv(file, frame)
    file.seek(0)
    back = pd.read_csv(file, keep_default_na=False)
    assert list(back) == ["id", "'=1+1", "'-2", "mixed"]
    assert restored(back["id"]).tolist() == restored(back["'-2"]).tolist() == FORMULAS
    np.testing.assert_array_equal(restored(back["'=1+1"]), numbers)
    assert restored(back["mixed"]).tolist() == [*FORMULAS[:-2], "-7", ""]


@pytest.mark.parametrize("kind", [OwnFile, LargeTable])
def test_ids_that_look_like_formulas_are_found_in_a_file_of_predictions(
    tmp_path: Path, kind: type[OwnFile]
) -> None:
    ids = ["-5", "+49", "=1", "'=1", "''=1", "'x", "7"]
    columns = {"id": ids, "prediction": 0, "probability_a": 0.5, "parties": "0+1"}
    with (tmp_path / "a.csv").open("wb") as file:
        write_csv(file, pd.DataFrame(columns))
    assert kind(str(tmp_path / "a.csv")).ids == encode_ids(ids, "The test")
    plain = pd.read_csv(tmp_path / "a.csv")["id"]
    assert plain.tolist() != ids  # the control


@pytest.mark.parametrize("kind", [OwnFile, LargeTable])
@pytest.mark.parametrize("others", [{}, {"prediction": 0, "x": 1.0}, {"x": 0, "prediction": 1}])
def test_in_any_other_csv_file_an_apostrophe_is_part_of_an_id(
    tmp_path: Path,
    kind: type[OwnFile],
    others: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = ["'=a", "=a", "''=a", "'+49", "+49", "'-5", "'x", "x"]
    pd.DataFrame({"id": ids, **others}).to_csv(tmp_path / "FILE.csv", index=False)
    assert kind(str(tmp_path / "FILE.csv")).ids == encode_ids(ids, "The test")
    assert caplog.text.count("4 ids in column 'id' begin with an apostrophe") == 1
    caplog.clear()
    pd.DataFrame({"id": ["'x", "=a"], **others}).to_csv(tmp_path / "FILE.csv", index=False)
    assert kind(str(tmp_path / "FILE.csv")).ids and not caplog.text  # the control of the notice
    pd.DataFrame({"id": ids, **others}).to_csv(tmp_path / "FILE.csv", index=False)
    monkeypatch.setattr(table_file, "are_predictions", lambda names, ids: True)  # the control
    with pytest.raises(ConfigError, match="repeat the id"):
        _ = kind(str(tmp_path / "FILE.csv")).ids  # two people were one


def test_one_place_writes_csv_files() -> None:
    """A csv file that is written elsewhere would have no guarded texts."""
    package = Path(vfl_flower.__file__).parent
    writers = [
        path.name
        for folder in (package, package.parent / "strategies")
        for path in folder.rglob("*.py")
        if re.search(r"\.to_csv\((?!FILE)|csv\.(Dict)?[wW]riter", path.read_text())
    ]
    assert sorted(writers) == ["csv_text.py"]


def test_without_labels_there_are_predictions_and_no_metrics(organisations: Organisations) -> None:
    new = organisations.folder / "new.csv"
    with_labels = organisations.predict("run", new, out=str(organisations.folder / "a.csv"))
    change(new, lambda frame: frame.drop(columns=["label"]))
    without = organisations.predict("run", new, out=str(organisations.folder / "b.csv"))
    pd.testing.assert_frame_equal(with_labels, without)
    found = summary_of(organisations.folder / "b.csv")
    assert not {"accuracy", "loss", "auc"} & found.keys() and found["rows"] == len(without)


def with_strangers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in another order, with rows of people who are new to the label holder."""
    others = frame.assign(**{ID: frame[ID] + 10**7, frame.columns[0]: 1e6})
    return pd.concat([others, frame[::-1]])


@pytest.mark.parametrize("how", [with_strangers, lambda frame: frame[frame.columns[::-1]]])
def test_other_rows_and_another_order_of_columns_change_nothing(
    organisations: Organisations, how: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    new = organisations.folder / "new.csv"
    before = organisations.predict("run", new, out=str(organisations.folder / "a.csv"))
    for path in organisations.files:
        change(path, how)
    after = organisations.predict("run", new, out=str(organisations.folder / "b.csv"))
    pd.testing.assert_frame_equal(before, after)


@pytest.mark.nightly
def test_regression_predicts_in_units_of_the_labels(tmp_path: Path) -> None:
    table = small(90)
    table["label"] = 5000 + 100 * table["f0"] - 40 * table["f2"]
    organisations = cut(tmp_path, table, known=1)
    keys = {**SHORT, "epochs": 60, "target": "regression", "party-lr": 0.05, "server-lr": 0.05}
    keys["noise-seed"] = 0  # else parties draw other models each time
    run = organisations.run("run", keys)
    predicted = organisations.predict("run")
    assert list(predicted) == [ID, "prediction"]
    labels = table.set_index(ID).loc[predicted[ID], "label"].to_numpy()
    errors = predicted["prediction"].to_numpy() - labels
    found = summary_of(run.folder / "predictions.csv")
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
    assert found["r2"] == pytest.approx(1 - np.mean(errors**2) / labels.var(), rel=1e-3)
    assert found["r2"] > 0.8 and abs(predicted["prediction"].mean() - 5000) < 60
    _, outputs = by_hand(organisations, "run", organisations.labels)
    about = checkpoint.load(run.folder).about_labels
    expected = about["mean"] + about["deviation"] * outputs[:, 0].numpy()
    np.testing.assert_allclose(predicted["prediction"], expected, rtol=1e-5)


def test_classes_have_their_names(tmp_path: Path) -> None:
    table = small(90)
    table["label"] = np.array(["low", "mid", "high"])[np.digitize(table["f0"], [-0.5, 0.5])]
    organisations = cut(tmp_path, table)
    organisations.run("run", {**SHORT, "epochs": 20})
    predicted = organisations.predict("run")
    names = ["high", "low", "mid"]
    assert list(predicted) == [ID, "prediction", *(f"probability_{name}" for name in names)]
    _, outputs = by_hand(organisations, "run", organisations.labels)
    chances = outputs.softmax(1).numpy()
    np.testing.assert_allclose(predicted.iloc[:, 2:], chances, atol=1e-6)
    assert predicted["prediction"].tolist() == [names[each] for each in chances.argmax(1)]


KINDS: dict[str, list[Any]] = {
    "bool": [False, True],
    "int": [-1, 2],
    "float": [0.5, 1.5],
    "text": ["no", "yes"],
    "zeros": ["01", "1"],  # another class each
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *((kind, ".csv") for kind in KINDS if kind != "zeros"),  # which csv files cannot tell apart
        *((kind, ".parquet") for kind in KINDS),
    ],
)
def test_classes_come_back_as_they_were_and_are_known_again(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    table = cancer(columns=6, rows=200)
    table["label"] = np.array(KINDS[kind], object)[table["label"].to_numpy(int)]
    organisations = cut(tmp_path, table)
    labels = tmp_path / f"kind{suffix}"
    write(table[[ID, "label"]].infer_objects(), labels)
    organisations = Organisations(tmp_path, labels, organisations.files)
    organisations.run("run", SHORT)
    gaps = table[[ID, "label"]].copy()
    gaps.loc[::3, "label"] = None
    for name, frame in (("all", table[[ID, "label"]]), ("gaps", gaps)):
        file = tmp_path / f"{name}{suffix}"
        write(frame.infer_objects(), file)
        said = organisations.predict("run", file, out=str(tmp_path / f"{name}-said.parquet"))
        assert set(said["prediction"]) <= set(KINDS[kind])
        true = frame.set_index(ID)["label"].loc[said[ID]].to_numpy()
        known = ~pd.isna(true)
        right = (said["prediction"].to_numpy()[known] == true[known]).mean()
        assert summary_of(tmp_path / f"{name}-said.parquet")["accuracy"] == pytest.approx(right)


def test_a_given_key_that_equals_its_default_is_that_of_the_new_file(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(columns=6, rows=120))
    organisations.run("run", SHORT)
    new = tmp_path / "new.csv"
    write(read(organisations.labels).rename(columns={ID: KEYS["id"].default}), new)
    with pytest.raises(ConfigError, match="does not have the id column"):
        organisations.predict("run", new)
    said = organisations.predict("run", new, id=KEYS["id"].default)
    assert len(said) == len(common(organisations))


def test_columns_are_prepared_as_training_taught(tmp_path: Path) -> None:
    """Gaps get the training median, new texts are all zeros, and scales are the training scales."""
    table = small(80)
    generator = np.random.default_rng(0)
    colours = generator.choice(["red", "blue"], len(table))
    table = table.assign(f3=np.where(colours == "red", table["f3"], np.nan), f4=colours)
    organisations = cut(tmp_path, table, parties=1, known=1)
    organisations.words = [{"missing": "median", "text": "one-hot"}]
    organisations.run("run", SHORT)
    found = checkpoint.load(tmp_path / "run")
    name = f"run-{found.run}-party-0-checkpoint-{found.number}.state"
    about = json.loads(load_about(state_file.read(tmp_path / "run" / name)))
    median = about["preparation"]["numbers"]["f3"]
    assert about["preparation"]["texts"] == {"f4": ["blue", "red"]}

    def predicted(how: Any, out: str) -> Any:
        write(how(table.drop(columns=["label"])), organisations.files[0])
        return organisations.predict("run", out=str(tmp_path / out))["probability_1"]

    gaps = predicted(lambda frame: frame.assign(f3=np.nan), "a.csv")
    filled = predicted(lambda frame: frame.assign(f3=median), "b.csv")
    np.testing.assert_array_equal(gaps, filled)
    green = predicted(lambda frame: frame.assign(f4="green"), "c.csv")
    purple = predicted(lambda frame: frame.assign(f4="purple"), "d.csv")
    red = predicted(lambda frame: frame.assign(f4="red"), "e.csv")
    np.testing.assert_array_equal(green, purple)
    assert not np.allclose(green, red)
    one = predicted(lambda frame: frame[:1], "f.csv")
    np.testing.assert_allclose(one, predicted(lambda frame: frame, "g.csv")[:1], atol=1e-6)


class Cut(BaseException):
    """Somebody stops the run."""


def test_a_checkpoint_of_a_run_that_was_cut_short_predicts(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small())
    evaluated = Results.evaluated

    def stop(self: Results, entry: dict[str, Any]) -> None:
        evaluated(self, entry)
        if len(self.history) == 2:
            raise Cut

    with patch.object(Results, "evaluated", stop), pytest.raises(Cut):
        organisations.run("run", {**SHORT, "checkpoint-every": 3})
    found = checkpoint.load(tmp_path / "run")
    assert not found.finished
    before = organisations.predict("run")
    organisations.resume("run")
    after = organisations.predict("run", out=str(tmp_path / "after.csv"))
    assert before[ID].tolist() == after[ID].tolist()
    assert not np.allclose(before["probability_1"], after["probability_1"])


@pytest.mark.one_by_day
@pytest.mark.parametrize("noise_seed", [-1, 0])
def test_embeddings_are_perturbed_when_it_predicts_too(tmp_path: Path, noise_seed: int) -> None:
    organisations = cut(tmp_path, small())
    keys = {"privacy": "perturbed-embedding", "embedding-noise": 2.0, "noise-seed": noise_seed}
    organisations.run("run", {**SHORT, **keys})
    one = organisations.predict("run", out=str(tmp_path / "one.csv"))["probability_1"]
    two = organisations.predict("run", out=str(tmp_path / "two.csv"))["probability_1"]
    assert np.array_equal(one, two) == (noise_seed >= 0)
    _, outputs = by_hand(organisations, "run", organisations.labels)
    assert np.abs(one - outputs[:, 0].sigmoid().numpy()).max() > 1e-3


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """A run with noise on embeddings, without predictions."""
    keys = {"privacy": "perturbed-embedding", "embedding-noise": 2.0}
    found = cut(tmp_path_factory.mktemp("perturbed"), small())
    found.run("run", {**SHORT, **keys})
    return found


@pytest.fixture
def spent(
    perturbed: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], int]:
    """Predicts with a copy of that run; returns how many predictions the epsilon counts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(perturbed.folder / "run", tmp_path / "run")
    found = checkpoint.load(tmp_path / "run")
    rows, before = len(found.arrays["table.rows"]), found.strategy["uploads"]
    known = [epsilon(found.config, rows, before + times) for times in range(20)]

    def predict(run: str) -> int:
        for path in tmp_path.glob("said.*"):
            path.unlink()
        perturbed.predict(str(tmp_path / run), out=str(tmp_path / "said.csv"))
        return known.index(summary_of(tmp_path / "said.csv")["epsilon"])

    return predict


def lose(run: Path, earlier: bytes, how: str) -> None:
    path = run / "predictions.journal"
    if how == "deleted":
        path.unlink()
    elif how == "restored":
        path.write_bytes(earlier)
    elif how == "the folder is renamed, and it is deleted":
        run.rename(run.with_name("renamed"))
        path = run.with_name("renamed") / path.name
        path.unlink()
        path.parent.rename(run)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "how", ["deleted", "restored", "the folder is renamed, and it is deleted", "not at all"]
)
def test_predictions_stay_counted_whatever_becomes_of_their_journal(
    spent: Callable[[str], int], tmp_path: Path, how: str
) -> None:
    assert spent("run") == 1
    earlier = (tmp_path / "run" / "predictions.journal").read_bytes()
    assert [spent("run"), spent("run")] == [2, 3]
    for count in (4, 5):
        lose(tmp_path / "run", earlier, how)
        assert spent("run") == count


def test_no_prediction_is_made_where_its_count_is_damaged(
    spent: Callable[[str], int], tmp_path: Path
) -> None:
    assert [spent("run"), spent("run")] == [1, 2]
    path = tmp_path / "run" / "predictions.journal"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-40], whole[:-1] + b"x", b"", whole[:40], whole[40:]):
        path.write_bytes(damaged)
        with pytest.raises(VflError, match=r"predictions\.journal is damaged"):
            spent("run")


@pytest.mark.parametrize("state", ["kept", "cut", "lost"])
def test_a_journal_of_an_earlier_version_is_read_once(
    spent: Callable[[str], int], tmp_path: Path, state: str
) -> None:
    """It had an event for each prediction, and a second count of 16 bytes each."""
    origin = checkpoint.load(tmp_path / "run").origin
    path, second = tmp_path / "run" / "predictions.journal", tmp_path / "second"
    journal = Journal(path, origin.partition("-")[0], second)
    assert not list(journal.read())
    journal.write(Event(EVALUATE, 0))
    earlier = path.read_bytes()
    for _ in range(2):
        journal.write(Event(EVALUATE, 0))
    place = second_count.of_run(origin, path.name)
    place.parent.mkdir(0o700, parents=True)
    place.write_bytes(second.read_bytes() * (state != "lost"))
    if state == "cut":
        path.write_bytes(earlier)
    for count in (4, 5):
        assert spent("run") == count
        with opened(path) as ledger, opened(place) as counted:
            assert ledger.count("uploads") == counted.count("uploads") == count
    content = path.read_bytes()
    for damaged, file in ((b"SQLite format 4", place), (b"vfl-flower releases 2", path)):
        file.write_bytes(damaged + file.read_bytes()[len(damaged) :])  # of a later version
        with pytest.raises(VflError, match="is damaged"):
            spent("run")
        place.unlink(missing_ok=True)
    path.write_bytes(content)
    assert spent("run") == 6  # the control


def test_counts_at_once_a_full_disk_and_a_kill_lose_no_prediction(
    spent: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkpoint.load(tmp_path / "run")
    counts = [UploadCount(resolve({"model": str(tmp_path / "run")}), found) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(UploadCount.add, counts * 3))
    place = second_count.of_run(found.origin, "predictions.journal")
    with full_after(100), pytest.raises(VflError, match="cannot be written"):
        counts[0].add()
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched, pytest.raises(VflError, match="cannot be written"):
        patched.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        counts[0].add()
    save = Ledger._save

    def killed(ledger: Ledger, connection: Any) -> None:  # between the two ledgers
        if "run" not in [name for name, _ in ledger._entries]:
            raise KeyboardInterrupt
        save(ledger, connection)

    with patch.object(Ledger, "_save", killed), pytest.raises(KeyboardInterrupt):
        counts[1].add()
    with opened(place) as counted, opened(tmp_path / "run" / "predictions.journal") as ledger:
        assert (ledger.count("uploads"), counted.count("uploads")) == (13, 12)
    counts[2].add(2)
    assert spent("run") == 16


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_journal_of_predictions_of_another_run_counts_no_less(
    spent: Callable[[str], int], tmp_path: Path, state: str
) -> None:
    assert [spent("run"), spent("run")] == [1, 2]
    if state == "lost":
        shutil.rmtree(tmp_path / "state")
    Journal(tmp_path / "other", "1")
    shutil.copy(tmp_path / "other", tmp_path / "run" / "predictions.journal")
    with pytest.raises(ConfigError, match="is of another run, and without it nobody knows"):
        spent("run")


def test_a_count_adds_what_others_count_meanwhile(
    spent: Callable[[str], int], tmp_path: Path
) -> None:
    found = checkpoint.load(tmp_path / "run")
    rows, before = len(found.arrays["table.rows"]), found.strategy["uploads"]
    count = UploadCount(resolve({"model": str(tmp_path / "run")}), found)
    for times in range(1, 11):
        assert count.add() == epsilon(found.config, rows, before + times)
    assert spent("run") == 11  # a prediction beside the service
    assert count.add(2) == epsilon(found.config, rows, before + 13)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert spent("copy") == 14
    assert count.add() == epsilon(found.config, rows, before + 15)
    (tmp_path / "run" / "predictions.journal").unlink()
    assert count.add() == epsilon(found.config, rows, before + 16)


def test_a_prediction_that_is_killed_after_its_count_stays_counted(
    spent: Callable[[str], int], tmp_path: Path
) -> None:
    with (
        patch.object(TrainedModel, "embed", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        spent("run")
    (tmp_path / "run" / "predictions.journal").unlink()
    assert spent("run") == 2


def test_predictions_of_an_interrupted_run_count_what_it_released_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    organisations = cut(tmp_path, small())
    keys = {"privacy": "perturbed-embedding", "embedding-noise": 2.0, "checkpoint-every": 11}
    keys |= {"epochs": 8, "validation-fraction": 0.0, "eval-every": 1}
    evaluated = Results.evaluated

    def stop(self: Results, entry: dict[str, Any]) -> None:
        evaluated(self, entry)
        if entry["epoch"] >= 4:
            raise KeyboardInterrupt

    with patch.object(Results, "evaluated", stop), pytest.raises(KeyboardInterrupt):
        organisations.run("run", {**SHORT, **keys})
    found = checkpoint.load(tmp_path / "run")
    rows, known = len(found.arrays["table.rows"]), found.strategy["uploads"]
    journal = tmp_path / "run" / "releases.journal"
    accountant = accountant_of(found.config, rows)
    ReleaseLog(accountant).keep(journal)
    assert accountant.uploads() > known  # the control: the checkpoint knows of fewer
    organisations.predict("run")
    said = summary_of(tmp_path / "run" / "predictions.csv")["epsilon"]
    assert said == epsilon(found.config, rows, accountant.uploads() + 1)
    journal.unlink()
    with pytest.raises(ConfigError, match=r"releases\.journal is missing, and without it"):
        organisations.predict("run", out=str(tmp_path / "other.csv"))


# --- what is refused ----------------------------------------------------------------------------


def refused(organisations: Organisations, sentence: str, **keys: Any) -> str:
    """The sentence; nothing is written."""
    before = contents(organisations.folder / "run"), contents(organisations.folder)
    with pytest.raises(VflError, match=sentence) as raised:
        organisations.predict("run", **keys)
    assert (contents(organisations.folder / "run"), contents(organisations.folder)) == before
    message = str(raised.value)
    assert message[-1] in ".?" and "\n" not in message and "raised" not in message
    return message


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "how",
    [
        lambda frame: frame.drop(columns=frame.columns[0]),
        lambda frame: frame.rename(columns={frame.columns[0]: "secret"}),
        lambda frame: frame.assign(secret=1),
        lambda frame: frame.assign(**{frame.columns[0]: "secret"}),
    ],
    ids=["gone", "renamed", "one more", "text"],
)
def test_other_columns_of_a_party(organisations: Organisations, how: Any) -> None:
    change(organisations.files[1], how)
    sentence = "Party 1's file has other columns than its model was trained with. Its own log says"
    message = refused(organisations, sentence)
    assert "secret" not in message and "f6" not in message and "party-1.csv" not in message


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["missing", "infinite"])
def test_values_and_labels_that_cannot_be_used(organisations: Organisations, value: Any) -> None:
    change(organisations.labels, lambda frame: frame.assign(label=frame["label"] + 1))
    refused(organisations, "have 1 values that the model has never seen. Correct them")
    change(organisations.files[0], lambda frame: frame.assign(**{frame.columns[0]: value}))
    refused(organisations, "Party 0's file has (missing|infinite) values")


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("scores.txt", "is not a .csv or .parquet file"),
        ("scores", "is not a .csv or .parquet file"),
        ("scores.csv.gz", "is not a .csv or .parquet file"),
        ("here.csv", r"here\.csv already exists. Name another file by the option out, or move"),
        ("there.csv", r"there\.json already exists. Name another file by the option out, or move"),
        ("there.json/a.csv", "a.csv cannot be written: a file stands where a folder must be"),
    ],
)
def test_files_that_cannot_be_written_are_refused_and_none_is_overwritten(
    organisations: Organisations, out: str, sentence: str
) -> None:
    for name in ("here.csv", "there.json"):
        (organisations.folder / name).write_text("precious")
    refused(organisations, sentence, out=str(organisations.folder / out))


@pytest.mark.parametrize(
    ("how", "why", "lazy"),
    [
        (lambda frame: frame.drop(columns=["f1"]), "column 'f1' is missing", False),
        (lambda frame: frame.assign(f1="12 EUR"), "column 'f1' has texts", False),
        (lambda frame: frame.assign(f1="12 EUR"), "column 'f1' has texts", True),
    ],
    ids=["gone", "text", "text on disk"],
)
def test_other_columns_of_the_label_holder_are_refused_before_parties_count_ids(
    how: Any, why: str, lazy: bool, organisations: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(*given: Any) -> None:
        raise VflError("The parties count ids.")

    monkeypatch.setattr(on_disk, "_LARGE", 0 if lazy else 2**30)
    monkeypatch.setattr(rows, "aligned", counts)
    change(organisations.labels, lambda frame: frame.assign(f1=1.5))  # the control
    refused(organisations, r"The parties count ids\.")
    change(organisations.labels, how)
    refused(organisations, rf"labels.csv has other columns than .*: {why}")


def test_missing_labels(organisations: Organisations) -> None:
    change(organisations.labels, lambda f: f.assign(label=f["label"].where(f.index > 3)))
    predicted = organisations.predict("run", organisations.labels)
    said = summary_of(organisations.folder / "run" / "predictions.csv")
    labels = read(organisations.labels).set_index(ID).loc[predicted[ID], "label"].to_numpy()
    known, right = ~np.isnan(labels), predicted["prediction"].to_numpy() == labels
    assert not known.all() and said["accuracy"] == pytest.approx(right[known].mean())


def test_later_predictions_go_into_dated_files(organisations: Organisations) -> None:
    run, new = organisations.folder / "run", organisations.folder / "new.csv"
    tables = [organisations.predict("run", each) for each in (organisations.labels, new, new)]
    first, *later = sorted(run.glob("predictions*.csv"), key=lambda each: each.stat().st_mtime_ns)
    assert first == run / "predictions.csv"
    for path, table in zip((first, *later), tables, strict=True):
        pd.testing.assert_frame_equal(read(path), table)  # no later one has overwritten it
        assert summary_of(path)["rows"] == len(table)
    assert len(tables[0]) != len(tables[1])
    assert all(re.fullmatch(r"predictions-\d{8}-\d{6}(-2)?\.csv", path.name) for path in later)
