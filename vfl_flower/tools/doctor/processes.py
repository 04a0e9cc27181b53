"""Processes of earlier runs that have outlived what started them, and may hold ports and keys."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from vfl_flower.launch.descendants import MARK
from vfl_flower.tools.doctor.finding import OK, WARNING, Finding, some

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
    """Yield whether processes of this user have outlived what started them.

    Homes are of deploy/superlink.sh and deploy/supernode.sh. The temporary folders of `vfl` count
    besides.
    """
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
    if not any(each in words for each in _PROGRAMS):
        return False
    temporary = process.home.startswith(f"{tempfile.gettempdir()}/vfl-flower-")
    # nginx writes over its environment.
    named = any(process.home == str(each) or f"{each}/proxy.conf" in words for each in homes)
    return temporary or named


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
