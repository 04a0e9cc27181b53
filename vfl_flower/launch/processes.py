"""Flower's own processes on this machine: a SuperLink, SuperNodes, and `flwr run`.

They use loopback, free ports, and a temporary folder as FLWR_HOME, not the user's Flower. Secrets
in that folder keep other users of this machine from starting runs, taking tasks, being a SuperNode
(`transport.nodes.superlink`) and using Ray. A process ends with its ``with`` block, or this one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from vfl_flower.config.checks import direct_to_loopback
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import opened_to_append
from vfl_flower.config.run_config import packed
from vfl_flower.launch.descendants import ending_with_this_process
from vfl_flower.transport.flower_internals import STATES, lasting_home
from vfl_flower.transport.flower_processes import app_of_this_package
from vfl_flower.transport.nodes.certificates import self_signed, supernode_keys

_CLOSED = [sys.executable, "-P", "-m", "vfl_flower.transport.nodes.superlink"]
_STARTING_SECONDS = 60.0
_END_SECONDS = 12.0  # a stopped run has 8 s to save a checkpoint


class SuperLink:
    """A SuperLink for SuperNodes, or for Ray simulations with parties' states in ``states``."""

    def __init__(self, simulation: bool, states: Path | None = None) -> None:
        self.simulation = simulation
        self.states = states

    def __enter__(self) -> SuperLink:
        with ExitStack() as stack:  # closes what was opened if this fails
            temporary = tempfile.TemporaryDirectory(prefix="vfl-flower-")
            self.home = Path(stack.enter_context(temporary))
            self.port = stack.enter_context(reserved_port())
            self._mark = stack.enter_context(ending_with_this_process(str(self.home)))
            self._serve(stack)
            self._until_end = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._until_end.close()

    def _serve(self, stack: ExitStack) -> None:
        """Start the SuperLink's process, and wait until it answers."""
        key, certificate = self_signed("127.0.0.1")
        (self.home / "superlink.key").write_bytes(key)
        (self.home / "superlink.crt").write_bytes(certificate)
        (self.home / "ray.token").write_text(secrets.token_hex(32))
        public = f"{self.home}/superlink.crt"
        command = [*_CLOSED, "superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ssl-keyfile", f"{self.home}/superlink.key", "--ssl-certfile", public]
        command += ["--ssl-ca-certfile", public]
        command += ["--simulation" if self.simulation else "--enable-supernode-auth"]
        own = {"address": f"127.0.0.1:{self.port}", "root-certificates": public}
        _write_toml(self.home / "config.toml", {"superlink": {"default": "own", "own": own}})
        self._process = self.start(command, self.home / "superlink.log")
        stack.callback(stop, self._process)
        deadline = time.monotonic() + _STARTING_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (self.home / "superlink.log").read_text(errors="replace")[-500:]
                raise VflError(f"Flower's SuperLink did not start. It said: {text}")
            time.sleep(0.1)

    @contextmanager
    def supernode(
        self, party: int, parties: int, node_config: Mapping[str, Any] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a SuperNode for one party; started again, it has the same key."""
        key = self.home / f"supernode-{party}"
        if not key.exists():
            private, public = supernode_keys()
            key.write_bytes(private)
            key.with_suffix(".pub").write_bytes(public)
            register = ["flwr", "supernode", "register", f"{key}.pub", "own"]
            log = self.home / f"register-{party}.log"
            if self.start(register, log).wait():
                raise VflError(f"Flower did not register a SuperNode. It said: {log.read_text()}")
        command = [*_CLOSED, "supernode", "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--root-certificates", str(self.home / "superlink.crt")]
        command += ["--auth-supernode-private-key", str(key)]
        words = {**(node_config or {}), "partition-id": party, "num-partitions": parties}
        _write_toml(self.home / f"node-{party}.toml", words)
        command += ["--node-config", f"{self.home}/node-{party}.toml"]
        with reserved_port() as port:
            command += ["--host", "127.0.0.1", "--port", str(port)]
            process = self.start(command, self.home / f"supernode-{party}.log")
            try:
                yield process
            finally:
                stop(process)

    def submit(
        self, run_config: Mapping[str, Any], nodes: int, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start `flwr run` with this configuration; the process ends with the run."""
        if not self.simulation:  # an earlier run may have been reached by another host
            run_config = {"stream-address": "127.0.0.1", **run_config}
        _write_toml(self.home / "run.toml", packed(run_config))
        app = self.home / "vfl-app"
        app.mkdir(exist_ok=True)
        (app / "pyproject.toml").write_text(app_of_this_package(), encoding="utf-8")
        command = ["flwr", "run", str(app), "own", "--stream"]
        command += ["--run-config", str(self.home / "run.toml")]
        if self.simulation:
            # Nodes can stream if each has an actor. The CPUs of a cluster are given.
            resources = "client-resources-num-cpus=1"
            if not ray_cluster():
                resources += f" init-args-num-cpus={nodes}"
                on_gpus = run_config.get("device") != "cpu"
                if share := _gpus_of_each(nodes) if on_gpus else 0:
                    resources += f" client-resources-num-gpus={share:g}"
            command += ["--federation-config", f"num-supernodes={nodes} {resources}"]
        return self.start(command, log)

    def end_run(self, number: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """Stop a run as `flwr stop` does, and wait until its process has ended, or some seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.start(["flwr", "stop", number, "own"], log).wait(_END_SECONDS)
            process.wait(_END_SECONDS)

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a Flower command; `stop` ends it and all that it starts."""
        scripts, of_ray = str(Path(sys.executable).parent), dict[str, str]()
        if not ray_cluster():  # close our Ray to others
            of_ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{self.home}/ray.token"}
        elif self.states:
            job = {"runtime_env": {"env_vars": {STATES: str(self.states)}}}
            of_ray = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
        environment = {
            **os.environ,
            **direct_to_loopback(os.environ),
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            **self._mark,
            "FLWR_HOME": str(self.home),
            # Files that outlive these processes stay in the user's own folder.
            "VFL_HOME": str(lasting_home()),
            **of_ray,
            # Otherwise Flower builds an environment for each run, and downloads torch.
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        with opened_to_append(log) as output:
            return subprocess.Popen(
                [str(Path(scripts, command[0])), *command[1:]],
                cwd=self.home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _healthy(self) -> bool:
        trust = ssl.create_default_context(cafile=str(self.home / "superlink.crt"))
        url = f"https://127.0.0.1:{self.port}/health"
        direct = urllib.request.ProxyHandler({})
        opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=trust))
        try:
            with opener.open(url, timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, also in new sessions; kill what is left later."""
    try:
        root = psutil.Process(process.pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=10)
    process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Bind a free loopback port, so that only a server that reuses addresses can bind it too."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def ray_cluster() -> str:
    """Return the address of the Ray cluster in RAY_ADDRESS; empty if a run starts Ray."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def ray_cpus() -> int:
    """Return the number of CPUs for Ray's actors: on its cluster, if any, or this machine."""
    if not (address := ray_cluster()):
        return os.cpu_count() or 1
    import ray

    if ray.is_initialized():  # for example, by a notebook
        return max(1, int(ray.cluster_resources().get("CPU", 0)))
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds
        raise ConfigError(
            f"RAY_ADDRESS = {address!r} is not a Ray cluster that this machine belongs to "
            f"({type(error).__name__}). Start Ray there and here, with the token that "
            "RAY_AUTH_TOKEN_PATH names, or unset RAY_ADDRESS."
        ) from None
    try:
        return max(1, int(ray.cluster_resources().get("CPU", 0)))
    finally:
        ray.shutdown()


def _write_toml(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _gpus_of_each(actors: int) -> float:
    """Return this machine's GPUs per actor. Ray takes a part of a GPU from one GPU alone."""
    import torch

    gpus = torch.cuda.device_count()
    if not 0 < gpus < actors:
        return gpus // actors
    return math.floor(10_000 / math.ceil(actors / gpus)) / 10_000  # Ray's units
