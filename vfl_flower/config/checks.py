"""Check outside values by pydantic: fields of messages, options, rules of a party."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints
from urllib.request import getproxies_environment, proxy_bypass

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic import create_model as create

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MUST_BE = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "string_pattern_mismatch": "plain text in one line",
}
_LIMITS = {  # pydantic's name of an error -> (words, name of the limit)
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


Line = Field(pattern=r"^(?:[^\p{C}\p{Z}]| )*$")
"""Annotation of a text without line breaks or control characters."""
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


class InvalidError(ValueError):
    """A value is not permitted. The text is a predicate about it, or about the field ``name``."""

    def __init__(self, name: str, predicate: str) -> None:
        super().__init__(predicate)
        self.name = name


Check = Callable[[Any], Any]  # return a permitted value; raise `InvalidError` for any other value


def check_of(kind: Any) -> Check:
    """Return the check of one value: its type, perhaps with pydantic's limits."""
    validate = TypeAdapter(kind, config=_STRICT).validator.validate_python

    def check(value: Any) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise _invalid(error) from None

    return check


def fields_check_of(kind: type[Any], without: Collection[str] = ()) -> Check:
    """Return the check of a mapping with all fields of a dataclass, ``without`` some."""
    hints = get_type_hints(kind, include_extras=True)
    names = [spec.name for spec in fields(kind) if spec.name not in without]
    typed: dict[str, Any] = {name: (hints[name], ...) for name in names}
    model: type[BaseModel] = create(kind.__name__, __config__=_STRICT, **typed)
    validate = model.__pydantic_validator__.validate_python

    def check(values: Mapping[str, Any]) -> Any:
        try:
            return vars(validate(values))
        except ValidationError as error:
            raise _invalid(error) from None

    return check


def _invalid(error: ValidationError) -> InvalidError:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "extra_forbidden":  # the sender chose the name: do not show it
        return InvalidError("", "has an unknown field")
    name = str(first["loc"][0]) if first["loc"] else ""
    return InvalidError(name, _predicate(first["type"], first.get("ctx", {})))


def _predicate(kind: str, limits: Mapping[str, Any]) -> str:
    """Return what is wrong, as in "must be a whole number"."""
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        limit = limits[name]
        return f"must be {words} {limit:{',' if isinstance(limit, int) else 'g'}}"
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}"
    if kind == "string_too_long":
        return f"must have at most {limits['max_length']:,} letters"
    if kind == "literal_error":
        return f"must be {limits['expected']}"
    return "is missing" if kind == "missing" else str(limits.get("error", f"is wrong ({kind})"))


_NO_PROXY = ("no_proxy", "NO_PROXY")


def is_loopback(host: str) -> bool:
    """Return whether a name or address means this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def direct_to_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to this machine from the environment's proxy."""
    known = environment.get("no_proxy") or environment.get("NO_PROXY", "")
    named = {name: environment.get(name) or known for name in _NO_PROXY}
    here = "127.0.0.1,localhost,::1"
    return {
        name: hosts if hosts == "*" else f"{hosts},{here}".lstrip(",")
        for name, hosts in named.items()
    }


def proxy_of(host: str) -> str:
    """Return the proxy through which a SuperNode, by httpx, and its streams call a host, if any."""
    known = {} if is_loopback(host) or proxy_bypass(host) else getproxies_environment()
    named = known.get("https") or known.get("all") or ""
    return named if "://" in named or not named else f"http://{named}"
