"""Where trials run side by side: in processes on this machine, or on a Ray cluster.

Both are used alike: `send` a job or an answer, and `wait` for what trials say. They get to know
nothing of the study. Ray Tune would bring a scheduler, a journal and a results folder of its own
beside those that the sweep has anyway, so that actors are all that is used of Ray.
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
from vfl_flower.tools.sweep.trial import Event, Stepper

_TERM_SECONDS = 30.0


class Workers(Protocol):
    """So many workers, by number, from entering to leaving."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def number(self) -> int:
        """How many there are."""
        ...

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        """Give a job to one that is idle, or an answer to one that has told of an evaluation."""
        ...

    def wait(self) -> Iterator[tuple[int, Event]]:
        """Wait until at least one of those that were sent something says something."""
        ...


def workers_on(engine: str, jobs: int) -> Callable[[Path], Workers]:
    """So many workers of an engine, 0 for one on each core, once the results folder is known.

    Raises
    ------
    ConfigError
        If there is no such engine for trials.
    """
    if engine == "ray":
        return lambda folder: Actors(jobs)
    if engine != "local":
        raise ConfigError(
            f"--engine {engine} is none for sweeps: choose local or ray; trials run in process."
        )
    return lambda folder: Processes(jobs or len(os.sched_getaffinity(0)), folder / "workers.log")


class Processes:
    """Workers in processes of their own, of one thread each.

    Parameters
    ----------
    number : how many.
    log : file that gets what they print.
    """

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self._log = log
        self._processes: list[subprocess.Popen[str]] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "vfl_flower.tools.sweep.worker"]
        with opened_to_append(self._log) as log:
            for worker in range(self.number):
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    encoding="utf-8",
                    start_new_session=True,  # Ctrl-C is for who sweeps
                )
                self._processes.append(process)
                assert process.stdout
                self._selector.register(process.stdout, selectors.EVENT_READ, worker)
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

    def send(self, worker: int, message: dict[str, Any] | bool) -> None:
        """A line in; one that has died is found by `wait`."""
        to = self._processes[worker].stdin
        assert to
        with suppress(BrokenPipeError):
            to.write(json.dumps(message) + "\n")
            to.flush()

    def wait(self) -> Iterator[tuple[int, Event]]:
        """A line out of each that has one.

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
    """Workers on Ray: on the cluster that RAY_ADDRESS names, else on one of this machine alone.

    Parameters
    ----------
    number : how many; 0: one for each CPU of the cluster.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting: dict[Any, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not os.environ.get("RAY_ADDRESS"):
                stack.enter_context(_closed_to_others())
            import ray

            stack.callback(ray.shutdown)
            with _without_ray_s_own():
                quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
                if os.environ.get("RAY_ADDRESS"):
                    ray.init(**quiet)
                else:
                    cpus = self.number or len(os.sched_getaffinity(0))
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
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
        """Call the actor; what it returns is what it says."""
        self._waiting[self._actors[worker].send.remote(message)] = worker

    def wait(self) -> Iterator[tuple[int, Event]]:
        """What one of them says.

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
    """Have Ray start without warnings about itself, and without its answer to SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings(action="ignore"):
        yield
    if threading.current_thread() is threading.main_thread():  # else Ray has set none
        signal.signal(signal.SIGTERM, before)


@cache
def _token() -> str:
    """A secret, once a process: Ray remembers the first that it is given."""
    return secrets.token_hex(32)


@contextmanager
def _closed_to_others() -> Iterator[None]:
    """Have the Ray that is started be used by who can read a file of this process alone."""
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
