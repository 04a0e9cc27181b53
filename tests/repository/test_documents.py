"""README and docs run as they stand: every block, in the order of its page, in a fresh folder.

A comment above a block says why it is not run, `<!-- not run: REASON -->`, or which section's
blocks come before it, `<!-- after: PAGE.md#SECTION -->`. A plain block below a block, perhaps with
a line between them that says "prints:", is compared with its output, where `...` stands for any
text. Below "for example:" the numbers may differ. Python blocks that follow each other share a
process.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

HERE = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(each.relative_to(HERE).as_posix() for each in (HERE / "docs").rglob("*.md")),
    "deploy/README.md",
]
_BLOCK = re.compile(
    r"(?:<!-- (?P<what>not run|after): (?P<said>[^>]+) -->\n+)?"
    r"(?P<indent>[ ]*)```(?P<language>bash|python)\n(?P<text>.*?)\n(?P=indent)```"
    r"(?:\n\n(?P<said_so>[^\n]*prints[^\n]*:\n\n)?```\n(?P<shown>.*?)\n```)?",
    re.DOTALL,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_RUN = re.compile(r"\bruns/[\w-]+")
_MADE = re.compile(r"(?:--out |out='?\$?P?W?D?/?)(?P<folder>runs/[\w-]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the output that the page shows below it."""

    language: str
    text: str
    shown: str | None = None
    example: bool = False
    not_run: str | None = None
    after: str | None = None


def blocks_in(text: str) -> list[Block]:
    return [
        Block(
            match["language"],
            dedent(match["text"]),  # of a numbered list
            match["shown"],
            "for example" in (match["said_so"] or ""),
            **({match["what"].replace(" ", "_"): match["said"]} if match["what"] else {}),
        )
        for match in _BLOCK.finditer(text)
    ]


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, after the blocks of the sections that they name."""
    found: list[Block] = []
    for block in blocks_in((HERE / page).read_text()):
        if block.after:
            other, _, section = block.after.partition("#")
            parts = (HERE / other).read_text().split("\n## ")
            (wanted,) = (each for each in parts if each.lower().startswith(section.lower()))
            found += [each for each in blocks_in(wanted) if not each.not_run]
        found.append(block)
    return found


def missing(blocks: list[Block]) -> list[str]:
    """Results folders that are used before a command makes them."""
    made: set[str] = set()
    found = []
    for block in blocks:
        for line in block.text.replace("\\\n", " ").splitlines():
            command = line.partition(" #")[0]
            made |= {match["folder"] for match in _MADE.finditer(command)}
            found += [each for each in _RUN.findall(command) if each not in made]
    return found


def test_results_are_used_after_they_are_made() -> None:
    lost = {page: missing([e for e in blocks_of(page) if not e.not_run]) for page in PAGES}
    assert {page: each for page, each in lost.items() if each} == {}
    # The control: as README once had it.
    block = "```bash\nvfl run --out runs/a\nvfl predict runs/a\nvfl contribution runs/any\n```\n"
    assert missing(blocks_in(block)) == ["runs/any"]


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    said = [each.not_run for page in PAGES for each in blocks_of(page) if each.not_run]
    assert len(said) <= 55
    assert all(each is not None and len(each) > 10 for each in said)


def same(shown: str, printed: str, example: bool = False) -> bool:
    """Return whether an output is the one shown, up to rounding and text shown as `...`.

    Parameters
    ----------
    example : whether numbers may differ.
    """
    parts = re.split(rf"({_NUMBER.pattern}|\.\.\.)", " ".join(shown.split()))
    pattern, numbers = "", []
    for part in parts:
        if _NUMBER.fullmatch(part):
            pattern += f"({_NUMBER.pattern})"
            numbers.append(float(part))
        else:
            pattern += ".*?" if part == "..." else re.escape(part)
    match = re.fullmatch(pattern, " ".join(printed.split()))
    found = [float(each) for each in match.groups()] if match else []
    return match is not None and (example or found == pytest.approx(numbers, rel=0.02))


def test_other_outputs_are_not_the_same() -> None:
    assert same("accuracy 0.976\n", "accuracy  0.975")
    assert not same("accuracy 0.976", "accuracy 0.9")
    assert not same("accuracy 0.976", "error 0.976")
    assert same("accuracy 0.976 in ... s\n...", "accuracy 0.976 in 12.3 s\nmore lines")
    assert not same("accuracy 0.976 in ... s", "accuracy 0.5 in 12.3 s")
    assert same("accuracy 0.976", "accuracy 0.5", example=True)
    assert not same("accuracy 0.976", "error 0.976", example=True)


def fresh(folder: Path) -> dict[str, str]:
    """Fill a folder with what a checkout has, and with the files that CONTRIBUTING.md writes."""
    for name in ("deploy", "examples"):
        shutil.copytree(HERE / name, folder / name)
    for block in blocks_in((HERE / "CONTRIBUTING.md").read_text()):
        named = re.match(r'"""(\w+\.py):', block.text)
        if named:
            (folder / named[1]).write_text(block.text)
    homes = {"VFL_HOME": str(folder / "home"), "FLWR_HOME": str(folder / "flwr")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **homes, "PATH": path, "HF_HUB_OFFLINE": "1"}


def play(blocks: list[Block], folder: Path) -> None:
    """Run blocks one after the other in one shell: each must succeed, and print what is shown."""
    environment, script = fresh(folder), ["set -eo pipefail"]
    session: Path | None = None  # of Python blocks that follow each other
    for number, block in enumerate(blocks):
        text, named = block.text + "\n", re.match(r'"""(\w+\.py)', block.text)
        if block.language == "bash":
            session = None
            script.append(f"{{ :\n{text}}} > block-{number}.out")
        elif named:
            (folder / named[1]).write_text(text)
        else:
            if session is None:
                session = folder / f"block-{number}.py"
                session.write_text("import sys\n")
                script.append(f"python {session.name}")
            with session.open("a") as file:
                file.write(f"sys.stdout = open('block-{number}.out', 'w', 1)\n{text}")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for number, block in enumerate(blocks):
        if block.shown is not None:
            printed = (folder / f"block-{number}.out").read_text()
            assert same(block.shown, printed, block.example), printed


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    """The control."""
    failing = [Block("bash", "X=1"), Block("bash", 'test "$X" = 2\necho never')]
    with pytest.raises(AssertionError):
        play(failing, tmp_path / "one")
    with pytest.raises(AssertionError):
        play([Block("bash", "echo 1.5", "1.6")], tmp_path / "other")
    play([Block("bash", "X=1"), Block("bash", 'test "$X" = 1; echo 1.6', "1.6")], tmp_path / "last")
    play([Block("python", "x = 2"), Block("python", "print(x)", "2")], tmp_path / "session")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not each.not_run for each in blocks_of(page))]
)
def test_a_page_runs_in_order(page: str, tmp_path: Path) -> None:
    play([each for each in blocks_of(page) if not each.not_run], tmp_path)


# --- architecture -------------------------------------------------------------------------------


def lost(text: str) -> list[str]:
    """Return paths, classes and functions that a page names in backquotes and that do not exist."""
    files = [
        each
        for part in ("vfl_flower", "strategies", "vfl_attacks")
        for each in (HERE / part).rglob("*.py")
    ]
    paths = [f"/{each.relative_to(HERE)}" for each in files]
    code = "\n".join(each.read_text() for each in files)
    pairs = re.findall(r"(?:def|class) (\w+)|^ *(\w+)\s*[:=]", code, re.M)
    defined = {each for pair in pairs for each in pair}
    found = []
    for quoted in re.findall(r"`([^`\n]+)`", text):
        path, _, name = quoted.rpartition(": ")
        for each in re.findall(r"^(?:\w+/)*\w+\.py$|^(?:\w+/)+$", path or quoted):
            found += [] if any(f"/{each}" in known for known in paths) else [each]
        dotted = re.fullmatch(r"[A-Z]\w+\.([a-z_]+)|([a-z]+_[a-z_]+|_[a-z_]+)", name)
        dotted = re.fullmatch(r"(?:[A-Z]\w+\.)?(\w+)()", name) if ".py" in path else dotted
        for each in filter(None, dotted.groups() if dotted else ()):
            found += [] if each in defined else [name]
    return found


def test_paths_and_names_of_the_architecture_are_there() -> None:
    gone = (
        "`vertical.py: NoSuch`",
        "`strategies/vertical.py: no_such`",
        "`nowhere/any.py`",
        "`_no_such`",
    )
    assert lost(", ".join([*gone, "`Party.none_such`"])) == [  # the control
        *("NoSuch", "no_such", "nowhere/any.py", "_no_such", "Party.none_such")
    ]
    page = HERE / "docs" / "explanation" / "one-mini-batch.md"
    assert not lost(page.read_text())
    papers = [each.read_text() for each in (HERE / "docs" / "papers").glob("*.md")]
    parts = [text.partition("## Where it is")[2].partition("\n## ")[0] for text in papers]
    assert sum(map(bool, parts)) == 5 and not lost("".join(parts))
    places = re.findall(
        r'class="[^"]*place[^"]*"[^>]*>([^<]+)<', page.with_suffix(".svg").read_text()
    )
    assert places and not lost(
        " ".join(f"`{each}`" for text in places for each in text.split(", "))
    )
