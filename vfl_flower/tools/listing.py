"""`vfl list`: systems, options and party rules, as panels in a terminal and plain lines elsewhere.

Every entry is an `Entry`. Lists show an entry's summary; `vfl list NAME` shows all of it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vfl_flower.config import renamed
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import RULES, Rule
from vfl_flower.config.options.option import sentences
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import GROUPS, KEYS, Key
from vfl_flower.protocol.systems import BY_ROWS, System, load_system

WIDTH = 80
_COLUMN = 28  # of names, in plain lines
_BOUNDS = {"least": "at least", "above": "above", "below": "below"}
_TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_FILES = ("--node-config \"file='a.csv'\"", "--node-config \"file='b.csv'\"")
_STARTS = {"": "", "ray": " --engine ray", "supernodes": " --engine supernodes"}
MORE = (
    "`vfl list --all` shows every option. `vfl list NAME` explains one. `vfl list WORD` searches."
)


class Entry(NamedTuple):
    """What can be listed: a system, an option or a party rule.

    kind : "system", "option", "basic option" or "party rule".
    group : title of its list.
    default : its default, or nothing.
    summary : one sentence.
    choices : the values that have names.
    details : title -> text of `vfl list NAME`; line breaks in a text stay.
    basic : whether the short list has it.
    """

    kind: str
    group: str
    name: str
    default: str
    summary: str
    choices: str
    details: dict[str, str]
    basic: bool

    @property
    def head(self) -> str:
        """Return its name, with its default if it has one."""
        return f"{self.name} = {self.default}" if self.default else self.name


def show(words: Sequence[str] = (), every: bool = False) -> None:
    """Print the short list, or with ``every`` the whole list, or what the words name or find.

    Raises
    ------
    ConfigError
        If nothing has such a name, and no text has all the words.
    """
    listed = list(entries())
    named = _named(words, listed)
    if not words:
        found = [each for each in listed if each.basic or every]
    else:
        found = named or _found(words, listed)
    if sys.stdout.isatty():
        if named:
            Console().print(*_explained(named), sep="\n")
        else:
            Console().print(*_panels(found), Text(MORE, "dim"), sep="\n")
    else:
        lines = _detail_lines(named) if named else _lines(found)
        print("\n".join(lines), flush=True)


def entries() -> Iterator[Entry]:
    """Yield all systems, then all options by their sections, then all party rules."""
    systems = [load_system(name) for name in SYSTEMS.names]
    yield from map(_of_system, systems)
    for key in KEYS.values():
        yield _of_key(key, systems)
    for rule in RULES.values():
        yield _of_rule(rule)


def _named(words: Sequence[str], listed: Sequence[Entry]) -> list[Entry]:
    """Return the entries whose name is the one word that is given."""
    names = {renamed.accepted("strategy", word) for word in words}
    return [each for each in listed if each.name in names] if len(words) == 1 else []


def _found(words: Sequence[str], listed: Sequence[Entry]) -> list[Entry]:
    """Return the entries whose name and texts have every word.

    Raises
    ------
    ConfigError
        If there is none, with the name that was perhaps meant.
    """
    found = [each for each in listed if all(_has(each, word.lower()) for word in words)]
    if not found:
        said = " ".join(words)
        close = get_close_matches(said.replace("_", "-"), [each.name for each in listed], 1)
        hint = f"Did you mean {close[0]}?" if close else "`vfl list --all` shows all of them."
        raise ConfigError(f"No system, option or party rule has the word {said!r}. {hint}")
    return found


def _has(entry: Entry, word: str) -> bool:
    searched = {"meaning", "values", "decided by", "axes"}
    texts = [text for title, text in entry.details.items() if title in searched]
    return any(word in text.lower() for text in (entry.name, *texts))


def _lines(found: Sequence[Entry]) -> Iterator[str]:
    """Yield the entries in two columns, below the title of their group."""
    for title, group in groupby(found, lambda each: each.group):
        yield from (title, "")
        for each in group:
            yield from _beside(f"  {each.head}", each.summary, _COLUMN)
            yield from _beside("", each.choices, _COLUMN)
        yield ""
    yield from textwrap.wrap(MORE, WIDTH)


def _detail_lines(found: Sequence[Entry]) -> Iterator[str]:
    """Yield all that is known of the entries."""
    for each in found:
        yield from (f"{each.name} ({each.kind})", "")
        for title, text in each.details.items():
            for number, line in enumerate(text.split("\n")):
                yield from _beside("" if number else f"  {title}", line, 14)
        yield ""


def _beside(head: str, text: str, column: int) -> Iterator[str]:
    """Yield a head and, beside it, a text that is wrapped at the width of a terminal.

    A head that is longer than its column has a line for itself. Commands keep their lines.
    """
    command = text.startswith(("vfl ", "flwr ", "  -"))
    lines = [text] if command else textwrap.wrap(text, WIDTH - column, break_on_hyphens=False)
    if len(head) > column - 2:
        yield head
        head = ""
    for line in lines:
        yield f"{head:<{column}}{line}".rstrip()
        head = ""


def _panels(found: Sequence[Entry]) -> Iterator[Panel]:
    """Yield a panel for each group."""
    for title, group in groupby(found, lambda each: each.group):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=_COLUMN - 6)
        for each in group:
            head = Text.assemble((each.name, "bold cyan"))
            if each.default:
                head.append_text(Text.assemble(" = ", (each.default, "green")))
            aside = (f"\n{each.choices}", "dim") if each.choices else ""
            table.add_row(head, Text.assemble(each.summary, aside))
        yield Panel(table, title=Text(title, "bold"), title_align="left", border_style="dim")


def _explained(found: Sequence[Entry]) -> Iterator[Panel]:
    """Yield a panel for each entry, with all that is known of it."""
    for each in found:
        table = Table.grid(padding=(0, 2))
        for title, text in each.details.items():
            table.add_row(Text(title, "dim"), Text(text, "green" if title == "example" else ""))
        name = Text.assemble((each.name, "bold cyan"), f" ({each.kind})")
        yield Panel(table, title=name, title_align="left", border_style="dim")


def _of_system(system: System) -> Entry:
    old = [was for was, name in renamed.VALUES["strategy"].items() if name == system.name]
    own = ", ".join(f"{key}={value!r}" for key, value in system.defaults.items())
    rates = "; ".join(f"{kind} {p:g} and {top:g}" for kind, (p, top) in system.rates.items())
    details = {
        "meaning": system.about,
        "axes": system.axes,
        "defaults": own,
        "rates": rates and f"{rates} (parties and top model)",
        "old name": f"{old[0]}, for one more release" if old else "",
        "example": f"vfl run -c \"strategy='{system.name}'\"",
    }
    group = "Systems and baselines: strategy='NAME'"
    return Entry("system", group, system.name, "", system.about, "", _filled(details), True)


def _of_key(key: Key, systems: Sequence[System]) -> Entry:
    own = {each.name: each.defaults[key.name] for each in systems if key.name in each.defaults}
    auto = key.default is None or key.name in BY_ROWS
    default = "auto" if auto else repr(key.default)
    details = {
        "meaning": key.help,
        "values": _values(key),
        "default": default,
        "decided by": key.auto,
        "of systems": ", ".join(f"{name}: {value!r}" for name, value in own.items()),
        "symbol": key.symbol,
        "example": _command(key),
        "needs": key.before,
        "related": ", ".join(key.related),
    }
    kind = "basic option" if key.basic else "option"
    group = f"Options: {GROUPS[key.section]}"
    choices = "" if key.registry is SYSTEMS else ", ".join(key.names)
    return Entry(kind, group, key.name, default, key.summary, choices, _filled(details), key.basic)


def _of_rule(rule: Rule) -> Entry:
    default = "none" if rule.default is None else repr(rule.default)
    details = {
        "meaning": rule.help,
        "values": _TYPES[rule.type] + (", at least 0" if rule.type in ("int", "float") else ""),
        "default": default,
        "example": f'flower-supernode --node-config "{rule.example}"',
    }
    group = "Rules of a party, in its --node-config"
    summary = sentences(rule.help)[0]
    return Entry("party rule", group, rule.name, default, summary, "", details, rule.basic)


def _filled(details: dict[str, str]) -> dict[str, str]:
    return {title: text for title, text in details.items() if text}


def _values(key: Key) -> str:
    """Return in words what values an option can have."""
    if key.values:
        return key.values
    if key.names:
        own = ", or FILE.py:NAME" if key.registry else ""
        return ", ".join(key.names) + own
    bounds = [
        f"{words} {bound:g}"
        for name, words in _BOUNDS.items()
        if (bound := getattr(key, name)) is not None
    ]
    return ", ".join((_TYPES[key.type.__name__], *bounds))


def _command(key: Key) -> str:
    """Return the command of an option's example, in lines that fit a terminal."""
    start = "flwr run ." if key.engine == "flower" else f"vfl run{_STARTS[key.engine]}"
    pairs = textwrap.wrap(key.example, 45, break_long_words=False, break_on_hyphens=False)
    parts = [f'-c "{each}"' for each in pairs]
    if "'files:" in key.example and not key.engine:
        parts += _FILES
    return " \\\n  ".join((f"{start} {parts[0]}", *parts[1:]))
