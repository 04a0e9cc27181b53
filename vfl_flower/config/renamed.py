"""Renamed values of options: the old names stay valid for one more release.

Results folders of earlier releases contain the old names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "alone": "local-only",
        "joined": "centralised",
        "common": "intersection-only",
    },
}
"""Option -> old name -> new name."""

notice = logging.getLogger("flwr.notice")  # `vfl run` shows these records too


def accepted(option: str, value: Any) -> Any:
    """Return the new name of an option's value."""
    return VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value


def notify(given: Mapping[str, Any]) -> None:
    """Log a notice, once in a process, for each old name that a user gives."""
    for option, value in given.items():
        new = accepted(option, value)
        if new != value:
            _notify(option, value, new)


@cache
def _notify(option: str, old: str, new: str) -> None:
    notice.warning(
        "%s='%s' has a new name: '%s'. The next release drops the old name.", option, old, new
    )
