"""Pictures of rows: mean curves over seeds, and a band of their deviation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.rows import Histories, History, Picture, value
from vfl_flower.results.charts import COLOURS, Line, chart, look


def draw(histories: Histories, picture: Picture, path: Path) -> None:
    """Write a PNG of at most three panels side by side, with a line for each job."""
    from matplotlib.figure import Figure

    histories = through_ends(histories, picture.x) if picture.ends else histories
    panels: dict[str, dict[str, Sequence[History]]] = {}
    for name, each in histories.items():
        panel, _, line = name.rpartition(" | ")
        panels.setdefault(panel, {})[line] = each
    names = list(dict.fromkeys(line for lines in panels.values() for line in lines))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(3.6 * across + 1.6, 2.7 * down), layout="constrained")
    drawn: dict[str, Any] = {}
    for number, (panel, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, number + 1)
        made, bands = [], []
        for name, each in lines.items():
            entries = [[(value(e, picture.x), value(e, picture.y)) for e in h] for h in each]
            shortest = min(map(len, entries))
            of_seeds = np.array([points[:shortest] for points in entries])
            x, y = of_seeds.mean(0).T
            points = [(float(at), float(is_)) for at, is_ in zip(x, y, strict=True)]
            made.append(Line(name, names.index(name), points))
            bands.append((x, y, of_seeds[:, :, 1].std(0)))
        y_label = picture.y_label if number % across == 0 else ""
        drawn |= chart(axes, made, picture.x_label, y_label)
        for drawn_line, (x, y, deviation) in zip(made, bands, strict=True):
            if drawn_line.moves:
                colour = COLOURS[look(drawn_line.number)[0]]
                axes.fill_between(x, y - deviation, y + deviation, color=colour, alpha=0.15)
        if picture.y == "gradient_norm":
            axes.set_yscale("log")
        axes.set_title(panel, fontsize=9, loc="left")
    figure.legend(
        handles=list(drawn.values()),
        labels=list(drawn),
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=100)


def through_ends(histories: Histories, x: str) -> Histories:
    """Return one history for all jobs with one name before the last bar: the end of each.

    Parameters
    ----------
    x : jobs without this figure are left out.
    """
    made: dict[str, list[list[Any]]] = {}
    for name, each in histories.items():
        ends = [history[-1] for history in each]
        if all(end.get(x) is not None for end in ends):
            lines = made.setdefault(name.rpartition(" | ")[0], [[] for _ in ends])
            for line, end in zip(lines, ends, strict=True):
                line.append(end)
    return made
