"""`vfl list`: systems, options and party rules, as panels in a terminal and plain lines elsewhere.

Lists show an entry's summary; `vfl list NAME` shows all of it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import NamedTuple

from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import RULES, Rule
from vfl_flower.config.options.option import Key, sentences
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import GROUPS, KEYS, OPTIONS
from vfl_flower.protocol.system import BY_ROWS, System, load_system
from vfl_flower.results.terminal import console_of, on_terminal

WIDTH = 80
_COLUMN = 25  # of names
_BOUNDS = {"least": "at least", "above": "above", "below": "below"}
_TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_RULE_TYPES = {
    "Count": "a whole number, at least 0",
    "Amount": "a number, at least 0",
    "str": "a text",
    "Name": names.MUST.removeprefix("must have "),
}
_FILES = ("--node-config \"file='a.csv'\"", "--node-config \"file='b.csv'\"")
_STARTS = {"": "", "ray": " --engine ray", "supernodes": " --engine supernodes"}
EXPERT = "expert setting"
MORE = (
    "`vfl list --all` shows every option.\n"
    "`vfl list NAME` explains one, as in `vfl list epochs`.\n"
    "`vfl list WORD` searches, as in `vfl list noise`."
)


class Entry(NamedTuple):
    """A system, an option or a party rule."""

    kind: str  # "system", "option", "basic option", `EXPERT` or "party rule"
    group: str  # title of its list
    name: str
    default: str
    summary: str  # one sentence
    choices: str  # the values that have names
    details: Callable[[], dict[str, str]]  # title -> text of `vfl list NAME`
    basic: bool  # whether the short list has it


def show(words: Sequence[str] = (), every: bool = False) -> None:
    """Print the short list, the whole list (``every``), or what the words find."""
    listed = list(entries())
    if named := [each for each in listed if [each.name] == [*words]]:
        _print([(f"{each.name} ({each.kind})", _explained(each)) for each in named])
        return
    found = [each for each in listed if each.basic or (every and each.kind != EXPERT)]
    if words:
        found = _found(words, listed)
    groups = groupby(found, lambda each: each.group)
    _print([(title, _listed(group)) for title, group in groups], MORE)


def entries() -> Iterator[Entry]:
    """Yield all systems, options by their sections, expert settings, and party rules."""
    systems = list[System]()
    for name in SYSTEMS.names:
        try:
            systems.append(load_system(name))
        except ConfigError as error:
            print(f"strategy {name!r} of an installed package cannot be listed: {error}")
    yield from map(_of_system, systems)
    for key in (*OPTIONS.values(), *(each for each in KEYS.values() if each.expert)):
        yield _of_key(key, systems)
    for rule in RULES.values():
        yield _of_rule(rule)


def _found(words: Sequence[str], listed: Sequence[Entry]) -> list[Entry]:
    """Return the entries whose name and texts have every word, and show each word."""
    low = [word.lower() for word in words]
    texts = [(each, " ".join((each.name, *_texts(each))).lower()) for each in listed]
    found = [_with_reasons(each, low) for each, text in texts if all(w in text for w in low)]
    if not found:
        said, every = " ".join(words), [each.name for each in listed]
        parts = {part for name in every for part in name.split("-")}  # as "noise" of noise-seed
        dashed = said.lower().replace("_", "-")
        close = get_close_matches(dashed, every, 1) or get_close_matches(dashed, parts, 1)
        hint = f"Did you mean {close[0]}?" if close else "`vfl list --all` shows all of them."
        raise ConfigError(f"No system, option or party rule has the word {said!r}. {hint}")
    return found


def _texts(entry: Entry) -> list[str]:
    searched = {"meaning", "values", "auto means", "axes"}
    return [text for title, text in entry.details().items() if title in searched]


def _with_reasons(entry: Entry, words: Sequence[str]) -> Entry:
    """Add to an entry's summary the first sentence with each word that its lines lack."""
    said = [entry.summary]
    for word in words:
        shown = " ".join((entry.name, entry.choices, *said)).lower()
        found = [each for text in _texts(entry) for each in sentences(text) if word in each.lower()]
        said += found[:1] if word not in shown else []
    return entry._replace(summary=" ".join(said))


def _print(tables: Sequence[tuple[str, Table]], note: str = "") -> None:
    live, console = on_terminal(), console_of(WIDTH)
    with console.capture() as captured:
        for title, table in tables:
            if live:
                named = Text(title, "bold")
                console.print(Panel(table, title=named, title_align="left", border_style="dim"))
            else:
                console.print(title, Padding(table, (1, 0, 1, 2)), sep="\n")
        console.print(Text(note, "dim"))
    print(re.sub("(?<! ) +$", "", captured.get().rstrip(), flags=re.MULTILINE), flush=True)


def _listed(found: Iterator[Entry]) -> Table:
    """Return a row for each entry: its name and default, its summary and its choices."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=_COLUMN - 3)
    for each in found:
        default = Text.assemble(" = ", (each.default, "green")) if each.default else ""
        choices = (f"\n{each.choices}", "dim") if each.choices else ""
        name = Text.assemble((each.name, "bold cyan"), default)
        table.add_row(name, Text.assemble(each.summary, choices))
    return table


def _explained(entry: Entry) -> Table:
    """Return a row for each thing that is known of an entry."""
    table = Table.grid(padding=(0, 2))
    for title, text in entry.details().items():
        table.add_row(Text(title, "dim"), Text(text, "green" if title == "example" else ""))
    return table


def _of_system(system: System) -> Entry:
    group = "Systems and baselines: strategy='NAME'"
    details = partial(_of_axes, system)  # only when they are asked for
    return Entry("system", group, system.name, "", system.about, "", details, True)


def _of_axes(system: System) -> dict[str, str]:
    own = ", ".join(f"{key}={value!r}" for key, value in system.defaults.items())
    rates = "; ".join(f"{kind} {p:g} and {top:g}" for kind, (p, top) in system.rates.items())
    said = {
        "meaning": system.about,
        "axes": system.axes,
        "defaults": own,
        "rates": rates and f"{rates} (parties and top model)",
        "example": f"vfl run -c \"strategy='{system.name}'\"",
    }
    return _filled(said)


def _of_key(key: Key, systems: Sequence[System]) -> Entry:
    own = {each.name: each.defaults[key.name] for each in systems if key.name in each.defaults}
    auto = key.default is None or key.name in BY_ROWS
    default = "auto" if auto else repr(key.default)
    details = {
        "meaning": key.help,
        "values": _values(key),
        "default": default,
        "auto means": key.auto,
        "by system": ", ".join(f"{name}: {value!r}" for name, value in own.items()),
        "symbol": key.symbol,
        "example": _command(key),
        "needs": key.before,
        "related": ", ".join(_related(key)),
    }
    kind = EXPERT if key.expert else "basic option" if key.basic else "option"
    group = f"{'Expert settings' if key.expert else 'Options'}: {GROUPS[key.section]}"
    choices = "" if key.registry is SYSTEMS else ", ".join(key.names)
    filled = _filled(details)
    return Entry(kind, group, key.name, default, key.summary, choices, lambda: filled, key.basic)


def _related(key: Key) -> list[str]:
    """Return the options that an option's help names, and two on each side in its section."""
    listed = OPTIONS | KEYS
    beside = [name for name, each in listed.items() if each.section == key.section]
    at = beside.index(key.name)
    every = [*re.findall(r"`([a-z-]+)`", key.help), *beside[max(0, at - 2) : at + 3]]
    others = dict.fromkeys(name for name in every if name not in (key.name, *key.names))
    return [name for name in others if name in listed]


def _of_rule(rule: Rule) -> Entry:
    default = "none" if rule.default is None else repr(rule.default)
    details = {
        "meaning": rule.help,
        "values": _RULE_TYPES[rule.type],
        "default": default,
        "example": _joined(["flower-supernode", f'--node-config "{rule.example}"']),
    }
    group = "Rules of a party, in its --node-config"
    summary = sentences(rule.help)[0]
    return Entry("party rule", group, rule.name, default, summary, "", lambda: details, rule.basic)


def _filled(details: dict[str, str]) -> dict[str, str]:
    return {title: text for title, text in details.items() if text}


def _values(key: Key) -> str:
    """Return in words what values an option can have."""
    if key.values:
        return key.values
    if key.names:
        own = ", or FILE.py:NAME" if key.registry else ""
        return ", ".join(key.names) + own
    ends = {words: getattr(key, name) for name, words in _BOUNDS.items()}
    bounds = [f"{words} {end:g}" for words, end in ends.items() if end is not None]
    return ", ".join((_TYPES[key.type.__name__], *bounds))


def _command(key: Key) -> str:
    """Return the command of an option's example, in lines that fit a terminal."""
    start = "flwr run ." if key.engine == "flower" else f"vfl run{_STARTS[key.engine]}"
    words = re.findall(r"[\w-]+=(?:'[^']*'|\S+)", key.example)
    settings = {name for name, each in KEYS.items() if each.expert}
    expert = [word for word in words if word.partition("=")[0] in settings]
    if expert:
        given = " ".join(expert).replace("'", "")
        words = [*(word for word in words if word not in expert), f"expert='{given}'"]
    lines = [""]
    for word in words:
        lines += [word] if len(lines[-1] + word) > 45 else [f"{lines.pop()} {word}".lstrip()]
    parts = [f'-c "{line}"' for line in lines if line]
    if "'files:" in key.example and not key.engine:
        parts += _FILES
    return _joined([start, *parts])


def _joined(parts: Sequence[str]) -> str:
    """Return a command in one line, or in several that a shell reads as one."""
    line = " ".join(parts)
    return line if len(line) < 65 else " \\\n  ".join(parts)
