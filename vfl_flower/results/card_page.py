"""Lay a model card out, as Markdown and as one HTML page.

Both are made from the same parts, and all texts in them are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from unicodedata import category


@dataclass(frozen=True)
class Facts:
    """A table. Columns after the first ``texts`` are figures.

    folded : title under which the table unfolds; an empty text shows the table at once.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    folded: str = ""


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Part:
    """A part of a card under a title: paragraphs, tables and lists."""

    title: str
    blocks: Sequence[str | Facts | Points]


def markdown(title: str, parts: Iterable[Part]) -> str:
    """Return the card in the Markdown of GitHub, whose only HTML are folded tables."""
    blocks = [f"# {_marked(title)}"]
    for part in parts:
        blocks.append(f"## {_marked(part.title)}")
        blocks += [_as_markdown(each) for each in part.blocks]
    return "\n\n".join(blocks) + "\n"


def html(title: str, parts: Iterable[Part]) -> str:
    """Return the card as a page that loads and runs nothing."""
    blocks = [f"<h1>{_escaped(title)}</h1>"]
    for part in parts:
        blocks.append(f"<h2>{_escaped(part.title)}</h2>")
        blocks += [_as_html(each) for each in part.blocks]
    page = Template("\n".join(_PAGE))
    return page.substitute(title=_escaped(title), body="\n".join(blocks))


def _as_markdown(block: str | Facts | Points) -> str:
    if isinstance(block, str):
        return _marked(block)
    if isinstance(block, Points):
        return "\n".join(f"- {_marked(each)}" for each in block.lines)
    rule = ["---"] * block.texts + ["---:"] * (len(block.head) - block.texts)
    rows = [list(map(_marked, block.head)), rule, *(map(_marked, row) for row in block.rows)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if not block.folded:
        return table
    summary = f"<summary>{_escaped(block.folded)}</summary>"
    return f"<details>\n{summary}\n\n{table}\n\n</details>"


def _as_html(block: str | Facts | Points) -> str:
    if isinstance(block, str):
        return f"<p>{_escaped(block)}</p>"
    if isinstance(block, Points):
        return "\n".join(["<ul>", *(f"<li>{_escaped(each)}</li>" for each in block.lines), "</ul>"])
    rows = [
        f"<thead><tr>{_cells('th', block.head, block.texts)}</tr></thead>",
        "<tbody>",
        *(f"<tr>{_cells('td', row, block.texts)}</tr>" for row in block.rows),
        "</tbody>",
    ]
    table = "\n".join(['<div class="scroll"><table>', *rows, "</table></div>"])
    if not block.folded:
        return table
    return f"<details><summary>{_escaped(block.folded)}</summary>\n{table}\n</details>"


def _cells(tag: str, texts: Iterable[str], first: int) -> str:
    kinds = (' class="text"' if n < first else "" for n in range(1 << 30))
    return "".join(
        f"<{tag}{kind}>{_escaped(each)}</{tag}>" for kind, each in zip(kinds, texts, strict=False)
    )


def _plain(text: str) -> str:
    """Return a text on one line, without characters that a page cannot show."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if category(c) in ("Cc", "Cs", "Cn") else c for c in text)


def _escaped(text: str) -> str:
    return escape(_plain(text))


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
    words = re.split(r"([\s|]+)", _plain(text))
    shown = "".join(
        _code(each) if _MENTION.search(each) else escape(_MARKS.sub(r"\\\g<0>", each), quote=False)
        for each in words
    )
    return re.sub(r"^ | $", "&#32;", shown)  # Markdown drops spaces at the ends


def _code(word: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`*", word))))
    space = " " * (word[0] == "`" or word[-1] == "`")
    return f"{fence}{space}{word}{space}{fence}"


_PAGE = (  # in Python, since a Flower bundle of the project holds no other files
    "<!DOCTYPE html>",
    '<html lang="en-GB">',
    "<head>",
    '<meta charset="utf-8"/>',
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
    '<meta name="color-scheme" content="light dark"/>',
    '<meta http-equiv="Content-Security-Policy"',
    " content=\"default-src 'none'; style-src 'unsafe-inline'\"/>",
    "<title>$title</title>",
    "<style>",
    ":root { --paper: #ffffff; --ink: #1a1f26; --soft: #58626e; --rule: #d9dfe5; }",
    "@media screen and (prefers-color-scheme: dark) {",
    "  :root { --paper: #12161b; --ink: #e7eaee; --soft: #9fa9b5; --rule: #343c46; }",
    "}",
    "* { box-sizing: border-box; }",
    "body {",
    "  margin: 0 auto; max-width: 860px; padding: 24px;",
    "  color: var(--ink); background: var(--paper);",
    '  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;',
    "}",
    "h1 { margin: 0 0 8px; font-size: 26px; line-height: 1.2; overflow-wrap: anywhere; }",
    "h2 { margin: 32px 0 8px; padding-bottom: 4px; font-size: 19px; border-bottom: 1px solid; }",
    "p { margin: 8px 0; } li { margin: 4px 0; } p, li { overflow-wrap: anywhere; }",
    ".scroll { overflow-x: auto; margin: 12px 0; }",
    "table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }",
    "th, td { padding: 4px 24px 4px 0; text-align: right; vertical-align: top; }",
    "th:first-child { white-space: nowrap; }",
    "th { font-weight: 400; color: var(--soft); border-bottom: 1px solid var(--ink); }",
    "tbody tr { border-bottom: 1px solid var(--rule); }",
    ".text { text-align: left; max-width: 480px; overflow-wrap: anywhere; }",
    "details { margin: 12px 0; } summary { cursor: pointer; color: var(--soft); }",
    "@media (max-width: 600px) { body { padding: 14px; } th, td { padding-right: 14px; } }",
    "@page { margin: 14mm; }",
    "@media print { body { padding: 0; max-width: none; font-size: 12px; } }",
    "</style>",
    "</head>",
    "<body>",
    "$body",
    "</body>",
    "</html>",
    "",
)
