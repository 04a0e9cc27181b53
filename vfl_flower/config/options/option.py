"""How a section of the run configuration declares one of its options."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any


def key(default: Any, help: str, *, example: str, basic: bool = False, **more: Any) -> Any:
    """Return the dataclass field of one option.

    Parameters
    ----------
    default : the default; ``None`` stands for "auto".
    help : sentences. The first one is the summary that lists show.
    example : pairs for `vfl run -c`, which `protocol.systems.resolve` accepts.
    basic : whether a new user needs the option. `vfl list` shows only these options.
    more : further fields of `config.run_config.Key`. ``name`` replaces the name of the field.
        ``auto`` says what decides a missing default. ``related`` names other options. ``symbol`` is
        the paper's. ``engine`` is the one that the example needs. ``choices``, ``registry``,
        ``least``, ``above`` and ``below`` limit the values. ``numbers`` permits numbers as texts.
    """
    return field(
        default=default, metadata={"help": help, "example": example, "basic": basic, **more}
    )


def sentences(text: str) -> list[str]:
    """Split a text into its sentences, each with its full stop."""
    return re.split(r"(?<=[.?!]) +(?=[A-Z0-9`(-])", text.strip())
