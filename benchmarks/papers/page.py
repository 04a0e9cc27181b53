"""Write the pages of results, each from its template and the kept runs.

A template has the text. A line ``{{ROW}}`` stands for a row's table, ``{{ROW; TABLE}}`` for another
table of it, and ``{{ROW; RUN; COLUMN}}`` for one mean. ``{{ROW; RUN; minus RUN; COLUMN}}`` is the
mean difference of two runs, seed by seed, with its interval.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

from benchmarks.papers.rows import HERE, Column, Histories, History, Row

DOCS = HERE.parent.parent / "docs"
PICTURES = DOCS / "papers"
PAGES = {
    HERE / "page.template": DOCS / "reference" / "papers.md",
    HERE / "label_privacy.template": DOCS / "results" / "label-privacy.md",
    **{
        HERE / f"{paper}.template": PICTURES / f"{paper}.md"
        for paper in ("vafl", "asyrevel", "cascaded", "ef-vfl", "dpzv")
    },
}
"""The page of each template."""
KEPT = HERE / "results"
"""The runs that the pages are made of."""
NOT_RUN = "not run"


def render(
    template: str,
    rows: Mapping[str, Row],
    of: Mapping[str, Histories],
    absent: Collection[str] = (),
) -> str:
    """Return a page.

    Parameters
    ----------
    of : the histories of each row's kept runs.
    absent : rows that lack some of their runs.
    """

    def filled(match: re.Match[str]) -> str:
        name, *place = (part.strip() for part in match[1].split(";"))
        if not place:
            return "\n".join(table(rows[name], of[name]))
        if name in absent and len(place) in (1, 3):  # they need all runs
            return NOT_RUN
        if len(place) == 1:
            return "\n".join(rows[name].tables[place[0]](of[name]))
        if len(place) == 3:
            run, other, column = place
            pair = of[name][run], of[name][other.removeprefix("minus ")]
            return difference(rows[name].columns[column], *pair)
        run, column = place
        text, _ = figure(rows[name].columns[column], of[name][run])
        return text.partition(" ± ")[0]

    return re.sub(r"\{\{([^}]+)\}\}", filled, template)


def picture(name: str) -> list[Path]:
    """Return where a row's picture is, if a page shows it beside the row's kept runs."""
    texts = [template.read_text() for template in PAGES]
    shown = any(
        f"{{{{{name}}}}}" in text and re.search(rf"[(/]{name}\.png\)", text) for text in texts
    )
    return [PICTURES / f"{name}.png"] if shown else []


def table(row: Row, histories: Histories) -> list[str]:
    """Return the lines of a Markdown table of a row's figures."""
    header = ["run", *(["the paper"] if row.theirs else []), *row.columns, "seeds"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [line(name, row, each) for name, each in histories.items()]


def line(name: str, row: Row, histories: Sequence[History]) -> str:
    """Return the line of a run in the table of its row."""
    cells = [figure(of, histories, row.missing)[0] for of in row.columns.values()]
    theirs = [row.theirs.get(name, "")] if row.theirs else []
    return f"| {' | '.join([name.replace(' | ', ', '), *theirs, *cells, str(len(histories))])} |"


def figure(
    column: Column, histories: Sequence[History], missing: str = "not reached"
) -> tuple[str, dict[str, Any]]:
    """Return a cell, "mean ± half the width of the 95 % interval of the mean", and its figures.

    Parameters
    ----------
    missing : the cell if no history has the figure.
    """
    if not histories:
        return NOT_RUN, {}
    diverged = sum(not each for each in histories)
    if diverged == len(histories):
        return "diverges", {}
    found = [column(history) if history else None for history in histories]
    have = [each for each in found if each is not None]
    text = interval(have) if have else missing
    if have and len(have) + diverged < len(found):
        text += f" ({len(have)} of {len(found)})"
    if diverged:
        text += f", {diverged} of {len(found)} diverged"
    by_seed = [None if each is None else float(f"{each:.6g}") for each in found]
    mean_of_all = {"mean": float(f"{mean(have):.6g}")} if have else {}
    return text, {**mean_of_all, "by_seed": by_seed}


def difference(column: Column, histories: Sequence[History], others: Sequence[History]) -> str:
    """Return "mean ± half the width of the interval" of differences, over seeds of both runs."""
    pairs = zip(map(column, histories), map(column, others), strict=False)
    found = [one - other for one, other in pairs if one is not None and other is not None]
    return interval(found, digits=3)


def interval(values: Sequence[float], digits: int = 4) -> str:
    """Return "mean ± half the width of the 95 % interval of the mean"; of one value, itself."""
    text = _rounded(mean(values), digits)
    return text + (f" ± {_rounded(half_interval(values), 2)}" if len(values) > 1 else "")


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of values, by Student's t."""
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def _rounded(number: float, digits: int) -> str:
    return f"{float(f'{number:.{digits}g}'):g}"


def write(
    rows: Mapping[str, Row], of: Mapping[str, Histories], absent: Collection[str] = ()
) -> None:
    """Write the pages, as `render` does."""
    for template, made in PAGES.items():
        made.write_text(render(template.read_text(), rows, of, absent))
