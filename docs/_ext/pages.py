"""Prepare pages before Sphinx reads them: generated parts, included files, links, notebooks.

A page holds a comment where a part belongs that comes from elsewhere:

- ``<!-- generated: NAME ARGUMENTS -->`` stands for the Markdown of a function in `generators`.
- ``<!-- include: FILE -->`` stands for a Markdown file of the repository, without its title.

Links to files outside docs/ lead to the repository on the web, or on the disk in a local build. A
link to a file that does not exist is a warning, which fails the build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import generators
from sphinx.util import logging

log = logging.getLogger(__name__)

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
ON_DISK = "checkout"
"""Scheme of links to files of the repository, in a build for this machine."""
NOTEBOOKS = DOCS / "notebooks"  # copies, which git ignores

_GENERATED = re.compile(r"^<!-- generated: (\S+) *(.*?) -->$", re.MULTILINE)
_INCLUDED = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^ *(```+|~~~+)([^\n]*)\n.*?^ *\1`*~*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<code>`+[^`]+`+)|(?P<start>\]\()(?P<target>[^()\s]+)(?P<end>\)| \")")
_HEAD = re.compile(r"\A(?:---\n(?s:.*?)\n---\n)?\s*# [^\n]*\n")  # front matter and title
_PICTURES = {".png", ".svg", ".jpg", ".gif"}
_DIRECTIVE = re.compile(r"\{(?!code|eval-rst|math)[\w-]+\}")


@cache
def included() -> dict[Path, Path]:
    """Return the files that a page includes, and the page of each."""
    found = {}
    for page in DOCS.rglob("*.md"):
        for name in _INCLUDED.findall(page.read_text()):
            found[ROOT / name] = page
    return found


def expand(text: str, page: Path, warn: Callable[[str], None]) -> str:
    """Return the text of a page with its generated and included parts, and links that resolve."""

    def include(match: re.Match[str]) -> str:
        file = ROOT / match[1]
        body = _HEAD.sub("", file.read_text())
        return with_links(body, file.parent, page, warn)

    text = with_links(text, page.parent, page, warn)
    text = _INCLUDED.sub(include, text)
    return _GENERATED.sub(lambda each: generators.made(each[1], each[2].split(), page), text)


def with_links(text: str, base: Path, page: Path, warn: Callable[[str], None]) -> str:
    """Return Markdown whose relative links lead somewhere from a page.

    Parameters
    ----------
    base : folder that the links are relative to.
    """

    def mend(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        return match["start"] + resolved(match["target"], base, page, warn) + match["end"]

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts.append(_LINK.sub(mend, text[end : fence.start()]))
        inside = bool(_DIRECTIVE.match(fence[2]))
        parts.append(_LINK.sub(mend, fence[0]) if inside else fence[0])
        end = fence.end()
    return "".join([*parts, _LINK.sub(mend, text[end:])])


def resolved(target: str, base: Path, page: Path, warn: Callable[[str], None]) -> str:
    """Return a link's target as a page needs it."""
    if re.match(r"[a-z]+:|#|<", target):
        return target
    path, hash_sign, anchor = target.partition("#")
    file = Path(os.path.normpath(base / path))
    if not file.exists() or not file.is_relative_to(ROOT):
        warn(f"the link {target} leads to no file of the repository")
        return target
    if file.suffix == ".md" and anchor and anchor not in anchors(file):
        warn(f"the link {target} names a section that {file.name} does not have")
    if file in included():
        file = included()[file]
    if file.suffix == ".ipynb":
        file = NOTEBOOKS / file.name
    if file.is_relative_to(DOCS) or file.suffix in _PICTURES:
        return Path(os.path.relpath(file, page.parent)).as_posix() + hash_sign + anchor
    if not generators.REPOSITORY:  # a Markdown parser leaves links to file: as they are written
        return f"{ON_DISK}:{file}"
    kind = "tree" if file.is_dir() else "blob"
    return f"{generators.REPOSITORY}/{kind}/main/{file.relative_to(ROOT)}{hash_sign}{anchor}"


@cache
def anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub gives the titles of a Markdown file."""
    text = file.read_text()
    if file.is_relative_to(DOCS):
        text = expand_generated(text, file)
        text = _INCLUDED.sub(lambda each: (ROOT / each[1]).read_text(), text)
    found: set[str] = set(re.findall(r"^\((\S+)\)=$", text, re.MULTILINE))
    for title in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", title).lower().strip()
        found.add(re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", plain)))
    return found


def expand_generated(text: str, page: Path) -> str:
    """Return the text of a page with its generated parts."""
    return _GENERATED.sub(lambda each: generators.made(each[1], each[2].split(), page), text)


def copy_notebooks(app: Any) -> None:
    """Copy the notebooks to where Sphinx finds them, with links that resolve from there."""
    NOTEBOOKS.mkdir(exist_ok=True)
    for old in NOTEBOOKS.glob("*.ipynb"):
        if not (ROOT / "notebooks" / old.name).exists():
            old.unlink()
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = NOTEBOOKS / file.name

        def warn(sentence: str, name: str = file.name) -> None:
            log.warning("notebooks/%s: %s", name, sentence)

        text = with_links(file.read_text(), file.parent, copy, warn)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


def read(app: Any, docname: str, source: list[str]) -> None:
    """Expand a page that Sphinx is about to read."""
    page = DOCS / f"{docname}.md"
    if page.exists():
        source[0] = expand(source[0], page, lambda text: log.warning(text, location=docname))


def outdated(app: Any, env: Any, added: Any, changed: Any, removed: Any) -> list[str]:
    """Return the pages with parts from elsewhere: Sphinx cannot see whether these changed."""
    pages = (each for each in DOCS.rglob("*.md") if "_build" not in each.parts)
    moving = (each for each in pages if "<!-- " in each.read_text())
    names = [each.relative_to(DOCS).with_suffix("").as_posix() for each in moving]
    return [each for each in names if each in env.found_docs]


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", read)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
