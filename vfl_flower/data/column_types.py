"""The type of each column of a table: decided once, over all its values.

A column of texts, as each column of a csv file is, holds numbers if all its values are numbers and
none is a code, such as 007 or +49. It holds truth values if all are ``true`` or ``false``.
Otherwise its texts stay as they were written. So every kind of file gives the same rows. A model
keeps the types of its training rows (`Preparation`), and later files are read by these.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, time
from typing import Any

import numpy as np

from vfl_flower.data.later import pa, pc, pd

Kinds = Mapping[str, str]
"""Column -> "empty", "truth", "whole", "number" or "text"; typed columns are left out."""

CODE = r"^\s*(?:-?0[0-9]|\+)"  # expression of a text that is a code, not a number
_WHOLE = r"^(0|-?[1-9][0-9]*)$"
_UNNAMED = r"\s*|Unnamed: \d+|__index_level_\d+__"
_OTHERS = ("date", "datetime", "datetime64", "timedelta", "time", "period", "interval", "bytes")
_TRUTH = r"(?i)^\s*(true|false)\s*$"


def text_of(value: Any) -> str:
    """Return the text of a value, as a csv file has it: midnight without a time zone is a date."""
    if isinstance(value, datetime) and value.tzinfo is None and value.time() == time():
        value = value.date()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def plain(kind: Any) -> Any:
    """Return the Arrow type in which a column is read: decimals are texts, as in a csv file."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if pa.types.is_decimal(kind) else kind


def kinds_of(pieces: Iterable[Any]) -> dict[str, str]:
    """Return the kind of each column of texts in Arrow tables or batches with the same columns."""
    kinds: dict[str, str] = {}
    for piece in pieces:
        for name, column in zip(piece.schema.names, piece.columns, strict=True):
            if not is_text(column.type) or kinds.get(name) == "text":
                continue
            kinds[name] = _common(kinds.get(name, "empty"), _kind(column))
    return kinds


def typed(piece: Any, kinds: Kinds) -> Any:
    """Return an Arrow table or batch whose columns of texts have become these kinds."""
    columns = [
        _converted(column, kinds[name]) if name in kinds and is_text(column.type) else column
        for name, column in zip(piece.schema.names, piece.columns, strict=True)
    ]
    return type(piece).from_arrays(columns, names=piece.schema.names)


def without_words(piece: Any, words: Collection[str]) -> Any:
    """Return an Arrow table or batch in which these texts, and empty ones, are missing values."""
    columns = []
    for column in piece.columns:
        if (kind := plain(column.type)) != column.type:
            column = column.cast(kind)
        if is_text(column.type):
            column = column.cast(pa.string())
            missing = pc.is_in(column, pa.array(["", *words], pa.string()))
            column = pc.if_else(missing, None, column)
        columns.append(column)
    return type(piece).from_arrays(columns, names=piece.schema.names)


def as_frame(pieces: Iterable[Any], names: Collection[str]) -> Any:
    """Return Arrow tables or batches with these columns as one pandas frame."""
    tables = [
        pa.Table.from_batches([each]) if isinstance(each, pa.RecordBatch) else each
        for each in pieces
    ]
    whole = pa.concat_tables(tables or [pa.table({name: pa.nulls(0) for name in names})])
    truths = {pa.bool_(): pd.BooleanDtype()}  # otherwise a missing value makes them objects
    return whole.to_pandas(ignore_metadata=True, types_mapper=truths.get)[list(names)]


def holds_texts(column: Any) -> bool:
    """Return whether a pandas column has values that a csv file has as texts: no dates."""
    if column.dtype.kind in "biufM":
        return False
    return pd.api.types.infer_dtype(column.to_numpy(object), skipna=True) not in _OTHERS


def as_typed(frame: Any, texts: Collection[str], words: Collection[str]) -> Any:
    """Return a pandas frame whose columns have their types, except ``texts``, which stay texts."""
    columns = {}
    for name in filter(lambda name: holds_texts(frame[name]), frame):
        column = frame[name]
        known = column.astype(object).where(column.notna(), None).tolist()
        made = [None if each is None else text_of(each) for each in known]
        columns[name] = pa.array(made, pa.string())
    if not columns:
        return frame
    piece = without_words(pa.table(columns), words)
    read = as_frame([typed(piece, {**kinds_of([piece]), **dict.fromkeys(texts, "text")})], columns)
    return frame.assign(**{name: read[name].set_axis(frame.index) for name in columns})


def with_names(columns: Iterable[str]) -> list[str]:
    """Return the columns that have a name: pandas and R write row numbers as one without."""
    return [name for name in columns if not re.fullmatch(_UNNAMED, name)]


def as_ids(pieces: Collection[Any]) -> Any:
    """Return the ids of a csv column from Arrow arrays of texts, [n]. A missing id is None.

    If all are a number's digits, they are numbers, which take less memory.
    """
    chunks = [each for piece in pieces for each in getattr(piece, "chunks", [piece])]
    texts = pa.chunked_array([each.cast("string") for each in chunks], pa.string())
    if len(texts) and not texts.null_count and _all(pc.match_substring_regex(texts, _WHOLE)):
        try:
            return pc.cast(texts, "int64").to_numpy()
        except ValueError:  # more than 64 bits
            pass
    return np.array(texts.to_pylist(), object)


def is_text(kind: Any) -> bool:
    """Return whether this Arrow type is text, or has no values."""
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(texts or pa.types.is_string_view(kind) or pa.types.is_null(kind))


def _kind(column: Any) -> str:
    """Return the kind of an Arrow array of texts by itself."""
    column = column.drop_null()
    if not len(column):
        return "empty"
    if pc.any(pc.match_substring_regex(column, CODE)).as_py():
        return "text"
    try:
        numbers = _numbers(column)
    except ValueError:
        return "truth" if _all(pc.match_substring_regex(column, _TRUTH)) else "text"
    if pc.any(pc.is_nan(numbers)).as_py():  # the word "nan" is no number
        return "text"
    try:
        pc.cast(column, "int64")
        return "whole"
    except ValueError:
        return "number"


def _common(one: str, other: str) -> str:
    """Return the narrowest kind that has the values of both."""
    if one == other or other == "empty":
        return one
    if one == "empty":
        return other
    return "number" if {one, other} == {"whole", "number"} else "text"


def _converted(column: Any, kind: str) -> Any:
    if kind == "text":
        return column
    if kind == "empty":
        return pa.nulls(len(column), pa.float64())
    if kind == "truth":
        return pc.equal(pc.utf8_lower(pc.utf8_trim_whitespace(column)), "true")
    return pc.cast(column, "int64") if kind == "whole" else _numbers(column)


def _numbers(texts: Any) -> Any:
    try:
        return pc.cast(texts, "float64")
    except ValueError:  # blanks around a number
        return pc.cast(pc.utf8_trim_whitespace(texts), "float64")


def _all(truths: Any) -> bool:
    return bool(pc.all(truths).as_py())
