"""Writes docs/reference/papers.md from its template and the kept runs.

The template `page.template` has the text. A line ``{{ROW}}`` stands for a row's table, and
``{{ROW; RUN; COLUMN}}`` for one mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

from benchmarks.papers.rows import HERE, Column, History, Row

TEMPLATE = HERE / "page.template"
PAGE = HERE.parent.parent / "docs" / "reference" / "papers.md"
PICTURES = HERE.parent.parent / "docs" / "papers"
KEPT = HERE / "results"
"""The runs that the page is made of."""

Histories = Mapping[str, Sequence[History]]
"""The histories of a row's runs, by seed."""


def render(template: str, rows: Mapping[str, Row], of: Mapping[str, Histories]) -> str:
    """Return the page.

    Parameters
    ----------
    of : the histories of each row's kept runs.
    """

    def filled(match: re.Match[str]) -> str:
        name, *place = (part.strip() for part in match[1].split(";"))
        if not place:
            return "\n".join(table(rows[name], of[name]))
        run, column = place
        text, _ = figure(rows[name].columns[column], of[name][run])
        return text.partition(" ± ")[0]

    return re.sub(r"\{\{([^}]+)\}\}", filled, template)


def picture(name: str) -> list[Path]:
    """Return where a row's picture is, if the page shows it beside the row's kept runs."""
    text = TEMPLATE.read_text()
    shown = f"{{{{{name}}}}}" in text and f"](../papers/{name}.png)" in text
    return [PICTURES / f"{name}.png"] if shown else []


def table(row: Row, histories: Histories) -> list[str]:
    """Return the lines of a Markdown table of a row's figures."""
    header = ["run", *(["the paper"] if row.theirs else []), *row.columns, "seeds"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [line(name, row, each) for name, each in histories.items()]


def line(name: str, row: Row, histories: Sequence[History]) -> str:
    """Return the line of a run in the table of its row."""
    cells = [figure(of, histories)[0] for of in row.columns.values()]
    theirs = [row.theirs.get(name, "")] if row.theirs else []
    return f"| {' | '.join([name.replace(' | ', ', '), *theirs, *cells, str(len(histories))])} |"


def figure(column: Column, histories: Sequence[History]) -> tuple[str, dict[str, Any]]:
    """Return a cell, "mean ± half of the 95 % interval of the mean", and its figures."""
    if not histories:
        return "not run", {}
    if not all(histories):
        return "diverges", {}
    found = [column(history) for history in histories]
    have = [each for each in found if each is not None]
    if not have:
        return "not reached", {"by_seed": found}
    text = _rounded(mean(have), 4)
    if len(have) > 1:
        half = float(student.ppf(0.975, len(have) - 1)) * stdev(have) / sqrt(len(have))
        text += f" ± {_rounded(half, 2)}"
    if len(have) < len(found):
        text += f" ({len(have)} of {len(found)})"
    by_seed = [None if each is None else float(f"{each:.6g}") for each in found]
    return text, {"mean": float(f"{mean(have):.6g}"), "by_seed": by_seed}


def _rounded(number: float, digits: int) -> str:
    return f"{float(f'{number:.{digits}g}'):g}"


def write(rows: Mapping[str, Row], of: Mapping[str, Histories]) -> None:
    """Write the page."""
    PAGE.write_text(render(TEMPLATE.read_text(), rows, of))
