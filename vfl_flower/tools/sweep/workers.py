"""Workers that run trials side by side: processes on this machine, or actors on a Ray cluster.

Both are used alike: `send` a job or an answer, and `wait` for events. Workers know nothing of the
study. Ray Tune would bring its own scheduler, journal and results folder, so the sweep uses actors
only.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import opened_to_append
from vfl_flower.launch.descendants import ending_with_this_process
from vfl_flower.tools.sweep.trial import Event, Stepper

_TERM_SECONDS = 30.0


class Workers(Protocol):
    """Workers, by number, from entering to leaving."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def number(self) -> int:
        """How many workers there are."""
        ...

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        """Give a job to an idle worker, or an answer to a worker that waits for it."""
        ...

    def wait(self) -> Iterator[tuple[int, Event]]:
        """Wait until at least one worker that was sent something says something."""
        ...


def workers_on(engine: str, jobs: int) -> Callable[[Path], Workers]:
    """Return what makes the workers of an engine, given the results folder.

    Parameters
    ----------
    jobs : number of workers; 0 for one per core.

    Raises
    ------
    ConfigError
        If the engine runs no trials.
    """
    if engine == "ray":
        return lambda folder: Actors(jobs)
    if engine != "local":
        raise ConfigError(
            f"--engine {engine} runs no trials, since they are in process: choose local or ray."
        )
    return lambda folder: Processes(jobs or len(os.sched_getaffinity(0)), folder / "workers.log")


class Processes:
    """Workers in processes with one thread each.

    Parameters
    ----------
    log : file for what the processes print.
    """

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self._log = log
        self._processes: list[subprocess.Popen[str]] = []
        self._selector = selectors.DefaultSelector()
        self._until_end = ExitStack()

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "vfl_flower.tools.sweep.worker"]
        with ExitStack() as stack, opened_to_append(self._log) as log:
            mark = stack.enter_context(ending_with_this_process())
            for worker in range(self.number):
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **mark, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    encoding="utf-8",
                    start_new_session=True,  # Ctrl-C is for the sweep
                )
                self._processes.append(process)
                assert process.stdout
                self._selector.register(process.stdout, selectors.EVENT_READ, worker)
            self._until_end = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_SECONDS)
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()
        self._selector.close()
        self._until_end.close()

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        """Write a line to a worker; `wait` finds a worker that has died."""
        to = self._processes[worker].stdin
        assert to
        with suppress(BrokenPipeError):
            to.write(json.dumps(message) + "\n")
            to.flush()

    def wait(self) -> Iterator[tuple[int, Event]]:
        """Yield the next event of each worker that has one.

        Raises
        ------
        VflError
            If a process has ended.
        """
        for key, _ in self._selector.select():
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if not line:
                raise VflError(
                    f"A process of trials has ended by itself, perhaps for want of memory: see "
                    f"{self._log}, lower --jobs, and give the same command again."
                )
            yield key.data, json.loads(line)


class Actors:
    """Workers on Ray: on the cluster in RAY_ADDRESS, or on a new one here.

    Parameters
    ----------
    number : how many; 0 for one per CPU of the cluster.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting: dict[Any, int] = {}

    def __enter__(self) -> Self:
        elsewhere = bool(os.environ.get("RAY_ADDRESS"))
        with ExitStack() as stack:
            if not elsewhere:
                if "ray._raylet" in sys.modules and not _token.cache_info().currsize:
                    raise ConfigError(
                        "Ray was loaded in this process without a token, so other users could use "
                        "the sweep's Ray. Start the sweep in a new process, by `vfl sweep`."
                    )
                stack.enter_context(_closed_to_others())
            import ray

            stack.callback(ray.shutdown)
            with _without_ray_s_own():
                quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
                if not elsewhere:
                    cpus = self.number or len(os.sched_getaffinity(0))
                    quiet |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
                ray.init(**quiet)
            cpus = int(ray.cluster_resources().get("CPU", 0))
            if self.number > cpus:
                raise ConfigError(f"The Ray cluster has {cpus} CPUs: lower --jobs to that.")
            self.number = self.number or cpus
            make: Any = ray.remote(num_cpus=1)(Stepper)
            self._actors = [make.remote() for _ in range(self.number)]
            self._ray = ray
            self._until_end = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._until_end:
            deadline = time.monotonic() + _TERM_SECONDS
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                ready, _ = self._ray.wait(list(self._waiting), timeout=left)
                for each in ready:  # a trial that is stopped removes its folder
                    worker = self._waiting.pop(each)
                    with suppress(self._ray.exceptions.RayError):
                        if "evaluated" in self._ray.get(each):
                            self.send(worker, True)

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        """Call the actor, which returns its next event."""
        self._waiting[self._actors[worker].send.remote(message)] = worker

    def wait(self) -> Iterator[tuple[int, Event]]:
        """Yield the next event of one worker.

        Raises
        ------
        VflError
            If an actor, or its machine, is gone.
        """
        ready, _ = self._ray.wait(list(self._waiting))
        for each in ready:
            worker = self._waiting.pop(each)
            try:
                event = self._ray.get(each)
            except self._ray.exceptions.RayActorError as error:
                raise VflError(
                    f"A Ray actor has ended by itself, perhaps for want of memory: lower --jobs, "
                    f"and give the same command again. Ray says: {' '.join(str(error).split())}"
                ) from None
            yield worker, event


@contextmanager
def _without_ray_s_own() -> Iterator[None]:
    """Start Ray without warnings about itself, and without its SIGTERM handler."""
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings(action="ignore"):
        yield
    if threading.current_thread() is threading.main_thread():  # else Ray has set no handler
        signal.signal(signal.SIGTERM, before)


@cache
def _token() -> str:
    """Return a secret; Ray remembers the first one of a process."""
    return secrets.token_hex(32)


@contextmanager
def _closed_to_others() -> Iterator[None]:
    """Start Ray so that only readers of a private file can use it."""
    before = {key: os.environ.get(key) for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    with tempfile.TemporaryDirectory(prefix="vfl-flower-") as home:
        token = Path(home, "ray.token")
        token.write_text(_token())
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        try:
            yield
        finally:
            for key, value in before.items():
                os.environ.pop(key)
                os.environ |= {} if value is None else {key: value}
