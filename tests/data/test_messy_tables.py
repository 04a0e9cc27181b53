"""Messy tables: one message says all that they need, and what it says to paste works."""

import gzip
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vfl_flower
from vfl_flower.config import errors
from vfl_flower.config.errors import ConfigError, UnfitError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import table_file
from vfl_flower.data.memory import Frame
from vfl_flower.data.needs import frequent
from vfl_flower.data.on_disk import LargeTable, as_kind, of_size
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.source import Preparation
from vfl_flower.data.survey import surveyed
from vfl_flower.tools.cli import main

train: Any = vfl_flower.train  # with arguments that its types forbid
OPTIONS = {"label": "defaulted", "epochs": 1, "strategy": "split-nn"}


def messy(people: int, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return labels of a bank, and the messy columns of a shop and a clinic."""
    random = np.random.default_rng(seed)
    causes = random.normal(size=(people, 4))
    ids = np.array([f"{number:07d}" for number in random.permutation(3 * people)[:people]])
    rare = np.array(["north", "south", "east", "west", *(f"place {n}" for n in range(400))])
    chances = np.r_[np.full(4, 0.2), np.full(400, 0.2 / 400)]
    income = pd.Series(np.exp(causes[:, 0] + 10).round(2)).where(random.random(people) > 0.1)
    since = np.datetime64("2015-01-01") + random.integers(0, 3000, people)
    days = random.integers(0, 4000, people) + np.datetime64("2012-06-01")
    ages = random.integers(18, 90, people).astype(str).astype(object)
    bank = pd.DataFrame({"customer": ids, "defaulted": (causes.sum(1) > 0).astype(int)})
    shop = pd.DataFrame(
        {
            "customer": ids,
            "income": income,
            "since": np.datetime_as_string(since).astype(object),
            "region": rare[random.choice(404, people, p=chances)].astype(object),
            "zip": [f"{number:05d}" for number in random.integers(501, 9999, people)],
            "married": np.where(random.random(people) < 0.1, "", "yes").astype(object),
            "age": np.where(random.random(people) < 0.02, "NA", ages),
            "name": [f"name {number}" for number in random.integers(0, 10**9, people)],
            "constant": 1,
            "x": causes[:, 1],
        }
    ).replace("", None)
    clinic = pd.DataFrame(
        {
            "customer": ids,
            "a": np.where(np.arange(people) == 7, np.inf, causes[:, 2]),
            "b": pd.Series(causes[:, 3]).where(np.arange(people) % 7 > 0),
            "seen": [pd.Timestamp(day).strftime("%d/%m/%Y") for day in days],
            "weight": [f"{number},5" for number in random.integers(50, 99, people)],
            "salary": [f"{number},500" for number in random.integers(10, 99, people)],
            "smoker": np.where(causes[:, 2] > 0, "y", "n"),
            "empty": None,
        }
    )
    clinic["born"] = pd.to_datetime(since)
    return {"bank": bank, "shop": shop.sample(frac=0.95, random_state=seed), "clinic": clinic}


def written(folder: Path, tables: dict[str, pd.DataFrame], suffix: str) -> dict[str, Path]:
    paths = {name: folder / f"{name}{suffix}" for name in tables}
    for name, path in paths.items():
        save = pd.DataFrame.to_parquet if suffix == ".parquet" else pd.DataFrame.to_csv
        save(tables[name], path, index=False)
    return paths


def shell(paths: dict[str, Path], nodes: list[str], out: Path) -> list[str]:
    keys = f"dataset='files:{paths['bank']}' id='customer' label='defaulted' epochs=1"
    configs = [part for node in nodes for part in ("--node-config", node)]
    return ["run", "-c", keys, *configs, "--out", str(out), "--quiet"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_the_second_command_works_on_messy_files(tmp_path: Path, capsys: Any, suffix: str) -> None:
    paths = written(tmp_path, messy(300), suffix)
    nodes = [f"file='{paths[name]}' id='customer'" for name in ("shop", "clinic")]
    assert main(shell(paths, nodes, tmp_path / "first")) == 1
    said = capsys.readouterr().err
    pasted = [shlex.split(line)[1] for line in said.splitlines() if "--node-config" in line]
    assert len(pasted) == 2 and "zip" in pasted[0]
    assert main(shell(paths, pasted, tmp_path / "second")) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert summary["failure"] is None


@pytest.mark.nightly
def test_the_second_call_works_on_messy_frames() -> None:
    tables = messy(500)
    features = [tables["shop"], tables["clinic"]]
    with pytest.raises(VflError) as refused:
        train(features, tables["bank"], id="customer", **OPTIONS)
    said = str(refused.value)
    *code, call = said.partition("Use:\n")[2].splitlines()
    for line in code:
        exec(line.strip(), {"features": features})
    options = eval(call.strip().replace("train(..., ", "dict("))
    with pytest.raises(VflError, match="'born'"):  # each option is needed
        train(features, tables["bank"], id="customer", **OPTIONS, text="one-hot")
    model = train(features, tables["bank"], id="customer", **OPTIONS, **options)
    assert model.summary["failure"] is None
    for column in ("income", "since", "region", "zip", "age", "name", "a", "b", "seen", "empty"):
        assert f"'{column}'" in said
    assert "Party 0" in said and "Party 1" in said
    assert "20" + "15-" not in said and tables["shop"]["name"].iloc[0] not in said


def test_gaps_of_ids_and_labels_are_told_too(tmp_path: Path, capsys: Any) -> None:
    tables = messy(300)
    tables["bank"] = tables["bank"].astype({"defaulted": "Int64"})
    tables["bank"].loc[3:5, "defaulted"] = None
    tables["shop"].iloc[:2, 0] = None
    tables["clinic"] = pd.concat([tables["clinic"], tables["clinic"][:4]])
    paths = written(tmp_path, tables, ".csv")
    nodes = [f"file='{paths[name]}' id='customer'" for name in ("shop", "clinic")]
    assert main(shell(paths, nodes, tmp_path / "first")) == 1
    said = capsys.readouterr().err
    for each in ("'defaulted' (3 in 300", "2 missing ids", "4 rows that repeat", "'since'"):
        assert each in said


def test_others_learn_kinds_and_the_owner_columns(tmp_path: Path, own_log: list[str]) -> None:
    path = written(tmp_path, messy(300), ".csv")["shop"]
    own = OwnFile(str(path), id="customer", party=0)
    with pytest.raises(ConfigError) as refused:
        own.learn(np.arange(100))
    said = str(refused.value)
    assert "dates" in said and "missing values" in said and "\n" not in said
    named = [name for name in own.feature_names if repr(name) in said]
    assert not named and all(f"'{name}'" in own_log[-1] for name in ("income", "since", "zip"))


# --- dates and rare levels ------------------------------------------------------------------------

DATES = {
    "days": ["2024-01-31", "2024-02-01", "2023-12-31"],
    "one digit": ["2024-1-31", "2024-2-1", "2023-12-31"],
    "slashes": ["2024/01/31", "2024/02/01", "2023/12/31"],
    "points": ["31.1.2024", "1.2.2024", "31.12.2023"],
    "midnight": ["2024-01-31 00:00", "2024-02-01T00:00:00", "2023-12-31 00:00:00.0"],
    "nanoseconds": ["2024-01-31 00:00:00.000000000", "2024-02-01", "2023-12-31"],
    "zones": ["2024-01-31T02:00+02:00", "2024-02-01T00:00Z", "2023-12-30T19:00-0500"],
}


def of_dates(path: Path, values: list[Any]) -> list[Any]:
    frame = pd.DataFrame({"who": range(len(values)), "d": pd.Series(values, dtype=object)})
    frame.to_csv(path.with_suffix(".csv"), index=False)
    frame.astype({"d": str}).to_parquet(path.with_suffix(".parquet"))
    words: dict[str, Any] = {"id": "who", "dates": "days", "party": 0}
    files = [OwnFile(str(path.with_suffix(each)), **words) for each in (".csv", ".parquet")]
    large = (as_kind(LargeTable, each) for each in files)
    return [*files, *large, Frame("f", frame=frame, **words)]


@pytest.mark.one_by_day
@pytest.mark.parametrize("form", DATES)
def test_dates_are_days_since_the_newest_training_date(tmp_path: Path, form: str) -> None:
    kinds = of_dates(tmp_path / "old", DATES[form])
    newer = of_dates(tmp_path / "new", ["2024-03-01", "2024-01-31"])
    preparations = set()
    for own, later in zip(kinds, newer[1:] + newer[:1], strict=True):  # of another kind
        learnt = own.learn(np.array([0, 2]))  # the newest date of all rows is in the second one
        raw = own.rows(np.arange(3), learnt)[:, 0] * learnt.deviation[0] + learnt.mean[0]
        np.testing.assert_allclose(raw, [0, 1, -31], atol=1e-5)
        preparations.add(written := json.dumps(learnt.as_json()))
        kept = Preparation(**json.loads(written))
        raw = later.rows(np.arange(2), kept)[:, 0] * learnt.deviation[0] + learnt.mean[0]
        np.testing.assert_allclose(raw, [30, 0], atol=1e-5)
    assert len(preparations) == 1  # so each kind of later file gives the same by any of them


def test_typed_dates_are_read_as_their_texts() -> None:
    days = pd.to_datetime(["2024-01-31", "2024-02-01", None])
    words: dict[str, Any] = {"id": "who", "dates": "days", "missing": "median", "party": 0}
    made = []
    for column in (days, days.tz_localize("UTC"), days.date, days.astype(str)):
        frame = pd.DataFrame({"who": range(3), "d": column}).replace({"NaT": None, "nan": None})
        own = Frame("f", frame=frame, **words)
        made.append(own.rows(np.arange(3), own.learn(np.arange(3))))
    for each in made:
        np.testing.assert_array_equal(each, made[0])


@pytest.mark.parametrize("text", ["31/01/2024", "01-02-2024", "1.3.24", "2024-13-01", "2024-02-30"])
def test_a_date_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, text: str) -> None:
    for own in of_dates(tmp_path / "old", [text] * 3):
        with pytest.raises(ConfigError, match="holds dates"):
            own.learn(np.arange(3))


def test_later_values_that_are_no_dates_are_refused(tmp_path: Path) -> None:
    learnt = of_dates(tmp_path / "old", DATES["days"])[0].learn(np.arange(3))
    for later in of_dates(tmp_path / "new", ["2024-03-01", "soon"]):
        with pytest.raises(ConfigError, match="other columns than its model"):
            later.rows(np.arange(2), learnt)


def test_dates_are_decided_over_all_rows(tmp_path: Path) -> None:
    for own in of_dates(tmp_path / "old", [*DATES["days"], "unknown"]):
        with pytest.raises(ConfigError, match="texts among its numbers"):
            own.learn(np.arange(3))
    for own in of_dates(tmp_path / "old", DATES["days"]):  # the control
        own.learn(np.arange(2))


@pytest.mark.parametrize("option", ["days", "refuse"])
def test_raw_columns_have_the_dates_of_the_model(tmp_path: Path, option: str) -> None:
    for own in of_dates(tmp_path / "old", DATES["days"]):
        learnt, later = own.learn(np.arange(3)), replace(own, dates=option)
        [(_, days)] = later.raw_columns(np.arange(3), ["d"], learnt.dates)
        [(_, values)] = later.raw_columns(np.arange(3))  # without a model: its own option
        assert days.dtype == np.float64
        assert (values.dtype == np.float64) == (option == "days")


def test_a_prediction_needs_no_dates_option(tmp_path: Path, capsys: Any) -> None:
    shop = PRIVATE.assign(since=pd.date_range("2020-01-01", periods=60).astype(str))
    tables = {"bank": Y, "shop": shop}
    bank, path = written(tmp_path, tables, ".csv").values()
    node = f"file='{path}' id='id'"
    keys = f"dataset='files:{bank}' id='id' label='label' epochs=1"
    out = str(tmp_path / "run")
    dated = f"{node} dates='days'"
    assert main(["run", "-c", keys, "--node-config", dated, "--out", out, "--quiet"]) == 0
    new = ["predict", out, "-c", f"dataset='files:{bank}'", "--node-config", node]
    assert main(new) == 0, capsys.readouterr().err


@pytest.mark.parametrize("apart", [False, True], ids=["one frame", "two frames"])
@pytest.mark.parametrize("category", ["none", "no pet"])
def test_no_word_becomes_missing_that_is_a_category(apart: bool, category: str) -> None:
    pets = pd.DataFrame({"id": range(60), "pet": ["dog", category] * 30})
    words = PRIVATE.assign(income=["none", *map(str, range(59))])
    features = [words, pets] if apart else [words.merge(pets), PRIVATE]
    with pytest.raises(UnfitError) as refused:
        train(features, Y, id="id", label="label")
    said, _, code = str(refused.value).partition("Use:\n")
    assert ("other words among numbers: 'income'" in said) == (category == "none")
    assert ("missing_words='none'" in code) == (category != "none")
    assert ("drop(columns=['income'])" in code) == (category == "none")


def test_a_mapping_and_an_estimator_get_code_in_their_words() -> None:
    name = [f"{n},5" for n in range(60)]
    dates = pd.date_range("2020-01-01", periods=60).astype(str)
    frame = PRIVATE.assign(name=name, since=dates)
    with pytest.raises(UnfitError, match=r"features\['shop'\] = features\['shop'\].drop"):
        train({"bank": PRIVATE, "shop": frame}, Y, id="id", label="label")
    x = frame.drop(columns="id")
    found = vfl_flower.VerticalClassifier(parties=2, config={"text": "refuse"})
    with pytest.raises(UnfitError) as refused:
        found.fit(x, Y["label"])
    code = str(refused.value).partition("Use:\n")[2]
    assert "X = X.drop(columns=['name'])" in code and "config=dict(" in code
    assert "features[" not in code and "train(" not in code


def test_quotes_of_a_file_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {"a": pd.DataFrame({"id": range(9), "x": 1, "y": 2})}, ".csv")["a"]
    counted: list[Path] = []
    monkeypatch.setattr(table_file, "_check_quotes", counted.append)
    for times in (1, 2):  # another file object counts anew
        file = table_file.TableFile(path, True)
        for name in ("x", "y"):
            file.read([name])
        assert counted == [path] * times


def test_a_preparation_without_dates_is_written_as_before() -> None:
    assert "dates" not in Preparation({"a": 1.0}, {}, [0.0], [1.0]).as_json()


def test_rare_levels_share_no_column_and_the_owner_learns_it(own_log: list[str]) -> None:
    values = ["a", "b"] * 60 + [f"rare {n}" for n in range(110)]
    frame = pd.DataFrame({"who": range(len(values)), "c": values})
    own = Frame("f", frame=frame, id="who", text="one-hot", party=0)
    assert own.learn(np.arange(len(values))).texts == {"c": ["a", "b"]}
    assert "has 112 texts, and the 2 most frequent ones become columns" in own_log[-1]
    assert frequent(frame["c"][120:]) == []  # the rare ones alone are no categories
    assert len(frequent(frame["c"][:120])) == 2


ZIPS = [
    ["01234", "12345", "23456"],
    ["12345", "12345-6789", "23456", "02134"],
    ["1011", "1012", "1234AB", "0123"],
]


@pytest.mark.parametrize("values", ZIPS, ids=str)
def test_zip_codes_are_no_texts_among_numbers(values: list[str]) -> None:
    frame = pd.DataFrame({"who": range(40), "c": (40 * values)[:40]})
    with pytest.raises(ConfigError) as refused:
        Frame("f", frame=frame, id="who", party=0).learn(np.arange(40))
    assert "among" not in str(refused.value) and "one-hot" in str(refused.value)


def test_a_minus_before_names_leaves_columns_out(tmp_path: Path) -> None:
    frame = pd.DataFrame({"who": range(9), "a": 1.0, "b": 2.0, "c": 3.0})
    own = Frame("f", frame=frame, id="who", columns="-a, -c", party=0)
    assert own.feature_names == ["b"]
    learnt = own.learn(np.arange(9))
    more = Frame("f", frame=frame.assign(d=1), id="who", columns="-a,-c", party=0)
    with pytest.raises(ConfigError, match="other columns"):  # a new column is no secret feature
        more.rows(np.arange(9), learnt)
    named = Frame("f", frame=frame.rename(columns={"a": "-a"}), id="who", columns="-a", party=0)
    assert named.feature_names == ["-a"]
    with pytest.raises(ConfigError, match="does not have the columns"):
        Frame("f", frame=frame, id="who", columns="-z", party=0).learn(np.arange(9))
    later = Frame("f", frame=frame.drop(columns="a"), id="who", columns="-a,-c", party=0)
    np.testing.assert_array_equal(later.rows(np.arange(9), learnt), own.rows(np.arange(9), learnt))


# --- files that are no tables ---------------------------------------------------------------------

TABLE = ("id,x\n" + "".join(f"{n},{n % 7}.5\n" for n in range(900))).encode()
PACKED = gzip.compress(TABLE)
CONTENT: dict[str, tuple[str, bytes, str]] = {
    "an empty file": ("a.csv", b"", "is empty"),
    "blank lines": ("a.csv", b"\n \n", "has no column names"),
    "an empty gzip file": ("a.csv.gz", gzip.compress(b""), "has no column names"),
    "a header alone": ("a.csv", b"id,x\n", "has no rows"),
    "a zip file": ("a.csv", b"PK\x03\x04" + TABLE, "is a zip or Excel file"),
    "an old Excel file": ("a.csv", b"\xd0\xcf\x11\xe0" + TABLE, "is an Excel file"),
    "a parquet file as csv": ("a.csv", b"PAR1" + TABLE, "is a parquet file"),
    "a gzip file as csv": ("a.csv", PACKED, "is compressed by gzip"),
    "csv as gzip": ("a.csv.gz", TABLE, "is not compressed"),
    "a gzip file that was cut": ("a.csv.gz", PACKED[: len(PACKED) // 2], "is damaged"),
    "a gzip file without its end": ("a.csv.gz", PACKED[:-6], "is damaged"),
    "gzip with other bytes": ("a.csv.gz", PACKED[:200] + b"zzz" + PACKED[203:], "is damaged"),
    "csv as parquet": ("a.parquet", TABLE, "cannot be read"),
    "half a parquet file": ("a.parquet", b"PAR1" + TABLE, "cannot be read"),
    "another kind": ("a.xlsx", TABLE, "is neither .csv"),
    "Latin letters": ("a.csv", TABLE + "900,é\n".encode("latin-1"), "line 902 has the byte 0xe9"),
    "Latin names": ("a.csv", "id,é\n1,2\n".encode("latin-1"), "encoding='cp1252'"),
    "UTF-16": ("a.csv", TABLE.decode().encode("utf-16"), "encoding='utf-16'"),
    "UTF-16 without a mark": ("a.csv", TABLE.decode().encode("utf-16-le"), "NUL bytes"),
    "NUL bytes": ("a.csv", TABLE + b"900,\0\0\n", "has NUL bytes"),
    "a quote that does not end": ("a.csv", TABLE.replace(b"\n500,", b'\n500,"'), "line 502"),
    "one at the end": ("a.csv", TABLE + b'900,"1\n', "quote that does not end"),
    "JSON": ("a.csv", b'{"id": 1, "x": 2}\n', "id column"),
    "a page": ("a.csv", b"<!DOCTYPE html>\n<html><body>a, b</body></html>\n", "id column"),
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_file_that_is_no_table_gets_a_sentence(tmp_path: Path, kind: str, large: bool) -> None:
    name, content, sentence = CONTENT[kind]
    (tmp_path / name).write_bytes(content)
    for party in (None, 0):
        with pytest.raises(ConfigError) as refused:
            own = of_size(OwnFile(str(tmp_path / name), party=party))
            own = as_kind(LargeTable, own) if large else own
            _ = own.ids
            own.learn(np.arange(own.count))
        assert party is not None or sentence in str(refused.value)
        assert str(refused.value).endswith(".")


def test_unchecked_quotes_swallow_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_bytes(TABLE.replace(b"\n500,", b'\n500,"'))
    monkeypatch.setattr(table_file, "_check_quotes", lambda path: None)
    assert len(OwnFile(str(tmp_path / "a.csv")).ids) == 501


def test_quotes_in_values_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,x\n1,5" pipe\n2,"a ""b"""\n3,"two\nlines"\n')
    own = OwnFile(str(tmp_path / "a.csv"), text="one-hot")
    assert own.learn(np.arange(3)).texts["x"] == ['5" pipe', 'a "b"', "two\nlines"]


def made(path: Path, make: Callable[[Path], Any]) -> str:
    make(path)
    return str(path)


PLACES: dict[str, Callable[[Path], str]] = {
    "nowhere": lambda folder: f"{folder}/gone.csv",
    "a folder": lambda folder: made(folder / "a.csv", Path.mkdir),
    "a folder as parquet": lambda folder: made(folder / "a.parquet", Path.mkdir),
    "below a file": lambda folder: f"{folder}/ok.csv/a.csv",
    "a long name": lambda folder: f"{folder}/{'n' * 300}.csv",
    "a NUL character": lambda folder: f"{folder}/a\0.csv",
    "nobody's home": lambda folder: "~nobody-at-all/a.csv",
    "a pipe": lambda folder: made(folder / "pipe.csv", os.mkfifo),
    "a link to itself": lambda folder: made(folder / "loop.csv", lambda at: at.symlink_to(at)),
    "no path": lambda folder: "",
}


@pytest.mark.parametrize("kind", PLACES)
def test_each_path_gets_a_sentence(tmp_path: Path, kind: str) -> None:
    (tmp_path / "ok.csv").write_bytes(TABLE)
    path = PLACES[kind](tmp_path)
    for party in (None, 0):
        with pytest.raises(ConfigError, match=r"\.$"):
            of_size(OwnFile(path, party=party))
    for dataset in (f"csv:{path}", f"parquet:{path}", f"npz:{path}", f"svmlight:{path}"):
        with pytest.raises(VflError, match=r"\.$"):
            train(dataset=dataset)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="needs root, to be another user"
)
def test_another_users_folder_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TABLE)
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="cannot be opened: Permission denied"):
            of_size(OwnFile(str(tmp_path / "a.csv")))
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_that_vanishes_gets_a_sentence(tmp_path: Path, suffix: str) -> None:
    for read in (lambda own: own.ids, lambda own: own.learn(np.arange(3)), of_size):
        path = written(tmp_path, {"a": pd.DataFrame({"id": range(9), "x": 1.5})}, suffix)["a"]
        own = OwnFile(str(path))
        assert own.feature_names == ["x"]
        path.unlink()
        with pytest.raises(ConfigError, match="cannot be read"):
            read(own)


# --- values in errors -----------------------------------------------------------------------------

PRIVATE = pd.DataFrame({"id": range(60), "x": np.arange(60) + 987654.5})
Y = pd.DataFrame({"id": range(60), "label": np.arange(60) % 2})
TWO = [PRIVATE, PRIVATE.rename(columns={"x": "z"})]


def with_option(it: Any, option: str, **more: Any) -> Any:
    return train(TWO, Y, **{option: it}, **more)


WRONG: dict[str, Callable[[Any], Any]] = {
    "parties one by one": lambda it: train(it, it, Y),
    "one party": lambda it: train(it, Y),
    "swapped": lambda it: train(Y, TWO),
    "labels as labels": lambda it: train(TWO, it, id="id"),
    "a configuration": lambda it: train(TWO, Y, config=it),
    "a keyword twice": lambda it: train({"epochs": it}, TWO, Y, epochs=it),
    "a load": lambda it: train(TWO, Y, resume=it),
    **{
        option: partial(with_option, option=option)
        for option in ("epochs", "strategy", "loss", "label", "metrics", "class_weights", "id")
    },
    **{
        option: partial(with_option, option=option, id="id")
        for option in ("engine", "out", "parties", "columns", "text", "observer", "bottom_model")
    },
}
KINDS: dict[str, Callable[[], Any]] = {
    "frame": lambda: PRIVATE,
    "series": lambda: PRIVATE["x"],
    "array": lambda: PRIVATE.to_numpy(),
    "list": lambda: PRIVATE["x"].tolist(),
    "dictionary": lambda: PRIVATE.to_dict("list"),
}


@pytest.mark.parametrize("made", KINDS)
@pytest.mark.parametrize("place", WRONG)
def test_no_error_shows_rows(place: str, made: str) -> None:
    with pytest.raises((VflError, TypeError)) as refused:
        WRONG[place](KINDS[made]())
    assert "98765" not in str(refused.value) and len(str(refused.value)) < 600


def test_without_the_bound_an_error_would_show_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vfl_flower.api import own_code

    monkeypatch.setattr(own_code, "shown", repr)
    with pytest.raises(ConfigError, match="98765"):
        train(PRIVATE, PRIVATE, Y)
    assert errors.shown("x" * 999) < repr("x" * 300) and errors.shown(0.5) == "0.5"


def test_ids_of_two_columns_are_to_be_joined(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"<list of length 2>.* Join"):
        train(TWO, Y, id=["id", "x"])
    PRIVATE.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ConfigError, match="Join"):
        _ = OwnFile(str(tmp_path / "a.csv"), id="id,x").ids
    assert not re.search("Join", str(ConfigError("id")))


# --- cells stay with their owner, and shells run none ---------------------------------------------

CELL = "Alice Smith HIV+"
GAPS = {"income": [CELL, *map(str, range(59))], "z": [None, *range(59)]}


@pytest.mark.parametrize("whose", ["label holder", "party"])
@pytest.mark.parametrize("files", [False, True], ids=["frames", "files"])
def test_results_have_no_cell_of_a_refused_table(tmp_path: Path, whose: str, files: bool) -> None:
    of_party = whose == "party"
    tables = {
        "bank": Y.assign(**({} if of_party else GAPS)),
        "shop": PRIVATE.assign(**(GAPS if of_party else {})),
    }
    out = tmp_path / "run"
    with pytest.raises(VflError) as refused:
        if files:
            paths = written(tmp_path, tables, ".csv")
            keys = {"dataset": f"files:{paths['bank']}", "id": "id", "label": "label", "out": out}
            node = {"file": str(paths["shop"]), "id": "id"}
            vfl_flower.run_local(1, {**keys, "out": str(out)}, node_configs=[node])
        else:
            train([tables["shop"]], tables["bank"], id="id", label="label", out=out)
    failure = json.loads((out / "summary.json").read_text())["failure"]
    assert CELL not in failure and "words among numbers" in failure
    if not (of_party and files):  # the owner of all tables reads the cell: it could have leaked
        assert CELL in str(refused.value)
    if isinstance(refused.value, errors.UnfitError):
        assert CELL not in refused.value.outside  # which the SuperLink gets


def test_others_learn_no_first_line_of_a_file_without_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{CELL},1\nBob,2\n")
    own = OwnFile(str(tmp_path / "a.csv"), label="y")
    for read in (lambda: own.ids, own.check_labels):
        with pytest.raises(ConfigError, match="Alice") as refused:
            read()
        assert "Alice" not in refused.value.outside and "Correct" in refused.value.outside.title()


RUN = ["`id`", "$(touch ran)", "$HOME", "a!b", 'a"b', "a\\b", "\x1b[31m", "a'b", "x,y"]


@pytest.mark.parametrize("place", ["word", "column", "file"])
@pytest.mark.parametrize("text", RUN, ids=ascii)  # "/x,y" is a path that an option can name
def test_what_is_to_be_pasted_runs_nothing(tmp_path: Path, text: str, place: str) -> None:
    column = f"name{text}" if place == "column" else "name"
    shop = PRIVATE.assign(**{column: [f"{n},5" for n in range(60)], "z": GAPS["z"]})
    shop["age"] = [text if place == "word" else "NA", *map(str, range(59))]
    paths = written(tmp_path, {"bank": Y, f"s{text * (place == 'file')}": shop}, ".csv")
    bank, path = paths.values()
    config = RunConfig.of({"dataset": f"files:{bank}", "id": "id", "label": "label"})
    node = {"file": str(path), "id": "id"}
    with pytest.raises(UnfitError) as refused, surveyed(config, [node]):
        raise UnfitError("no table")
    said, _, to_paste = str(refused.value).partition("Use:\n")
    to_paste = to_paste.replace("sx,y", "s")
    assert text not in to_paste and "missing='median'" in to_paste
    assert "\x1b" not in said or place == "file"
    assert (repr(text) in said) == (place == "word")
    assert ("Rename columns" in said) == (place == "column" or (place == "file" and text != "x,y"))


# --- what to paste --------------------------------------------------------------------------------


def test_advice_keeps_zeros_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{n:03d};0{n}000;1.{n}00,5;NA\n" for n in range(1, 9)]
    Path("a.csv").write_text("id;zip;a;b\n" + "".join(rows))
    for column in ("", "a"):  # first the separators, then the decimal commas
        own = OwnFile("a.csv", text="one-hot" if not column else "refuse")
        with pytest.raises(ConfigError, match=r"pandas.read_csv\(FILE") as refused:
            own.learn(np.arange(8))
        (call,) = re.findall(r"pandas\.read_csv\(.*?index=False\)", str(refused.value))
        call = call.replace("FILE", "'a.csv'").replace("COLUMN", column)
        eval(call, {"pandas": pd})
    assert Path("a.csv").read_text().splitlines()[1] == "001,01000,1100.5,NA"


def refusal(folder: Path, bank: pd.DataFrame, shop: pd.DataFrame, node_id: str, label: str) -> str:
    """Return what a run on these tables says, and on a party whose `id` is as given."""
    paths = written(folder, {"bank": bank, "shop": shop}, ".csv")
    config = RunConfig.of({"dataset": f"files:{paths['bank']}", "id": "id", "label": label})
    node = {"file": str(paths["shop"]), "id": node_id}
    own = OwnFile(str(paths["bank"]), id="id", label=label)
    with pytest.raises(VflError) as refused, surveyed(config, [node]):
        own.check()
        raise UnfitError("no table")
    return str(refused.value)


def test_an_absent_label_is_in_the_message_about_all_tables(tmp_path: Path) -> None:
    bank = pd.DataFrame({"id": range(60), "default": [0, 1] * 30})
    shop = pd.DataFrame({"id": range(60), "zone": ["a", "b", "c"] * 20})
    said = refusal(tmp_path, bank, shop, "id", "label")
    assert "no label column: 'label', set label='default'" in said
    assert "in -c: label='default'" in said and "text='one-hot'" in said
    said = refusal(tmp_path, bank.assign(age=1), shop, "id", "label")
    assert "label='...' with one of default, age" in said and "in -c" not in said
    said = refusal(tmp_path, bank, shop[["id"]].assign(zone=1), "id", "label")
    assert said.endswith("bank.csv has no label column 'label': set label='default'.")


def test_a_file_that_cannot_be_used_is_in_the_message_about_all_tables(tmp_path: Path) -> None:
    bank = pd.DataFrame({"id": range(60), "label": [0, 1] * 30})
    zones = pd.DataFrame({"id": range(60), "zone": ["a", "b", "c"] * 20})
    files = {name: str(path) for name, path in written(tmp_path, {"shop": zones}, ".csv").items()}
    bank.to_csv(tmp_path / "bank.csv", index=False)
    bank.to_csv(tmp_path / "points.csv", index=False, sep=";")
    nodes = [{"file": files["shop"], "id": "id"}, {"file": f"{tmp_path}/points.csv", "id": "id"}]
    for name, lacks_bank in (("bank", False), ("absent", True)):
        config = RunConfig.of({"dataset": f"files:{tmp_path}/{name}.csv", "id": "id"})
        with pytest.raises(VflError) as refused, surveyed(config, nodes):
            raise UnfitError("no table")
        said = str(refused.value)
        assert ("The label holder's table:" in said) == lacks_bank
        assert ("absent.csv" in said) == lacks_bank
        assert "Party 1's table:\n  cannot be used: " in said and "has semicolons" in said
        assert said.count("--node-config") == 1 and "shop.csv' id='id' text='one-hot'" in said


def test_a_table_with_a_wrong_id_has_nothing_to_paste(tmp_path: Path) -> None:
    bank = pd.DataFrame({"id": range(60), "default": [0, 1] * 30})
    shop = pd.DataFrame({"id": [f"p{n}" for n in range(60)], "zone": ["a", "b", "c"] * 20})
    assert "--node-config" in refusal(tmp_path, bank, shop, "id", "default")  # the control
    client = shop.rename(columns={"id": "client"})
    for wrong, table in (("person", client), ("zone", shop)):
        said = refusal(tmp_path, bank.assign(age="x"), table, wrong, "default")
        assert "ids: " in said and "--node-config" not in said and "-id" not in said


def test_the_id_column_of_the_label_holder_is_offered_to_a_party(tmp_path: Path) -> None:
    """A party's own `id` is "id" unless it says otherwise: the commonest first mistake."""
    bank = pd.DataFrame({"id": range(60), "label": [0, 1] * 30})
    shop = pd.DataFrame({"id": [f"p{n}" for n in range(60)], "zone": ["a", "b", "c"] * 20})
    said = refusal(tmp_path, bank, shop, "person", "label")
    assert said.endswith(f"--node-config \"file='{tmp_path}/shop.csv' id='id' text='one-hot'\"")
    said = refusal(tmp_path, bank, shop.assign(zone=1), "person", "label")  # it is the only need
    assert said.endswith("shop.csv' id='id'\"")
    said = refusal(tmp_path, bank, shop.assign(id=7), "person", "label")  # nobody's ids either
    assert "--node-config" not in said


def test_a_later_file_with_other_columns_is_told_the_options_of_training(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": range(9), "a": range(9), "zip": range(9)})
    paths = written(tmp_path, {"old": table, "new": table.assign(a=["x", *range(8)])}, ".csv")
    learnt = OwnFile(str(paths["old"]), columns="a").learn(np.arange(9))
    for columns, ask in (("", "Set columns='a', to"), ("a", "set missing-words=")):
        with pytest.raises(ConfigError, match=ask):
            OwnFile(str(paths["new"]), columns=columns).rows(np.arange(9), learnt)
