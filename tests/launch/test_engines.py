"""Whole runs on Flower's own runtimes, each with a new SuperLink; all processes end."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w

from tests.conftest import Start
from tests.fleet import EF_VFL, assert_equals, processes_of, until
from tests.relay import Relay
from tests.stranger import call
from vfl_flower.config.errors import VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch import processes as flower_processes
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_ray, run_supernodes
from vfl_flower.launch.processes import SuperLink

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The FLWR_HOME of every SuperLink that a test starts."""
    seen: list[Path] = []
    enter = SuperLink.__enter__

    def remember(self: SuperLink) -> SuperLink:
        entered = enter(self)
        seen.append(self.home)
        return entered

    monkeypatch.setattr(SuperLink, "__enter__", remember)
    return seen


MANY = {
    **{"optimizer": "adamw", "lr-schedule": "one-cycle", "weight-decay": 0.1},
    **{"party-lr": 0.01, "server-lr": 0.01, "clip-gradient": 0.1, "epochs": 2},
    **{"codec": "float16", "downlink-codec": "bfloat16", "window": 4},
    **{"transport": "messages", "calibrate": "platt"},
}
SHARED = {**EF_VFL, "epochs": 2, "labels": "shared", "initial-surrogates": "embeddings"}
NOISY = {"privacy": "labels", "epsilon": 3.0, "epochs": 2, "window": 8}
RUNS: dict[str, tuple[Callable[[int, Mapping[str, Any]], Run], dict[str, Any]]] = {
    "ray": (run_ray, MANY),
    "ray, default options": (run_ray, {"dataset": "breast-cancer"}),
    "ray, shared labels": (run_ray, SHARED),
    "supernodes, default options": (run_supernodes, {"dataset": "breast-cancer"}),
    # The ServerApp draws the same noise as this process.
    "supernodes, noisy labels": (run_supernodes, NOISY),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_a_synchronous_run_is_the_same_as_in_process(
    name: str, run: Start, tmp_path: Path, homes: list[Path]
) -> None:
    (engine, keys), parties = RUNS[name], 3 if name == "ray" else 2
    on_flower = engine(parties, {**keys, "out": str(tmp_path / "on-flower")})
    in_process = run(parties, keys)
    assert_equals(on_flower, in_process)
    for name in ("window", "test_accuracy", "code"):
        assert on_flower.summary[name] == in_process.summary[name]
    kept = [checkpoint.load(each.folder).calibration or {} for each in (on_flower, in_process)]
    assert [each.get("method", "none") for each in kept] == 2 * [keys.get("calibrate", "none")]
    for name in ("slope", "offset") if "calibrate" in keys else ():
        np.testing.assert_allclose(kept[0][name], kept[1][name], rtol=1e-3)
    assert on_flower.summary["engine"] == engine.__name__.removeprefix("run_")
    modes = {path.name: path.stat().st_mode & 0o777 for path in on_flower.folder.iterdir()}
    assert modes["flower.log"] == 0o600 and set(modes.values()) == {0o600}
    assert not any(name.endswith(".lock") for name in modes)
    assert len(homes) == 1 and processes_of(homes[0]) == []


@pytest.mark.nightly
def test_asynchronous_systems_learn_on_ray_and_a_failing_party_ends_it_with_a_sentence(
    tmp_path: Path, homes: list[Path]
) -> None:
    keys = {"strategy": "vafl", "epochs": 8, "window": 8, "out": str(tmp_path / "vafl")}
    finished = run_ray(2, keys)
    assert finished.summary["test_accuracy"] > 0.8
    assert finished.summary["exchanges"] == 2 * 8 * 5
    private = {"strategy": "dpzv", "epochs": 6, "epsilon": 40.0, "delta": 1e-3, "batch-size": 100}
    private |= {"bottom-model": "linear", "top-model": "linear"}
    private |= {"party-lr": 0.02, "server-lr": 0.2}
    finished = run_ray(2, {**private, "out": str(tmp_path / "dpzv")})
    assert finished.summary["test_accuracy"] > 0.5
    assert 30 < finished.summary["epsilon"] < 40.0001
    text = {"a": ["x", "y"] * 20, "b": [0.0] * 40, "label": [0, 1] * 20}
    pd.DataFrame(text).to_csv(tmp_path / "text.csv", index=False)
    keys = {"dataset": f"csv:{tmp_path / 'text.csv'}", "out": str(tmp_path / "text")}
    with pytest.raises(VflError, match="is not numeric"):
        run_ray(2, keys)
    log = (tmp_path / "text" / "flower.log").read_text()
    assert "is not numeric" in log and "Traceback" not in log
    assert [processes_of(home) for home in homes] == [[], [], []]


EVIL = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    from time import sleep
    while not (nodes := list(grid.get_node_ids())):
        sleep(0.1)
    asked = RecordDict({"scalars": ConfigRecord({"outputs": 1})})
    [said] = grid.send_and_receive([Message(asked, nodes[0], "query.describe")])
    Path("MARK-server").write_text(str(said.content) if said.has_content() else "an error")

@client.query("describe")
def run(message, context):
    Path("MARK-party").write_text("I run beside your file")
    return Message(RecordDict(), reply_to=message)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("closed", [True, False], ids=["as we start it", "as Flower starts it"])
def test_a_node_runs_what_is_installed_beside_it_whatever_its_label_holder_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "evil.py").write_text(EVIL.replace("MARK", str(tmp_path / "ran")))
    parts = {"serverapp": "evil:server", "clientapp": "evil:client"}
    about = {"publisher": "evil", "components": parts, "config": {"theirs": 1}}
    project = {"name": "evil", "version": "1.0.0"}
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": about}}})
    (app / "pyproject.toml").write_text(text)
    with SuperLink(simulation=False) as superlink:
        if not closed:
            monkeypatch.setattr(flower_processes, "_CLOSED", ["env"])
            start, node = superlink.start, ["flower-supernode"]

            def open_to_all(words: list[str], log: Path) -> subprocess.Popen[bytes]:
                return start([*node, *words[2:]] if words[0] == "env" else words, log)

            monkeypatch.setattr(superlink, "start", open_to_all)
        with superlink.supernode(0, 1):
            command = ["flwr", "run", str(app), "own", "--stream", "--run-config", "theirs=2"]
            superlink.start(command, tmp_path / "log").wait()
    assert (tmp_path / "ran-server").exists()  # the label holder's own code ran at its own place
    assert (tmp_path / "ran-party").exists() is not closed
    if closed:
        assert "an older version" in (tmp_path / "ran-server").read_text()


@pytest.mark.nightly
def test_a_node_that_is_kept_out_ends_so_that_it_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SuperLink(simulation=False) as superlink:
        port = superlink.port
        with Relay(lambda _: port) as relay, monkeypatch.context() as patch:
            patch.setattr(superlink, "port", relay.port)
            with superlink.supernode(0, 1) as node:
                log = superlink.home / "supernode-0.log"
                until(lambda: "SuperNode ID" in log.read_text(), 60)
                relay.blocked = True
                relay.cut()
                until(lambda: node.poll() is not None, 60)
        assert "handshake" in log.read_text()


@pytest.mark.nightly
def test_who_has_not_the_token_is_no_client_of_ray(tmp_path: Path) -> None:
    with SuperLink(simulation=True) as superlink:
        script = tmp_path / "simulation.py"
        script.write_text(
            "import ray, sys, time\n"
            "address = ray.init(num_cpus=1, include_dashboard=False).address_info['gcs_address']\n"
            f"open({str(tmp_path / 'address')!r}, 'w').write(address + '\\n')\n"
            "time.sleep(600)\n"
        )
        log = tmp_path / "log"
        superlink.start(["python", str(script)], log)
        address = tmp_path / "address"
        until(lambda: address.exists() and address.read_text().endswith("\n"))
        guest = "import ray, sys; ray.init(address=sys.argv[1]); print(ray.cluster_resources())"
        command = ["python", "-c", guest, address.read_text().strip()]
        assert superlink.start(command, log).wait() == 0
        without = {key: each for key, each in os.environ.items() if not key.startswith("RAY_AUTH")}
        stranger = [sys.executable, *command[1:]]
        refused = subprocess.run(stranger, env=without, capture_output=True, text=True)
        assert refused.returncode and "InvalidAuthToken" in refused.stderr


def test_a_process_group_ends_as_a_whole_and_was_closed_to_others(tmp_path: Path) -> None:
    with SuperLink(simulation=True) as superlink:
        home = superlink.home
        certificate = home / "superlink.crt"
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task"):
            assert call(superlink.port, certificate, "POST", path).status_code == 401
        child = superlink.start(["python", "-c", "import time; time.sleep(600)"], tmp_path / "log")
        assert processes_of(home) != []
        flower_processes.stop(child)
        assert child.returncode is not None
    assert processes_of(home) == []
    assert not home.exists()
    assert "FLWR_HOME" not in os.environ or Path(os.environ["FLWR_HOME"]) != home
