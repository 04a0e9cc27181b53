"""Streams between real nodes: processes on loopback, of which some are killed, and that all end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import Start
from tests.relay import Relay
from vfl_flower import flower_processes
from vfl_flower.engines import Run
from vfl_flower.flower_processes import SuperLink, free_port
from vfl_flower.records import load_scalars, state_from_bytes

pytestmark = pytest.mark.slow


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
    "epochs": 5,  # of 45 steps: evaluations compare the surrogates at both ends
    "window": 45,
}


@dataclass
class Fleet:
    """A SuperLink with SuperNodes, for runs one after another, and for what may befall them."""

    superlink: SuperLink
    parties: int
    folder: Path
    nodes: dict[int, tuple[ExitStack, subprocess.Popen[bytes]]]

    def start(self, party: int) -> None:
        """Start its SuperNode; again, with the same key, if it has been killed."""
        stack = ExitStack()
        process = stack.enter_context(self.superlink.supernode(party, self.parties))
        self.nodes[party] = stack, process

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
        return started_by(self.superlink._process.pid, "flwr-serverapp")

    def states(self) -> list[Path]:
        return sorted((self.superlink.home / "vfl-flower").glob("run-*.state"))

    def served(self) -> list[int]:
        """Of each party that has kept a state, how many messages it had served by then."""
        states = [state_from_bytes(file.read_bytes()) for file in self.states()]
        return [int(load_scalars(state).get("exchange", 0)) for state in states]

    def submit(self, keys: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], Run]:
        out = self.folder / f"nodes-{len(list(self.folder.glob('nodes-*')))}"
        out.mkdir()
        log = out / "flower.log"
        return self.superlink.submit({**keys, "out": str(out)}, self.parties, log), Run(out)

    def finish(self, submitted: tuple[subprocess.Popen[bytes], Run], seconds: float = 400) -> Run:
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
            if command in " ".join(process.cmdline()):
                found.append(process)
    return found


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended, be it that nobody has asked yet how."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def fleet(parties: int, folder: Path) -> Iterator[Fleet]:
    with SuperLink(simulation=False) as superlink:
        home = superlink.home
        each = Fleet(superlink, parties, folder, {})
        try:
            for party in range(parties):
                each.start(party)
            yield each
        finally:
            for stack, _ in each.nodes.values():
                stack.close()
    assert processes_of(home) == []


def until(holds: Callable[[], Any], seconds: float = 90) -> None:
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


SYNCHRONOUS: list[dict[str, Any]] = [
    {"strategy": "split-nn", "epochs": 5},
    {**EF_VFL, "window": 8},
]
ASYNCHRONOUS: list[dict[str, Any]] = [
    {"strategy": "vafl", "epochs": 12, "party-lr": 0.1, "server-lr": 0.1},
    {"strategy": "cascaded", "epochs": 20, "noise-seed": 0, "window": 16, "party-lr": 1e-3},
    {"strategy": "dpzv", "epochs": 16, "noise-seed": 0, "window": 16, "noise-multiplier": 1.0},
]


def test_the_systems_run_over_streams_as_in_process(run: Start, tmp_path: Path) -> None:
    with fleet(2, tmp_path) as nodes:
        for keys in SYNCHRONOUS + ASYNCHRONOUS:
            finished = nodes.finish(nodes.submit({**keys, "transport": "stream"}))
            summary = finished.summary
            assert summary["transport"] == "stream"
            in_process = run(2, {**keys, "window": summary["window"]})
            if keys in SYNCHRONOUS:
                assert_equals(finished, in_process)
            expected = in_process.summary["test_accuracy"]
            assert summary["test_accuracy"] == pytest.approx(expected, abs=0.03)


def test_a_run_over_messages_is_the_same_as_in_process(run: Start, tmp_path: Path) -> None:
    keys = {**EF_VFL, "epochs": 1}
    with fleet(2, tmp_path) as nodes:
        finished = nodes.finish(nodes.submit({**keys, "transport": "messages"}))
        assert finished.summary["transport"] == "messages"
        assert finished.summary["exchanges"] == 2
        assert_equals(finished, run(2, keys))
        assert nodes.states() == []


PRESUMED_ALIVE = 65.0  # seconds in which Flower refuses a SuperNode with the key of a killed one
# A message a step, so that a run lasts for some seconds.
LONG: dict[str, Any] = {**EF_VFL, "window": 1, "epochs": 100, "transport": "stream"}


def test_parties_that_are_killed_and_started_again_go_on(tmp_path: Path) -> None:
    # Sessions that last longer than it takes to open one, and short enough to leave files.
    with fleet(2, tmp_path) as nodes:
        process, unfinished = nodes.submit({**LONG, "session-seconds": 15.0, "epochs": 150})
        # A first session may end before anything was served, where opening it took long.
        until(lambda: len(nodes.served()) == 2 and min(nodes.served()) > 0, 200)
        since = evaluations(unfinished)
        until(lambda: evaluations(unfinished) >= since + 2)
        assert since < 140, "too few epochs to kill a party in the middle"
        (app,) = nodes.client_apps(0)
        app.kill()
        nodes.kill(1)
        time.sleep(PRESUMED_ALIVE)
        nodes.start(1)
        finished = nodes.finish((process, unfinished))
        assert finished.summary["epochs"] == 150 and len(finished.history) == 150
        assert finished.summary["test_accuracy"] > 0.9
        log = (finished.folder / "flower.log").read_text()
        assert log.count("It goes on from there") == 2
        for party in (0, 1):  # with the state that its file had
            (message,) = re.findall(rf"Party {party} got message \d+ after message (\d+)", log)
            assert int(message) > 0


def test_a_network_that_is_cut_for_a_while_changes_nothing(run: Start, tmp_path: Path) -> None:
    port = free_port()
    with Relay(lambda number: port) as relay, fleet(2, tmp_path) as nodes:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        process, unfinished = nodes.submit({**LONG, **address, "epochs": 40})
        until(lambda: evaluations(unfinished) >= 3)
        assert len(relay.pairs) == 2
        relay.blocked = True
        relay.cut(0)
        at_cut = evaluations(unfinished)
        time.sleep(20)
        assert at_cut <= evaluations(unfinished) <= at_cut + 1
        relay.blocked = False
        finished = nodes.finish((process, unfinished))
        assert finished.summary["transport"] == "stream"
        assert len(relay.pairs) + relay.accepted >= 3
    assert_equals(finished, run(2, {**LONG, "epochs": 40}))
    log = (finished.folder / "flower.log").read_text()
    assert log.count("The stream of the party on node") == 1


def test_parties_whose_server_app_is_killed_end_by_themselves(tmp_path: Path) -> None:
    with fleet(2, tmp_path) as nodes:
        process, unfinished = nodes.submit({**LONG, "epochs": 1000})
        until(lambda: evaluations(unfinished) >= 3)
        connected = [*nodes.client_apps(0), *nodes.client_apps(1)]
        assert len(connected) == 2 and nodes.states() == []
        for app in nodes.server_apps():
            app.kill()
        until(lambda: not any(is_running(app) for app in connected), 90)  # they try for 60 seconds
        assert len(nodes.states()) == 2
        for file in nodes.states():
            assert file.stat().st_mode & 0o777 == 0o600
        assert min(nodes.served()) >= 3 * 46  # 45 windows and an evaluation an epoch
        flower_processes.stop(process)
