"""The parts of a page: tables, charts, notes and sections; and figures as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from markupsafe import Markup

from vfl_flower.results.figures import tabulated, wrapped
from vfl_flower.results.report.read import NOTHING, number


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its lengths, the greatest sum, and a mark (where guessing lies).

    least : left end of the scale, below 0 if a bar of one part can be negative.
    interval : ends of a line across the bar, if any.
    """

    parts: Sequence[float]
    most: float = 1.0
    mark: float | None = None
    least: float = 0.0
    interval: tuple[float, float] | None = None

    @property
    def says(self) -> bool:
        """Return whether the bar has a length or a mark."""
        return any(self.parts) or self.mark is not None


@dataclass(frozen=True)
class Dot:
    """An estimate with its interval, on a scale from ``least`` to ``most``, and perhaps a mark.

    colour : number of its colour.
    """

    value: float
    interval: tuple[float, float]
    least: float
    most: float
    colour: int = 0
    mark: float | None = None
    says: ClassVar[bool] = True


@dataclass(frozen=True)
class Cell:
    """A text, perhaps as code, perhaps after a line with these CSS classes; or a drawing.

    shade : from 0 (none) to 4 (the darkest).
    """

    text: str = ""
    code: bool = False
    line: str = ""
    bar: Bar | Dot | None = None
    shade: int = 0


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Groups of rows under a head; columns after the first ``texts`` are figures."""

    head: Sequence[str]
    bodies: Sequence[Sequence[Row]]
    texts: int = 1
    caption: str = ""

    @property
    def filled(self) -> Table:
        """This table without rows and columns that have no content beside their titles."""
        bodies = [[row for row in body if len(row) == 1 or _says(row[1:])] for body in self.bodies]
        bodies = [body for body in bodies if body]
        rows = [row for body in bodies for row in body]
        kept = [n for n in range(len(self.head)) if not n or _says([row[n] for row in rows])]
        return replace(
            self,
            head=[self.head[n] for n in kept],
            bodies=[[[row[n] for n in kept] for row in body] for body in bodies],
            texts=sum(n < self.texts for n in kept),
        )


@dataclass(frozen=True)
class Chart:
    """SVG elements without texts from a folder, with a description and tool tips."""

    title: str
    said: str
    width: float
    height: float
    elements: Markup
    tips: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    notes : sentences, each with the class of a swatch before it, or "".
    charts : label of an x-axis -> a row of charts. The reader switches between the axes.
    more : titles of tables that unfold.
    """

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[tuple[str, str]] = ()
    legend: Sequence[Cell] = ()
    charts: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    more: Mapping[str, Table] = field(default_factory=dict)

    @property
    def filled(self) -> Section:
        """This section with what its tables say: no empty rows, columns and tables."""
        tables = [each for table in self.tables if (each := table.filled).bodies]
        more = {title: each for title, table in self.more.items() if (each := table.filled).bodies}
        return replace(self, tables=tables, more=more)

    def in_terminal(self) -> str:
        """Return tables and notes for a terminal, without bars and swatches."""
        found = []
        for table in self.filled.tables:
            rows = [[_plain(cell) for cell in row] for body in table.bodies for row in body]
            bars = {n for row in rows for n, cell in enumerate(row) if cell is None}
            shown = [n for n in range(len(table.head)) if n not in bars]
            lines = [[row[n] or "" for n in shown] for row in rows]
            found += [table.caption] if table.caption else []
            found.append(tabulated([table.head[n] for n in shown], lines, table.texts))
        notes = wrapped(*(note for swatch, note in self.notes if not swatch))
        return "\n".join([*found, *filter(None, [notes])])


def shown_of(sections: Sequence[Section | None]) -> list[Section]:
    """Return the sections that have content, without their empty rows."""
    found = [each.filled for each in sections if each]
    return [each for each in found if each.tables or each.notes or each.charts or each.more]


def _says(cells: Sequence[str | Cell]) -> bool:
    """Return whether any cell has content: a text or a figure, or a bar of a length."""
    return any(
        cell.bar.says if isinstance(cell, Cell) and cell.bar else _plain(cell) not in ("", NOTHING)
        for cell in cells
    )


def _plain(cell: str | Cell) -> str | None:
    """Return the text of a cell; None for a bar."""
    if isinstance(cell, str):
        return cell
    return None if cell.bar else cell.text


def shown(figure: float | None, form: str = ".4g") -> str:
    """Return a number as text."""
    return NOTHING if figure is None else format(figure, form)


def measured(of: Mapping[str, object], *path: str, form: str = ".4g", unit: float = 1) -> str:
    """Return the number at a path, times ``unit``, with its deviation over seeds."""
    *above, key = path
    found = number(of, *path), number(of, *above, "deviation", key)
    mean, deviation = (None if each is None else each * unit for each in found)
    return shown(mean, form) if deviation is None else f"{shown(mean, form)} ± {deviation:{form}}"


def megabytes(of: Mapping[str, object], key: str, unit: float = 1e-6) -> str:
    """Return a number of bytes as text, in megabytes to three digits."""
    figure = number(of, key)
    large = figure is not None and figure * unit >= 100
    return measured(of, key, form=".0f" if large else ".3g", unit=unit)


def counted(figure: float | None, one: str, several: str) -> str:
    """Return a number of things as text."""
    return f"{shown(figure)} {one if figure == 1 else several}"
