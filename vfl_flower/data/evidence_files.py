"""The file and the picture of a participant's own columns: bins, weight of evidence, value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.files import make_folder, told, whole
from vfl_flower.data.bins import Bins
from vfl_flower.data.evidence import Estimate, Evidence, Groups

_DRAWN = 30  # columns in the picture, with the largest values
_SHOWN = 9  # of these, columns whose bins are drawn too
_BLUE, _GREY = "#0a56dd", "#58626e"


@dataclass(frozen=True)
class ColumnEvidence:
    """A column's merged bins, and what they say about the labels.

    names : name of each group of bins, [G].
    edges : range of each group of numbers, [G]: above the first number, up to the second. None for
        texts, and for missing values alone.
    """

    column: str
    names: list[str]
    edges: list[tuple[float, float] | None]
    evidence: Evidence
    information: Estimate | None

    @classmethod
    def of(
        cls, column: str, bins: Bins, counts: Sequence[int], groups: Groups, evidence: Evidence
    ) -> ColumnEvidence:
        """Name the groups of a column's bins.

        counts : rows in each bin, [B]. Empty bins give no name.
        evidence : of the groups.
        """
        names: list[str] = []
        edges: list[tuple[float, float] | None] = []
        limits = (-np.inf, *bins.edges, np.inf)
        for group in range(int(groups.max()) + 1):
            inside = [at for at in np.flatnonzero(groups == group).tolist() if counts[at]]
            names.append(" or ".join(_joined(bins, inside)) or "none")
            known = [at for at in inside if at < bins.count - 1]
            if bins.values is None and known:
                edges.append((float(limits[known[0]]), float(limits[known[-1] + 1])))
            else:
                edges.append(None)
        return cls(column, names, edges, evidence, value_of(np.array(counts), evidence))

    @property
    def note(self) -> str:
        """Return why the column has no value, or says nothing."""
        return note_of(self.information, len(self.names))


def value_of(counts: NDArray[np.int64], evidence: Evidence) -> Estimate | None:
    """Return the information value of merged bins; None if all of several bins were merged.

    counts : rows in each bin before merging, [B].
    """
    merged_all = len(evidence.rows) == 1 and (counts > 0).sum() > 1
    return None if merged_all else evidence.information()


def note_of(information: Estimate | None, bins: int) -> str:
    """Return why a column has no value, or says nothing; else an empty text."""
    if information is None:
        return "no value: no two bins have enough rows, or enough rows of each class"
    return "constant in the training rows" if bins == 1 else ""


def _joined(bins: Bins, inside: list[int]) -> list[str]:
    """Return the names of some bins. Neighbouring ranges of numbers become one range."""
    missing = bins.count - 1
    known = [at for at in inside if at < missing]
    named = [bins.names[at] for at in known]
    if bins.values is None and len(known) > 1:
        limits = (-np.inf, *bins.edges, np.inf)
        low, high = limits[known[0]], limits[known[-1] + 1]
        named = [
            "all"
            if np.isinf(low) and np.isinf(high)
            else f"<= {high:g}"
            if np.isinf(low)
            else f"> {low:g}"
            if np.isinf(high)
            else f"({low:g}, {high:g}]"
        ]
    return named + ["missing"] * (missing in inside)


def write_files(path: Path, columns: Sequence[ColumnEvidence]) -> None:
    """Write a table, a line for each bin, to ``path``, and a picture beside it (.png).

    ``events`` and ``others`` are estimates if labels had noise. ``woe`` is ln(share of others /
    share of events). Raise `VflError` if a file cannot be written.
    """
    import pandas as pd

    fields = "column,bin,above,up_to,rows,events,others,woe,woe_low,woe_high,iv,iv_low,iv_high,note"
    lines = []
    for each in columns:
        evidence, value = each.evidence, each.information
        low, high = evidence.weight_intervals()
        for at, name in enumerate(each.names):
            rows, events = int(evidence.rows[at]), float(evidence.events[at])
            counts = [rows, _plain(events), _plain(rows - events)]
            weights = [float(part[at]) for part in (evidence.weights, low, high)]
            iv = [value.value, value.low, value.high] if value else [""] * 3
            edges = ["" if np.isinf(edge) else edge for edge in each.edges[at] or (np.inf, np.inf)]
            lines.append([each.column, name, *edges, *counts, *weights, *iv, each.note])
    with told(path):
        make_folder(path.parent)
        with whole(path) as file:
            write_csv(file, pd.DataFrame(lines, columns=fields.split(","), dtype=object))
    _draw(path.with_suffix(".png"), columns)


def _plain(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _draw(path: Path, columns: Sequence[ColumnEvidence]) -> None:
    """Draw values with intervals, and the weight of evidence of the best columns."""
    from matplotlib.figure import Figure

    valued = [(each, each.information) for each in columns if each.information]
    best = sorted(valued, key=lambda pair: -pair[1].value)[:_DRAWN]
    if not best:
        path.unlink(missing_ok=True)
        return
    lines = -(-min(len(best), _SHOWN) // 3)
    heights = 0.8 + 0.24 * len(best), 2.5 * lines
    figure = Figure(figsize=(9, sum(heights)), dpi=110, layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    axes, at = halves[0].subplots(), np.arange(len(best))
    ends = np.array([(each.low, each.value, each.high) for _, each in best])
    axes.barh(at, ends[:, 1], xerr=np.diff(ends).T, color=_BLUE, ecolor=_GREY, height=0.6)
    axes.set_yticks(at, [_short(each.column) for each, _ in best], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("information value, with 95 % intervals")
    parts = np.ravel(halves[1].subplots(lines, 3, squeeze=False))
    for part, (each, _) in zip(parts, best, strict=False):
        weights, groups = each.evidence.weights, np.arange(len(each.names))
        low, high = each.evidence.weight_intervals()
        reach = weights - low, high - weights
        part.bar(groups, weights, yerr=reach, color=_BLUE, ecolor=_GREY)
        part.set_xticks(groups, [_short(name, 14) for name in each.names], rotation=60, fontsize=6)
        part.tick_params(axis="y", labelsize=7)
        part.set_title(f"{_short(each.column)}: weight of evidence", fontsize=8)
        part.axhline(0, color=_GREY, linewidth=0.6)
    for part in parts[len(best) :]:
        part.set_visible(False)
    for part in (axes, *parts):
        part.spines[["top", "right"]].set_visible(False)
    with whole(path) as file:
        figure.savefig(file, format="png")


def _short(text: str, most: int = 32) -> str:
    """Return a text for a picture: short, and no formula of matplotlib."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    cut = plain if len(plain) <= most else f"{plain[: most - 3]}..."
    return cut.replace("$", r"\$")
