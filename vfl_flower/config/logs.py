"""Log records as JSON lines for a log collector: option ``log-format``.

A line has `time` (UTC, in milliseconds), `level`, `logger` and `message`, and, where they are
known, `run`, `role` ("label holder" or "party") and `party`. An error adds `exception`: its type,
and the places in the code, but not its text, which may quote data.

The standard library does this in few lines. A library's formatter would have to be changed in
two points: Flower's handler ignores formatters, and the text of an error must stay out.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

FORMATS = ("text", "json")


class _About(NamedTuple):
    """Format of the records that are written now, and their fields."""

    as_json: bool = False
    fields: Mapping[str, Any] = {}


_here: ContextVar[_About | None] = ContextVar("log records", default=None)
_of_process = _About()  # of other threads, and of records that come after a block


@contextmanager
def described(log_format: object = None, lasting: bool = False, **fields: Any) -> Iterator[None]:
    """Write the records of this block in a format, and with these fields.

    A block within another one adds to its fields.

    Parameters
    ----------
    log_format : a value of option ``log-format``. Any other value keeps the format.
    lasting : whether all other threads, and all later records of this process, are alike.
    """
    global _of_process
    outer = _about()
    as_json = log_format == "json" if log_format in FORMATS else outer.as_json
    about = _About(as_json, {**outer.fields, **fields})
    if as_json:
        _take_over()
    if lasting:
        _of_process = about
    token = _here.set(about)
    try:
        yield
    finally:
        _here.reset(token)


def as_json() -> bool:
    """Return whether records are JSON lines now."""
    return _about().as_json


def _about() -> _About:
    return _here.get() or _of_process


def _take_over() -> None:
    """Have Flower's handler, which ignores formatters, write JSON lines where they are due."""
    from flwr.common.logger import console_handler

    if "format" not in vars(console_handler):
        vars(console_handler)["format"] = partial(_formatted, console_handler.format)


def _formatted(as_text: Any, record: logging.LogRecord) -> str:
    about = _about()
    if not about.as_json:
        return str(as_text(record))
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    content = {
        "time": moment.replace("+00:00", "Z"),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage(),
        **about.fields,
    }
    if record.exc_info and record.exc_info[1]:
        content["exception"] = _places(record.exc_info[1])
    return json.dumps(content, default=str)


def _places(error: BaseException) -> str:
    """Return the type of an error, and of its causes, each with its places in the code."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{each.filename}:{each.lineno} in {each.name}" for each in frames]
    said = "\n".join([type(error).__name__, *places])
    return f"{_places(before)}\n{said}" if before else said
