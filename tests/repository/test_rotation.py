"""Keys and certificates are renewed in the middle of a run, as docs/how-to/rotate-keys.md says."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.doctored import found
from tests.fleet import evaluations, processes_of, until
from tests.repository.test_deploy import NGINX, PARTIES, PORTS, STARTING, Deployed, reserved_ports
from tests.stranger import call
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_local
from vfl_flower.launch.processes import stop
from vfl_flower.tools.doctor.finding import OK, PROBLEM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not NGINX, reason="nginx is missing: apt install nginx-light"),
]

TRAINING: dict[str, Any] = {
    **{"strategy": "split-nn", "combine": "mean", "aggregation": "secure", "window": 1},
    **{"epochs": 120, "patience": 0, "checkpoint-every": 40, "noise-seed": 0},
}
RENEWED = ("supernode.key", "vfl-flower/sums.key")  # of each party
NODE_ID = re.compile(r"SuperNode ID: (\d+)")


class Organisations(Deployed):
    """A label holder and parties that start and stop their own scripts."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port)
        self.keys = self.home / "superlink"
        self.mine = [self.home / f"party-{party}" for party in range(PARTIES)]
        self.address = f"127.0.0.1:{port}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start_nodes(self) -> None:
        """Start the SuperLink, and make and register the parties' keys."""
        self.home.mkdir()
        self.start_superlink()
        self.public = [self.make_key(party) for party in range(PARTIES)]
        for party in range(PARTIES):
            self.register(party)
            shutil.copy(self.keys / "superlink.crt", self.mine[party])
            self.start_node(party)

    def start_superlink(self) -> None:
        self.running["superlink"] = self.command(
            ["deploy/superlink.sh", str(self.keys)], "superlink.log"
        )
        until(self._listens)

    def _listens(self) -> bool:
        assert self.running["superlink"].poll() is None, self.log("superlink.log")
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 5).close()
            return True
        return False

    def make_key(self, party: int) -> str:
        """Have a party make its keys; return the public half of the one for masked sums."""
        script = ["deploy/supernode.sh", str(self.mine[party]), self.address, ""]
        assert self.command(script, "made.log").wait(STARTING) == 0
        assert "start again when the label holder has registered it" in self.log("made.log")
        return self.log("made.log").rsplit(maxsplit=1)[-1]

    def register(self, party: int) -> None:
        public = str(self.mine[party] / "supernode.pub")
        self.flwr("supernode", "register", public)

    def flwr(self, *words: str) -> str:
        """A `flwr` command at the label holder, and what it prints."""
        process = self.command(["flwr", *words, "vfl"], "flwr.log", "superlink")
        assert process.wait(STARTING) == 0, self.log("flwr.log")
        return self.log("flwr.log")

    def start_node(self, party: int) -> None:
        """Start a party's SuperNode, which knows the others' keys for masked sums."""
        peers = " ".join(f"{n}:{key}" for n, key in enumerate(self.public) if n != party)
        words = f"{self.words[party]} partition-id={party} num-partitions={PARTIES}"
        script = ["deploy/supernode.sh", str(self.mine[party]), self.address]
        process = self.command(
            [*script, f"{words} sum-peers='{peers}'"],
            f"party-{party}.log",
            PORT=str(self.port + 2 + party),
        )
        self.running[f"party-{party}"] = process
        log = f"party-{party}.log"
        until(lambda: NODE_ID.search(self.log(log)) or process.poll() is not None)
        assert process.poll() is None, self.log(log)

    def node_id(self, party: int) -> str:
        """The id that a party reads in its log."""
        match = NODE_ID.search(self.log(f"party-{party}.log"))
        assert match
        return match[1]

    def stop(self, name: str) -> None:
        stop(self.running.pop(name))


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Organisations]:
    with reserved_ports(PORTS) as port:
        here = Organisations(tmp_path_factory.mktemp("rotated"), port)
        try:
            here.start()
            yield here
        finally:
            here.end()
        until(lambda: not processes_of(here.home))


def interrupted(here: Organisations, run: Run) -> None:
    """Begin a run, and stop it in its middle."""
    running = here.flwr_run("begun.log", **here.dataset, **TRAINING, out=str(run.folder))
    until(lambda: evaluations(run) >= 20 or running.poll() is not None, STARTING)
    (number,) = set(re.findall(r"Successfully started run (\d+)", here.log("begun.log")))
    here.flwr("stop", number)
    running.wait(STARTING)
    until(lambda: not here.processes("superlink", "flwr-serverapp"))
    kept = len(checkpoint.load(run.folder).strategy["history"]["entries"])
    assert 0 < kept < 120, "the run was not cut short in its middle"


def findings(here: Organisations, party: int) -> dict[str, str]:
    """Results of `vfl doctor` at a party, about its label holder."""
    every = found(here.mine[party], superlink=here.address)
    checks = ("certificate", "key", "port", "SuperLink", "registration")
    return {check: every[check][0].result for check in checks if check in every}


WELL = dict.fromkeys(("certificate", "key", "port", "SuperLink", "registration"), OK)


def test_all_keys_are_renewed_in_a_run_which_ends_as_if_they_had_not_been(
    organisations: Organisations, tmp_path: Path
) -> None:
    here, run = organisations, Run(tmp_path / "run")
    assert [findings(here, party) for party in range(PARTIES)] == [WELL] * PARTIES
    interrupted(here, run)
    nodes = [here.node_id(party) for party in range(PARTIES)]
    for name in list(here.running)[::-1]:  # the SuperNodes sign off at their SuperLink
        here.stop(name)
    old = shutil.copytree(here.home, tmp_path / "old")

    # The label holder's certificate, and its blinding key.
    for name in ("superlink.crt", "superlink.key", "vfl-flower/blinding.key"):
        (here.keys / name).unlink()
    here.start_superlink()
    assert findings(here, 0) == {"certificate": OK, "key": OK, "port": PROBLEM}
    renewed = (here.keys / "superlink.crt").read_bytes()
    (here.mine[0] / "superlink.crt").write_bytes(renewed)
    with (here.mine[1] / "superlink.crt").open("ab") as file:
        file.write(renewed)  # it trusts both for a while
    with pytest.raises(httpx.ConnectError):
        call(here.port, old / "superlink/superlink.crt", "POST", "/v1/fleet/get-run")
    assert [findings(here, party) for party in range(PARTIES)] == [WELL] * PARTIES

    # The parties' keys.
    for party in range(PARTIES):
        for name in (*RENEWED, "supernode.pub"):
            (here.mine[party] / name).unlink()
        here.public[party] = here.make_key(party)
        for name in RENEWED:
            before = (old / f"party-{party}" / name).read_bytes()
            assert (here.mine[party] / name).read_bytes() != before
        assert findings(here, party) == {**WELL, "registration": PROBLEM}
        here.flwr("supernode", "unregister", nodes[party])
        here.register(party)
        assert findings(here, party) == WELL
    listed = json.loads(here.flwr("supernode", "list", "--format", "json"))
    status = {each["node-id"]: each["status"] for each in listed["nodes"]}
    assert {status[node] for node in nodes} == {"unregistered"}

    # A thief of the old key knows the new certificate, which is public.
    thief = old / "party-0"
    (thief / "superlink.crt").write_bytes(renewed)
    words = f"{here.words[0]} partition-id=0 num-partitions={PARTIES}"
    script = ["deploy/supernode.sh", str(thief), here.address, words]
    stolen = here.command(script, "thief.log", PORT=str(here.port + 2 + PARTIES))
    assert stolen.wait(STARTING) != 0
    assert "Failed to activate SuperNode" in here.log("thief.log")

    for party in range(PARTIES):
        here.start_node(party)
    assert not {here.node_id(party) for party in range(PARTIES)} & {*nodes}
    resumed = here.flwr_run("resumed.log", resume=str(run.folder))
    control = {**here.dataset, **TRAINING, "out": str(tmp_path / "control")}
    unrotated = run_local(PARTIES, control, node_configs=here.node_configs)
    assert resumed.wait(2 * STARTING) == 0
    assert run.summary["failure"] is None and len(run.history) == len(unrotated.history) == 120
    for name, values in unrotated.parameters("top").items():
        np.testing.assert_allclose(run.parameters("top")[name], values, atol=1e-5)
    for name in ("steps", "exchanges", "test_accuracy"):
        assert run.summary[name] == unrotated.summary[name]

    # The parties' models are theirs still.
    new = {"task": "predict", "dataset": f"files:{here.files}/bank/new.csv"}
    scores = tmp_path / "scores.csv"
    predicting = here.flwr_run("predict.log", **new, model=str(run.folder), out=str(scores))
    assert predicting.wait(STARTING) == 0
    assert json.loads(scores.with_suffix(".json").read_text())["accuracy"] > 0.9
