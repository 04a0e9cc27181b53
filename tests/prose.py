"""Check the project's prose: phrases to avoid, and the length of sentences. `make lint` runs it."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent.parent

READ = (".md", ".ipynb", ".py", ".sh", ".toml", ".yml", ".yaml", ".conf", "Makefile")
"""Endings of the files that are read."""

MOST_WORDS = 30
MOST_WORDS_OF_HELP = 25

PHRASES = (
    r"\bof then\b",
    r"\bof its own\b",
    r"\bof their own\b",
    r"\bof one's own\b",
    r"\bof which\b",
    r"\bthose of\b",
    r"\bsuch as would\b",
    r"\bby all reason\b",
    r"\bthat is another's\b",
    r"\bwh(?:at|ich) comes? of\b",
    r"\banswered not\b",
    r"(?<!\bthere )\bis (?-i:none)\b",
    r"\bby wh(?:ose|om)\b",
    r"\bthat there is not\b",
    r"\bas then\b",
)
"""Phrases that point to nothing, or that a reader must read twice, as regular expressions."""

STARTS = r"^(?:who|what|whose|whom|that which)\b(?!.*\?$)"
"""Sentences that start with a relative clause without a noun; questions may."""

WORDS = {"seat": "party record", "seats": "party records", "mailbox": "messenger"}
"""Private words, and the field's word for each."""

WORDS_OF_HELP = {
    "alone": "local-only",
    "joined": "centralised",
    "pace": "adaptive window",
    "recall": "alignment reuse",
}
"""Words that have another meaning elsewhere, but none in a help text."""


class Text(NamedTuple):
    """A paragraph, the line that it starts in, and whether it is a title."""

    line: int
    text: str
    title: bool = False


def sentences(text: str) -> list[str]:
    """Split a paragraph into its sentences, each with its full stop."""
    plain = re.sub(r"!?\[([^]]*)\](?:\([^)\s]*\)|\[[^]]*\])", r"\1", " ".join(text.split()))
    plain = re.sub(r"\*\*|(?<![\w*])\*(?=\w)|(?<=[\w.])\*(?![\w*])", "", plain)
    end = r"(?:(?<=[.?!])|(?<=[.?!][\")'”])|(?<=[.?!][\"'”]\)))"
    return re.split(end + r" +(?=[A-Z0-9`\"'(“-])", plain.strip())


def problems(text: str, most: int = MOST_WORDS, title: bool = False) -> list[str]:
    """Return what is wrong with a text, a line for each problem."""
    found = []
    help_text = most == MOST_WORDS_OF_HELP
    for sentence in sentences(text):
        counted = re.sub(r"``[^`]+``|`[^`]+`|\$[^$]+\$", "code", sentence)
        words = len(re.findall(r"\S*\w\S*", counted))
        if words > most:
            found.append(f"{words} words: {sentence}")
        if not title and re.search(STARTS, sentence, re.IGNORECASE):
            found.append(f"starts without a noun: {sentence}")
        for phrase in PHRASES:
            match = re.search(phrase, counted, re.IGNORECASE)
            if match:
                found.append(f"'{match[0]}': {sentence}")
        for word, better in (WORDS | WORDS_OF_HELP if help_text else WORDS).items():
            if re.search(rf"\b{word}\b", counted, re.IGNORECASE):
                found.append(f"'{word}', not '{better}': {sentence}")
    return found


# --- Markdown -----------------------------------------------------------------------------------

_NEW = re.compile(r"\s*(?:[-*+] |\d+[.)] |> ?|:(?!:)|#+ |\[\^?\w+\]: ?)")


def of_markdown(text: str, first: int = 1) -> Iterator[Text]:
    """Return the paragraphs, list items, headings and table cells of a Markdown text.

    Code, comments and formulas are left out; directives that hold prose are read.
    """
    blank = re.compile(r"<!--.*?-->|\A---\n.*?\n---\n|^\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
    text = blank.sub(lambda match: "\n" * match[0].count("\n"), text)
    fences: list[tuple[str, bool]] = []
    start, held = first, list[str]()

    def paragraph() -> Iterator[Text]:
        if held:
            yield Text(start, " ".join(held))
            held.clear()

    for number, line in enumerate(text.split("\n"), first):
        fence = re.match(r"\s*(`{3,}|~{3,}|:{3,})\s*(.*)", line)
        if fence:
            yield from paragraph()
            mark, said = fence[1], fence[2]
            if fences and not said and mark.startswith(fences[-1][0]):
                fences.pop()
            elif not fences or fences[-1][1]:
                prose = r"\{(?:note|tip|warning|important|admonition|dropdown|grid|tab|card)"
                fences.append((mark, bool(re.match(prose, said))))
            continue
        if fences and (not fences[-1][1] or re.match(r"\s*:[\w-]+:", line)):
            continue
        if re.match(r"\s*\|", line):
            yield from paragraph()
            cells = [each.strip() for each in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            yield from (Text(number, each, title=True) for each in cells if each.strip(":- "))
            continue
        if line.startswith("#"):
            yield from paragraph()
            yield Text(number, line.strip("# "), title=True)
            continue
        if not line.strip() or (line.startswith("(") and line.endswith(")=")):
            yield from paragraph()
            continue
        new = _NEW.match(line)
        if new:
            yield from paragraph()
            line = line[new.end() :]
        if not held:
            start = number
        held.append(line.strip())
    yield from paragraph()


# --- Python -------------------------------------------------------------------------------------


def of_docstring(text: str, first: int) -> Iterator[Text]:
    """Return the paragraphs of a docstring in numpydoc's form, without examples and types."""
    held, start, literal = list[str](), first, None

    def paragraph() -> Iterator[Text]:
        if held:
            yield Text(start, " ".join(held))
            held.clear()

    lines = text.expandtabs().split("\n")
    for number, line in enumerate(lines, first):
        body, indent = line.strip(), len(line) - len(line.lstrip())
        if literal is not None and (not body or indent > literal):
            continue
        literal = None
        below = lines[number - first + 1].strip() if number - first + 1 < len(lines) else ""
        named = re.fullmatch(r"[\w*][\w*, .\[\]`-]* : .+", body)
        if not body or named or set(body) <= set("-=") or re.fullmatch(r"-{3,}", below):
            yield from paragraph()
            continue
        if body.startswith((">>>", "|", "..")):
            yield from paragraph()
            literal = indent - 1 if body.startswith(">>>") else indent
            continue
        new = _NEW.match(line)
        if new:
            yield from paragraph()
            body = line[new.end() :].strip()
        if not held:
            start = number
        held.append(body)
        if body.endswith("::"):
            yield from paragraph()
            literal = indent
    yield from paragraph()


def of_comments(source: str) -> Iterator[Text]:
    """Return the comments of a Python file; lines that follow each other are one text."""
    held, start, last = list[str](), 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        said = token.string.lstrip("#: ").strip()
        if re.match(r"-{3,}|!|(?:type|noqa|ruff|mypy|pragma|fmt)\b:?", said):
            continue
        alone = not token.line[: token.start[1]].strip()
        if held and alone and token.start[0] == last + 1:
            held.append(said)
        else:
            if held:
                yield Text(start, " ".join(held))
            held, start = [said], token.start[0]
        last = token.start[0] if alone else -1
    if held:
        yield Text(start, " ".join(held))


def _said(node: ast.AST) -> str | None:
    """Return the text of a string or an f-string, with "X" for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(each) or "" for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return "X"
    return None


def of_python(source: str, strings: bool, names: bool) -> Iterator[Text]:
    """Return the docstrings and comments of a Python file.

    `strings` adds texts that a program says, which are strings of at least four words without
    line breaks: errors, log lines and help texts. `names` adds the names of tests.
    """
    yield from of_comments(source)
    tree = ast.parse(source)
    inner = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := _said(node.value)) is not None:
            inner.add(id(node.value))
            yield from of_docstring(text, node.lineno)
        elif isinstance(node, ast.FunctionDef) and names and node.name.startswith("test_"):
            yield Text(node.lineno, node.name[5:].replace("_", " "), title=True)
        elif isinstance(node, ast.JoinedStr):
            inner |= {id(each) for each in node.values}
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            inner.add(id(node.format_spec))
    for node in ast.walk(tree) if strings else ():
        said = None if id(node) in inner else _said(node)
        if said is None or len(said.split()) < 4 or not re.search(r"[a-z]{2,} [a-z]{2,}", said):
            continue
        line: int = node.lineno  # type: ignore[attr-defined]
        if "\n" not in said.strip():
            yield Text(line, said, title=not said.rstrip().endswith((".", ":", "!")))
            continue
        try:
            ast.parse(said)
        except SyntaxError:
            yield from of_docstring(said, line)


# --- files --------------------------------------------------------------------------------------


def of_notebook(text: str) -> Iterator[Text]:
    """Return the prose of a notebook; its lines are numbered by cell, 1 for the first."""
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found = of_markdown(source)
        else:
            shell = re.compile(r"^(\s*)[!%].*", re.MULTILINE)
            found = of_python(shell.sub(r"\1pass", source), strings=True, names=False)
        yield from (each._replace(line=number) for each in found)


def of_file(name: str, text: str) -> Iterator[Text]:
    """Return the prose of a file of the repository."""
    if name.endswith(".md"):
        yield from of_markdown(text)
    elif name.endswith(".ipynb"):
        yield from of_notebook(text)
    elif name.endswith(".py"):
        tests = name.startswith("tests/")
        yield from of_python(text, strings=not tests, names=tests)
    else:
        held = list[str]()
        for number, line in enumerate([*text.split("\n"), ""], 1):
            said = re.match(r"\s*#+ (.*)", line)
            if said:
                held.append(said[1])
            elif held:
                yield Text(number - len(held), " ".join(held))
                held.clear()


def check(files: list[str]) -> list[str]:
    """Return the problems of files, each as `file:line: what is wrong: the sentence`."""
    found = []
    for name in filter(lambda each: (HERE / each).is_file(), files):
        for each in of_file(name, (HERE / name).read_text()):
            wrong = problems(each.text, title=each.title)
            found += [f"{name}:{each.line}: {problem}" for problem in wrong]
    return found


def main() -> int:
    """Check the files that git knows, or the ones that are named."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    named = sys.argv[1:] or listed
    found = check([each for each in named if each.endswith(READ)])
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
