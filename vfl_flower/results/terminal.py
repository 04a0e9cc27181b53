"""Tables and sentences on a terminal, which is narrow, and elsewhere, where lines are whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a table is drawn at the end of a command, if at all
    from rich.console import Console
    from rich.table import Table

_WHOLE = 25  # characters: a shorter text in a first column stays on one line


def tabulated(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Draw a table: first ``texts`` left-aligned columns, then right-aligned figures.

    On a terminal, columns that do not fit the width follow in another block. Elsewhere each row is
    one line.
    """
    live = on_terminal()
    console = console_of()
    columns = [
        _Column(title, [row[n] for row in rows], n < texts, not n) for n, title in enumerate(head)
    ]
    blocks: list[list[_Column]] = [[]]
    for column in columns:
        least = [each.least for each in (*blocks[-1], column)]
        if len(blocks[-1]) > 1 and _total(least) > console.width:
            blocks.append([columns[0]])
        blocks[-1].append(column)
    with console.capture() as captured:
        for number, block in enumerate(blocks):
            console.print(*[""] * bool(number), _drawn(block, console.width), sep="\n")
    lines = (line.rstrip(" ") for line in captured.get().strip("\n").splitlines())
    return "\n".join(lines) + "\n" * live  # an empty line before the next output


def wrapped(*lines: str) -> str:
    """Return lines that wrap between words on a terminal, and are whole elsewhere."""
    if not on_terminal():
        return "\n".join(lines)
    width = console_of().width
    return "\n".join(fill(each, width, break_on_hyphens=False) for each in lines)


def console_of(width: int = 10_000) -> Console:
    """Return a console as wide as the terminal; elsewhere of this width, and without styles."""
    from rich.console import Console

    live = on_terminal()
    return Console(
        width=None if live else width,
        force_terminal=live,
        color_system="auto" if live and not os.environ.get("NO_COLOR") else None,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


def on_terminal() -> bool:
    """Return whether a terminal shows the output. A notebook's output also claims to be one."""
    return sys.stdout.isatty() and not in_notebook()


def in_notebook() -> bool:
    """Return whether a notebook shows the output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class _Column:
    """A column of a table: its cells, and the widths that break no line, or else no word."""

    def __init__(self, title: str, cells: Sequence[str], is_text: bool, is_first: bool) -> None:
        self.title, self.cells, self.is_text = title, cells, is_text
        longest = max(map(len, cells), default=0)
        self.whole = not is_text or (is_first and longest < _WHOLE)
        words = " ".join([title, *([] if self.whole else cells)]).split()
        self.full = max(len(title), longest)
        self.least = max([*map(len, words), longest if self.whole else 1])


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _drawn(columns: Sequence[_Column], width: int) -> Table:
    """Return columns as a table of rich, which wraps texts if they do not fit the width."""
    from rich import box
    from rich.table import Table

    live = on_terminal()
    table = Table(
        box=box.SIMPLE_HEAD if live else None,
        show_edge=False,
        pad_edge=False,
        collapse_padding=live,
        header_style="bold",
    )
    narrow = _total([each.full for each in columns]) > width
    for each in columns:
        table.add_column(
            each.title,
            justify="left" if each.is_text else "right",
            overflow="fold",
            width=each.least if narrow and each.whole else None,
        )
    for row in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*row)
    return table
