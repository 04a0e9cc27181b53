"""Organisations with their own files: common rows, columns, and what others learn of them."""

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from flwr.app import Context, Message
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

from tests.conftest import Start
from tests.organisations import (
    ID,
    Organisations,
    Recorder,
    cancer,
    change,
    common,
    cut,
    read,
    small,
    write,
)
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError
from vfl_flower.data.at_party import load_own_features
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.source import Preparation
from vfl_flower.data.sources import source_of
from vfl_flower.data.split import Alignment
from vfl_flower.label_holder import checkpoint
from vfl_flower.party import state_file
from vfl_flower.party.state import load_arrays
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.early_messages import Aligned, SetKept
from vfl_flower.transport.messages import Introduction
from vfl_flower.transport.wire import read_reply, to_reply

Array = NDArray[Any]

SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


def models(run: Any, parties: int) -> dict[str, Any]:
    names = ["top", *(f"party-{number}" for number in range(parties))]
    return {f"{name}.{key}": v for name in names for key, v in run.parameters(name).items()}


def as_one_table(organisations: Organisations, path: Path) -> str:
    """The rows that all have, in common order, with the parties' columns side by side."""
    ids = common(organisations)
    frames = [read(file).set_index(ID).loc[ids] for file in organisations.files]
    table = pd.concat(frames, axis=1)
    labels = read(organisations.labels).set_index(ID).loc[ids, "label"]
    np.savez(path, X=table.to_numpy(np.float64), y=labels.to_numpy())
    return f"npz:{path}"


# --- which rows, and the run on them ------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "cascaded", "ef-vfl"])
def test_a_run_on_files_is_that_on_one_table(tmp_path: Path, run: Start, strategy: str) -> None:
    organisations = cut(tmp_path / "files", cancer(rows=250), parties=3)
    keys = {**SHORT, "epochs": 1, "strategy": strategy}
    keys["noise-seed"] = 0  # else each party draws its model
    on_files = organisations.run("run", keys)
    on_table = run(3, {**keys, "dataset": as_one_table(organisations, tmp_path / "one.npz")})
    expected = models(on_table, 3)
    for name, parameters in models(on_files, 3).items():
        np.testing.assert_allclose(parameters, expected[name], atol=1e-5, err_msg=name)
    assert len(common(organisations)) < 0.8 * 250  # a tenth is missing at each party
    assert on_files.summary["test_auc"] == pytest.approx(on_table.summary["test_auc"], abs=1e-6)


def test_the_label_holders_columns_are_those_that_joined_trains_on(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(rows=250), parties=2, own=10)
    ours = organisations.run("ours", {**SHORT, "window": 1, "noise-seed": 0})
    joined = organisations.run("joined", {**SHORT, "strategy": "centralised"})
    assert any(name.startswith("own.") for name in ours.parameters("top"))
    for name, parameters in ours.parameters("top").items():
        np.testing.assert_allclose(parameters, joined.parameters("top")[name], atol=1e-5)
    for mine, other in zip(ours.history, joined.history, strict=True):
        assert mine["test_loss"] == pytest.approx(other["test_loss"], abs=1e-5)
    without = organisations.run("without", {**SHORT, "columns": "none"})
    assert not any(name.startswith("own.") for name in without.parameters("top"))


@pytest.mark.one_by_day
@pytest.mark.parametrize("ids", [lambda n: 5 * n + 7, lambda n: f"né-{n}"], ids=["number", "text"])
def test_equal_ids_give_what_psi_gives(tmp_path: Path, ids: Callable[[int], Any]) -> None:
    table = small()
    table[ID] = [ids(number) for number in table[ID]]
    organisations = cut(tmp_path, table, known=1)
    keys = {**SHORT, "noise-seed": 0}
    by_digest = organisations.run("ids", {**keys, "align": "ids"})
    by_psi = organisations.run("psi", keys)
    expected = models(by_psi, 2)
    for name, parameters in models(by_digest, 2).items():
        np.testing.assert_array_equal(parameters, expected[name])


def test_unequal_ids_are_refused(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(), known=1)
    change(organisations.files[1], ids(lambda each: each.where(each.index > 0, 77)))
    sentence = "Party 1 has other ids than the label holder has shown to know. align = 'ids' nee"
    with pytest.raises(PartyError, match=sentence):
        organisations.run("run", {**SHORT, "align": "ids"})


def test_both_sides_know_the_common_rows_and_no_more(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(), parties=3, known=0.7)
    recorder = Recorder()
    organisations.run("run", SHORT, recorder)  # type: ignore[arg-type]
    expected = common(organisations)
    with np.load(organisations.folder / "run" / "checkpoint.npz") as file:
        assert read(organisations.labels)[ID].iloc[file["rows"]].tolist() == expected
    run = checkpoint.load(organisations.folder / "run").run
    for number in range(3):
        kept = organisations.folder / "run" / f"run-{run}-party-{number}-checkpoint-1.state"
        state = state_file.read(kept)
        aligned = load_arrays(state, "aligned")
        assert list(aligned) == ["rows", "name", "digest", "method"]  # no secret is left
        assert read(organisations.files[number])[ID].iloc[aligned["rows"]].tolist() == expected


def test_order_and_place_of_the_columns_decide_nothing_about_rows(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small())
    keys = {**SHORT, "noise-seed": 0}
    first = models(organisations.run("first", keys), 2)
    change(organisations.files[0], lambda frame: frame[::-1])
    change(organisations.labels, lambda frame: frame.sample(frac=1, random_state=0))
    second = models(organisations.run("second", keys), 2)
    for name, parameters in first.items():
        np.testing.assert_allclose(parameters, second[name], atol=1e-6)


def test_the_example_files_are_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "deploy" / "example_files.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    known, new = (read(tmp_path / "bank" / f"{name}.csv") for name in ("labels", "new"))
    files = [tmp_path / "party-0" / "features.parquet", tmp_path / "party-1" / "features.csv"]
    assert len(capsys.readouterr().out.splitlines()) == 4
    everyone = set(known["person"]) | set(new["person"])
    assert len(known) + len(new) == len(everyone) == 569 and len(new) == 113
    blocks = [set(frame) - {"person", "label"} for frame in (known, *map(read, files))]
    assert [len(block) for block in blocks] == [10, 10, 10] and len(set.union(*blocks)) == 30
    whole, _ = load_breast_cancer(return_X_y=True)
    for path in files:
        frame = read(path)
        assert len(frame) == 512 and set(frame["person"]) < everyone
        for name in set(frame) - {"person"}:  # every column is one of the table's
            number = int(name.removeprefix("feature-"))
            assert set(frame[name]) <= set(whole[:, number])


# --- columns ------------------------------------------------------------------------------------


def own_file(path: Path, **words: Any) -> OwnFile:
    return OwnFile(str(path), id=ID, party=1, **words)


def prepared(own: OwnFile, train: Array, test: Array) -> tuple[Array, Array, Preparation]:
    preparation = own.learn(train)
    return own.rows(train, preparation), own.rows(test, preparation), preparation


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_scaled_by_the_training_rows_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    values = np.array([1.0, 3.0, 100.0, 5.0, -50.0])
    constant = np.full(5, 7)
    write(pd.DataFrame({ID: range(5), "a": values, "b": constant}), path)
    train, test, preparation = prepared(own_file(path), np.array([3, 0, 1]), np.array([2, 4]))
    deviation = np.std([5, 1, 3])
    assert train.dtype == test.dtype == np.float32
    np.testing.assert_allclose(train[:, 0], (np.array([5, 1, 3]) - 3) / deviation, rtol=1e-6)
    np.testing.assert_allclose(test[:, 0], (np.array([100, -50]) - 3) / deviation, rtol=1e-6)
    assert not train[:, 1].any() and not test[:, 1].any()
    again = own_file(path).rows(np.array([2, 4]), preparation)
    np.testing.assert_array_equal(again, test)


def operations(path: Path, columns: int) -> dict[str, int]:
    """Reads of a schema, and columns taken out of a frame, until a party's rows are prepared."""
    frame = pd.DataFrame(np.arange(20.0 * columns).reshape(20, columns) % 7).add_prefix("c")
    write(frame.assign(**{ID: np.arange(20)}), path)
    schema, take, rows = pq.read_schema, pd.DataFrame.__getitem__, np.arange(20)
    taken: list[Any] = []

    def takes(self: pd.DataFrame, key: Any) -> Any:
        taken.append(key)
        return take(self, key)

    with (
        patch.object(pq, "read_schema", side_effect=schema) as read_schema,
        patch.object(pd.DataFrame, "__getitem__", takes),
    ):
        own = source_of({"file": str(path), "id": ID}, 0)
        assert prepared(cast(OwnFile, own), rows[:15], rows[15:])[0].shape == (15, columns)
    named = sum(isinstance(each, str) for each in taken)
    return {"schemas": read_schema.call_count, "columns": named}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_wide_file_takes_no_more_operations(tmp_path: Path, suffix: str) -> None:
    narrow, broad = (operations(tmp_path / f"{n}{suffix}", n) for n in (20, 200))
    assert narrow == broad
    assert broad["schemas"] <= 2 and broad["columns"] <= 5


def test_a_schema_read_too_often_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once_a_column(self: OwnFile) -> str:
        types = [pq.read_schema(self.path).field(name).type for name in self.feature_names]
        return "table" if types else ""

    monkeypatch.setattr(OwnFile, "kind_of_features", property(once_a_column))
    assert operations(tmp_path / "wide.parquet", 200)["schemas"] >= 200


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_missing_numbers_become_the_training_rows_median(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write(pd.DataFrame({ID: range(6), "a": [1.0, 2.0, 90.0, None, None, 5000.0]}), path)
    own = own_file(path, missing="median")
    train, test, preparation = prepared(own, np.array([0, 1, 2, 3]), np.array([4, 5]))
    assert preparation.numbers == {"a": 2.0}  # of 1, 2 and 90
    np.testing.assert_allclose(train[3], train[1])
    np.testing.assert_allclose(test[0], train[1])
    assert preparation.mean == [pytest.approx((1 + 2 + 90 + 2) / 4)]


@pytest.mark.parametrize("dtype", ["Int64", "Float64"])
def test_nullable_columns_of_parquet_are_numbers(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.parquet"
    column = pd.Series([1, 0, 1, None], dtype=dtype)
    write(pd.DataFrame({ID: range(4), "a": column}), path)
    with pytest.raises(ConfigError, match="has missing values in its features"):
        prepared(own_file(path), np.array([0, 1]), np.array([2, 3]))
    train, test, _ = prepared(own_file(path, missing="median"), np.arange(3), np.array([3]))
    np.testing.assert_allclose(test[0], train[0])
    empty = pd.DataFrame({ID: range(4), "a": pd.Series([None] * 4, dtype=dtype)})
    write(empty, path)
    with pytest.raises(ConfigError, match="has a column without any value"):
        prepared(own_file(path, missing="median"), np.arange(3), np.array([3]))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_text_column_becomes_one_column_for_each_value(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    colours = ["red", "blue", "red", "green", "blue"]
    write(pd.DataFrame({ID: range(5), "c": colours, "n": [0.0, 1.0, 2.0, 3.0, 4.0]}), path)
    own = own_file(path, text="one-hot")
    train, test, preparation = prepared(own, np.array([0, 1, 2]), np.array([3, 4]))
    assert preparation.texts == {"c": ["blue", "red"]}  # green is in no training row
    mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
    raw = np.concatenate([train, test]) * deviation + mean
    expected = [[0, 0, 1], [1, 1, 0], [2, 0, 1], [3, 0, 0], [4, 1, 0]]
    np.testing.assert_allclose(raw, expected, atol=1e-6)
    assert Preparation(**preparation.as_json()) == preparation


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_missing_text_is_refused_or_a_separate_value(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write(pd.DataFrame({ID: range(4), "c": ["red", None, "red", None]}), path)
    with pytest.raises(ConfigError, match="has missing values in its features"):
        prepared(own_file(path, text="one-hot"), np.arange(3), np.array([3]))
    own = own_file(path, text="one-hot", missing="median")
    train, test, preparation = prepared(own, np.arange(3), np.array([3]))
    assert preparation.texts == {"c": ["", "red"]}
    np.testing.assert_array_equal(test[0], train[1])


def test_a_text_column_of_many_values_is_refused(tmp_path: Path, own_log: list[str]) -> None:
    path = tmp_path / "a.csv"
    write(pd.DataFrame({ID: range(102), "name": [f"name {n}" for n in range(102)]}), path)
    own = own_file(path, text="one-hot")
    assert prepared(own, np.arange(100), np.array([100, 101]))[0].shape == (100, 100)
    with pytest.raises(ConfigError, match=r"has a text column with more than 100 values\. Leave"):
        prepared(own, np.arange(101), np.array([101]))
    assert any("column 'name' has 102 values" in line for line in own_log)


def test_columns_name_those_that_are_features(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(small(), path)
    assert own_file(path, label="label").feature_names == ["f0", "f1", "f2", "f3"]
    assert own_file(path, columns="f3, f1").feature_names == ["f3", "f1"]
    rows = np.arange(60)
    two = prepared(own_file(path, columns="f3,f1"), rows[:40], rows[40:])[0]
    alone = prepared(own_file(path, columns="f1"), rows[:40], rows[40:])[0]
    np.testing.assert_array_equal(two[:, 1], alone[:, 0])


# --- what is told of them -----------------------------------------------------------------------

SENTINEL = "zebrafish"
NUMBER = 987654.321  # a value
LONG_ID = 7236454152718


def telling() -> pd.DataFrame:
    """A table whose ids, column names and values can be searched for in bytes."""
    table = small()
    table[ID] = LONG_ID + 997 * np.arange(len(table))
    table = table.rename(columns={"f1": f"{SENTINEL}-1", "f3": f"{SENTINEL}-3"})
    table.loc[::3, f"{SENTINEL}-3"] = NUMBER
    return table


def assert_tells_nothing(messages: list[bytes], *more: str) -> None:
    table = telling()
    secret = [SENTINEL, SENTINEL.upper(), str(NUMBER), *more]
    words = [text.encode() for text in secret] + [text.encode("utf-16-le") for text in secret]
    for number in table[ID].tolist():
        words += [str(number).encode(), number.to_bytes(8, "little"), number.to_bytes(8, "big")]
        words += [np.float64(number).tobytes()]
    columns = [name for name in table if name not in (ID, "label")]
    for name in columns:
        values = table[name].to_numpy()
        rows = np.arange(len(values))
        # Numbers with many zero bits, such as 2.375, may come by chance.
        words += [each for each in map(np.float64.tobytes, values) if each.count(0) < 4]
        words += [str(value).encode() for value in values if len(str(value)) > 5]
        # Pairs of rows as a model reads them; four bytes alone may come by chance.
        scaled = ((values - values.mean()) / values.std()).astype(np.float32)
        words += [scaled[row : row + 2].tobytes() for row in rows[:-1]]
    assert len(messages) > 0
    for message in messages:
        assert not [word for word in words if word in message]


@pytest.mark.one_by_day
@pytest.mark.parametrize("align", ["psi", "ids"])
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "dpzv"])
def test_no_message_holds_an_id_a_column_name_or_a_value(
    tmp_path: Path, align: str, strategy: str
) -> None:
    organisations = cut(tmp_path, telling(), known=1)
    recorder = Recorder()
    keys = {**SHORT, "align": align, "strategy": strategy}
    if strategy == "dpzv":
        keys |= {"noise-multiplier": 1.0, "noise-seed": 0}  # neither is accounted for
    organisations.run("run", keys, recorder)  # type: ignore[arg-type]
    assert_tells_nothing(recorder.sent, str(tmp_path))
    labels = [str(number).encode() for number in telling()[ID]]
    assert not [word for word in labels for message in recorder.orders if word in message]


def test_the_search_finds_what_is_there() -> None:
    with pytest.raises(AssertionError):
        assert_tells_nothing([b"..." + np.float64(LONG_ID + 997).tobytes()])
    with pytest.raises(AssertionError):
        assert_tells_nothing([b"...zebrafish-3..."])


THIRD = f"{SENTINEL}-3"  # a column


def cells(value: Any, rows: slice = slice(0, 1)) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Put a value into some rows of the third column."""

    def put(frame: pd.DataFrame) -> pd.DataFrame:
        column = frame[THIRD].tolist()
        column[rows] = [value] * len(column[rows])
        return frame.assign(**{THIRD: column})

    return put


def texts(form: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Make the third column one of texts, from the rows' numbers."""
    return lambda frame: frame.assign(**{THIRD: [form.format(1 + n % 28) for n in range(60)]})


def ids(how: Callable[[pd.Series], Any]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**{ID: how(frame[ID])})


def as_it_is(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


ID_COLUMN = "does not have the id column that `id` names"


def bad(spoil: Any, sentence: str, in_log: str = "", **words: Any) -> tuple[Any, ...]:
    """Return how a file is spoilt, the node's words, and what is said to all and to the party."""
    return spoil, words, sentence, in_log


NO_ID = f"{SENTINEL}-id"
BAD: dict[str, tuple[Any, ...]] = {
    "not there": bad(lambda f: None, "file is not there", "no such file"),
    "of another kind": bad(as_it_is, "is neither .csv, .csv.gz nor", ".xlsx", name="a.xlsx"),
    "no parquet": bad(lambda f: b"a,b", "cannot be read as a table", "Arrow", name="a.parquet"),
    "empty": bad(lambda f: b"", "is empty. Give it a line of column names", "0 bytes"),
    "semicolons": bad(lambda f: b"who;f1\n1;2,5\n", "has semicolons between its", "no commas"),
    "no text": bad(lambda f: b"\xff\xfe\0,\x81\n", "is not UTF-8. Write it as UTF-8"),
    "no id column": bad(lambda f: f.rename(columns={ID: NO_ID}), ID_COLUMN, NO_ID),
    "no column of that name": bad(as_it_is, ID_COLUMN, SENTINEL, id=f"{SENTINEL}-7"),
    "an id twice": bad(ids(lambda x: x.where(x.index > 0, x.iloc[1])), "1 row that repeats the"),
    "a missing id": bad(ids(lambda x: x.where(x.index > 0)), "missing ids"),
    "a missing text": bad(ids(lambda x: ("p" + x.astype(str))[1:]), "has 1 missing ids"),
    "text": bad(cells("zebrafish soup"), "has a column that is not numeric", THIRD),
    "decimal commas": bad(texts("{},5"), "numbers have decimal commas. Write points", THIRD),
    "dates": bad(texts("{}.3.24"), "be read in two ways. Write them", THIRD, columns=THIRD),
    "missing": bad(cells(None), "has missing values in its features", THIRD),
    "infinite": bad(cells(np.inf), "has infinite values", THIRD),
    "too large": bad(cells(1e300, slice(0, 2)), "has numbers that are too large", "infinite"),
    "empty column": bad(
        cells(None, slice(None)), "has a column without any value in", THIRD, missing="median"
    ),
    "absent columns": bad(as_it_is, "does not have the columns", THIRD, columns=f"f2,{THIRD}9"),
    "the labels": bad(lambda f: f.assign(label=f[ID] % 2), "a column of the label's name, so the"),
    "no rows": bad(lambda f: f[:0], "has no rows. Name a file with rows"),
    "a column twice": bad(as_it_is, "or has one twice", "f2,f2", columns="f2,f2"),
    "only ids": bad(lambda f: f[[ID]], "has no feature columns", "only ids"),
    "no file named": bad(as_it_is, "has named no file. Start its SuperNode with", file=""),
    "a wrong word": bad(as_it_is, "must be 'refuse' or 'median'", missing="drop"),
    "another wrong word": bad(as_it_is, "'refuse', 'one-hot' or 'tokens'", text="embed"),
    "a number for a word": bad(as_it_is, "must be a text in quotes", id=3),
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_file_is_told_without_its_values(
    tmp_path: Path, own_log: list[str], kind: str
) -> None:
    spoil, given, sentence, in_log = BAD[kind]
    words = {"id": ID, **given}
    path = tmp_path / words.pop("name", "party-1.csv")
    table = spoil(telling().drop(columns="label"))
    if isinstance(table, bytes):
        path.write_bytes(table)
    elif table is not None:
        table.to_csv(path, index=False)
    with pytest.raises(ConfigError) as raised:
        own = source_of({"file": str(path), **words}, 1)
        rows = Alignment("a" * 32, np.arange(len(own.ids)))
        load_own_features(resolve({"dataset": "files:labels.csv"}).data, own, rows)
    message = str(raised.value)
    assert sentence in message and message.count("arty 1") == 1
    assert message[-1] in ".?" and "\n" not in message and str(tmp_path) not in message
    assert SENTINEL not in message and re.search(r"\d{6}", message) is None
    assert not in_log or any(in_log in line and path.name in line for line in own_log)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (cells("zebrafish soup"), "has a column that is not numeric"),
        (ids(lambda each: "p" + each.astype(str)), "Use the same kind of id at both"),
        (ids(lambda each: each + 0.5), "has none of the 60 ids"),
        (ids(lambda each: each + 10**9), "has none of the 60 ids"),
    ],
)
def test_a_run_tells_nothing_of_a_wrong_file(tmp_path: Path, spoil: Any, sentence: str) -> None:
    organisations = cut(tmp_path / "place", telling(), known=1)
    change(organisations.files[1], spoil)
    recorder = Recorder()
    with pytest.raises((ConfigError, PartyError), match=sentence) as raised:
        organisations.run("run", SHORT, recorder)  # type: ignore[arg-type]
    message = str(raised.value)
    assert message.count("arty 1") == 1 and "on node" not in message and "raised" not in message
    assert SENTINEL not in message and re.search(r"\d{6}", message) is None
    assert_tells_nothing(recorder.sent, str(organisations.folder), "party-1.")


def test_a_feature_that_is_called_as_the_labels_is_used_where_it_is_named(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(), known=1)
    feature = read(organisations.files[1]).columns.drop(ID)[0]
    change(organisations.files[1], lambda frame: frame.rename(columns={feature: "label"}))
    organisations.words = [{}, {"columns": "label"}]
    assert organisations.run("run", SHORT).summary["failure"] is None


MANY = {f"c{n}": 0.0 for n in range(9)}
LABEL_HOLDERS: dict[str, tuple[Any, ...]] = {
    "not there": bad(lambda f: None, "labels.csv is not there"),
    "no path": bad(as_it_is, "is not there", dataset="files:"),
    "no label column": bad(as_it_is, "column 'lebal': did you mean 'label'", label="lebal"),
    "no id column": bad(as_it_is, f"{ID_COLUMN}: id = 'nobody', .* Correct `id`", id="nobody"),
    "no id column, of many columns": bad(
        lambda f: f.assign(**MANY), r"its columns are .*c\d, \.\.\.\. Correct `id`\.$", id="nobody"
    ),
    "missing labels": bad(
        lambda f: f.assign(label=f.label.where(f.index > 3)),
        "Column 'label' of .*labels.csv has missing labels. Drop those rows",
    ),
    "an id twice": bad(lambda f: pd.concat([f, f[:2]]), "has 2 rows that repeat the id"),
    "missing values": bad(
        lambda f: f.assign(own=[None, *range(1, len(f))]),
        "labels.csv has missing values in its features.*column 'own' has 1 in 60 rows",
    ),
    "missing values in all rows": bad(  # some of them held out
        lambda f: f.assign(own=f.index.where(f.index % 2), b=None),
        r"missing values: 'own' \(30 in 60 rows\)\n  columns without any value: 'b'",
        columns="own,b",
    ),
    "semicolons": bad(
        lambda f: f.to_csv(index=False, sep=";"),
        r"labels.csv has semicolons between its columns.*sep=';', dtype=str, keep",
    ),
    "absent columns": bad(as_it_is, "does not have the columns", columns="gone"),
    "one class": bad(lambda f: f.assign(label=1), "take 1 values in 60 rows"),
}


@pytest.mark.parametrize("kind", LABEL_HOLDERS)
def test_what_is_wrong_with_the_label_holders_file_is_said(tmp_path: Path, kind: str) -> None:
    spoil, keys, sentence, _ = LABEL_HOLDERS[kind]
    organisations = cut(tmp_path, small(), known=1)
    table = spoil(read(organisations.labels))
    organisations.labels.unlink()
    if isinstance(table, str):
        organisations.labels.write_text(table)
    elif table is not None:
        write(table, organisations.labels)
    with pytest.raises(ConfigError, match=sentence) as raised:
        organisations.run("run", {**SHORT, **keys})
    assert str(raised.value).endswith(".")


def test_a_number_of_parties_that_nobody_gave_is_said_to_be_the_default(tmp_path: Path) -> None:
    from vfl_flower.launch.engines import prepare

    keys = {"dataset": f"files:{cut(tmp_path, small()).labels}"}
    with pytest.raises(ConfigError, match=r"each of the 4 parties \(--parties is 4 by default\)\."):
        prepare(4, keys, ())


# --- those who do not keep to the protocol ------------------------------------------------------


class Lying:
    """The ClientApp, but for what a party answers when it is asked to align."""

    def __init__(self, lie: Callable[[Any], Any], kind: type[Introduction] = Aligned) -> None:
        self.lie, self.kind = lie, kind

    def __call__(self, message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        kinds = {"query.set": SetKept, "query.align": Aligned}
        said = kinds.get(message.metadata.message_type)
        if context.node_config["partition-id"] == 1 and said is self.kind:
            return to_reply(self.lie(read_reply(reply, self.kind)), message)
        return reply


def arrays(**changes: Callable[[Any], Any]) -> Callable[[Aligned], Aligned]:
    return lambda answer: replace(
        answer,
        arrays={key: changes.get(key, lambda a: a)(each) for key, each in answer.arrays.items()},
    )


def gone(*places: int) -> Callable[[Aligned], Aligned]:
    return arrays(gone=lambda a: np.array(places, np.int32))


def without(name: str) -> Callable[[Aligned], Aligned]:
    return lambda answer: replace(
        answer, arrays={key: each for key, each in answer.arrays.items() if key != name}
    )


def twice(a: Array) -> Array:
    return np.concatenate([a[:-1], a[:1]])


PLACES = "sent an invalid list of places"
LIES = {  # and what is said after the party's name
    "too few": (arrays(again=lambda a: a[1:]), "did not blind exactly the 60 ids"),
    "nothing": (lambda answer: replace(answer, arrays={}), "did not blind exactly the 60"),
    "one number": (arrays(again=lambda a: a[0, 0]), "did not blind exactly the 60 ids"),
    "wide": (arrays(again=lambda a: a.repeat(2, axis=1)), r"sent .* shape \(60, 64\)"),
    "floats": (arrays(again=lambda a: a.astype(np.float32)), "sent .* are float32"),
    "none of its own": (without("own"), "sent 0 of 54 blinded ids, where 54 were due"),
    "flat": (arrays(own=lambda a: a.ravel()), "sent blinded ids that cannot be used"),
    "signed": (arrays(own=lambda a: a.view(np.int8)), "sent blinded ids that cannot"),
    "zeros": (arrays(again=lambda a: 0 * a), "sent blinded ids .*, or is the identity"),
    "no elements": (arrays(again=lambda a: a | 1), "sent blinded ids .* not an element"),
    "zeros of its own": (arrays(own=lambda a: 0 * a), "sent a blinded id more than once"),
    "others": (arrays(own=lambda a: a ^ 1), "has none of the 60 ids"),
    "twice": (arrays(own=twice), "sent a blinded id more than once"),
    "too many": (
        arrays(own=lambda a: np.concatenate([a, a[:1]])),
        "sent 55 of 54 blinded ids, where 54 were due",
    ),
    "a claim": (
        lambda answer: replace(answer, places=10**8 + 1),
        "sent 100000001 blinded ids, more than 100000000",
    ),
    "fewer than claimed": (
        lambda answer: replace(answer, places=10**8),
        "sent 54 of 100000000 blinded ids, where 262144 were due",
    ),
    "ours twice": (arrays(again=twice), "sent a blinded id more than once"),
    "another party": (lambda answer: replace(answer, party=0), "answers as party 0"),
    "a place beyond": (gone(54), "sent places without a row that do not exist"),
    "a place before": (gone(-1), "sent places without a row that do not exist"),
    "a place twice": (gone(3, 3), PLACES + " without a row"),
    "other places": (arrays(gone=lambda a: a.astype(np.int64)), PLACES),
    "table of places": (arrays(gone=lambda a: a[:, None]), PLACES),
}
FIRST_LIES = {
    "another party": (lambda answer: replace(answer, party=0), "partition-ids are \\[0, 0\\]"),
    "of another number": (lambda answer: replace(answer, parties=3), "Only 2 of the 3 nodes"),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("lie", "sentence", "kind"),
    [
        *((lie, f"^Party 1 {said}", Aligned) for lie, said in LIES.values()),
        *((*each, SetKept) for each in FIRST_LIES.values()),
    ],
    ids=[*LIES, *(f"first {each}" for each in FIRST_LIES)],
)
def test_a_party_that_answers_nonsense_is_refused(
    tmp_path: Path, lie: Callable[[Any], Any], sentence: str, kind: Any
) -> None:
    organisations = cut(tmp_path, small())
    with pytest.raises((ConfigError, PartyError), match=sentence) as raised:
        organisations.run("run", {**SHORT, "party-timeout": 3.0}, Lying(lie, kind))  # type: ignore[arg-type]
    assert str(raised.value)[-1] in ".?"
