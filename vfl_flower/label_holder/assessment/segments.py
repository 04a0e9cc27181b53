"""Segments: figures of rows by the values of a column, and differences between segments."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.bins import segments
from vfl_flower.data.drift import LEAST, between
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.intervals import difference, figure, inflated

Array = NDArray[Any]


def of_columns(
    scored: Scored, columns: Mapping[str, Array], least: int, time: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the figures of segments of at least so many rows, by column; ``time`` has periods."""
    by = columns.items()
    return {name: _of_column(scored, name, each, least, name == time) for name, each in by}


def _of_column(
    scored: Scored, column: str, values: Array, least: int, is_time: bool
) -> dict[str, Any]:
    names, numbers = segments(column, values)
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=len(names))
    parts = dict(zip(names, np.split(order, counts.cumsum()[:-1]), strict=True))
    kept, left_out = {}, {}
    for name, rows in parts.items():
        part = scored[rows]
        if len(part) < least:
            left_out[name] = f"has {len(part)} rows, fewer than min-segment = {least}"
        elif part.lack:
            left_out[name] = part.lack
        else:
            kept[name] = part
    found: dict[str, Any] = {
        "rows": {name: len(rows) for name, rows in parts.items()},
        "figures": {name: part.figures() for name, part in kept.items()},
        "left_out": left_out,
    }
    if is_time:
        found["drift"] = _drift({name: scored[rows] for name, rows in parts.items()})
    elif len(scored.classes) == 2 and len(kept) > 1:
        flagged = {name: _flagged(part) for name, part in kept.items()}
        recalled = {name: _flagged(part[part.positive]) for name, part in kept.items()}
        found["differences"] = {
            "demographic_parity": largest_difference(flagged),
            "equal_opportunity": largest_difference(recalled),
        }
    return found


def _drift(parts: Mapping[str, Scored]) -> dict[str, dict[str, Any]]:
    """Return the drift of scores and labels from each period to the next, if both have the rows."""
    return {
        name: {"since": before, **between(earlier.watched.items(), part.watched.items())}
        for (before, earlier), (name, part) in pairwise(parts.items())
        if min(len(earlier), len(part)) >= LEAST
    }


def _flagged(part: Scored) -> tuple[int, int]:
    """Return how many rows are predicted to be of the second class, and all rows."""
    return int((part.said[:, 1] > part.threshold).sum()), len(part)


def largest_difference(shares: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the largest difference between the shares of two segments.

    Among more than two it is too large on average, which `inflated` corrects.
    """
    by_share = sorted(shares, key=lambda name: shares[name][0] / shares[name][1])
    lowest, highest = by_share[0], by_share[-1]
    found = difference(shares[highest], shares[lowest])
    if len(shares) > 2:
        number, of = np.array(list(shares.values()), np.float64).T
        smooth = (number + 1) / (of + 2)  # a share of 0 or 1 is not certain either
        spread = np.sqrt(smooth * (1 - smooth) / of)
        ends = inflated(number / of, spread, lambda each: np.ptp(each, axis=-1))
        found = figure(found["value"], *ends, 0, 1)
    found["low"] = max(0.0, found["low"])
    return {**found, "highest": highest, "lowest": lowest}
