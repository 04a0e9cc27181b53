"""How a section of the run configuration declares one of its options, and checks its values."""

from __future__ import annotations

import re
from dataclasses import field
from functools import cache, partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from vfl_flower.config import plugins
from vfl_flower.config.checks import Check, InvalidError, check_of
from vfl_flower.config.errors import ConfigError, shown, unknown


def key(default: Any, help: str, *, example: str, **more: Any) -> Any:
    """Return the dataclass field of one option, with fields of `Key`; the default None is "auto".

    ``name`` replaces the name of the field.
    """
    return field(default=default, metadata={"help": help, "example": example, **more})


basic, setting = partial(key, basic=True), partial(key, expert=True)
"""Return the field of an option that a new user needs, and of an expert setting."""


def sentences(text: str) -> list[str]:
    """Split a text into its sentences, each with its full stop."""
    return re.split(r"(?<=[.?!]) +(?=[A-Z0-9`(-])", text.strip())


class Key(NamedTuple):
    """An option of the run configuration, and its position in a `RunConfig`."""

    name: str
    section: str  # empty for `RunConfig` itself
    field: str
    type: type
    default: Any
    help: str  # sentences; lists show the first one
    example: str  # pairs for -c, which `protocol.systems.resolve` accepts
    auto: str = ""  # says what decides the value if there is no default
    basic: bool = False  # whether a new user needs it; `vfl list` shows only these
    expert: bool = False  # no option of every run: a system or an experiment decides it
    symbol: str = ""  # in the paper
    engine: str = ""  # that the example needs; "flower" for `flwr run`
    before: str = ""  # a condition of the example
    values: str = ""  # permitted values in words, if no other field describes them
    choices: tuple[str, ...] = ()
    registry: plugins.Registry | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    numbers: bool = False  # whether a number stands for its text

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the option's values, if the values have names."""
        return self.registry.names if self.registry else self.choices

    @property
    def summary(self) -> str:
        """Return the first sentence of the help text."""
        return sentences(self.help)[0]

    def typed(self, value: Any, named: str = "") -> Any:
        """Return a value with the option's type, or raise `ConfigError` about what is `named`."""
        if self.numbers and isinstance(value, int | float):
            value = str(value)
        try:
            return _check_of(self.type, self.least, self.above, self.below)(value)
        except InvalidError as error:
            quoted = isinstance(value, str) and self.type in (int, float, bool)
            hint = " Leave the quotes out." * quoted
            hint = f" {self.summary}" if isinstance(value, bool) and self.type is str else hint
            raise ConfigError(f"{named or self.name} = {shown(value)} {error}.{hint}") from None

    def check(self, value: Any) -> Any:
        """Return a value with the option's type; raise `ConfigError` unless it is permitted."""
        if value is None:
            return None
        if self.registry:
            self.registry.check(value, self.name)
        if self.choices and value not in self.choices:
            raise unknown(self.name, value, self.choices)
        return self.typed(value)


@cache
def _check_of(kind: type, least: float | None, above: float | None, below: float | None) -> Check:
    widest = {int: 2**31, float: 1e38}.get(kind)  # of 32 bits
    if widest is None:
        return check_of(kind)
    below = widest if below is None else below
    above = -widest if least is None and above is None else above
    return check_of(Annotated[kind, Field(ge=least, gt=above, lt=below)])
