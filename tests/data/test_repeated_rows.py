"""Several rows of a person in a party's file: the last one, means, and sequences."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alignment.test_matching import SHORT, World, people
from tests.organisations import ID, Organisations, change, cut, forget_alignments, small
from vfl_flower.config.errors import ConfigError, PartyError
from vfl_flower.data import on_disk, own_files
from vfl_flower.data.on_disk import LargeTable, SequenceColumn
from vfl_flower.data.sources import source_of
from vfl_flower.launch.engines import predict_local, run_local

SUFFIXES = pytest.mark.parametrize("suffix", [".csv", ".parquet"])


def visits(seed: int = 0, rows: int = 200) -> pd.DataFrame:
    """Rows of few people, with all that a column can be, and gaps."""
    random = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            ID: random.integers(0, 40, rows),
            "pulse": random.standard_normal(rows),
            "visits": random.integers(0, 9, rows),
            "ward": random.choice(["a", "b", "7"], rows),
            "late": random.random(rows) < 0.5,
            "day": random.choice(["2024-01-01", "2023-05-06"], rows),
        }
    )
    for name in ("pulse", "ward"):
        table[name] = table[name].where(random.random(rows) > 0.2)
    table.loc[table[ID] == 0, "ward"] = None
    return table


def own(path: Path, rows: str, **words: Any) -> Any:
    words = {"id": ID, "text": "one-hot", "dates": "days", "missing": "median", **words}
    return source_of({"file": str(path), "rows": rows, **words}, 1)


def saved(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False, row_group_size=7)
    return path


def with_more_rows(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return a table with earlier rows of some people, with other features, before the last."""
    random = np.random.default_rng(seed)
    earlier = table.sample(2 * len(table), replace=True, random_state=seed)
    numbers = [name for name in table.select_dtypes("float") if name != ID]
    earlier[numbers] = random.standard_normal((len(earlier), len(numbers)))
    return pd.concat([earlier, table])


@SUFFIXES
@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_the_mean_of_rows_is_that_of_pandas(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, seed: int
) -> None:
    table = visits(seed)
    party = own(saved(table, tmp_path_factory.mktemp("mean") / f"a{suffix}"), "mean")
    made = party._read(party.feature_names).set_index(party.id_column)
    grouped = table.groupby(ID)
    means = grouped[["pulse", "visits", "late"]].mean().loc[made.index]
    pd.testing.assert_frame_equal(made[[*means]], means.astype(float), check_names=False)
    for name in ("ward", "day"):
        for person, value in made[name].items():
            times = grouped.get_group(person)[name].value_counts()
            assert times[value] == times.max() if len(times) else pd.isna(value)


@SUFFIXES
def test_sequences_are_the_rows_of_each_person_in_order(tmp_path: Path, suffix: str) -> None:
    table = visits()[[ID, "visits", "late"]]
    party = own(saved(table, tmp_path / f"a{suffix}"), "sequence")
    assert isinstance(party, SequenceColumn) and party.count == table[ID].nunique()
    every = np.arange(party.count)
    preparation = party.learn(every)
    party.load(every, preparation)
    whole = table[["visits", "late"]].to_numpy(float)
    for person, rows in zip(party.id_column, party.rows(every, preparation), strict=True):
        due = whole[table[ID] == person]
        due = (due - whole.mean(0)) / whole.std(0)
        np.testing.assert_allclose(rows[-len(due) :], due, atol=1e-5)
        assert not rows[: -len(due)].any()
    saved(table[[ID, "late", "visits"]], tmp_path / f"a{suffix}")  # a later file, in another order
    later = own(tmp_path / f"a{suffix}", "sequence")
    np.testing.assert_array_equal(later.rows(every, preparation), party.rows(every, preparation))


@pytest.mark.one_by_day
@SUFFIXES
@pytest.mark.parametrize("how", ["last", "mean"])
def test_a_large_file_gives_the_same_rows_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, how: str
) -> None:
    path = saved(visits(), tmp_path / f"a{suffix}")
    small = own(path, how)
    preparation = small.learn(np.arange(30))
    monkeypatch.setattr(on_disk, "_LARGE", 0)
    monkeypatch.setattr(LargeTable, "piece", 7)
    monkeypatch.setattr(own_files, "_ROWS", 5)
    monkeypatch.setattr(own_files, "_AT_ONCE", 1)
    large = own(path, how)
    assert isinstance(large, LargeTable) and large.learn(np.arange(30)) == preparation
    every = np.arange(large.count)
    large.load(every, preparation)
    np.testing.assert_array_equal(large.rows(every, preparation), small.rows(every, preparation))


def test_a_model_keeps_what_is_text(tmp_path: Path) -> None:
    party = own(saved(visits(), tmp_path / "a.csv"), "mean", columns="ward")
    preparation = party.learn(np.arange(party.count))
    assert preparation.texts == {"ward": ["", "7", "a", "b"]}
    later = pd.DataFrame({ID: [1, 1, 1], "ward": [7, 7, 8]})
    row = own(saved(later, tmp_path / "b.csv"), "mean").rows(np.arange(1), preparation)
    assert row.argmax() == 1  # a mean of numbers would be no value of the model


@pytest.mark.parametrize(
    ("how", "table", "sentence"),
    [
        ("sequence", visits()[[ID, "ward"]], "texts, dates or missing values, and rows="),
        ("sequence", visits()[[ID, "pulse"]], "texts, dates or missing values, and rows="),
        ("mean", pd.DataFrame({ID: [1, 1], "x": [[1.0], [2.0]]}), "Set rows='last'"),
        ("last", pd.DataFrame({ID: [1, None, None], "x": [1, 2, 3]}), "has 2 missing ids in 3"),
        ("last", pd.DataFrame({"x": [1, 2, 3]}), "does not have the id column"),
        ("last", visits()[:0], "has no rows"),
        ("mean", visits()[:0], "has no rows"),
        ("first", visits(), "must be 'refuse', 'last', 'mean' or 'sequence'"),
        ("refuse", visits(), "may instead set rows='last', 'mean' or 'sequence'"),
    ],
)
def test_rows_that_do_not_combine_are_refused(
    tmp_path: Path, how: str, table: pd.DataFrame, sentence: str
) -> None:
    path = saved(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=sentence):
        party = own(path, how)
        _ = party.ids
        party.learn(np.arange(party.count))
    if not len(table):
        with pytest.raises(ConfigError, match=sentence):
            _ = own(saved(table, tmp_path / "a.csv"), how).ids


def repeated(folder: Path) -> tuple[Organisations, Organisations]:
    """Organisations with one row of each person, and with several at both parties."""
    once, often = (cut(folder / name, small(120), known=1) for name in ("once", "often"))
    for path in often.files:
        change(path, with_more_rows)
    often.words = [{"rows": "last"}] * 2
    return once, often


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", [{}, {"align": "any"}])
def test_the_last_rows_train_as_if_alone(tmp_path: Path, keys: dict[str, Any]) -> None:
    once, often = repeated(tmp_path)
    keys = {**SHORT, "noise-seed": 0, **keys}
    runs = []
    for each in (once, often):
        forget_alignments()
        runs.append((each.run("run", keys), each.predict("run")))
    (first, said), (second, also) = runs
    assert first.summary["test_loss"] == second.summary["test_loss"]
    pd.testing.assert_frame_equal(said, also)
    for party in range(2):
        mine, theirs = (run.parameters(f"party-{party}") for run in (first, second))
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_rows_of_people_make_sequences_for_an_lstm(tmp_path: Path) -> None:
    _, often = repeated(tmp_path)
    with patch.object(often, "words", []), pytest.raises(PartyError, match="set rows='last', 'me"):
        often.run("run", SHORT)
    often.words = [{"rows": "mean"}, {"rows": "sequence", "model": "lstm"}]
    run = often.run("run", SHORT)
    assert run.parameters("party-1")["layers.0.lstm.weight_ih_l0"].shape == (32, 2)  # signals
    assert len(often.predict("run")) == 120


@pytest.mark.nightly
def test_rows_that_tell_the_same_person_are_one_by_rules(tmp_path: Path) -> None:
    table = people(200, few=200)
    table["birthdate"] = pd.to_datetime(table["birthdate"]).dt.strftime("%d.%m.%Y").str.lstrip("0")
    theirs = with_more_rows(table)
    shouted = np.random.default_rng(0).random(len(theirs)) < 0.5
    theirs["surname"] = theirs["surname"].mask(shouted, theirs["surname"].str.upper() + " ")
    world = World(tmp_path, table, theirs)
    few = len(world.align()[0].rows)
    for how in ("last", "mean"):
        world.nodes[0]["rows"] = how
        made, (rows,) = world.align()
        assert few < 60 and len(made.rows) == 200 == len(set(rows.tolist()))
        sizes = source_of(world.nodes[0], 0)._read(["size"])["size"].to_numpy()[rows]  # type: ignore[attr-defined]
        if how == "last":
            np.testing.assert_array_equal(sizes, table["size"].to_numpy()[made.rows])
    run = run_local(
        1, {**world.keys, **SHORT, "out": str(tmp_path / "run")}, node_configs=world.nodes
    )
    assert run.summary["coverage"]["aligned"] == 200
    words = {"model": str(tmp_path / "run"), "dataset": world.keys["dataset"]}
    assert len(pd.read_csv(predict_local(words, world.nodes))) == 200


@pytest.mark.one_by_day
@pytest.mark.parametrize("words", [{"rows": "sequence", "model": "lstm"}, {"rows": "mean"}, {}])
def test_people_without_ids_are_read_in_pieces_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, str]
) -> None:
    monkeypatch.setattr(on_disk, "_LARGE", 0)
    table = people(200, few=200)
    world = World(tmp_path, table, with_more_rows(table) if words else table)
    world.nodes[0] |= words
    run = run_local(1, {**world.keys, **SHORT}, node_configs=world.nodes)
    assert run.summary["failure"] is None and run.summary["coverage"]["aligned"] == 200


def test_dates_of_equal_digits_are_two_people(tmp_path: Path) -> None:
    table = pd.DataFrame({"born": ["1.12.2024", "11.2.2024", "1.12.2024 "], "x": [1, 2, 3]})
    path = saved(table, tmp_path / "a.csv")
    party = own(path, "last", **{"match-columns": "birthdate=born"})
    assert party.count == 2 and party._read(["x"])["x"].tolist() == [2, 3]
    assert len(set(party.ids)) == 2 and len(party.keys) == 2


def test_a_column_that_tells_people_may_be_a_feature_too(tmp_path: Path) -> None:
    table = pd.DataFrame({"age": [30, 30, 40], "name": ["A", "a", "b"], "x": [1, 2, 3]})
    words = {"match-columns": "name age", "columns": "age,x"}
    party = own(saved(table, tmp_path / "a.csv"), "mean", **words)
    assert party._read(["age", "x"]).to_numpy().tolist() == [[30, 1.5], [40, 3]]
    assert party.keys.columns["name"].tolist() == ["A", "b"]


def test_lists_and_tokens_keep_their_last_row(tmp_path: Path) -> None:
    table = pd.DataFrame({ID: [1, 2, 1], "trace": [[1.0], [2.0, 4.0], [3.0, 5.0]]})
    path = saved(table, tmp_path / "a.parquet")
    party = own(path, "last")
    assert isinstance(party, SequenceColumn) and party.id_column.tolist() == [2, 1]
    preparation = party.learn(np.arange(2))
    assert preparation.mean == [3.5] and preparation.shape == [2, 1]
