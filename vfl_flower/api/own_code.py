"""Turn classes and functions that Python code passes as options into names, as a run keeps them.

A run keeps texts only. A class or function with an import path is kept as ``package.module:NAME``.
One without an import path, such as a class of a notebook, is held in this process and gets a name
of this module. `config.plugins.load_place` finds it here as long as the process lasts.
"""

import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.nn import Module

from vfl_flower.config.errors import IN_PROCESS, ConfigError, meant, shown
from vfl_flower.config.plugins import PLUGIN_MODULES, Registry
from vfl_flower.config.run_config import KEYS, OPTIONS, opened, parse
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.system import System

_PLACE = f"{__name__}:"
_held: dict[str, Any] = {}
_NOT_KEYWORDS = ("task", "model", "information", "id", "out", "parties")
KEYWORDS = {name.replace("-", "_"): name for name in OPTIONS if name not in _NOT_KEYWORDS}
"""Keyword option of `train` -> name of the option. Arguments of `train` have other names."""


def __getattr__(name: str) -> Any:
    """Return the class or function that is held under a name."""
    try:
        return _held[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def values_of(
    config: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options by their names, and further arguments for the engine.

    ``options`` are in snake_case, and None stands for the default.
    """
    if not isinstance(config, Mapping | None):
        raise ConfigError(
            f"config = {shown(config)} must be a mapping of options, such as "
            "{'strategy': 'vafl'}. Features are one list: train([bank, shop], labels)."
        )
    values = {**(config or {})}
    values["out"] = str(values.get("out", ""))
    for option, value in options.items():
        name = option.replace("_", "-")
        if option not in KEYWORDS:
            hint = f"{meant(option, KEYWORDS)}See `vfl list`."
            if name in KEYS and KEYS[name].expert:
                hint = f"It is an expert setting: write expert={{{name!r}: ...}}."
            raise ConfigError(f"{option} is not an option of train. {hint}")
        if value is None:
            continue
        if name in values:
            raise ConfigError(
                f"{option} is given twice: {shown(values[name])} in config, and {shown(value)} "
                "as a keyword argument. Leave one of them out."
            )
        values[name] = value
    values = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in opened(values).items()
    }
    more: dict[str, Any] = {}
    if isinstance(values.get("observer"), Callback):
        more["observers"] = [values.pop("observer")]
    for name in values.keys() & {name for name, each in KEYS.items() if each.registry}:
        if not isinstance(values[name], str | None):
            values[name] = _name_of_code(name, values[name])
    return parse(values), more


def _name_of_code(option: str, value: Any) -> str:
    """Return the name of a value that is code; raise `ConfigError` if the option takes none."""
    kind = type(value).__name__
    if option == "strategy" and not isinstance(value, System):
        raise ConfigError(
            f"strategy = {shown(value)} is not a strategy: give a name of `vfl list`, or a System."
        )
    if option in ("bottom-model", "top-model") and isinstance(value, Module):
        raise ConfigError(
            f"{option} = {kind}(...) is a module, and training makes its own: give the class "
            f"{kind}, or a function that returns a module."
        )
    if option != "strategy" and not callable(value):
        raise ConfigError(f"{option} = {shown(value)} must be a name, a class or a function.")
    registry = KEYS[option].registry
    assert registry
    return name_of(value, registry)


def name_of(value: Any, registry: Registry) -> str:
    """Return the name that a run saves for an object: ours, an entry point's, or its import path.

    Without any, it is a name that is valid only in this process.
    """
    for known, place in registry.known.items():
        module, _, name = place.partition(":")
        if module in sys.modules and _same(getattr(sys.modules[module], name, None), value):
            return known
    place = _import_path(value)
    for entry in registry.entries:
        if entry.value == place:
            return entry.name
    return place or _hold(value)


def without_path(values: Mapping[str, Any]) -> dict[str, str]:
    """Return options whose values have no import path -> names of their classes."""
    matches = {option: IN_PROCESS.fullmatch(str(value)) for option, value in values.items()}
    return {option: name[1] for option, name in matches.items() if name}


def check_there(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a value is a class or function that another process held."""
    for option, name in without_path(values).items():
        if values[option].removeprefix(_PLACE) not in _held:
            raise ConfigError(
                f"{option} = {name} has no import path and was defined in another process. Define "
                f"{name} in a module (a .py file) that can be imported, and train again."
            )


def _same(one: Any, other: Any) -> bool:
    """Return whether two objects are one, or equal, as copies of a `System` are."""
    return one is other or (type(one) is type(other) and bool(one == other))


def _import_path(value: Any) -> str:
    """Return ``package.module:NAME`` or ``FILE.py:NAME``; empty if there is none."""
    if name := getattr(value, "__qualname__", ""):
        return _path_in(getattr(value, "__module__", None) or "", name, value)
    for module, content in list(sys.modules.items()):  # an object, such as a `System`
        for name, each in list(getattr(content, "__dict__", {}).items()):
            if _same(each, value) and (place := _path_in(module, name, each)):
                return place
    return ""


def _path_in(module: str, name: str, value: Any) -> str:
    content = sys.modules.get(module)
    file = getattr(content, "__file__", None)
    if module in ("__main__", __name__) or not file or not name.isidentifier():
        return ""
    if getattr(content, name, None) is not value:
        return ""
    return f"{file if module.startswith(PLUGIN_MODULES) else module}:{name}"


def _hold(value: Any) -> str:
    """Hold an object, and return its name; the same one if it is held already."""
    for name, each in _held.items():
        if _same(each, value):
            return _PLACE + name
    called = getattr(value, "__name__", "") or type(value).__name__
    called = re.sub(r"\W", "", called) or "code"
    name = f"{called}__in_process_{secrets.token_hex(8)}"
    _held[name] = value
    return _PLACE + name
