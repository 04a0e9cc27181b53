"""Nodes of Flower and of Ray on loopback, whose processes a test can find and kill."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.processes import SuperLink, reserved_port, stop
from vfl_flower.party import state_file
from vfl_flower.party.state import load_scalars


def processes_of(home: Path) -> list[str]:
    """Command lines of the processes that have this FLWR_HOME in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it has ended, or is not ours
    return found


EF_VFL = {
    "strategy": "ef-vfl",
    "downlink-codec": "top-k",
    "downlink-compression": "error-feedback",
    "epochs": 5,  # of 39 steps: evaluations compare the surrogates at both ends
    "window": 45,
}


ACTIVE = "SuperNode ID"  # logged once the SuperLink has accepted the SuperNode's key


@dataclass
class Fleet:
    """A SuperLink with SuperNodes, for runs one after another, and for what may befall them."""

    superlink: SuperLink
    parties: int
    folder: Path
    nodes: dict[int, tuple[ExitStack, subprocess.Popen[bytes]]]
    node_config: Mapping[str, Any] = field(default_factory=dict)

    def start(self, party: int) -> None:
        """Start its SuperNode."""
        stack = ExitStack()
        node = self.superlink.supernode(party, self.parties, self.node_config)
        process = stack.enter_context(node)
        self.nodes[party] = stack, process

    def start_again(self, party: int) -> None:
        """After it was killed, until Flower takes the same key: it presumes the old one alive."""
        log = self.superlink.home / f"supernode-{party}.log"
        before = log.read_text().count(ACTIVE)
        while True:
            self.start(party)
            until(lambda: log.read_text().count(ACTIVE) > before or self.has_ended(party))
            if not self.has_ended(party):
                return
            self.nodes.pop(party)[0].close()

    def has_ended(self, party: int) -> bool:
        return self.nodes[party][1].poll() is not None

    def kill(self, party: int) -> None:
        """Kill its SuperNode and all that it has started."""
        stack, process = self.nodes.pop(party)
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, timeout=10)
        stack.close()

    def client_apps(self, party: int) -> list[psutil.Process]:
        return started_by(self.nodes[party][1].pid, "flwr-clientapp")

    def server_apps(self) -> list[psutil.Process]:
        assert self.superlink._process
        return started_by(self.superlink._process.pid, "flwr-serverapp")

    def states(self) -> list[Path]:
        return sorted((self.superlink.home / "vfl-flower").glob("run-*.state"))

    def ends_of_sessions(self) -> list[Path]:
        return [path for path in self.states() if "checkpoint" not in path.name]

    def served(self) -> list[int]:
        """Of each party whose session has ended, how many messages it had served by then."""
        states = [state_file.read(file) for file in self.ends_of_sessions()]
        return [int(load_scalars(state).get("exchange", 0)) for state in states]

    def submit(self, keys: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], Run]:
        out = self.folder / f"nodes-{len(list(self.folder.glob('nodes-*')))}"
        out.mkdir()
        log = out / "flower.log"
        return self.superlink.submit({**keys, "out": str(out)}, self.parties, log), Run(out)

    def finish(self, submitted: tuple[subprocess.Popen[bytes], Run], seconds: float = 900) -> Run:
        """A run that has ended well."""
        process, finished = submitted
        process.wait(seconds)
        assert finished.summary["failure"] is None
        assert finished.summary["engine"] == "supernodes"
        assert finished.summary["failed_parties"] == []
        return finished


def started_by(pid: int, command: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == command:
                found.append(process)
    return found


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended, be it that nobody has asked yet how."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def fleet(
    parties: int, folder: Path, node_config: Mapping[str, Any] | None = None
) -> Iterator[Fleet]:
    with SuperLink(simulation=False) as superlink:
        home = superlink.home
        each = Fleet(superlink, parties, folder, {}, node_config or {})
        try:
            for party in range(parties):
                each.start(party)
            yield each
        finally:
            for stack, _ in each.nodes.values():
                stack.close()
    assert processes_of(home) == []


@contextmanager
def ray_cluster(folder: Path, number: int) -> Iterator[dict[str, psutil.Process]]:
    """A Ray cluster of nodes with a CPU each, by their addresses from 127.0.0.2 on."""
    (folder / "token").write_text(secrets.token_hex(32))
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    ray = str(Path(sys.executable).parent / "ray")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as short, reserved_port() as port:
        for name, value in environment.items():
            stack.enter_context(patch.dict(os.environ, {name: value}))
        nodes: dict[str, psutil.Process] = {}
        for node in range(number):
            address, log = f"127.0.0.{2 + node}", folder / f"ray-node-{node}.log"
            own = ["--head", "--port", str(port), "--temp-dir", short, "--include-dashboard=false"]
            command = [ray, "start", *(own if not node else [f"--address=127.0.0.2:{port}"])]
            command += ["--node-ip-address", address, "--num-cpus=1", "--block"]
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(stop, process)
            until(lambda: b"runtime started" in log.read_bytes())  # noqa: B023
            nodes[address] = psutil.Process(process.pid)
        stack.enter_context(patch.dict(os.environ, {"RAY_ADDRESS": f"127.0.0.2:{port}"}))
        yield nodes


def until(holds: Callable[[], Any], seconds: float = 300) -> None:
    """Wait for a fact; only what hangs takes so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def evaluations(finished: Run) -> int:
    file = finished.folder / "history.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def assert_equals(on_flower: Run, in_process: Run) -> None:
    for key, values in in_process.parameters("top").items():
        np.testing.assert_allclose(on_flower.parameters("top")[key], values, atol=1e-5)
    for name in ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert on_flower.summary[name] == in_process.summary[name]
