"""Curves of the page: what runs reach against each thing that they spend."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vfl_flower.results import charts
from vfl_flower.results.charts import Line, around, look, svg
from vfl_flower.results.page import Cell, Chart, Section, Table
from vfl_flower.results.report.read import MEASURES, Shown, measured, number, shown, spent

_AXES = {
    "epoch": "epochs",
    "exchanges": "exchanges",
    "megabytes": "megabytes, up and down",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}
_MEASURES = {"accuracy": "accuracy", "r2": "R²", "loss": "loss"}
_ROWS = {"test": 0, "validation": 1, "train": 7}
"""Rows that a run is measured on -> number of their line on the page of one run."""

_LEVEL = "A dashed line is the result of a run that sends nothing while it trains."
_VIRTUAL = "Virtual seconds: time on a simulated clock, with the delays that the run was given."
_NOISY = (
    "Training and validation use noisy labels, and are corrected for the noise: such an accuracy "
    "can exceed 1. The test uses true labels."
)
_CALLED = {"test": "test", "validation": "validation", "train": "training"}


def curves(runs: Sequence[Shown]) -> Section | None:
    """Draw the measures of the runs against what they spend."""
    entries = [entry for run in runs for entry in run.history]
    axes = [axis for axis in _AXES if any(spent(entry, axis) for entry in entries)]
    if len(runs) > 1:
        axes.sort(key="epoch".__eq__)  # runs are compared by what they cost
    rows = {
        _AXES[axis]: [each for key in _MEASURES if (each := _chart(runs, axis, key))]
        for axis in axes
    }
    if not any(rows.values()):
        return None
    best = _best(runs)
    notes = []
    drawn_here = (each for axis in axes for key in _MEASURES for each in _lines(runs, axis, key))
    if any(not line.moves for line in drawn_here):
        notes.append(_LEVEL)
    if any("deviation" in entry for entry in entries):
        notes.append("A band is one standard deviation of the seeds to either side of their mean.")
    if len(runs) == 1 and runs[0].config.get("privacy") == "labels":
        notes.append(_NOISY)
    if "virtual_seconds" in axes:
        notes.append(_VIRTUAL)
    return Section(
        "Curves",
        legend=[*_legend(runs), *best],
        charts={axis: row for axis, row in rows.items() if row},
        notes=notes,
        more={"These figures as a table": _table(runs, axes)},
    )


def _best(runs: Sequence[Shown]) -> list[Cell]:
    """Return the legend of the ring; of one run with the epoch that it marks."""
    epochs = [shown(number(run.best, "epoch")) for run in runs if run.best]
    if not epochs:
        return []
    which = f" ({epochs[0]})" if len(runs) == 1 else ""
    return [Cell(f"best epoch{which} by validation loss", line="ring")]


def titles(runs: Sequence[Shown]) -> list[Cell]:
    """Return the runs' titles, each beside the line that the run has in the charts."""
    return [Cell(run.title, line=_line(place)) for place, run in enumerate(runs)]


def run_column(runs: Sequence[Shown]) -> list[Cell]:
    """Return the titles of several runs. A page drops the column if there is one run."""
    return titles(runs) if len(runs) > 1 else [Cell()]


def _line(place: int) -> str:
    colour, dashes = look(place)
    return f"line s{colour} dashes-{dashes}"


def _legend(runs: Sequence[Shown]) -> list[Cell]:
    if len(runs) > 1:
        return titles(runs)
    there = {key.partition("_")[0] for key in _columns(runs)}
    return [Cell(_CALLED[rows], line=_line(n)) for rows, n in _ROWS.items() if rows in there]


def _columns(runs: Sequence[Shown]) -> list[str]:
    """Return the keys of all figures."""
    keys = (f"{rows}_{key}" for key in _MEASURES for rows in _ROWS)
    entries = [entry for run in runs for entry in run.history]
    return [key for key in keys if any(number(entry, key) is not None for entry in entries)]


def _lines(runs: Sequence[Shown], axis: str, key: str) -> Iterator[Line]:
    """Yield a line for each run; for one run alone, a line for each kind of rows."""
    if len(runs) > 1:
        kinds = [(run.title, place, run, f"test_{key}") for place, run in enumerate(runs)]
    else:
        kinds = [(_CALLED[rows], n, runs[0], f"{rows}_{key}") for rows, n in _ROWS.items()]
    for name, place, run, of in kinds:
        found = [
            (x, y, each)
            for each in run.history
            if (x := spent(each, axis)) is not None and (y := number(each, of)) is not None
        ]
        points = [(x, y) for x, y, _ in found]
        spread = [number(each, "deviation", of) or 0.0 for _, _, each in found]
        best = next(((x, y) for x, y, each in found if each is run.best), None)
        if found:
            kept = number(run.figures, of) if run.finished else None
            yield Line(name, place, points, around(points, spread), best=best, kept=kept)


def _chart(runs: Sequence[Shown], axis: str, key: str) -> Chart | None:
    """Draw one measure; a run that spends nothing of the axis is a level."""
    lines = list(_lines(runs, axis, key))
    what = _MEASURES[key] if len(runs) == 1 else f"test {_MEASURES[key]}"
    return drawn(f"{what} against {_AXES[axis].partition(',')[0]}", lines, _AXES[axis])


def drawn(title: str, lines: Sequence[Line], x_label: str) -> Chart | None:
    """Draw lines, with what each point is; None if none of them has a course."""
    if not any(line.moves for line in lines):
        return None
    drawing = svg(lines, x_label)
    tips = []
    for line, places in zip(lines, drawing.places, strict=True):
        points = line.points if line.moves else [(line.points[-1][0], line.level)]
        for at, (x, y) in zip(places, points, strict=True):
            if line.dots or at == places[-1] or (x, y) == line.best:
                best = ", the best epoch" if (x, y) == line.best else ""
                tips.append((*at, f"{line.name}: {y:.4g} at {x:.4g}{best}"))
    tips = [tip for tip in tips if math.isfinite(tip[0])]  # 0 has no place on a logarithmic axis
    ends = "; ".join(f"{line.name}: {line.level:.4g}{_when(line)}" for line in lines)
    elements = Markup(drawing.elements)  # by matplotlib, from numbers only
    return Chart(title, f"{title}. {ends}.", drawing.width, drawing.height, elements, tips)


def _when(line: Line) -> str:
    """Return when a run had the figure of its model; empty for a mean over seeds."""
    if line.best:
        return " at the best epoch"
    return " at the end" if line.level == line.points[-1][1] else ""


def frontier(runs: Sequence[Shown]) -> Section | None:
    """Draw the models that runs had kept so far against bytes and seconds, and the best of them."""
    metric = runs[0].measure
    needed = metric, "bytes_up", "bytes_down", "seconds"
    keys = *needed, "validation_loss", metric.replace("test", "validation")
    shown: list[tuple[str, list[dict[str, Any]], float | None]] = []
    for run in runs:
        history = [
            found
            for entry in run.history
            if None not in map((found := {key: number(entry, key) for key in keys}).get, needed)
        ]
        shown.append((run.title, history, number(run.figures, metric) if run.finished else None))
    row = []
    for key, axis, unit in (("bytes", "megabytes", 1e-6), ("seconds", "seconds", 1.0)):
        lines = charts.frontier_lines(shown, metric, key, unit)
        title = f"{MEASURES[metric]} of the kept model against {axis}"
        best = any(line.broad for line in lines)
        row += [each for each in [drawn(title, lines, _AXES[axis])] if best and each]
    if not row:
        return None
    notes = [
        "A line is the test figure of the model that a run's validation rows had chosen so far.",
        "Frontier: of all runs, the model that validation rows choose at this cost.",
    ]
    legend = [*titles(runs), Cell("frontier", line="line s7 broad")]
    return Section("Frontier", [], notes, legend, {"": row})


def _table(runs: Sequence[Shown], axes: Sequence[str]) -> Table:
    columns, several = _columns(runs), len(runs) > 1
    parted = [key.partition("_") for key in columns]
    heads = [f"{_CALLED[rows]} {_MEASURES[key]}" for rows, _, key in parted]
    bodies = [
        [
            (
                *([run.title] if several else []),
                *(_of_axis(entry, axis, entry is best) for axis in axes),
                *(measured(entry, key, form=".4f") for key in columns),
            )
            for entry in run.history
        ]
        for run, best in [(run, run.best) for run in runs]
    ]
    head = [*(["run"] if several else []), *(_AXES[axis] for axis in axes), *heads]
    return Table(head, bodies)


def _of_axis(entry: Mapping[str, Any], axis: str, is_best: bool) -> str | Cell:
    """Return how much had been spent; the best epoch is marked."""
    text = _spent(entry, axis)
    return Cell(f"best: {text}", line="ring") if is_best and axis == "epoch" else text


def _spent(entry: Mapping[str, Any], axis: str) -> str:
    """Return how much had been spent; of several seeds, with the standard deviation."""
    if axis != "megabytes":
        return measured(entry, axis)
    deviation = number(entry, "deviation", "bytes")
    text = shown(spent(entry, axis))
    return text if deviation is None else f"{text} ± {deviation / 1e6:.4g}"
