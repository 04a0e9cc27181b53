"""Columns of a pandas frame: kinds, missing values, and conversion to numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.column_types import CODE, text_of
from vfl_flower.data.source import Preparation

Array = NDArray[Any]


def is_missing(values: Array) -> Array:
    """Return which values are missing: None, NaN, or pandas' missing values."""
    import pandas as pd

    missing: Array = pd.isna(values)
    return missing


_THOUSANDS = r"\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*"
_DECIMAL_COMMA = r"\s*[-+]?(?:\d+|\d{1,3}(?:[. ]\d{3})+),\d+\s*"
_DATE = r"\s*(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})(?:[ T].*)?\s*"
_ADVICE = ". Encode it, leave it out by `columns`, or set text='one-hot'."


def of_texts(column: Any, otherwise: str = _ADVICE) -> str:
    """Return what a text column seems to hold, and what to do, without quoting values.

    The text ends a sentence about the column, and adds one. For texts it is ``otherwise``.
    """
    import pandas as pd

    known = column.dropna()
    texts = known[:10_000].astype(str)
    if not len(texts):
        return otherwise
    if known.dtype.kind == "M" or texts.str.fullmatch(_DATE).all():
        return (
            ", since it holds dates. Make numbers of them, such as days since a fixed day, or "
            "leave it out by `columns`."
        )
    numbers = pd.to_numeric(texts, errors="coerce").notna()
    thousands = texts.str.fullmatch(_THOUSANDS)
    if thousands.any() and (thousands | numbers).all():
        return (
            ", since its numbers have commas before three digits, which may separate thousands. "
            "Remove the commas, as pandas.read_csv(..., thousands=',') and to_csv do, or write "
            "points if they are decimal commas."
        )
    commas = texts.str.fullmatch(_DECIMAL_COMMA)
    if commas.any() and (commas | numbers).all():
        return (
            ", since its numbers have decimal commas. Write points instead, as "
            "pandas.read_csv(..., decimal=',') and to_csv do."
        )
    codes = texts.str.match(CODE)
    if codes.any() and (codes | numbers).all():
        return (
            ", since it holds codes: numbers with a zero or a plus before them. Leave it out by "
            "`columns`, or set text='one-hot'."
        )
    if numbers.mean() > 0.5:
        return (
            ", since it has texts among its numbers. If they stand for missing values, name them "
            "by missing-words, and set missing='median'. Else correct them."
        )
    return otherwise


def raw_columns(frame: Any, places: Array) -> Iterator[tuple[str, Array]]:
    """Yield the columns of a frame at these rows, as `Source.raw_columns`."""
    rows = frame.iloc[places]
    numbers = numeric(rows)
    found = dict(zip(numbers, floats(rows[numbers]).T, strict=True)) if numbers else {}
    for name in rows:
        column = rows[name]
        yield (
            name,
            found[name]
            if name in found
            else column.astype(object).where(column.notna(), None).to_numpy(),
        )


def floats(columns: Any) -> Array:
    """Return numbers as floats, also from pandas types with their own missing values."""
    numbers: Array = columns.to_numpy(np.float64, na_value=np.nan)
    return numbers


def numeric(frame: Any) -> list[str]:
    """Return the columns whose type is numeric."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind in "biuf"]


def medians_of(numbers: Array) -> list[float]:
    """Return the median of each column [rows, columns], without missing values."""
    medians = np.median(numbers, axis=0)  # NaN where a value is missing
    for at in np.flatnonzero(np.isnan(medians)):
        medians[at] = np.nanmedian(numbers[:, at])
    found: list[float] = medians.tolist()
    return found


def texts_of(column: Any) -> list[str]:
    """Return the values of a text column. A missing value is a value too."""
    known = column.astype(object).where(column.notna(), "")
    return [text_of(each) for each in known.tolist()]


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
        found = np.array([places.get(each, -1) for each in texts_of(frame[name])], np.int64)
        parts.append((found[:, None] == np.arange(len(values))).astype(np.float64))
    return np.concatenate(parts, axis=1)
