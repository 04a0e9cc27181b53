"""Weight of evidence and information value of a column's bins, from exact or noisy labels.

Labels are 0 (no event) or 1 (event). Bin b has E_b events and N_b other rows. With e_b = E_b /
sum E and g_b = N_b / sum N (credit scoring: shares of bads and goods), the conventions are

    WoE_b = ln(g_b / e_b),    IV = sum_b (g_b - e_b) WoE_b.

A count below 1/2 counts as 1/2.

With noise, each label stays with probability p, else it flips. A bin of n rows with M noisy events
has an estimated E = (M - q n) / (p - q) events, where q = 1 - p. Noise adds a variance V_b = n p q
/ (p - q)^2 to this estimate. IV is convex, so noise raises it by about 1/2 sum_b V_b d2IV/dE_b2,
also for a column that says nothing. The value has this subtracted. A count below one deviation of
its noise counts as one deviation. So the value of a column with nearly pure bins is too low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.files import make_folder, told, whole
from vfl_flower.data.bins import Bins
from vfl_flower.data.later import pd

Floats = NDArray[np.float64]
Groups = NDArray[np.uint8]
"""Bin -> number of the group that it is merged into, ascending from 0: [B]."""

NORMAL = 1.959964  # 95 % of a normal distribution is within so many deviations
_SMOOTHED = 0.5  # least count of a class in a bin
_CLEAR = 4.0  # least count of the rarer class in an average bin, over the deviation of its noise
MOST_TOLD = 0.2
"""Largest of `leverages`. A label with noise explains tanh^2(eps / 2) of itself: 0.21 at eps 1."""


@dataclass(frozen=True)
class Estimate:
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evidence:
    """Rows and events of each bin of a column, [B], and what they say."""

    rows: NDArray[np.int64]
    events: Floats  # estimated with noise, so perhaps negative
    kept: float = 1.0  # probability p that a label is the true one

    @classmethod
    def count(cls, bins: Array, labels: Array, count: int, kept: float = 1.0) -> Evidence:
        """Count rows by bin, and estimate their events, from the bin and label of each row, [R]."""
        rows = np.bincount(bins, minlength=count)
        seen = np.bincount(bins, weights=labels, minlength=count)
        return cls(rows, (seen - (1 - kept) * rows) / (2 * kept - 1), kept)

    def grouped(self, groups: Groups) -> Evidence:
        """Return the evidence of merged bins."""
        return Evidence(
            np.bincount(groups, self.rows).astype(np.int64),
            np.bincount(groups, self.events).astype(np.float64),
            self.kept,
        )

    @property
    def _filled(self) -> tuple[Floats, Floats]:
        """Return events and other rows [B], without counts near or below zero."""
        least = np.maximum(_SMOOTHED, np.sqrt(self._noise))
        return np.maximum(self.events, least), np.maximum(self.rows - self.events, least)

    @property
    def weights(self) -> Floats:
        """Return the weight of evidence of each bin, [B]."""
        events, others = self._filled
        return np.log(others / others.sum()) - np.log(events / events.sum())

    def weight_intervals(self) -> tuple[Floats, Floats]:
        """Return the ends of the 95 % intervals of `weights`, each [B]."""
        events, others = self._filled
        slopes = np.full((len(events),) * 2, 1 / others.sum() + 1 / events.sum())
        slopes -= np.diag(1 / others + 1 / events)
        apart: Floats = NORMAL * np.sqrt(slopes**2 @ self._variance)
        return self.weights - apart, self.weights + apart

    def information(self) -> Estimate:
        """Return the information value, corrected for noise on labels.

        The interval is for the column's value in the population behind the rows. It covers
        noise and sampling. Sampling raises the value too, and only the low end has this subtracted.
        Where noise hides whether a bin is pure, the high end is the value if it is.
        """
        slope, curve = _derivatives(*self._filled)
        noise, variance = self._noise, self._variance
        value = _value(*self._filled) - float(np.diag(curve) @ noise) / 2
        by_sampling = float(np.diag(curve) @ (variance - noise)) / 2
        spread = float(slope**2 @ variance + variance @ curve**2 @ variance / 2)
        apart = NORMAL * np.sqrt(spread)
        low = max(0.0, value - max(by_sampling, 0.0) - apart)
        return Estimate(max(value, 0.0), low, max(value + apart, self._if_pure, 0.0))

    @property
    def _if_pure(self) -> float:
        """Return the value if each bin is pure whose count may be zero; 0 if there is none."""
        reach = NORMAL * np.sqrt(self._noise)
        events, others = self._filled
        no_events, no_others = self.events < reach, self.rows - self.events < reach
        if not (no_events | no_others).any():
            return 0.0
        pure = np.where(no_events, _SMOOTHED, events), np.where(no_others, _SMOOTHED, others)
        return _value(*pure)

    @property
    def _noise(self) -> Floats:
        """Return the variance of the estimated events by noise alone, [B]."""
        spread = self.kept * (1 - self.kept) / (2 * self.kept - 1) ** 2
        return self.rows.astype(np.float64) * spread

    @property
    def _variance(self) -> Floats:
        """Return the variance of the estimated events by noise and sampling, [B]."""
        seen = (1 - self.kept) * self.rows + (2 * self.kept - 1) * self.events
        shares = np.clip(seen / np.maximum(self.rows, 1), 0, 1)
        return self.rows * shares * (1 - shares) / (2 * self.kept - 1) ** 2


def _value(events: Floats, others: Floats) -> float:
    """Return the information value of bins with so many events and other rows, [B] each."""
    e, g = events / events.sum(), others / others.sum()
    return float(((g - e) * np.log(g / e)).sum())


def _derivatives(events: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return dIV/dE_b [B], and the second derivatives [B, B], where E_b + N_b is constant."""
    total, rest = events.sum(), others.sum()
    e, g = events / total, others / rest
    log = np.log(g / e)
    by_e, by_g = 1 - log - g / e, 1 + log - e / g  # dIV/de, dIV/dg
    mean_e, mean_g = e @ by_e, g @ by_g
    slope = (by_e - mean_e) / total - (by_g - mean_g) / rest
    one = np.eye(len(e))
    of_e, of_g = (one - e[:, None]) / total, (g[:, None] - one) / rest  # de_b/dE_c, dg_b/dE_c
    mixed = of_e.T @ np.diag(-1 / g - 1 / e) @ of_g
    curve = of_e.T @ np.diag(1 / e + g / e**2) @ of_e + of_g.T @ np.diag(1 / g + e / g**2) @ of_g
    curve += mixed + mixed.T
    curve -= np.add.outer(by_e - mean_e, by_e - mean_e) / total**2
    curve -= np.add.outer(by_g - mean_g, by_g - mean_g) / rest**2
    return slope, curve


def merged(evidence: Evidence, min_rows: int) -> Groups:
    """Merge bins with their neighbours until each group has enough rows.

    With exact counts, each group has at least ``min_rows`` rows of each class. With noise, it has
    at least that many rows, and enough to see the rarer class. For its share s of all rows, n s is
    at least four deviations of the noise. That depends on no bin's noisy count, so it favours no
    bin. The last bin, of missing values, stays alone if it can. Else it joins the group before it.
    """
    last, least = len(evidence.rows) - 1, least_rows(evidence, min_rows)

    def apart(start: int, until: int, end: int) -> bool:
        """Return whether the bins on both sides of ``until`` have enough rows."""
        enough = []
        for low, high in ((start, until), (until, end)):
            rows, events = evidence.rows[low:high].sum(), evidence.events[low:high].sum()
            rarer = min(events, rows - events)
            enough.append(rows >= least and (evidence.kept < 1 or rarer >= min_rows))
        return all(enough)

    groups, group, start = np.zeros(last + 1, np.uint8), 0, 0
    for until in range(1, last + 1):
        groups[until - 1] = group
        if apart(start, until, last):
            group, start = group + 1, until
    groups[last] = group + apart(0, last, last + 1)
    return groups


def least_rows(evidence: Evidence, min_rows: int) -> float:
    """Return the least rows in a bin: infinite, if noise hides the rarer class in all rows."""
    rows, events, kept = evidence.rows.sum(), evidence.events.sum(), evidence.kept
    deviation = math.sqrt(kept * (1 - kept)) / (2 * kept - 1)
    share = min(events, rows - events) / max(rows, 1)
    return max(min_rows, (_CLEAR * deviation / share) ** 2) if share > 0 else math.inf


def leverages(sums: Array, times: Array | None = None) -> Floats:
    """Return what sums over people say about each of them at most, [N].

    The leverage of person i is a_i' (A A')^+ a_i, where a_i is its column in A. It is the share of
    its value's variance that the best linear estimate explains. At 1, the sums determine the value.

    sums : matrix A [K, N] of zeros and ones: a row for each sum, a column for each person.
    times : number of people with each column, [N]. Each counts once by default.
    """
    times = np.ones(sums.shape[1]) if times is None else times
    pieces = [slice(at, at + 65536) for at in range(0, sums.shape[1], 65536)]
    gram = np.zeros((len(sums),) * 2)
    for some in pieces:
        piece = sums[:, some].astype(np.float64)
        gram += (piece * times[some]) @ piece.T
    values, vectors = np.linalg.eigh(gram)
    real = values > 1e-14 * len(sums) * values[-1]  # others are zero but for rounding
    whitened = (vectors[:, real] / np.sqrt(values[real])).T
    return np.concatenate([np.square(whitened @ sums[:, some]).sum(0) for some in pieces])


_DRAWN = 30  # columns in the picture, with the largest values
_SHOWN = 9  # of these, columns whose bins are drawn too
_BLUE, _GREY = "#0a56dd", "#58626e"


@dataclass(frozen=True)
class ColumnEvidence:
    """A column's merged bins, and what they say about the labels."""

    column: str
    names: list[str]  # of each group of bins, [G]
    edges: list[tuple[float, float] | None]  # above the first, up to the second; None: texts
    evidence: Evidence
    information: Estimate | None

    @classmethod
    def of(
        cls, column: str, bins: Bins, counts: Sequence[int], groups: Groups, evidence: Evidence
    ) -> ColumnEvidence:
        """Name the groups of a column's bins. Bins without ``counts``, [B], give no name."""
        names: list[str] = []
        edges: list[tuple[float, float] | None] = []
        limits, missing = (-np.inf, *bins.edges, np.inf), bins.count - 1
        for group in range(int(groups.max()) + 1):
            inside = [at for at in np.flatnonzero(groups == group).tolist() if counts[at]]
            known = [at for at in inside if at < missing]
            named, span = [bins.names[at] for at in known], None
            if bins.values is None and known:
                span = limits[known[0]], limits[known[-1] + 1]
            if span and len(known) > 1:  # neighbouring ranges of numbers become one range
                ends = Bins(tuple(each for each in span if np.isfinite(each)))
                named = [ends.names[int(np.isfinite(span[0]))]]
            named += ["missing"] * (missing in inside)
            names.append(" or ".join(named) or "none")
            edges.append(span)
        return cls(column, names, edges, evidence, value_of(np.array(counts), evidence))

    @property
    def note(self) -> str:
        """Return why the column has no value, or says nothing."""
        return note_of(self.information, len(self.names))


def value_of(counts: NDArray[np.int64], evidence: Evidence) -> Estimate | None:
    """Return the information value of merged bins; None if all of several bins were merged."""
    merged_all = len(evidence.rows) == 1 and (counts > 0).sum() > 1
    return None if merged_all else evidence.information()


def note_of(information: Estimate | None, bins: int) -> str:
    """Return why a column has no value, or says nothing; else an empty text."""
    if information is None:
        return "no value: no two bins have enough rows, or enough rows of each class"
    return "constant in the training rows" if bins == 1 else ""


def write_files(path: Path, columns: Sequence[ColumnEvidence]) -> None:
    """Write a table, a line for each bin, to ``path``, and a picture beside it (.png)."""
    fields = "column,bin,above,up_to,rows,events,others,woe,woe_low,woe_high,iv,iv_low,iv_high,note"
    lines = []
    for each in columns:
        evidence, value = each.evidence, each.information
        low, high = evidence.weight_intervals()
        for at, name in enumerate(each.names):
            rows, events = int(evidence.rows[at]), float(evidence.events[at])
            of_labels = (int(n) if n.is_integer() else n for n in (events, rows - events))
            weights = [float(part[at]) for part in (evidence.weights, low, high)]
            iv = [value.value, value.low, value.high] if value else [""] * 3
            edges = ["" if np.isinf(edge) else edge for edge in each.edges[at] or (np.inf, np.inf)]
            lines.append([each.column, name, *edges, rows, *of_labels, *weights, *iv, each.note])
    with told(path):
        make_folder(path.parent)
        with whole(path) as file:
            write_csv(file, pd.DataFrame(lines, columns=fields.split(","), dtype=object))
    _draw(path.with_suffix(".png"), columns)


def _draw(path: Path, columns: Sequence[ColumnEvidence]) -> None:
    """Draw values with intervals, and the weight of evidence of the best columns."""
    from matplotlib.figure import Figure

    valued = [(each, each.information) for each in columns if each.information]
    if not (best := sorted(valued, key=lambda pair: -pair[1].value)[:_DRAWN]):
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
