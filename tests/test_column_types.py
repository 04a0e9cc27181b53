"""Types of columns: every kind of file gives the same rows, whatever its size and its later files.

Each shape of a table is a list of texts, as a csv file has them. A parquet file and a frame hold
the values that pandas makes of them.
"""

import gzip
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
    """Repeat values to a column."""
    return [values[row % len(values)] for row in range(ROWS)]


NUMBERS: dict[str, list[str]] = {
    "whole": cells("3", "-7", "0"),
    "whole with gaps": cells("3", "", "5"),
    "points": cells("1.5", "-0.25", "2"),
    "points with gaps": cells("1.5", "", "2.75"),
    "exponents": cells("1e5", "2.5E-3", "-1e+02"),
    "no digit before the point": cells(".5", "-.25", "1."),
    "blanks around": cells(" 1", "2 ", " 3.5 "),
    "large": cells("4006000000001", "4006000000007"),
    "beyond 64 bits": cells("9223372036854775808", "12345678901234567890"),
    "zero and one": cells("0", "1"),
    "minus zero": cells("-0", "0.0", "1"),
    "truth": cells("True", "False"),
    "truth in capitals": cells("TRUE", "FALSE"),
    "truth in small letters": cells("true", "false"),
    "truth with gaps": cells("true", "", "false"),
    "constant": cells("7", "7.0"),
    "many digits": cells("0.1000000000000000055", "0.1", "3"),
    "tiny": cells("1e-30", "-2e-30", "0"),
    "tabs around": cells("\t1", "2\t"),
    "one number alone": ["4", *[""] * (ROWS - 2), "6"],
}
TEXTS: dict[str, list[str]] = {
    "codes": cells("01", "02", "10"),
    "codes and a letter": cells("01", "02", "2A"),
    "codes of zeros": cells("0", "00", "000"),
    "codes with a minus": cells("-01", "5"),
    "a plus": cells("+49", "+1"),
    "a plus among numbers": cells("+5", "-3"),
    "words for missing values": cells("NA", "None", "null", "n/a"),
    "nan among numbers": cells("1", "nan", "2"),
    "a word among numbers": cells("1", "2", "unknown"),
    "a word at the end": [*map(str, range(ROWS - 1)), "none"],
    "truth and numbers": cells("true", "1"),
    "yes and no": cells("yes", "no"),
    "capitals differ": cells("a", "A"),
    "blanks differ": cells("a", "a ", " a"),
    "quotes and commas": cells('a,"b"', "c\nd", "'e'"),
    "Unicode": cells("é", "e\u0301", "１", "𝟙"),
    "hexadecimal": cells("0x10", "0x11"),
    "underscores": cells("1_000", "2_000"),
    "thousands": cells("1,028", "2,500"),
    "dates": cells("2024-01-31", "2024-02-01"),
    "texts with gaps": cells("red", "", "blue"),
    "a lone minus": cells("-", "5"),
    "per cent": cells("5%", "6%"),
    "formulas": cells("=1+1", "@x"),
    "Arabic digits": cells("٣", "٤"),
    "a space of no width": cells("1\u200b", "2"),
    "a space that does not break": cells("1\u00a0000", "2"),
    "spaces between thousands": cells("1 000", "2 500"),
    "apostrophes between thousands": cells("1'000", "2'500"),
    "money": cells("$5", "€6"),
    "fractions": cells("1/2", "3/4"),
    "brackets for a minus": cells("(5)", "6"),
    "a minus behind": cells("5-", "6"),
    "clock": cells("12:30", "07:05"),
    "weeks": cells("2024-W05", "2024-W06"),
    "single letters of truth": cells("T", "F"),
    "complex": cells("1+2j", "3"),
    "a letter behind numbers": cells("1f", "2L", "3d"),
    "zeros before a point": cells("00.5", "1.5"),
    "an apostrophe before": cells("'5", "6"),
    "signs alone": cells("+", "-", "."),
    "emoji": cells("🙂", "🙃"),
    "versions": cells("1.10", "1.1", "1.1b"),
}


def as_csv(path: Path, values: Values) -> OwnFile:
    """Write a csv file and open it."""
    frame(values).to_csv(path.with_suffix(".csv"), index=False)
    return OwnFile(str(path.with_suffix(".csv")), **WORDS)


def as_gzip(path: Path, values: Values) -> OwnFile:
    """Write a compressed csv file and open it."""
    name = path.with_suffix(".csv.gz")
    name.write_bytes(gzip.compress(frame(values).to_csv(index=False).encode()))
    return OwnFile(str(name), **WORDS)


def as_parquet(path: Path, values: Values) -> OwnFile:
    """Write a parquet file of texts and open it."""
    frame(values).to_parquet(path.with_suffix(".parquet"))
    return OwnFile(str(path.with_suffix(".parquet")), **WORDS)


def as_typed_parquet(path: Path, values: Values) -> OwnFile:
    """Write a parquet file with pandas' types of the values, and open it."""
    typed(values).to_parquet(path.with_suffix(".parquet"))
    return OwnFile(str(path.with_suffix(".parquet")), **WORDS)


def as_large_csv(path: Path, values: Values) -> OwnFile:
    """Open a csv file as one that is too large for memory."""
    return as_kind(LargeTable, as_csv(path, values))


def as_large_parquet(path: Path, values: Values) -> OwnFile:
    """Open a parquet file as one that is too large for memory."""
    return as_kind(LargeTable, as_parquet(path, values))


def as_memory(path: Path, values: Values) -> Frame:
    """Return a frame of texts in memory."""
    return Frame("features", frame=frame(values), **WORDS)


def as_typed_memory(path: Path, values: Values) -> Frame:
    """Return a frame with pandas' types of the values."""
    return Frame("features", frame=typed(values), **WORDS)


OPENERS = [as_csv, as_gzip, as_parquet, as_large_csv, as_large_parquet, as_memory]
TYPED = [as_typed_parquet, as_typed_memory]


def frame(values: Values) -> Any:
    """Return ids, a column of these texts or several by name, and one of numbers."""
    columns = values if isinstance(values, dict) else {"value": values}
    texts = {name: pd.Series(of, dtype=object) for name, of in columns.items()}
    rows = range(len(next(iter(texts.values()))))
    return pd.DataFrame(
        {"who": rows, **{name: of.replace("", None) for name, of in texts.items()}, "x": rows}
    )


def typed(values: Values) -> Any:
    """Return the same with numbers and truth values of pandas."""
    table = frame(values)
    for name in table.columns[1:-1]:
        column = table[name]
        if set(column.dropna().str.lower()) <= {"true", "false"}:
            is_true = column.map(lambda each: each and each.lower() == "true")
            table[name] = is_true.astype("boolean")
        else:
            table[name] = pd.to_numeric(column)
    return table


def rows_of(own: Table) -> Any:
    """Return all rows, prepared by the first eight."""
    return own.rows(np.arange(ROWS), own.learn(np.arange(8)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few rows at a time, so that a type by piece would differ."""
    monkeypatch.setattr(table_file, "_BLOCK", 64)
    monkeypatch.setattr(LargeTable, "piece", 3)


@pytest.mark.one_by_day
@pytest.mark.parametrize("shapes", [NUMBERS, TEXTS], ids=["numbers", "texts"])
def test_every_kind_of_file_gives_the_same_rows(
    tmp_path: Path, shapes: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_file, "_BLOCK", 1024)  # a few of these longer rows
    openers = [*OPENERS, *TYPED * (shapes is NUMBERS)]
    made = {each.__name__: rows_of(each(tmp_path / each.__name__, shapes)) for each in openers}
    for name, rows in made.items():
        np.testing.assert_array_equal(rows, made["as_csv"], err_msg=name)
    learnt = as_csv(tmp_path / "again", shapes).learn(np.arange(8))
    assert set(learnt.numbers) - {"x"} == (NUMBERS.keys() if shapes is NUMBERS else set())
    if shapes is TEXTS:
        assert {name: set(learnt.texts[name]) for name in TEXTS} == {
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
        as_memory(Path(), cells("a\ud800")).learn(np.arange(ROWS))


def test_pieces_decided_by_themselves_would_differ(tmp_path: Path) -> None:
    own = as_csv(tmp_path / "a", TEXTS["a word at the end"])
    kinds = {kinds_of([piece])["value"] for piece in own._file.pieces(["value"])}
    assert kinds == {"whole", "text"}


@pytest.mark.parametrize("opener", [*OPENERS, *TYPED], ids=lambda each: each.__name__)
def test_a_later_file_is_read_by_the_types_of_the_model(tmp_path: Path, opener: Opener) -> None:
    preparation = as_csv(tmp_path / "old", cells("1", "2", "2A")).learn(np.arange(ROWS))
    later = opener(tmp_path / "new", cells("1", "2"))
    rows = later.rows(np.arange(4), preparation)
    assert preparation.texts["value"] == ["1", "2", "2A"]
    known = rows[:, [1, 2]] > 0  # the 0/1 columns of 1 and 2
    assert known.tolist() == [[True, False], [False, True]] * 2


@pytest.mark.parametrize("opener", OPENERS, ids=lambda each: each.__name__)
def test_texts_of_numbers_stay_as_written_for_a_model_of_texts(
    tmp_path: Path, opener: Opener
) -> None:
    preparation = as_csv(tmp_path / "old", cells("1.10", "1.1", "b")).learn(np.arange(ROWS))
    rows = opener(tmp_path / "new", cells("1.10", "1.1")).rows(np.arange(2), preparation)
    at = preparation.texts["value"].index("1.10")
    assert (rows[:, 1 + at] > 0).tolist() == [True, False]


@pytest.mark.parametrize("opener", OPENERS, ids=lambda each: each.__name__)
def test_texts_in_a_column_of_numbers_are_refused(tmp_path: Path, opener: Opener) -> None:
    preparation = as_csv(tmp_path / "old", cells("1", "2")).learn(np.arange(ROWS))
    with pytest.raises(ConfigError, match="other columns than its model"):
        opener(tmp_path / "new", cells("1", "many")).rows(np.arange(ROWS), preparation)


@pytest.mark.parametrize("opener", OPENERS, ids=lambda each: each.__name__)
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
@pytest.mark.parametrize("opener", OPENERS, ids=lambda each: each.__name__)
def test_ids_are_texts_as_written(tmp_path: Path, opener: Opener, kind: str) -> None:
    ids = IDS[kind] + [str(row) for row in range(100, 109)]
    own = replace(opener(tmp_path / "a", ids), id="value")
    assert [str(each) for each in own.id_values(np.arange(ROWS))] == ids
    assert len(set(own.ids)) == ROWS


def test_digits_in_a_column_of_texts_stay_texts(tmp_path: Path) -> None:
    ids = [str(row) for row in range(ROWS)]
    for opener in (as_parquet, as_memory):
        own = replace(opener(tmp_path / opener.__name__, ids), id="value")
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
