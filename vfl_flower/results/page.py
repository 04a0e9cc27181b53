"""A page about runs: sections of tables, charts and notes, for a terminal, Markdown and HTML."""

from __future__ import annotations

import re
import tomllib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any
from unicodedata import category

from markupsafe import Markup

from vfl_flower.results.terminal import tabulated, wrapped

NOTHING = "–"  # stands where there is no number or text


@dataclass(frozen=True)
class Bar:
    """A stacked bar, or a dot."""

    parts: Sequence[float] = ()  # lengths
    most: float = 1.0  # right end of the scale
    mark: float | None = None  # where guessing lies
    least: float = 0.0  # left end, below 0 if a bar of one part can be negative
    interval: tuple[float, float] | None = None  # ends of a line across the bar
    dot: tuple[float, int] | None = None  # an estimate, and the number of its colour

    @property
    def says(self) -> bool:
        """Return whether the bar has a length, a mark or a dot."""
        return any(self.parts) or self.mark is not None or self.dot is not None


@dataclass(frozen=True)
class Cell:
    """A text, perhaps as code, perhaps after a line with these CSS classes; or a drawing."""

    text: str = ""
    code: bool = False
    line: str = ""
    bar: Bar | None = None
    shade: int = 0  # to 4, the darkest


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Groups of rows under a head; columns after the first ``texts`` are figures."""

    head: Sequence[str]
    bodies: Sequence[Sequence[Row]]
    texts: int = 1
    caption: str = ""

    @property
    def plain(self) -> Table:
        """This table without its drawings."""
        return self._of(self.bodies, lambda cells: None not in map(_plain, cells))

    @property
    def lines(self) -> list[list[str]]:
        """The cells of all rows as texts."""
        return [[_plain(cell) or "" for cell in row] for body in self.bodies for row in body]

    @property
    def filled(self) -> Table:
        """This table without rows and columns that have no content beside their titles."""
        bodies = [[row for row in body if len(row) == 1 or _says(row[1:])] for body in self.bodies]
        return self._of([body for body in bodies if body], _says)

    def _of(
        self, bodies: Sequence[Sequence[Row]], keeps: Callable[[Sequence[str | Cell]], bool]
    ) -> Table:
        """Return this table with these bodies, and the first column and those that are kept."""
        columns = enumerate(zip(*(row for body in bodies for row in body), strict=True))
        kept = [n for n, cells in columns if not n or keeps(cells)]
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
    elements: Markup
    tips: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page. The reader switches between x-axes of charts, and unfolds more tables."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str | Cell] = ()  # sentences; the line of a cell is a swatch before it
    legend: Sequence[Cell] = ()
    charts: Mapping[str, Sequence[Chart]] = field(default_factory=dict)  # x-axis -> a row
    more: Mapping[str, Table] = field(default_factory=dict)  # by their titles

    @property
    def filled(self) -> Section:
        """This section with what its tables say: no empty rows, columns and tables."""
        tables = [each for table in self.tables if (each := table.filled).bodies]
        more = {title: each for title, table in self.more.items() if (each := table.filled).bodies}
        return replace(self, tables=tables, more=more)

    @property
    def plain(self) -> Section:
        """This section without drawings."""
        more = {title: table.plain for title, table in self.more.items()}
        return replace(self, tables=[each.plain for each in self.tables], more=more, charts={})

    def in_terminal(self) -> str:
        """Return tables and notes for a terminal, without bars and swatches."""
        found = []
        for table in (each.plain for each in self.filled.tables):
            found += [table.caption] if table.caption else []
            found.append(tabulated(table.head, table.lines, table.texts))
        notes = wrapped(*(each for each in self.notes if isinstance(each, str)))
        return "\n".join([*found, *filter(None, [notes])])


@dataclass(frozen=True)
class Banner:
    """The outcome of the runs, at the top of the page."""

    kind: str  # "finished", "open" or "failed"
    word: str
    text: str
    about: str = ""


@dataclass(frozen=True)
class Page:
    """A page: a banner and headline figures (tiles), if there are any, and sections."""

    title: str
    sections: Sequence[Section | None]
    banner: Banner | None = None
    tiles: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[Section]:
        """Return the sections that have content, without their empty rows."""
        filled = [each.filled for each in self.sections if each]
        return [each for each in filled if each.tables or each.notes or each.charts or each.more]


def _says(cells: Sequence[str | Cell]) -> bool:
    """Return whether any cell has content: a text or a figure, or a bar of a length."""
    return any(
        cell.bar.says if isinstance(cell, Cell) and cell.bar else _plain(cell) not in ("", NOTHING)
        for cell in cells
    )


def _plain(cell: str | Cell) -> str | None:
    if isinstance(cell, str):
        return cell
    return None if cell.bar else cell.text


# --- Markdown -----------------------------------------------------------------------------------


def markdown(page: Page) -> str:
    """Return a page without charts in the Markdown of GitHub, whose only HTML are folded tables."""
    blocks = [f"# {_marked(page.title)}"]
    for section in page.shown:
        blocks.append(f"## {_marked(section.title)}")
        blocks += map(_table, section.tables)
        before = "- " if len(section.notes) > 1 else ""
        blocks.append("\n".join(before + _marked(_plain(each) or "") for each in section.notes))
        for title, table in section.more.items():
            summary = f"<summary>{escape(printable(title))}</summary>"
            blocks.append(f"<details>\n{summary}\n\n{_table(table)}\n\n</details>")
    return "\n\n".join(filter(None, blocks)) + "\n"


def _table(table: Table) -> str:
    rule = ["---"] * table.texts + ["---:"] * (len(table.head) - table.texts)
    rows = [[_marked(text) for text in row] for row in (table.head, *table.lines)]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
    caption = [_marked(table.caption), ""] if table.caption else []
    return "\n".join([*caption, *lines])


def printable(text: str) -> str:
    """Return a text on one line, without characters that a page cannot show."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if category(c) in ("Cc", "Cs", "Cn") else c for c in text)


_MARKS = re.compile(  # in a word
    r"[\\`*_\[\]|~$#]"
    r"|:(?=[^\W\d]|/)|/(?=/)|\.(?=[^\W\d])|(?<=[^\W\d])\.(?=\w)"  # of addresses
    r"|^[-+](?!\d)|(?<=\d)[.)]$"  # of lists
)
_MENTION = re.compile(r"@|#\d|GH-\d", re.IGNORECASE)


def _marked(text: str) -> str:
    """Return a text that Markdown shows as it is, and turns into no link.

    A backslash stops no mention of a user or an issue, and no e-mail address: GitHub looks for them
    in what is shown. So a word that may be one becomes code.
    """
    words = re.split(r"([\s|]+)", printable(text))
    shown = "".join(
        _code(each) if _MENTION.search(each) else escape(_MARKS.sub(r"\\\g<0>", each), quote=False)
        for each in words
    )
    return re.sub(r"^ | $", "&#32;", shown)  # Markdown drops spaces at the ends


def _code(word: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`*", word))))
    space = " " * (word[0] == "`" or word[-1] == "`")
    return f"{fence}{space}{word}{space}{fence}"


def html(page: Page) -> str:
    """Return a page as HTML."""
    template, style, policy = _layout()
    return template.render(page=page, style=style, policy=policy)


@cache
def _layout() -> tuple[Any, Markup, Markup]:
    """Return the template, the style sheet, and what a browser lets the page do."""
    parts = tomllib.loads(Path(__file__).with_name("layout.toml").read_text(encoding="utf-8"))
    digest = b64encode(sha256(parts["style"].encode()).digest()).decode()
    rules = ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    policy = "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])
    from jinja2 import Environment, StrictUndefined  # lazy: slow to import

    environment = Environment(
        autoescape=True,  # all that comes from a folder is text
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(parts["page"]), Markup(parts["style"]), Markup(policy)
