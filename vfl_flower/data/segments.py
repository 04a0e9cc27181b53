"""Segments of rows: one for each value, or range of numbers, of a column."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.bins import Bins

MISSING = "missing"  # the segment of rows without a value

_MOST = 100  # segments of a column
_RANGES = 5  # of a column with more numbers


def check_segments(columns: Mapping[str, Array]) -> None:
    """Raise `ConfigError` if a column has too many values for segments."""
    for name, values in columns.items():
        segments(name, values)


def segments(column: str, values: Array) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of a column's segments in their order, and the segment of each row, [R].

    Each value is a segment. More than ten different numbers form five ranges with about equally
    many rows. Rows without a value are a segment too. Raise `ConfigError` if there are more than
    100 texts.
    """
    import pandas as pd

    values = np.asarray(values)
    codes, known = pd.factorize(values, sort=False)
    if values.dtype.kind in "iuf" and len(known) > 2 * _RANGES:
        bins = Bins.learn(values, _RANGES)
        names, numbers = [*bins.names[:-1], MISSING], bins.of(values)
    else:
        if len(known) > _MOST:
            raise ConfigError(
                f"Column {column!r} has more than {_MOST} values, too many for segments. Group its "
                "values, or leave it out of `segments`."
            )
        texts = np.array([_text(each) for each in known], object)
        of_numbers = np.asarray(known).dtype.kind in "iufb"  # by size, and texts by the alphabet
        order = np.argsort(np.asarray(known) if of_numbers else texts, kind="stable")
        place = np.empty(len(known) + 1, np.int64)
        place[order] = np.arange(len(known))
        place[-1] = len(known)  # factorize's number of a missing value is -1
        names, numbers = [*texts[order].tolist(), MISSING], place[codes]
    at = {name: place for place, name in enumerate(dict.fromkeys(names))}  # merge equal texts
    numbers = np.array([at[name] for name in names])[numbers]
    there = np.bincount(numbers, minlength=len(at)) > 0
    return [name for name, is_there in zip(at, there, strict=True) if is_there], (
        np.cumsum(there) - 1
    )[numbers]


def _text(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float | np.floating) else str(value)
    return text or MISSING
