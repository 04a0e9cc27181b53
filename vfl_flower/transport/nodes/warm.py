"""Starts Flower's tasks without a wait for imports.

Flower starts a process for each run of a ServerApp, and for each message to a ClientApp. Each
imports torch, which takes seconds. Here one process imports torch once, and forks for each task. So
a task starts in milliseconds and shares the memory of the modules.

The process uses no GPU and opens no connection, because forks would inherit them in a broken state.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from io import FileIO
from pathlib import Path
from select import select
from types import ModuleType, SimpleNamespace
from typing import Any

from vfl_flower.config.provenance import code_digest

_IDLE = 30.0  # seconds after an order, or between two looks at tasks, before the next import


class WarmTasks:
    """Starts tasks by a process that has already imported ``modules``, the most needed first.

    Each task looks for the packages ``fresh`` anew, because a run may bring another version.
    """

    def __init__(self, modules: Sequence[str], fresh: Sequence[str] = ()) -> None:
        names = [",".join(modules), ",".join(fresh)]
        self._command = [sys.executable, "-P", "-m", "vfl_flower.transport.nodes.warm", *names]
        self._begin()

    def start(self, arguments: list[str], quiet: bool) -> None:
        """Start a task, whose output may be discarded, by arguments of an installed command.

        They pass through a pipe, so that other users of this machine cannot read a token among
        them.
        """
        order = json.dumps([arguments, quiet]).encode() + b"\n"
        try:
            self._give(order)
        except BrokenPipeError:  # the process has ended, for example because memory ran out
            self._begin()
            self._give(order)

    def _give(self, order: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(order)

    def _begin(self) -> None:
        """Start the process that forks. It ends with this one."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, bufsize=0)


def _fork_for_each_order(modules: Sequence[str], fresh: Sequence[str]) -> int:
    """Fork for each line of standard input; return an exit code, also in each fork.

    The first module is imported before the first fork. The others wait while orders come, because a
    node that starts again should serve at once. They also wait while a task runs: importing takes a
    core for seconds, which a service would miss.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that gives orders
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for tasks
    code_digest()  # cached for forks, which run this code even if its files change
    first, *others = modules
    _import(first)
    # Without a buffer, which would hand the next task's token to a fork.
    orders, idle, tasks = FileIO(0, closefd=False), 0.0, list[int]()
    while True:
        if others and not select([orders], [], [], idle)[0]:
            tasks = [*filter(_is_running, tasks)]
            if not tasks:
                _import(others.pop(0))
                idle = 0.0
            continue
        gc.freeze()  # else the first collection in a fork would copy all memory
        order = orders.readline()
        if not order:
            return 0
        task = os.fork()
        if not task:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            here = [name for name in sys.modules if name.partition(".")[0] in fresh]
            sys.meta_path.insert(0, _Kept({name: sys.modules.pop(name) for name in here}))
            return _run(*json.loads(order))
        tasks = [*filter(_is_running, tasks), task]
        idle = _IDLE


class _Kept(MetaPathFinder):
    """Gives a task the modules of this process, unless it would import them from other files."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Decide for all packages, when the first of them is imported."""
        if name not in self._modules:
            return None
        sys.meta_path.remove(self)
        found = {each: PathFinder.find_spec(each) for each in self._modules if "." not in each}
        same = all(of and of.origin == self._modules[each].__file__ for each, of in found.items())
        if not same or code_digest.__wrapped__() != code_digest():  # a run's own, or an upgrade
            return None
        own = self._modules[name].__spec__

        def give(module: ModuleType) -> None:
            module.__spec__ = own  # else `importlib.resources` would find no files
            sys.modules.update(self._modules)

        loader: Any = SimpleNamespace(create_module=lambda _: self._modules[name], exec_module=give)
        return ModuleSpec(name, loader)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:  # none has this number, or another user's
        return False
    return True


def _import(name: str) -> None:
    with suppress(Exception):  # a task that needs it fails, and its log says why
        import_module(name)


def _run(arguments: list[str], quiet: bool) -> int:
    """Run a command of an installed package in this process; return its exit code."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2) if quiet else (0,):
        os.dup2(nowhere, descriptor)
    if "numpy" in sys.modules:  # `random` does so itself, and torch starts with one seed anyway
        sys.modules["numpy"].random.seed()
    with suppress(OSError):  # else `ps` would show all tasks by the same name
        Path("/proc/self/comm").write_text(arguments[0])
    sys.argv = arguments
    [script] = entry_points(group="console_scripts", name=arguments[0])
    return int(script.load()() or 0)


if __name__ == "__main__":
    sys.exit(_fork_for_each_order(*(names.split(",") for names in sys.argv[1:])))
