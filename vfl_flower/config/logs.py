"""Log records as JSON lines for a log collector: option ``log-format``.

A line has `time` (UTC, in milliseconds), `level`, `logger` and `message`, and, where they are
known, `run`, `role` ("label holder" or "party") and `party`. An error adds `exception`: its type,
and the places in the code. In no format does a line have its text, which may quote data.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from vfl_flower.config.errors import VflError, place, places

FORMATS = ("text", "json")

log, notice = logging.getLogger("flwr"), logging.getLogger("flwr.notice")
"""Flower's log, and what a run tells its user: commands of `vfl` show these records alone."""


class _About(NamedTuple):
    """Format of the records that are written now, and their fields."""

    as_json: bool = False
    fields: Mapping[str, Any] = {}


_here: ContextVar[_About | None] = ContextVar("log records", default=None)
_of_process = _About()  # of other threads, and of records that come after a block


@contextmanager
def described(log_format: object = None, lasting: bool = False, **fields: Any) -> Iterator[None]:
    """Write the records of this block in a ``log-format``, if it is one, with more fields.

    ``lasting`` covers all other threads, and all later records of this process.
    """
    global _of_process
    outer = _here.get() or _of_process
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


def without_colours() -> None:
    """Have Flower's handler write no escape codes, unless a terminal shows them."""
    from flwr.common.logger import update_console_handler

    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stderr.isatty():
        update_console_handler(colored=False)


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
    if hasattr(record, "exception"):
        content["exception"] = record.exception
    return json.dumps(content, default=str)


class _WithoutText(logging.Filter):
    """Write an error as its type and its places in the code; one of this package, as a sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; let it pass."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, VflError):
            record.msg, record.args = error.outside, ()
        elif error and _about().as_json:
            record.exception = places(error)
        elif error:
            # The place comes first: `LogBudget` cuts long records.
            said = f"{record.getMessage()}: {place(error)}\n{places(error)}"
            record.msg, record.args = said, ()
        record.exc_info = None
        return True


for _logger in map(logging.getLogger, ("flwr", "uvicorn.error")):
    # A warm process has imported this module before. That copy knows another `VflError`.
    for _before in [each for each in _logger.filters if type(each).__name__ == "_WithoutText"]:
        _logger.removeFilter(_before)
    _logger.addFilter(_WithoutText())
