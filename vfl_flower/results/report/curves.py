"""Curves of the page: what runs reach against each thing that they spend."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vfl_flower.results.charts import Line, look, svg
from vfl_flower.results.page import Cell, Chart, Row, Section, Table
from vfl_flower.results.report.read import MEASURES, Shown, measured, number, shown

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
_MOST_TIPS = 30  # of a line
_CALLED = {"test": "test", "validation": "validation", "train": "training"}


def curves(runs: Sequence[Shown]) -> Section | None:
    """Draw the measures of the runs against what they spend."""
    entries = [entry for run in runs for entry in run.history]
    axes = [axis for axis in _AXES if any(number(entry, axis) for entry in entries)]
    if len(runs) > 1:
        axes.sort(key="epoch".__eq__)  # runs are compared by what they cost
    pairs = ((axis, key) for axis in axes for key in _MEASURES)
    lines = {pair: list(_lines(runs, *pair)) for pair in pairs}
    rows: dict[str, list[Chart]] = {}
    for (axis, key), each in lines.items():
        what = _MEASURES[key] if len(runs) == 1 else f"test {_MEASURES[key]}"
        title = f"{what} against {_AXES[axis].partition(',')[0]}"
        if chart := drawn(title, each, _AXES[axis]):
            rows.setdefault(_AXES[axis], []).append(chart)
    if not rows:
        return None
    notes = []
    if any(not line.moves for each in lines.values() for line in each):
        notes.append(_LEVEL)
    if any("deviation" in entry for entry in entries):
        notes.append("A band is one standard deviation of the seeds to either side of their mean.")
    if len(runs) == 1 and runs[0].config.get("privacy") == "labels":
        notes.append(_NOISY)
    if "virtual_seconds" in axes:
        notes.append(_VIRTUAL)
    more = {"These figures as a table": _table(runs, axes)}
    return Section("Curves", [], notes, _legend(runs), rows, more)


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
    """Return the names of the lines, and of the ring; of one run with the epoch that it marks."""
    there = {key.partition("_")[0] for key in _columns(runs)}
    kinds = [Cell(_CALLED[rows], line=_line(n)) for rows, n in _ROWS.items() if rows in there]
    epochs = [shown(number(run.best, "epoch")) for run in runs if run.best]
    which = f" ({epochs[0]})" if len(runs) == 1 and epochs else ""
    ring = Cell(f"best epoch{which} by validation loss", line="ring")
    return [*(titles(runs) if len(runs) > 1 else kinds), *([ring] if epochs else [])]


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
            (x, y, number(each, "deviation", of), each is run.best)
            for each in run.history
            if (x := number(each, axis)) is not None and (y := number(each, of)) is not None
        ]
        if not found:
            continue
        points, several = [(x, y) for x, y, *_ in found], any(half for _, _, half, _ in found)
        band = [(y - (half or 0.0), y + (half or 0.0)) for _, y, half, _ in found if several]
        best = next(((x, y) for x, y, _, is_best in found if is_best), None)
        level = number(run.figures, of) if run.finished else None
        yield Line(name, place, points, band, best=best, kept=level)


def drawn(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    references: Sequence[Line] = (),
    linear: bool = False,
) -> Chart | None:
    """Draw lines, with what each point is; None if none of them has a course."""
    if not any(line.moves for line in lines):
        return None
    elements, places = svg([*references, *lines], x_label, linear)
    own = zip(lines, places[len(references) :], strict=True)
    tips = [(*at, tip) for line, places in own for at, tip in _tips(line, places)]
    tips = [tip for tip in tips if math.isfinite(tip[0])]  # 0 has no place on a logarithmic axis
    ends = "; ".join(f"{line.name}: {line.level:.4g}{line.when}" for line in lines)
    return Chart(title, f"{title}. {ends}.", elements, tips)


def _tips(line: Line, places: Sequence[tuple[float, float]]) -> Iterator[tuple[Any, str]]:
    """Yield place and text of a line's points: each, or some of many, its best one and its end."""
    points = line.points if line.moves else [(line.points[-1][0], line.level)]
    step = -(-len(points) // _MOST_TIPS) if line.joined else 1
    for n, (at, (x, y)) in enumerate(zip(places, points, strict=True)):
        is_best = (x, y) == line.best
        if n % step == 0 or is_best or n == len(points) - 1:
            band = "".join(f" ({low:.4g} to {high:.4g})" for low, high in line.band[n : n + 1])
            yield at, f"{line.name}: {y:.4g}{band} at {x:.4g}{', the best epoch' * is_best}"


def frontier(runs: Sequence[Shown]) -> Section | None:
    """Draw the models that runs had kept so far against bytes and seconds, and the best of them."""
    row = []
    for axis in ("megabytes", "seconds"):
        lines = frontier_lines(runs, axis)
        title = f"{MEASURES[runs[0].measure]} of the kept model against {axis}"
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


def frontier_lines(runs: Sequence[Shown], axis: str) -> list[Line]:
    """Return the line of the frontier, if there is one, and one of each run's models by cost."""
    metric, models = runs[0].measure, [kept(run.history, axis) for run in runs]
    best = best_models([model for of_run in models for model in of_run], metric)
    lines = [Line("frontier", 7, best, broad=True)] if best else []
    for place, (run, of_run) in enumerate(zip(runs, models, strict=True)):
        figures = {cost: number(model, metric) for cost, model in of_run}
        points = [(cost, each) for cost, each in figures.items() if each is not None]
        level = number(run.figures, metric) if run.finished else None
        lines += [Line(run.title, place, points, kept=level)] if points else []
    return lines


def kept(history: Sequence[dict[str, Any]], axis: str) -> list[tuple[float, dict[str, Any]]]:
    """Return cost of each evaluation, and the evaluation whose model a run has kept by then."""
    found, model = list[tuple[float, dict[str, Any]]](), dict[str, Any]()
    for entry in history:
        loss, least = (number(each, "validation_loss") for each in (entry, model))
        model = model if loss is not None and least is not None and loss >= least else entry
        found += [(cost, model) for cost in [number(entry, axis)] if cost is not None]
    return found


def best_models(
    models: Sequence[tuple[float, Mapping[str, Any]]], metric: str
) -> list[tuple[float, float]]:
    """Return cost and figure of the best of the models that runs had kept at this cost.

    Validation rows choose the model, and test rows measure it.
    """
    found, best = dict[float, float](), -math.inf
    for cost, model in sorted(models, key=lambda each: each[0]):
        value, figure = number(model, metric.replace("test", "validation")), number(model, metric)
        if cost and value is not None and figure is not None and value > best:
            best, found[cost] = value, figure
    if found:  # to the right end
        found.setdefault(max(cost for cost, _ in models), [*found.values()][-1])
    return [*found.items()]


def _table(runs: Sequence[Shown], axes: Sequence[str]) -> Table:
    columns, several, bodies = _columns(runs), len(runs) > 1, list[list[Row]]()
    parted = [key.partition("_") for key in columns]
    heads = [f"{_CALLED[rows]} {_MEASURES[key]}" for rows, _, key in parted]
    for run in runs:
        best, rows = run.best, list[Row]()
        for entry in run.history:
            spent: dict[str, str | Cell] = {axis: measured(entry, axis) for axis in axes}
            if entry is best and "epoch" in spent:
                spent["epoch"] = Cell(f"best: {spent['epoch']}", line="ring")
            figures = [measured(entry, key, form=".4f") for key in columns]
            rows.append([*([run.title] if several else []), *spent.values(), *figures])
        bodies.append(rows)
    head = [*(["run"] if several else []), *(_AXES[axis] for axis in axes), *heads]
    return Table(head, bodies)
