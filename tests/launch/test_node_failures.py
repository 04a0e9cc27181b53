"""Real nodes, some killed or cut off: processes on loopback, which all end."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.fleet import EF_VFL, assert_equals, evaluations, fleet, is_running, until
from tests.relay import Relay
from vfl_flower.launch import processes as flower_processes
from vfl_flower.launch.processes import reserved_port

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# A message a step, so that a run lasts for some seconds.
LONG: dict[str, Any] = {**EF_VFL, "window": 1, "patience": 0.0, "transport": "stream"}


def test_parties_that_are_killed_and_started_again_go_on(tmp_path: Path) -> None:
    # Sessions that last longer than it takes to open one, and short enough to leave files.
    with fleet(2, tmp_path) as nodes:
        process, unfinished = nodes.submit({**LONG, "session-seconds": 15.0, "epochs": 150})
        # A first session may end before anything was served, where opening it took long.
        until(lambda: len(nodes.served()) == 2 and min(nodes.served()) > 0)
        since = evaluations(unfinished)
        until(lambda: evaluations(unfinished) >= since + 2)
        assert since < 140, "too few epochs to kill a party in the middle"
        (app,) = nodes.client_apps(0)
        app.kill()
        nodes.kill(1)
        nodes.start_again(1)
        finished = nodes.finish((process, unfinished))
        assert finished.summary["epochs"] == 150 and len(finished.history) == 150
        assert finished.summary["test_accuracy"] > 0.9
        log = (finished.folder / "flower.log").read_text()
        assert log.count("It continues from that state") == 2
        for party in (0, 1):  # with the state that its file had
            (message,) = re.findall(rf"Party {party} has an older.*after message (\d+)", log)
            assert int(message) > 0


def test_a_network_that_is_cut_for_a_while_changes_nothing(run: Start, tmp_path: Path) -> None:
    with reserved_port() as port, Relay(lambda number: port) as relay, fleet(2, tmp_path) as nodes:
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
        assert len(connected) == 2
        killed_at = time.time()  # earlier states are of a best model
        for app in nodes.server_apps():
            app.kill()
        until(lambda: not any(is_running(app) for app in connected))  # they try for 60 seconds
        ends = nodes.ends_of_sessions()
        assert len(ends) == 2 and all(file.stat().st_mtime > killed_at for file in ends)
        for file in nodes.states():
            assert file.stat().st_mode & 0o777 == 0o600
        assert min(nodes.served()) >= 3 * 40  # 39 windows and an evaluation an epoch
        flower_processes.stop(process)
