"""Names of parties, which people read in place of their numbers.

Code, messages and files know a party by its number. A name decides nothing: `in_words` replaces the
numbers in a text when a person gets to see it, in errors, log records and tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import AfterValidator

MUST = "must have 1 to 30 English letters, digits, - or _, a letter first"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,29}")
# Quoted texts, paths and classes stay as they are. "Parties" has a list of numbers, "party" one.
_NUMBERED = re.compile(
    r"(?<!class )(?<![\w'\"/-])([Pp]arty )(\d{1,6})\b"
    r"|(?<![\w'\"/-])([Pp]arties )(\d{1,6}(?:(?:, | and )\d{1,6})*)\b"
)
_here: ContextVar[dict[int, str] | None] = ContextVar("names of parties", default=None)


def is_name(name: object) -> bool:
    """Return whether a party can have this name, which is safe in html, Markdown and csv."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _permitted(name: str) -> str:
    if name and not is_name(name):
        raise ValueError(MUST)
    return name


Name = Annotated[str, AfterValidator(_permitted)]
"""Annotation of a name from outside. The empty text stands for no name."""


def alike(names: Mapping[int, str]) -> tuple[int, int] | None:
    """Return two parties whose names a reader could confuse; None if there are none."""
    first: dict[str, int] = {}
    for party, name in names.items():
        if (other := first.setdefault(name.lower().replace("_", "-"), party)) != party:
            return other, party
    return None


def in_words(text: str, names: Mapping[int, str] | None = None) -> str:
    """Return a text with names of parties, by default of `named`: "party 0" is "party bank"."""
    if not (known := (_here.get() if names is None else names) or {}):
        return text

    def name(match: re.Match[str]) -> str:
        return known.get(int(match[0]), match[0])

    return _NUMBERED.sub(
        lambda match: (match[1] or match[3]) + re.sub(r"\d+", name, match[2] or match[4]), text
    )


def called(of: Mapping[str, Any]) -> str:
    """Return what a summary's entry of a party is called: "party bank", or "party 0"."""
    return f"party {of['name'] if is_name(of.get('name')) else of['party']}"


def note(names: Mapping[int, str]) -> None:
    """Use these names too, in the block of `named`; empty ones are none."""
    if (known := _here.get()) is not None:
        known.update({party: name for party, name in names.items() if name})


def note_others(names: Mapping[int, str]) -> list[int]:
    """Use these names too, except names of other parties; return the parties without a name now."""
    known = _here.get()
    known, dropped = {} if known is None else known, []
    for party, name in names.items():
        if alike({**known, party: name}):
            known.pop(party, None)
            dropped.append(party)
        else:
            known[party] = name
    return dropped


@contextmanager
def named(names: Mapping[int, str]) -> Iterator[None]:
    """Use names in log records of this block, and in errors that leave it."""
    known = {**(_here.get() or {}), **names}
    token = _here.set(known)
    try:
        yield
    except Exception as error:
        if known:
            error.args = tuple(in_words(a) if isinstance(a, str) else a for a in error.args)
        raise
    finally:
        _here.reset(token)


def with_names() -> dict[str, Any]:
    """Return the field ``names`` of a file of results, if parties have names."""
    known = sorted((_here.get() or {}).items())
    return {"names": {str(party): name for party, name in known}} if known else {}


def from_json(names: object) -> dict[int, str]:
    """Return the names in a file's field ``names``, which may say anything."""
    items = names.items() if isinstance(names, Mapping) else ()
    return {int(n): name for n, name in items if str(n).isdecimal() and is_name(name)}


class _InWords(logging.Filter):
    """Use names in log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; let it pass."""
        said = record.getMessage() if _here.get() else ""
        if (text := in_words(said)) != said:
            record.msg, record.args = text, ()
        return True


for _logger in ("flwr", "flwr.notice"):
    logging.getLogger(_logger).addFilter(_InWords())
