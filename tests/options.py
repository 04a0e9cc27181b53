"""Write what is generated from the options: python -m tests.options.

These are vfl_flower/api/keywords.py, the keyword arguments of `train`, and Flower's table of
options in pyproject.toml.
"""

from __future__ import annotations

import json
from pathlib import Path

from vfl_flower.api import keywords
from vfl_flower.api.own_code import KEYWORDS
from vfl_flower.config.options.option import Key
from vfl_flower.config.run_config import OPTIONS, SHOWN, flower_defaults

FILE = Path(keywords.__file__)
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
TABLE = "[tool.flwr.app.config]\n"
OTHERS = """
# All other options, since Flower refuses an option that this table lacks. `vfl list` explains them.
"""
HEAD = '''"""Keyword arguments of `vfl_flower.train`; `vfl list` explains each.

This file is generated from vfl_flower/config/options/: python -m tests.options
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.system import System

Code = str | type[Any] | Callable[..., Any]
"""The name of a component, a class, or a function."""


class Options(TypedDict, total=False):
    """Options of a run. None stands for the default."""

'''


def generated() -> str:
    """Return the content of vfl_flower/api/keywords.py."""
    return HEAD + "".join(_field(keyword, OPTIONS[name]) for keyword, name in KEYWORDS.items())


def _field(keyword: str, key: Key) -> str:
    kind = "Code" if key.registry else key.type.__name__
    if key.name == "strategy":
        kind = "str | System"
    if key.name == "observer":
        kind = "Code | Callback"
    if key.name == "expert":
        kind = "str | Mapping[str, Any]"
    if key.choices:
        values = [f'"{each}"' for each in key.choices]
        kind = f"Literal[{', '.join(values)}]"
    return f"    {keyword}: {kind} | None\n"


def with_table(text: str) -> str:
    """Return the text of pyproject.toml with the table of `flower_defaults`."""
    start = text.index(TABLE) + len(TABLE)
    lines = [_line(name, value) for name, value in flower_defaults().items()]
    lines.insert(len(SHOWN), OTHERS)
    return text[:start] + "".join(lines) + text[text.index("\n[", start) :]


def _line(name: str, value: object) -> str:
    auto = OPTIONS[name].auto.partition(". ")[0] if name in SHOWN else ""
    return f"{name} = {json.dumps(value)}{'  # ' + auto if auto else ''}\n"


if __name__ == "__main__":
    FILE.write_text(generated())
    PYPROJECT.write_text(with_table(PYPROJECT.read_text()))
