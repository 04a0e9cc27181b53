"""Values of options that have a new name: both names are accepted for one release.

Lists and errors show the new names. Results folders keep the old names until the next release, so
that this release can read them beside older ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "local-only": "alone",
        "centralised": "joined",
        "intersection-only": "common",
    },
}
"""Option -> new name -> old name, which the code and the results folders still use."""

notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too


def accepted(option: str, value: Any) -> Any:
    """Return the name that the code uses for a value of an option."""
    return VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value


def shown(option: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the new names of values of an option."""
    new = {old: name for name, old in VALUES.get(option, {}).items()}
    return tuple(new.get(name, name) for name in names)


def notify(given: Mapping[str, Any]) -> None:
    """Log a notice, once in a process, for each old name that a user gives."""
    for option, value in given.items():
        if isinstance(value, str) and value in VALUES.get(option, {}).values():
            _notify(option, value, *shown(option, [value]))


@cache
def _notify(option: str, old: str, new: str) -> None:
    notice.warning(
        "%s='%s' has a new name: '%s'. The next release drops the old name.", option, old, new
    )
