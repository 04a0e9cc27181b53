"""`vfl list`: panels in a terminal, and elsewhere plain lines to search."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vfl_flower.config import KEYS, Key, RunConfig
from vfl_flower.registry import SYSTEMS
from vfl_flower.systems import BY_ROWS, System, load_system


def show() -> None:
    """Print all systems, baselines and configuration keys."""
    if sys.stdout.isatty():
        Console().print(*panels(), sep="\n")
    else:
        print("\n".join(lines()), flush=True)


def lines() -> Iterator[str]:
    """A line for each system and key, and below it what there is to say of it."""
    for title, entries in _sections():
        yield from (title, "")
        for head, texts in entries.items():
            yield f"  {head}"
            yield from (f"      {text}" for text in texts)
        yield ""


def panels() -> Iterator[Panel]:
    """The same in tables, which fit a terminal."""
    for title, entries in _sections():
        table = Table.grid(padding=(0, 2))
        for head, (about, *asides) in entries.items():
            name, equals, default = head.partition(" = ")
            table.add_row(
                Text.assemble((name, "bold cyan"), equals, (default, "green")),
                Text.assemble(about, *((f"\n{aside}", "dim") for aside in asides)),
            )
        name, _, about = title.partition(": ")
        content = Group(Text(f"{about}\n", "italic"), table)
        yield Panel(content, title=Text(name, "bold"), title_align="left", border_style="dim")


def _sections() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Systems, then keys by the section of a `RunConfig` that they are in: title, and entries."""
    systems = {name: _of_system(load_system(name)) for name in SYSTEMS.names}
    yield "Systems and baselines: strategy = '...'", systems
    for section, keys in groupby(KEYS.values(), lambda key: key.section):
        about = str(getattr(RunConfig(), section).__doc__) if section else "What is to be done."
        title = f"Keys of {section or 'a run'}: {re.split('[.;]', about)[0]}"
        yield title, dict(_of_key(key) for key in keys)


def _of_system(system: System) -> list[str]:
    """Return what it is, its axes, and its own defaults and rates if it has some."""
    own = " ".join(f"{key}={value!r}" for key, value in system.defaults.items())
    rates = "; ".join(f"{kind} {p:g} and {top:g}" for kind, (p, top) in system.rates.items())
    asides = own and f"defaults of its own: {own}", rates and f"rates of its own: {rates}"
    return [system.about, system.axes, *filter(None, asides)]


def _of_key(key: Key) -> tuple[str, list[str]]:
    """Name and default; what it means, what can be chosen, and what decides it otherwise."""
    default = "auto" if key.default is None or key.name in BY_ROWS else repr(key.default)
    choices = ", ".join(key.names) if key.name != "strategy" else ""
    asides = choices and f"one of {choices}", key.auto and f"auto: {key.auto}"
    return f"{key.name} = {default}", [key.help, *filter(None, asides)]
