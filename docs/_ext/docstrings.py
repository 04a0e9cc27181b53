"""Turn the docstrings of this project into reStructuredText that numpydoc reads.

A section lists ``name : description``, which numpydoc would take for ``name : type``.
"""

from __future__ import annotations

import re
from typing import Any

_ITEM = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \w+)*) : (?P<text>.+)$")
_SECTIONS = {"Parameters", "Attributes", "Other Parameters"}


def prepare(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put each description below its name, and free lists of fields into a field list."""
    section, made = "", []
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if below and set(below) == {"-"}:
            section = line
        found = _ITEM.match(line)
        if found and section in _SECTIONS:
            made += [found["names"], "    " + found["text"][:1].upper() + found["text"][1:]]
        elif found and not section:
            made.append(f":{found['names']}: {found['text']}")
        else:
            made.append(line)
    lines[:] = made


def shorten(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str | None, Any]:
    """Show the options of `train` as ``**options``: the page of options lists them."""
    if name == "vfl_flower.train" and signature:
        before = signature.partition("progress=None")
        return f"{before[0]}{before[1]}, **options)", returned
    return signature, returned


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx, before numpydoc."""
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
