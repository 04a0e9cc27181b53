"""Checks of this machine: versions, code, compiled modules, open files, and processes left over."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import getproxies_environment, proxy_bypass

import psutil

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.protocol_version import VERSION
from vfl_flower.config.provenance import shared_code, versions
from vfl_flower.launch.descendants import MARK
from vfl_flower.tools.doctor.finding import HINT, OK, PROBLEM, WARNING, Finding, some

_SHOWN = ("vfl-flower", "flwr", "torch", "numpy", "python")
_LOADED = ("vfl_flower", "strategies", "flwr", "torch", "numpy")
_FEW_FILES = 1024
_SPOKEN = 16  # hexadecimal digits of a digest: too many to find another code with them


def description() -> dict[str, Any]:
    """Return what another organisation compares: versions, protocol and digest of its code."""
    return {
        "versions": {"vfl-flower": version("vfl-flower"), **versions()},
        "protocol": VERSION,
        "code": shared_code(),
    }


def about(compared: Path | None) -> Iterator[Finding]:
    """Yield the findings about this machine."""
    here = description()
    said = ", ".join(f"{name} {here['versions'][name]}" for name in _SHOWN)
    yield Finding("versions", OK, said)
    spoken = here["code"][:_SPOKEN]
    groups = " ".join(spoken[at : at + 4] for at in range(0, _SPOKEN, 4))
    said = f"version {VERSION} (all organisations must have the same), code {groups}"
    yield Finding("protocol", OK, said)
    if compared:
        yield from differences(here, _read(compared))
    yield compiled_modules()
    yield open_files()
    yield from proxies()


def _read(file: Path) -> dict[str, Any]:
    """Return another organisation's description, the output of `vfl doctor --json`."""
    try:
        there = json.loads(file.expanduser().read_text())
        protocol, code = int(there["protocol"]), str(there["code"])
        return {"versions": dict(there["versions"]), "protocol": protocol, "code": code}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is not the output of `vfl doctor --json`. Ask the other organisation for it."
        ) from error


def differences(here: dict[str, Any], there: dict[str, Any]) -> Iterator[Finding]:
    """Yield what differs between two descriptions, or that nothing does."""
    same = "Install the same version at all organisations, with deploy/requirements.txt."
    if here["protocol"] != there["protocol"]:
        said = f"The other organisation has protocol {there['protocol']}, and the run will "
        yield Finding("compared protocol", PROBLEM, f"{said}refuse it. {same}")
    else:
        code = "the same" if here["code"] == there["code"] else "other"
        said = f"The other organisation has the same protocol, and {code} code for it."
        yield Finding("compared protocol", OK, said)
    differ = [
        f"{name} is {ours} here and {str(there['versions'].get(name))[:40]!r} there"
        for name, ours in here["versions"].items()
        if ours != there["versions"].get(name)
    ]
    if differ:
        said = f"{', '.join(differ)}. Results may differ in their last digits. {same}"
        yield Finding("compared versions", WARNING, said)
    else:
        yield Finding("compared versions", OK, "The other organisation has the same versions.")


def compiled_modules() -> Finding:
    """Check whether Python has just written bytecode of the modules that a node loads."""
    import_module("vfl_flower.client_app")
    import_module("vfl_flower.server_app")
    modules = [each for name, each in list(sys.modules.items()) if name.split(".")[0] in _LOADED]
    specs = [spec for each in modules if (spec := each.__spec__) and spec.cached and spec.origin]
    missing = [spec for spec in specs if not Path(str(spec.cached)).exists()]
    if not missing:
        return Finding("bytecode", OK, f"The {len(specs)} modules that a node loads are compiled.")
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "Python cannot write it"
    where = max(path for path in sys.path if path and str(missing[0].origin).startswith(path))
    said = (
        f"{len(missing)} of {len(specs)} modules have no bytecode, and {why}. Each process starts "
        f"seconds later. Run `python -m compileall -q {where}`."
    )
    return Finding("bytecode", HINT, said)


def open_files() -> Finding:
    """Check the limit of open files, up to which a label holder raises its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        said = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
        return Finding("open files", OK, f"A process may open many files ({said}).")
    said = f"A process may open only {hard} files. Raise `ulimit -Hn` to {4 * _FEW_FILES}."
    return Finding("open files", WARNING, said)


def proxies() -> Iterator[Finding]:
    """Check a proxy that the environment names: Flower's commands use it on this machine, too."""
    known = getproxies_environment()
    names = [f"{kind}_proxy" for kind in ("http", "https", "all") if kind in known]
    said = ", ".join(names)
    if names and proxy_bypass("127.0.0.1"):
        yield Finding("proxy", OK, f"Calls to this machine do not use the proxy of {said}.")
    elif names:
        said += (
            " is set, so `flwr` calls a SuperLink on this machine through a proxy. "
            "Set no_proxy=127.0.0.1,localhost. Processes that `vfl` starts need no such setting."
        )
        yield Finding("proxy", WARNING, said)


_PROGRAMS = ("vfl_flower.transport.nodes.", "flower-", "flwr-", "nginx", "raylet", "gcs_server")
_STARTERS = ("systemd", "init", "tini", "docker-init", "dumb-init", "catatonit")

_AGAIN = 1.0  # seconds until the second look


class _Process(NamedTuple):
    number: int
    parent: int
    words: list[str]
    home: str
    mark: str

    @property
    def name(self) -> str:
        """Return its number and program, without arguments, which may name columns."""
        at = self.words.index("-m") + 1 if "-m" in self.words else 0
        program = [each.rpartition(".")[2] for each in self.words[at : at + 1 + bool(at)]]
        return f"{self.number} ({Path(' '.join(program).partition(':')[0]).name})"


def left_over(homes: Collection[Path]) -> Iterator[Finding]:
    """Yield whether processes of this user, in these homes or of `vfl`, outlive their starter."""
    found = _alone(homes)
    if found:  # some may be ending just now
        time.sleep(_AGAIN)
        numbers = {each.number for each in found}
        found = [each for each in _alone(homes) if each.number in numbers]
    if not found:
        yield Finding("processes", OK, "No process of an earlier run is left.")
        return
    end = " ".join(["kill", *(str(each.number) for each in found)])
    said = f"What started these processes has ended: {some([each.name for each in found])}. They "
    said += f"may hold ports. If no run needs them, end them: `{end}`."
    yield Finding("processes", WARNING, said)


def _alone(homes: Collection[Path]) -> list[_Process]:
    every = {each.number: each for each in _running()}
    return [each for each in every.values() if _is_ours(each, homes) and _is_alone(each, every)]


def _running() -> Iterator[_Process]:
    for each in psutil.process_iter(["ppid", "cmdline"]):
        environment: dict[str, str] = {}
        with suppress(psutil.Error, OSError):  # another user's, or it has ended
            environment = each.environ() if each.uids().real == os.geteuid() else {}
        words = each.info["cmdline"] or []
        home, mark = (environment.get(name, "") for name in ("FLWR_HOME", MARK))
        yield _Process(each.pid, each.info["ppid"] or 0, words, home, mark)


def _is_ours(process: _Process, homes: Collection[Path]) -> bool:
    words = " ".join(process.words)
    temporary = process.home.startswith(f"{tempfile.gettempdir()}/vfl-flower-")
    # nginx writes over its environment.
    named = any(process.home == str(each) or f"{each}/proxy.conf" in words for each in homes)
    return any(each in words for each in _PROGRAMS) and (temporary or named)


def _is_alone(process: _Process, every: dict[int, _Process]) -> bool:
    """Return whether nobody is left who would end a process. A SuperNode may stand alone."""
    if process.mark:  # it ends with a `vfl` command, by a process that has its mark
        return not any(process.mark in each.words for each in every.values())
    if "supernode" in process.words:
        return False
    parent = every.get(process.parent)
    if parent is None or parent.number == 1 or not parent.words:
        return True
    return Path(parent.words[0]).name in _STARTERS
