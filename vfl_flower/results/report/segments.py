"""The section of the page with a model's figures by segment, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vfl_flower.results.figures import ASSESSED, form_of, percent
from vfl_flower.results.page import Row, Section, Table
from vfl_flower.results.report.assessment import (
    Estimate,
    by_run,
    estimates,
    scale,
)
from vfl_flower.results.report.curves import run_column
from vfl_flower.results.report.features import drifts
from vfl_flower.results.report.read import Shown, mapping, number, shown, text

_MAIN = "auc", "macro_auc", "accuracy", "rmse"
"""Figures that may be drawn. The first that a run has is."""

_DIFFERENCES = {
    "demographic_parity": "share flagged (demographic parity)",
    "equal_opportunity": "recall (equal opportunity)",
}


_MOST_LEFT_OUT = 5  # segments that notes name; more unfold


def segments(runs: Sequence[Shown]) -> Section | None:
    """Show figures by segment, the differences between segments, and segments left out."""
    runs = [run for run in runs if _of(run)]
    columns = dict.fromkeys(column for run in runs for column in _of(run))
    tables, more, left_out = [], {}, [(run, _left_out(run)) for run in runs]
    for column in columns:
        found = [mapping(_of(run).get(column)) for run in runs]
        tables += [_main(column, runs, found), _differences(column, runs, found)]
        tables += [_drift(column, run, of) for run, of in zip(runs, found, strict=True)]
        more[f"All figures by {column}"] = _all(column, runs, found)
    notes = []
    if any(mapping(_of(run).get(each)).get("differences") for run in runs for each in columns):
        notes.append("Largest difference: between two segments. The mark is at 0, no difference.")
    said = [
        (run, [f"No figures of {name} in {column}: it {why}." for column, name, why in each])
        for run, each in left_out
    ]
    if all(len(each) <= _MOST_LEFT_OUT for _, each in left_out):
        notes += by_run(said)
    else:
        rows: list[Row] = [[run.title, *each] for run, every in left_out for each in every]
        more["Segments without figures"] = Table(["run", "column", "segment", "why"], [rows], 4)
    return Section("Segments", tables, [("", n) for n in notes], more=more) if columns else None


def _of(run: Shown) -> dict[str, Any]:
    return mapping(run.assessment.get("segments"))


def _left_out(run: Shown) -> list[tuple[str, str, str]]:
    """Return column, segment and reason of each segment without figures."""
    return [
        (column, name, text(why))
        for column, found in _of(run).items()
        for name, why in mapping(mapping(found).get("left_out")).items()
    ]


Found = Sequence[Mapping[str, Any]]  # a column's segments, of each run
Segment = tuple[int, str, dict[str, Estimate]]  # place of the run, rows, figures


def _by_segment(found: Found) -> dict[str, list[Segment]]:
    """Return each segment with the rows and figures that each run has of it."""
    names = dict.fromkeys(name for each in found for name in mapping(each.get("figures")))
    return {
        name: [
            (n, shown(number(each, "rows", name), ",.0f"), estimates(mapping(figures[name])))
            for n, each in enumerate(found)
            if name in (figures := mapping(each.get("figures")))
        ]
        for name in names
    }


def _main(column: str, runs: Sequence[Shown], found: Found) -> Table:
    """Return the main figure of each segment, drawn on one scale."""
    by_segment, names = _by_segment(found), run_column(runs)
    every = [figures for each in by_segment.values() for _, _, figures in each]
    key = next((key for key in _MAIN if any(key in each for each in every)), "")
    ends = scale([each[key] for each in every if key in each])
    bodies: list[list[Row]] = [
        [
            [
                name,
                names[n],
                rows,
                percent(figures["flagged"].value or 0.0) if "flagged" in figures else "",
                *(estimate := figures.get(key, Estimate(None))).texts(form_of(key)),
                estimate.dot(*ends, n),
            ]
            for n, rows, figures in each
        ]
        for name, each in by_segment.items()
    ]
    called, _ = ASSESSED.get(key, (key, ""))
    drawn = "{:.3g} to {:.3g}".format(*ends)
    head = [column, "run", "rows", "flagged", called, "95 % interval", drawn]
    bodies = bodies if len(runs) > 1 else [[row for body in bodies for row in body]]
    return Table(head, bodies, 2, f"By {column}")


def _drift(column: str, run: Shown, found: Mapping[str, Any]) -> Table:
    """Return the drift of labels and scores from each period to the next."""
    drift = mapping(found.get("drift"))
    named = {
        f"{name}, {text(period)} against {text(mapping(of).get('since'))}": index
        for period, of in drift.items()
        for name, index in mapping(of).items()
        if name != "since"
    }
    return drifts(named, ", ".join(filter(None, [f"Drift by {column}", run.title])))


def _all(column: str, runs: Sequence[Shown], found: Found) -> Table:
    """Return every figure of every segment."""
    names = run_column(runs)
    rows: list[Row] = [
        [name, names[n], ASSESSED.get(key, (key, ""))[0], *texts]
        for name, each in _by_segment(found).items()
        for n, _, figures in each
        for key, estimate in figures.items()
        if (texts := estimate.texts(form_of(key)))
    ]
    return Table([column, "run", "figure", "value", "95 % interval"], [rows], 3)


def _differences(column: str, runs: Sequence[Shown], found: Found) -> Table:
    """Return the differences between segments."""
    shares = (estimates(mapping(each.get("differences"))) for each in found)
    of_runs = [
        {key: Estimate(*(end and 100 * end for end in each)) for key, each in of.items()}
        for of in shares
    ]
    least, most = scale([each for every in of_runs for each in every.values()])
    ends, names = (min(least, 0.0), max(most, 0.0)), run_column(runs)
    rows: list[Row] = [
        [
            _called(key, found[n]),
            names[n],
            *every[key].texts(".1f"),
            every[key].dot(*ends, n, 0.0),
        ]
        for key in dict.fromkeys(key for every in of_runs for key in every)
        for n, every in enumerate(of_runs)
        if key in every
    ]
    drawn = "{:.3g} to {:.3g}".format(*ends)
    head = ["largest difference", "run", "percentage points", "95 % interval", drawn]
    return Table(head, [rows], 2, f"Differences by {column}")


def _called(key: str, found: Mapping[str, Any]) -> str:
    """Return what differs, between which segments, and the ratio of their shares."""
    of = mapping(mapping(found.get("differences")).get(key))
    ends = [text(of[end]) for end in ("highest", "lowest") if of.get(end) is not None]
    between = f": {' above '.join(ends)}" if len(ends) == 2 else ""
    kind = "flagged" if key == "demographic_parity" else "recall"
    high, low = ([number(found, "figures", each, kind, "value") for each in ends] + [None] * 2)[:2]
    if high and low is not None:
        between += f", ratio {low / high:.2f}"
    return _DIFFERENCES.get(key, key) + between
