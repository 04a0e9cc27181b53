"""What the page says about a sweep: the best trials, what keys matter, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vfl_flower.label_holder.charts import Line, svg
from vfl_flower.label_holder.figures import SECOND, VALIDATED
from vfl_flower.tools.report.page import Verdict
from vfl_flower.tools.report.read import NOTHING, json_of, mapping, mappings, number, text
from vfl_flower.tools.report.sections import (
    Bar,
    Cell,
    Chart,
    Row,
    Section,
    Table,
    counted,
    measured,
    shown,
)

FILE = "sweep.json"
_STATES = {"finished": "finished", "stopped": "stopped early", "failed": "failed"}
_SHOWN = 10  # trials, of which the others are to unfold


def page_of_sweep(folder: Path) -> dict[str, Any]:
    """All that the template shows, by name.

    Raises
    ------
    VflError
        If ``sweep.json`` cannot be read.
    """
    found = json_of(folder / FILE)
    keys, trials = mapping(found.get("keys")), mappings(found.get("trials"))
    metric = VALIDATED.get(text(found.get("metric")), "figure")
    of = {state: sum(each.get("state") == state for each in trials) for state in _STATES}
    said = ", ".join(f"{count} {_STATES[state]}" for state, count in of.items() if count)
    seeds = number(found, "seeds")
    by = f"; each by {counted(seeds, 'seed', 'seeds')}" if seeds and seeds > 1 else ""
    strategy = text(keys.get("strategy"))
    sentence = f"{counted(len(trials), 'trial', 'trials')}: {said}{by}."
    about = f"Chosen by {metric}; test rows have no say."
    sections = [_best(found), _trials(found, trials, metric), _importance(found, metric)]
    return {
        "title": f"Sweep of {strategy} on {text(keys.get('dataset', 'digits')).rsplit('/', 1)[-1]}",
        "verdicts": [Verdict("", "finished", "Swept: ", sentence, about)],
        "tiles": {},
        "sections": [*filter(None, sections), _charts(found, trials, metric)],
    }


def _best(found: Mapping[str, Any]) -> Section:
    row: list[Row] = [("to paste", Cell(text(found.get("line")), code=True))]
    table = Table(["", "command"], [row], "texts")
    return Section("Best configuration", [table])


def _trials(found: Mapping[str, Any], trials: Sequence[dict[str, Any]], metric: str) -> Section:
    keys = list(dict.fromkeys(key for each in trials for key in mapping(each.get("keys"))))
    second, front = _called(found), _front(found)
    head = ["trial", *keys, metric, *([second, "Pareto"] if second else []), "seconds", ""]

    def row(each: dict[str, Any]) -> Row:
        on_front = "front" if each.get("number") in front else ""
        return (
            shown(number(each, "number")),
            *(text(mapping(each.get("keys")).get(key)) for key in keys),
            _figure(each),
            *([shown(_second(found, each)), on_front] if second else []),
            shown(number(each, "seconds"), ".1f"),
            text(each.get("failure")) or _STATES.get(text(each.get("state")), NOTHING),
        )

    def order(each: dict[str, Any]) -> tuple[bool, float]:
        return each.get("state") != "finished", -(number(each, "figure") or 0.0)

    rows = [row(each) for each in sorted(trials, key=order)]
    notes = ["What was stopped early counts with the last figure of its curve."]
    notes += [
        f"{shown(number(each, 'runs'))} runs together: epsilon {shown(number(each, 'epsilon'))} at "
        f"delta {shown(number(each, 'delta'))}; it protects {text(each.get('protects'))}."
        for each in mappings(found.get("together"))
    ]
    return Section(
        "Trials",
        [Table(head, [rows[:_SHOWN]])],
        [("", note) for note in notes],
        more=(f"{len(rows) - _SHOWN} more", Table(head, [rows[_SHOWN:]]))
        if rows[_SHOWN:]
        else None,
    )


def _figure(trial: Mapping[str, Any]) -> str:
    figure, deviation = number(trial, "figure"), number(trial, "deviation")
    seeds = {"deviation": {"figure": deviation}} if deviation is not None else {}
    return measured({"figure": figure, **seeds}, "figure", form=".4f")


def _second(found: Mapping[str, Any], trial: Mapping[str, Any]) -> float | None:
    second, unit = number(trial, "second"), SECOND.get(text(found.get("second")), ((), "", 1))[2]
    return None if second is None else second * unit


def _called(found: Mapping[str, Any]) -> str:
    """What the second objective is called; empty if there is none."""
    return SECOND.get(text(found.get("second")), ((), "", 1))[1]


def _front(found: Mapping[str, Any]) -> list[Any]:
    """Numbers of the trials of the Pareto front."""
    front = found.get("frontier")
    return front if isinstance(front, list) else []


def front_lines(found: Mapping[str, Any]) -> list[Line]:
    """The Pareto front of a ``sweep.json``, and the finished trials that others beat in both."""
    points: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for each in mappings(found.get("trials")):
        figure, spent = number(each, "figure"), _second(found, each)
        if figure is not None and spent is not None:
            points[each.get("number") in _front(found)].append((spent, figure))
    lines = [Line("Pareto front", 0, sorted(points[True]))]
    lines.append(Line("other trials", 7, sorted(points[False]), joined=False))
    return [each for each in lines if each.points]


def _importance(found: Mapping[str, Any], metric: str) -> Section | None:
    shares = mapping(found.get("importance"))
    rows: list[Row] = [
        (
            Cell(key, code=True),
            shown(share := number(shares, key), ".2f"),
            Cell(bar=Bar.of([min(share or 0.0, 1.0)], 1)),
        )
        for key in shares
    ]
    note = (
        f"Shares of the variance of {metric} over all trials, by fANOVA. What is chosen well "
        "already, or searched narrowly, matters little here."
    )
    table = Table(["key", "importance", "0 to 1"], [rows])
    return Section("Importance of each key", [table], [("", note)]) if rows else None


def _charts(found: Mapping[str, Any], trials: Sequence[dict[str, Any]], metric: str) -> Section:
    over = [
        (n + 1.0, figure, each)
        for each in trials
        if (n := number(each, "number")) is not None
        and (figure := number(each, "figure")) is not None
    ]
    finished = [(x, y) for x, y, each in over if each.get("state") == "finished"]
    stopped = [(x, y) for x, y, each in over if each.get("state") != "finished"]
    best = [(x, max(y for _, y in finished[: n + 1])) for n, (x, _) in enumerate(finished)]
    so_far = [Line("best so far", 0, best)] if best else []
    so_far += [Line("finished", 2, finished, joined=False)] if finished else []
    so_far += [Line("stopped early", 7, stopped, joined=False)] if stopped else []
    charts = [_chart(f"{metric} by trial", so_far, "trial")]
    if second := _called(found):
        charts.append(_chart(f"{metric} against {second}", front_lines(found), second))
    legend = {"best so far, or Pareto front": 0, "finished": 2, "stopped early, or others": 7}
    cells = [Cell(name, line=f"line s{colour}") for name, colour in legend.items()]
    return Section("Course", legend=cells, charts=[[each for each in charts if each]])


def _chart(title: str, lines: Sequence[Line], x_label: str) -> Chart | None:
    """Lines and points, each with what it is."""
    if not any(line.moves for line in lines):
        return None
    drawing = svg(lines, x_label)
    tips = [
        (*at, f"{line.name}: {y:.4g} at {x:.4g}")
        for line, places in zip(lines, drawing.places, strict=True)
        for at, (x, y) in zip(places, line.points, strict=False)
    ]
    ends = "; ".join(f"{line.name}: {line.points[-1][1]:.4g} at the end" for line in lines)
    size = drawing.width, drawing.height
    return Chart(title, f"{title}. {ends}.", *size, Markup(drawing.elements), tips)
