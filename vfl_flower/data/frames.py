"""Columns of a pandas frame: kinds, missing values, and conversion to numbers."""

import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.data.column_types import CODE, text_of
from vfl_flower.data.later import pd
from vfl_flower.data.source import Preparation

_THOUSANDS = r"\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*"
_DECIMAL_COMMA = r"\s*[-+]?(?:\d+|\d{1,3}(?:[. ]\d{3})+),\d+\s*"
_DATE = r"\s*(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})(?:[ T].*)?\s*"
_YEAR_FIRST = r"(?P<y>\d{4})(?P<s>[-/.])(?P<m>\d{1,2})(?P=s)(?P<d>\d{1,2})"
_DAY_FIRST = r"(?P<d>\d{1,2})\.(?P<m>\d{1,2})\.(?P<y>\d{4})"
_TIME = r"(?:[ T](?P<t>\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?) ?(?P<z>Z|[-+]\d{2}:?\d{2})?)?"
_FORMS = f"{_YEAR_FIRST}{_TIME}", f"{_DAY_FIRST}{_TIME}"
_LOOK = 4  # values that tell of most columns that they are no dates
_WORDS = 20  # different texts among numbers that may stand for missing values
_ADVICE = ". Encode it, leave it out by `columns`, or set text='one-hot'."
_REPLACED = (
    "pandas.read_csv(FILE, dtype=str, keep_default_na=False)"
    ".replace({'COLUMN': {%s}}, regex=True).to_csv(FILE, index=False) does"
)  # all other texts stay, such as ids with zeros before them
NO_COMMAS = "Remove the commas, as " + _REPLACED % "',': ''"
POINTS = "Write points instead, as " + _REPLACED % "'[. ]': '', ',': '.'"
_OF_TEXTS = {
    "dates": ", since it holds dates. Set dates='days', or leave it out by `columns`.",
    "other dates": ", since it holds dates that can be read in two ways. Write them as 2024-01-31, "
    "and set dates='days', or leave it out by `columns`.",
    "commas between thousands": ", since its numbers have commas before three digits, which may "
    f"separate thousands. {NO_COMMAS}, or write points if they are decimal commas.",
    "decimal commas": f", since its numbers have decimal commas. {POINTS}.",
    "codes": ", since it holds codes: numbers with a zero or a plus before them. Leave it out by "
    "`columns`, or set text='one-hot'.",
    "words among numbers": ", since it has texts among its numbers. If they stand for missing "
    "values, name them by missing-words, and set missing='median'. Else correct them.",
}


def of_texts(column: Any, otherwise: str = _ADVICE) -> str:
    """Return the end of a sentence on what texts seem to be, without values, and what to do."""
    return _OF_TEXTS.get(content_of(column)[0], otherwise)


def content_of(column: Any) -> tuple[str, list[str]]:
    """Return what a column of texts or dates seems to hold, and the words among its numbers."""
    counts = column.dropna().astype(str).value_counts()
    texts = counts.index.to_series()
    if not len(texts):
        return "texts", []
    if days_of(column) is not None:
        return "dates", []
    if texts.str.fullmatch(_DATE).all():
        return "other dates", []
    numbers = pd.to_numeric(texts, errors="coerce").notna()
    patterns = {
        "commas between thousands": _THOUSANDS,
        "decimal commas": _DECIMAL_COMMA,
        "codes": f"{CODE}.*",
    }
    for content, pattern in patterns.items():
        matches = texts.str.fullmatch(pattern)
        if matches.any() and (matches | numbers).all():
            return content, []
    words = texts[~(numbers | texts.str.fullmatch(_DATE))]
    few = len(words) <= _WORDS and counts[words].sum() < counts.sum() / 2
    if few and len(words) and not texts.str.match(CODE).any():
        return "words among numbers", sorted(words)
    return "texts", []


def days_of(column: Any) -> Array | None:
    """Return dates as days since 1970, NaN for missing ones, [n]; None if some are no dates.

    Each value is read by itself, so that all files are read alike: the year first, or a day first
    and points (31.1.2024). Times may follow. Without a zone, they are in UTC.
    """
    known = column.dropna()
    days = np.full(len(column), np.nan)
    if len(known) and known.dtype.kind in "biuf":
        return None
    if len(known) and known.dtype.kind != "M":
        few = known.iloc[:_LOOK].astype(str).str.strip()
        if not all(any(re.fullmatch(form, text) for form in _FORMS) for text in few):
            return None
        texts = known.astype(str).str.strip()
        parts = texts.str.extract(f"^{_FORMS[0]}$")
        if parts.y.isna().any():
            parts = parts.fillna(texts.str.extract(f"^{_FORMS[1]}$"))
        if parts[["y", "m", "d"]].isna().any(axis=None):
            return None
        known = parts.y + "-" + parts.m.str.zfill(2) + "-" + parts.d.str.zfill(2)
        known += "T" + parts.t.fillna("00:00") + parts.z.fillna("")
    if len(known):
        try:
            form = None if known.dtype.kind == "M" else "ISO8601"
            times = pd.to_datetime(known, utc=True, format=form).dt.tz_localize(None).to_numpy()
        except ValueError:  # such as a thirteenth month
            return None
        times = times.astype("datetime64[us]") - np.datetime64(0, "us")
        days[column.notna().to_numpy()] = times / np.timedelta64(1, "D")
    return days


def periods_of(column: Any) -> Array | None:
    """Return the month of each date, or each whole number from 0, as texts in the order of time.

    Return None if a value is missing, or another one.
    """
    if column.isna().any():
        return None
    if column.dtype.kind in "iuf":
        if (column % 1 != 0).any() or column.min() < 0:
            return None
        texts = column.astype("int64").astype(str)
        return np.array(texts.str.zfill(texts.str.len().max()), object)
    if column.dtype.kind == "O":
        column = column.astype(str).str.replace(r"^\s*(\d{4}-\d{2})\s*$", r"\1-01", regex=True)
    days = days_of(column)
    if days is None:
        return None
    return np.array(np.floor(days).astype("M8[D]").astype("M8[M]").astype(str), object)


def raw_columns(frame: Any, places: Array, dates: Collection[str]) -> Iterator[tuple[str, Array]]:
    """Yield the columns of a frame at these rows, as `Source.raw_columns`."""
    rows = frame.iloc[places]
    numbers = numeric(rows)
    columns = dict(zip(numbers, floats(rows[numbers]).T, strict=True)) if numbers else {}
    for name in rows:
        column = rows[name]
        if name not in columns:
            days = days_of(column) if name in dates else None
            texts = column.astype(object).where(column.notna(), None).to_numpy()
            columns[name] = texts if days is None else days
        yield name, columns[name]


def floats(columns: Any) -> Array:
    """Return numbers as floats, also from pandas types with their own missing values."""
    return columns.to_numpy(np.float64, na_value=np.nan)


def numeric(frame: Any) -> list[str]:
    """Return the columns whose type is numeric."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind in "biuf"]


def others(frame: Any) -> list[str]:
    """Return the columns whose type is not numeric."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind not in "biuf"]


def medians_of(numbers: Array) -> list[float]:
    """Return the median of each column [rows, columns], without missing values."""
    medians = np.median(numbers, axis=0)  # NaN where a value is missing
    for at in np.flatnonzero(np.isnan(medians)):
        medians[at] = np.nanmedian(numbers[:, at])
    return medians.tolist()


def texts_of(column: Any) -> list[str]:
    """Return the values of a text column. A missing value is a value too."""
    known = column.astype(object).where(column.notna(), "")
    return [each if type(each) is str else text_of(each) for each in known.tolist()]


def matrix(preparation: Preparation, frame: Any) -> Array:
    """Return numbers with medians for missing ones, and 0/1 columns for text values."""
    parts: list[Array] = []
    if preparation.numbers:
        numbers = floats(frame[list(preparation.numbers)]).copy(order="K")
        for column, median in zip(numbers.T, preparation.numbers.values(), strict=True):
            column[np.isnan(column)] = median
        parts.append(numbers)
    for name, values in preparation.texts.items():
        places = {value: place for place, value in enumerate(values)}
        codes = np.array([places.get(each, -1) for each in texts_of(frame[name])], np.int64)
        parts.append((codes[:, None] == np.arange(len(values))).astype(np.float64))
    return np.concatenate(parts, axis=1)
