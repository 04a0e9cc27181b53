"""One line of `vfl doctor`: what was checked, its result, and what to do."""

from typing import NamedTuple

OK, UNKNOWN, HINT, WARNING, PROBLEM = "ok", "not checked", "hint", "warning", "problem"


class Finding(NamedTuple):
    """A check, its result, and a text that says what to do."""

    check: str
    result: str  # OK, UNKNOWN, HINT, WARNING or PROBLEM
    said: str


def printable(finding: Finding) -> Finding:
    """Return a finding on one line: it may quote an error that came from another organisation."""
    said = "".join(each if each.isprintable() else "?" for each in finding.said)
    return finding._replace(said=said)


def many(count: int, noun: str) -> str:
    """Return a number with its noun, such as "2 files"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def some(names: list[str]) -> str:
    """Return the first names of a list, and how many follow."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
