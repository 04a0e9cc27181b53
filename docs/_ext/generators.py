"""Make the reference from the code: each function returns the Markdown of one part of a page."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent

_SERVER, _NAME = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
REPOSITORY = f"{_SERVER}/{_NAME}" if _SERVER and _NAME else ""
"""Address of the repository on the web. GitHub's workflows set it; a local build has none."""

GROUPS = (
    ("Tutorials", "tutorials"),
    ("How-to guides", "how-to"),
    ("Explanation", "explanation"),
    ("Papers", "papers"),
    ("Results", "results"),
    ("Reference", "reference"),
    ("Extend", "extend"),
    ("Notebooks", "notebooks"),
)
"""Title and folder of each part of the site."""


def made(name: str, arguments: Sequence[str], page: Path) -> str:
    """Return the Markdown of a generated part.

    Raises
    ------
    KeyError
        If no generator has that name.
    """
    return _GENERATORS[name](page, *arguments)


# --- pages ----------------------------------------------------------------------------------------


class About(NamedTuple):
    """Title and first sentence of a page."""

    title: str
    description: str


def about(page: Path) -> About:
    """Return the title of a page and the first sentence after it."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    after = text[title.end() :] if title else text
    paragraphs = [each.strip() for each in re.split(r"\n\s*\n", after)]
    plain = [_plain(each) for each in paragraphs if re.match(r"(?!```)[\w`*\[\"']", each)]
    first = re.split(r"(?<=[.?!:])\s+(?=[A-Z`(])", plain[0], maxsplit=1)[0] if plain else ""
    first = first.rstrip(":")
    said = first if first.endswith((".", "?", "!")) else f"{first}."
    return About(_plain(title[1]) if title else page.stem, said)


def _plain(text: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(text.replace("**", "").split())


def _contents(page: Path, *order: str) -> str:
    """List the pages of this page's folder: first these names, then all others."""
    folder = page.parent if page.parent != DOCS else DOCS / order[0]
    order = order if page.parent != DOCS else order[1:]
    found = {each.stem: each for each in sorted(folder.iterdir()) if _is_page(each)}
    found |= {each.name: each / "index.md" for each in sorted(folder.glob("*")) if _has_index(each)}
    names = [each for each in order if each in found]
    names += [each for each in found if each not in names and each != "index"]
    return _listed(page, *(found[each].relative_to(page.parent).as_posix() for each in names))


def _listed(page: Path, *targets: str) -> str:
    """List these pages, each with its title and its first sentence."""
    lines = []
    for target in targets:
        title, said = about(page.parent / target)
        lines.append(f"- **[{title}]({target})**  \n  {said}")
    tree = [target.rpartition(".")[0] for target in targets]
    hidden = "\n".join(["```{toctree}", ":hidden:", "", *tree, "```"])
    return "\n".join([*lines, "", hidden, ""])


def _is_page(path: Path) -> bool:
    return path.suffix in (".md", ".ipynb")


def _has_index(path: Path) -> bool:
    return path.is_dir() and (path / "index.md").exists()


# --- options and rules ----------------------------------------------------------------------------


_OF_EXPERTS = """A system or an experiment decides these: a number of a paper, noise that can be
repeated, a simulated delay. The option [`expert`](#option-expert) sets them, as in
`-c "expert='mu=0.0001 directions=sphere'"`, or `train(..., expert={"mu": 1e-4})` in Python. A
`System` of yours has them among its `defaults`, and `run_local` takes them beside the options."""


def _options(page: Path) -> str:
    """Return all options: basic ones open, the others folded; then the expert settings."""
    from vfl_flower.config.run_config import GROUPS as SECTIONS
    from vfl_flower.tools.listing import EXPERT, entries

    listed = [each for each in entries() if each.kind.endswith("option") or each.kind == EXPERT]
    parts = []
    for title in SECTIONS.values():
        group = [each for each in listed if each.group == f"Options: {title}"]
        parts += [f"## {title[:1].upper()}{title[1:]}\n"] if group else []
        parts += [_entry(each, "option") for each in group if each.basic]
        parts += [_entry(each, "option") for each in group if not each.basic]
    parts.append(f"## Expert settings\n\n{_OF_EXPERTS}\n")
    for title in SECTIONS.values():
        group = [each for each in listed if each.group == f"Expert settings: {title}"]
        parts += [f"### Settings of {title}\n"] if group else []
        parts += [_entry(each, "option") for each in group]
    return "\n".join(parts)


def _rules(page: Path) -> str:
    """Return all rules of a party."""
    from vfl_flower.tools.listing import entries

    return "\n".join(_entry(each, "rule") for each in entries() if each.kind == "party rule")


def _entry(entry: Any, kind: str) -> str:
    """Return one option or rule with all that is known of it."""
    details = dict(entry.details())
    example = details.pop("example", "")
    rest = {title: text for title, text in details.items() if title != "meaning"}
    if "related" in rest:
        names = rest["related"].split(", ")
        rest["related"] = ", ".join(f"[`{each}`](#{kind}-{each})" for each in names)
    if "by system" in rest:
        rest["by system"] = _coded(rest["by system"])
    if "default" in rest and rest["default"] not in ("auto", "none"):
        rest["default"] = f"`{rest['default']}`"
    facts = [f":{title}: {text}" for title, text in rest.items()]
    body = [f"({kind}-{entry.name})=", details["meaning"], "", *facts, ""]
    body += ["```bash", example, "```", ""] if example else []
    if entry.basic:
        return "\n".join([f"### `{entry.name}`", "", *body])
    title = f"`{entry.name}` {entry.summary}"
    return "\n".join([f"::::{{dropdown}} {title}", *body, "::::", ""])


def _coded(pairs: str) -> str:
    return re.sub(r"([\w-]+): ('[^']*'|\S+?)(?=,|$)", r"\1: `\2`", pairs)


# --- commands -------------------------------------------------------------------------------------


def _commands(page: Path) -> str:
    """Return each subcommand with its arguments, options and examples."""
    import typer

    from vfl_flower.tools.cli import app

    parts = []
    for name, command in _subcommands(typer.main.get_command(app)):
        head, _, rest = inspect.cleandoc(command.help or "").partition("\n\n")
        parts += [f"## `vfl {name}`", "", head, "", rest, ""]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option"]
        usage = " ".join(each.metavar or each.name.upper() for each in arguments)
        parts += ["```text", f"vfl {name} [OPTIONS] {usage}".strip(), "```", ""]
        rows = [
            [
                ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts)),
                f"`{option.metavar}`" if option.metavar else "",
                _described(option),
            ]
            for option in options
            if option.name != "help"
        ]
        parts += [_table(["Option", "Value", "Meaning"], rows), ""] if rows else []
        if examples := _of_epilog(command.epilog or ""):
            parts += ["```bash", examples, "```", ""]
    return "\n".join(parts)


def _subcommands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command with its name, also the commands of a group within the group."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _subcommands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _described(option: Any) -> str:
    text = option.help or ""
    if option.required:
        return f"{text} Required."
    shown = option.default not in (None, "", False, 0) and "Default" not in text
    return f"{text} Default: `{option.default}`." if shown else text


def _of_epilog(epilog: str) -> str:
    """Return the examples of a command as lines of a shell."""
    after = epilog.partition("[bold]examples:[/]")[2].replace("\n\n", "\n")
    plain = re.sub(r"\[/?\w*\]", "", after).strip()
    return re.sub(r"\\\n(?=--)", r"\\\n    ", plain)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(c.split()) for c in row)} |" for row in lines)


# --- messages -------------------------------------------------------------------------------------

_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _messages(page: Path, *modules: str) -> str:
    """Return every message of these modules: its kind, its fields and its arrays."""
    parts = []
    for module in modules:
        found = import_module(module)
        for kind in vars(found).values():
            if inspect.isclass(kind) and kind.__module__ == module and _is_message(kind):
                parts.append(_message(kind))
    return "\n".join(parts)


def _is_message(kind: type) -> bool:
    from vfl_flower.transport.messages import Payload

    bases = {"Payload", "Order", "Turn", "EarlyOrder", "Introduction"}
    is_base = kind.__name__ in bases and kind.__name__ != "Introduction"
    return issubclass(kind, Payload) and not is_base


def _message(kind: Any) -> str:
    names = kind.names
    arrays = "of the codec" if names is None else ", ".join(f"`{each}`" for each in names) or "none"
    sent = f"`{kind.kind}`" if "kind" in dir(kind) else "an answer"
    hints = get_type_hints(kind, include_extras=True)
    rows = [
        [
            f"`{spec.name}`",
            _type(hints[spec.name]),
            "" if spec.default is MISSING else f"`{spec.default!r}`",
        ]
        for spec in fields(kind)
        if spec.name != "arrays"
    ]
    table = _table(["Field", "Type and bounds", "Default"], rows) if rows else "It has no fields."
    lines = [f"### `{kind.__name__}`", "", _markdown(inspect.getdoc(kind) or ""), ""]
    lines += [f":Flower's message type: {sent}", f":arrays: {arrays}", "", table, ""]
    return "\n".join(lines)


def _type(hint: Any) -> str:
    """Return a type and its limits in words."""
    if get_origin(hint) is not Annotated:
        return _TYPES.get(hint, getattr(hint, "__name__", str(hint)))
    kind, *more = get_args(hint)
    words = [_TYPES.get(kind, str(kind))]
    for each in more:
        for limit in getattr(each, "metadata", []):
            for name, said in _WORDS.items():
                if hasattr(limit, name):
                    words.append(f"{said} {_number(getattr(limit, name))}")
            if hasattr(limit, "max_length"):
                words.append(f"at most {limit.max_length:,} characters")
        if "pattern=" in repr(each):
            words.append("one line")
    return ", ".join(words)


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and power > 9 else f"{value:,g}"


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: lists of ``name : text`` become definitions."""
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    return re.sub(r"^(\w+(?:, \w+)*) : ", r":\1: ", text, flags=re.MULTILINE)


# --- Python API -----------------------------------------------------------------------------------


def public() -> list[str]:
    """Return the public names of the package."""
    import vfl_flower

    return [f"vfl_flower.{each}" for each in vfl_flower.__all__]


_GUIDES = ("a-codec", "an-estimator")


def extension() -> list[str]:
    """Return the names that CONTRIBUTING.md and two guides import, and the names in its table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    guides = [(DOCS / "how-to" / f"write-{kind}.md").read_text() for kind in _GUIDES]
    found: dict[str, None] = {}
    for block in re.findall(r"```python\n(.*?)\n```", "\n".join([text, *guides]), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                ("vfl_flower.", "strategies.")
            ):
                found |= dict.fromkeys(f"{node.module}.{each.name}" for each in node.names)
    for name, file in re.findall(r"`(\w+)` \(`([\w/]+)\.py`\)", text):
        if name[0].isupper():
            found[f"{file.replace('/', '.')}.{name}"] = None
    return sorted(each for each in found if not each.rpartition(".")[2].isupper())


_OF_SKLEARN = "set_fit_request, set_score_request, set_predict_request"


def _api(page: Path, which: str) -> str:
    """Return directives for the names of one part of the API."""
    names = public() if which == "public" else extension()
    parts = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
        kind = "autoclass" if inspect.isclass(found) else "autofunction"
        members = ["   :members:", f"   :exclude-members: {_OF_SKLEARN}"]
        directive = [f".. {kind}:: {name}", *(members if kind == "autoclass" else [])]
        parts += [f"## {attribute}", "", "```{eval-rst}", *directive, "```", ""]
    return "\n".join(parts)


# --- files ----------------------------------------------------------------------------------------


def _module(page: Path, name: str) -> str:
    """Return the text at the head of a module, without its first line."""
    text = inspect.getdoc(import_module(name)) or ""
    return _markdown(text.partition("\n\n")[2]) + "\n"


def _class(page: Path, name: str) -> str:
    """Return the fields of a class, as its docstring describes them."""
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(import_module(module), attribute)) or ""
    return _markdown(text) + "\n"


def _arrays(page: Path, archive: str, pattern: str) -> str:
    """Return the arrays of a file that a run of the tests has left."""
    import numpy as np

    with zipfile.ZipFile(ROOT / "tests" / "artefacts" / archive) as files:
        name = next(each for each in sorted(files.namelist()) if re.search(pattern, each))
        content = files.read(name)[:-32]  # without the checksum
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        rows = [
            [f"`{each}`", str(file[each].dtype), " × ".join(map(str, file[each].shape)) or "scalar"]
            for each in file.files
        ]
    return _table(["Array", "Type", "Shape in an example"], rows) + "\n"


_GENERATORS: dict[str, Callable[..., str]] = {
    "contents": _contents,
    "listed": _listed,
    "options": _options,
    "rules": _rules,
    "commands": _commands,
    "messages": _messages,
    "api": _api,
    "module": _module,
    "class": _class,
    "arrays": _arrays,
}
