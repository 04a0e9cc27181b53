"""Segments: figures of rows by the values of a column, and differences between segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.segments import segments
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.intervals import (
    DRAWS,
    difference,
    figure,
    generator,
)

Array = NDArray[Any]

_OUTSIDE = (0.025, 0.975)


def of_columns(
    scored: Scored, columns: Mapping[str, Array], least: int
) -> dict[str, dict[str, Any]]:
    """Return the figures of each segment, by column.

    Parameters
    ----------
    columns : name of a column -> its values, [R].
    least : fewest rows of a segment that has figures.
    """
    return {name: _of_column(scored, name, values, least) for name, values in columns.items()}


def _of_column(scored: Scored, column: str, values: Array, least: int) -> dict[str, Any]:
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
    if len(scored.classes) == 2 and len(kept) > 1:
        found["differences"] = {
            "demographic_parity": _apart({name: _flagged(part) for name, part in kept.items()}),
            "equal_opportunity": _apart(
                {name: _flagged(part[part.positive]) for name, part in kept.items()}
            ),
        }
    return found


def _flagged(part: Scored) -> tuple[int, int]:
    """Return how many rows are predicted to be of the second class, and all rows."""
    return int((part.said[:, 1] > part.threshold).sum()), len(part)


def _apart(shares: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the largest difference between the shares of two segments.

    The interval of two segments is Newcombe's (1998). Among more, the largest difference is too
    large on average, so a parametric bootstrap corrects for that.

    Parameters
    ----------
    shares : segment -> number and ``of`` of its share.
    """
    by_share = sorted(shares, key=lambda name: shares[name][0] / shares[name][1])
    lowest, highest = by_share[0], by_share[-1]
    found = difference(shares[highest], shares[lowest])
    if len(shares) > 2:
        of = np.array([each[1] for each in shares.values()])
        share = np.array([each[0] for each in shares.values()]) / of
        drawn = generator().binomial(of, share, (DRAWS, len(of))) / of
        ends = np.quantile(np.ptp(drawn, axis=1), _OUTSIDE)
        value = found["value"]
        found = figure(value, 2 * value - ends[1], 2 * value - ends[0])
    found["low"] = max(0.0, found["low"])
    return {**found, "highest": highest, "lowest": lowest}
