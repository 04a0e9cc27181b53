"""Types of columns: every kind of file gives the same rows, whatever its size and its later files.

Each shape of a table is a list of texts, as a csv file has them. A parquet file and a frame hold
the values that pandas makes of them.
"""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from vfl_flower.config.errors import ConfigError
from vfl_flower.data import table_file
from vfl_flower.data.column_types import kinds_of
from vfl_flower.data.memory import Frame
from vfl_flower.data.on_disk import LargeTable, as_kind
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.tables import Table

ROWS = 12
WORDS: dict[str, Any] = {"id": "who", "missing": "median", "text": "one-hot", "party": 0}
Values = list[str] | dict[str, list[str]]
Opener = Callable[[Path, Values], Table]


def cells(*values: str) -> list[str]:
    return [values[row % len(values)] for row in range(ROWS)]


def numbered(columns: str) -> dict[str, list[str]]:
    """Return columns by number from a text with "; " between columns and | between cells."""
    return {f"c{n}": cells(*text.split("|")) for n, text in enumerate(columns.split("; "))}


NUMBERS = numbered(
    "3|-7|0; 3||5; 1.5|-0.25|2; 1.5||2.75; 1e5|2.5E-3|-1e+02; .5|-.25|1.;  1|2 | 3.5 ; 0|1; "
    "4006000000001|4006000000007; 9223372036854775808|12345678901234567890; -0|0.0|1; True|False; "
    "TRUE|FALSE; true|false; true||false; 7|7.0; 0.1000000000000000055|0.1|3; 1e-30|-2e-30|0; "
    "\t1|2\t; 4|||||||||||6"
)
WORD_AT_THE_END = [*map(str, range(ROWS - 1)), "none"]
TEXTS = numbered(
    "01|02|10; 01|02|2A; 0|00|000; -01|5; +49|+1; +5|-3; NA|None|null|n/a; 1|nan|2; 1|2|unknown; "
    "true|1; yes|no; a|A; a|a | a; a,\"b\"|c\nd|'e'; é|e\u0301|１|𝟙; 0x10|0x11; 1_000|2_000; "
    "1,028|2,500; 2024-01-31|2024-02-01; red||blue; -|5; 5%|6%; =1+1|@x; ٣|٤; 1\u200b|2; "
    "1\u00a0000|2; 1 000|2 500; 1'000|2'500; $5|€6; 1/2|3/4; (5)|6; 5-|6; 12:30|07:05; T|F; "
    "2024-W05|2024-W06; 1+2j|3; 1f|2L|3d; 00.5|1.5; '5|6; +|-|.; 🙂|🙃; 1.10|1.1|1.1b"
) | {"end": WORD_AT_THE_END}


def frame(values: Values) -> Any:
    """Return ids, a column of these texts or several by name, and one of numbers."""
    columns = values if isinstance(values, dict) else {"value": values}
    texts = {name: pd.Series(of, dtype=object) for name, of in columns.items()}
    rows = range(len(next(iter(texts.values()))))
    return pd.DataFrame(
        {"who": rows, **{name: of.replace("", None) for name, of in texts.items()}, "x": rows}
    )


def typed(values: Values) -> Any:
    table = frame(values)
    for name in table.columns[1:-1]:
        column = table[name]
        if set(column.dropna().str.lower()) <= {"true", "false"}:
            is_true = column.map(lambda each: each and each.lower() == "true")
            table[name] = is_true.astype("boolean")
        else:
            table[name] = pd.to_numeric(column)
    return table


def of_file(suffix: str, make: Callable[[Values], Any] = frame, large: bool = False) -> Opener:
    """Return what writes values to a file, and opens it, perhaps as one too large for memory."""

    def opener(path: Path, values: Values) -> Table:
        place, table = path.with_suffix(suffix), make(values)
        if suffix == ".parquet":
            table.to_parquet(place)
        else:
            table.to_csv(place, index=False)
        own = OwnFile(str(place), **WORDS)
        return as_kind(LargeTable, own) if large else own

    return opener


def in_memory(make: Callable[[Values], Any]) -> Opener:
    return lambda path, values: Frame("features", frame=make(values), **WORDS)


OPENERS = {
    "csv": of_file(".csv"),
    "gzip": of_file(".csv.gz"),
    "parquet": of_file(".parquet"),  # of texts
    "large csv": of_file(".csv", large=True),
    "large parquet": of_file(".parquet", large=True),
    "memory": in_memory(frame),
}
TYPED = {"typed parquet": of_file(".parquet", typed), "typed memory": in_memory(typed)}
as_csv = OPENERS["csv"]
openers = pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few rows at a time, so that a type by piece would differ."""
    monkeypatch.setattr(table_file, "_BLOCK", 64)
    monkeypatch.setattr(LargeTable, "piece", 3)


@pytest.mark.parametrize("shapes", [NUMBERS, TEXTS], ids=["numbers", "texts"])
def test_every_kind_of_file_gives_the_same_rows(
    tmp_path: Path, shapes: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_file, "_BLOCK", 1024)  # a few of these longer rows
    kinds = OPENERS | (TYPED if shapes is NUMBERS else {})
    made = {name: opener(tmp_path / name, shapes) for name, opener in kinds.items()}
    learnt = {name: own.learn(np.arange(8)) for name, own in made.items()}
    rows = {name: own.rows(np.arange(ROWS), learnt[name]) for name, own in made.items()}
    for name, found in rows.items():
        np.testing.assert_array_equal(found, rows["csv"], err_msg=name)
    assert set(learnt["csv"].numbers) - {"x"} == (NUMBERS.keys() if shapes is NUMBERS else set())
    if shapes is TEXTS:
        assert {name: set(learnt["csv"].texts[name]) for name in TEXTS} == {
            name: set(values[:8]) for name, values in TEXTS.items()
        }


DECIMALS = pa.decimal128(38, 2)
COLUMNS: dict[str, tuple[Any, bool]] = {  # values, and whether they become numbers
    "decimals": (pd.array([Decimal("1.50"), None, Decimal(3)] * 4, pd.ArrowDtype(DECIMALS)), True),
    "whole decimals": (
        pd.array([Decimal(7), Decimal(80)] * 6, pd.ArrowDtype(pa.decimal128(38, 0))),
        True,
    ),
    "levels of number texts": (pd.Categorical(["1", "2.5"] * 6), True),
    "levels of codes": (pd.Categorical(["01", "2"] * 6), False),
    "dates as levels": (pd.to_datetime(["2024-01-31", "2024-02-01"] * 6), False),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_typed_column_gives_the_rows_of_its_csv_file(tmp_path: Path, kind: str) -> None:
    values, is_number = COLUMNS[kind]
    table = frame(cells("")).assign(value=values)
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    files = [OwnFile(str(tmp_path / name), **WORDS) for name in ("a.csv", "a.parquet")]
    kinds = [*files, *(as_kind(LargeTable, each) for each in files)]
    learnt = [each.learn(np.arange(8)) for each in kinds]
    for preparation in learnt:
        assert ("value" in preparation.numbers) == is_number
        for own in [*kinds, Frame("features", frame=table, **WORDS)]:
            rows = own.rows(np.arange(ROWS), preparation)
            np.testing.assert_array_equal(rows, kinds[0].rows(np.arange(ROWS), learnt[0]))


def test_decimals_are_ids_as_their_digits(tmp_path: Path) -> None:
    column = pd.array([Decimal(row) for row in range(ROWS)], pd.ArrowDtype(pa.decimal128(38, 0)))
    frame(cells("")).assign(who=column).to_parquet(tmp_path / "a.parquet")
    own = OwnFile(str(tmp_path / "a.parquet"), **WORDS)
    assert list(own.ids) == list(as_csv(tmp_path / "b", cells("1")).ids)


def test_a_frame_with_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(ConfigError, match="no Unicode"):
        OPENERS["memory"](Path(), cells("a\ud800")).learn(np.arange(ROWS))


def test_pieces_decided_by_themselves_would_differ(tmp_path: Path) -> None:
    own: Any = as_csv(tmp_path / "a", WORD_AT_THE_END)
    kinds = {kinds_of([piece])["value"] for piece in own._file.pieces(["value"])}
    assert kinds == {"whole", "text"}


@pytest.mark.parametrize("opener", (OPENERS | TYPED).values(), ids=OPENERS | TYPED)
def test_a_later_file_is_read_by_the_types_of_the_model(tmp_path: Path, opener: Opener) -> None:
    preparation = as_csv(tmp_path / "old", cells("1", "2", "2A")).learn(np.arange(ROWS))
    later = opener(tmp_path / "new", cells("1", "2"))
    rows = later.rows(np.arange(4), preparation)
    assert preparation.texts["value"] == ["1", "2", "2A"]
    known = rows[:, [1, 2]] > 0  # the 0/1 columns of 1 and 2
    assert known.tolist() == [[True, False], [False, True]] * 2


@openers
def test_texts_of_numbers_stay_as_written_for_texts(tmp_path: Path, opener: Opener) -> None:
    preparation = as_csv(tmp_path / "old", cells("1.10", "1.1", "b")).learn(np.arange(ROWS))
    rows = opener(tmp_path / "new", cells("1.10", "1.1")).rows(np.arange(2), preparation)
    at = preparation.texts["value"].index("1.10")
    assert (rows[:, 1 + at] > 0).tolist() == [True, False]


@openers
def test_texts_in_a_column_of_numbers_are_refused(tmp_path: Path, opener: Opener) -> None:
    preparation = as_csv(tmp_path / "old", cells("1", "2")).learn(np.arange(ROWS))
    with pytest.raises(ConfigError, match="other columns than its model"):
        opener(tmp_path / "new", cells("1", "many")).rows(np.arange(ROWS), preparation)


@openers
def test_words_that_are_named_are_missing_values(tmp_path: Path, opener: Opener) -> None:
    values = cells("1", "NA", "?", "2")
    own = opener(tmp_path / "a", values)
    named = replace(own, missing_words="NA, ?")
    assert named.learn(np.arange(ROWS)).numbers["value"] == 1.5
    assert own.learn(np.arange(ROWS)).texts["value"] == ["1", "2", "?", "NA"]


IDS = {
    "whole": ["7", "8", "-9"],
    "with zeros": ["0007", "7", "07"],
    "with a plus": ["+49", "49", "0"],
    "words": ["NULL", "NA", "nan"],
    "beyond 64 bits": ["18446744073709551616", "7", "8"],
    "texts": ["a", "a ", "A"],
    "points": ["1.5", "1.50", "2"],
}


@pytest.mark.parametrize("kind", IDS)
@openers
def test_ids_are_texts_as_written(tmp_path: Path, opener: Opener, kind: str) -> None:
    ids = IDS[kind] + [str(row) for row in range(100, 109)]
    own = replace(opener(tmp_path / "a", ids), id="value")
    assert [str(each) for each in own.id_values(np.arange(ROWS))] == ids
    assert len(set(own.ids)) == ROWS


def test_digits_in_a_column_of_texts_stay_texts(tmp_path: Path) -> None:
    ids = [str(row) for row in range(ROWS)]
    for kind in ("parquet", "memory"):
        own = replace(OPENERS[kind](tmp_path / kind, ids), id="value")
        assert own.id_values(np.arange(ROWS)).tolist() == ids
    of_csv = replace(as_csv(tmp_path / "a", ids), id="value")
    assert list(own.ids) == list(of_csv.ids)  # they match all the same


WRONG: dict[str, tuple[str | bytes, str, str]] = {
    "a comma at the end": ("a,b\n1,2,\n3,4,\n", "comma at the end", "line 2 has 3"),
    "row names": ("a,b\nr1,1,2\nr2,3,4\n", "row name", "line 2 has 3"),
    "a short line": ("a,b\n1,2\n3\n", "more or fewer values", "line 3 has 1"),
    "a long line": ("a,b\n1,2\n3,4,5,6\n", "more or fewer values", "line 3 has 4"),
    "two columns of one name": ("a,a\n1,2\n", "two columns of one name", "'a'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_csv_file_that_is_no_table_is_refused(tmp_path: Path, kind: str) -> None:
    content, what, detail = WRONG[kind]
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=what) as refused:
        OwnFile(str(path), id="a").learn(np.arange(1))
    assert detail in str(refused.value)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", " "])
def test_a_column_without_a_name_is_no_feature(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{name},who,x\n" + "".join(f"{n},{n},{n * n}\n" for n in range(9)))
    assert OwnFile(str(path), id="who").feature_names == ["x"]
    named = pd.DataFrame({name: range(9), "who": range(9), "x": range(9)})
    assert Frame("f", id="who", frame=named).feature_names == ["x"]


def test_a_byte_order_mark_and_blank_lines_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffwho,x\n\n1,2\n\n3,4\n".encode())
    own = OwnFile(str(path), id="who")
    assert own.feature_names == ["x"] and list(own.id_column) == [1, 3] and own.count == 2


ADVICE = {
    "codes": ("01234", "it holds codes"),
    "a plus": ("+4912", "it holds codes"),
    "a word for missing values": ("n/a", "name them by missing-words"),
    "thousands": ("1,028", "may separate thousands"),
    "decimal commas": ("1,5", "decimal commas"),
    "both": ("1.028,50", "decimal commas"),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_a_column_of_texts_gets_advice_that_fits(tmp_path: Path, kind: str) -> None:
    text, advice = ADVICE[kind]
    own = as_csv(tmp_path / "a", [text, *map(str, range(10, 9 + ROWS))])
    with pytest.raises(ConfigError, match=advice):
        replace(own, text="refuse", party=None).learn(np.arange(ROWS))
