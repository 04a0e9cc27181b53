"""Deployment as deploy/README.md has it: the scripts, a file at each organisation, failures."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import psutil
import pytest
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE as PROTOBUF

from tests.fleet import assert_equals, evaluations, processes_of, until
from tests.stranger import (
    FLEET,
    WITHOUT_TOKEN,
    begun,
    call,
    raw,
    signature_of_nobody,
    superlink_routes,
)
from vfl_flower.config.run_config import packed
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.launch.processes import reserved_port, stop

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not NGINX, reason="nginx is missing: apt install nginx-light"),
]

PARTIES = 2
PORTS = 2 + PARTIES + 2
CHECKOUT = Path(__file__).parents[2]
STARTING = 240.0  # seconds that a run may take to begin, on a machine that has much else to do


class Deployed:
    """A deployment that deploy/try_here.sh starts in a new folder, and commands beside it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.home, self.files = folder / "fleet", folder / "files"
        self.folder = folder
        # Of the proxy; the SuperLink's and the SuperNodes' follow it, one for a stranger, and one
        # for a SuperLink as Flower starts it.
        self.port = port
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Make the files, and start a SuperLink and SuperNodes that have them."""
        self.command(["python", "deploy/example_files.py", str(self.files)], "files.log").wait()
        files = [self.files / "party-0/features.parquet", self.files / "party-1/features.csv"]
        self.node_configs = [{"file": str(file), "id": "person"} for file in files]
        # A seed, so that runs can be compared, is permitted by the parties too.
        self.words = [f"file='{file}' id='person' noise-seed=0" for file in files]
        began = time.monotonic()
        self.start_nodes()
        # Seconds for `party-timeout`, in which a party must be able to start its process.
        self.patience = round(10 + 1.5 * (time.monotonic() - began))

    def start_nodes(self) -> None:
        """All that is to run; none has been refused then."""
        self.here = self.command(["deploy/try_here.sh", str(self.home), *self.words], "here.log")
        until(lambda: "parties; to run" in self.log("here.log") or self.here.poll() is not None)
        assert self.here.poll() is None, self.log("here.log")

    @property
    def dataset(self) -> dict[str, str]:
        return {"dataset": f"files:{self.files}/bank/labels.csv", "id": "person"}

    def command(
        self, command: list[str], log: str, home: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a command as a user would, from the checkout."""
        own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        own |= {"FLWR_HOME": str(self.home / home), "PORT": str(self.port)}
        own |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=CHECKOUT,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def flwr_run(self, log: str, **keys: Any) -> subprocess.Popen[bytes]:
        """`flwr run . vfl --stream -c "..."`."""
        words = " ".join(f"{key}={value!r}" for key, value in packed(keys).items())
        return self.command(["flwr", "run", ".", "vfl", "--stream", "-c", words], log, "superlink")

    def log(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def processes(self, home: str, command: str) -> list[psutil.Process]:
        """Return the label holder's ("superlink") or a party's processes that run this command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("FLWR_HOME") == str(self.home / home) and any(
                    word.endswith(command) for word in [process.name(), *process.cmdline()]
                ):
                    found.append(process)
        return found

    @contextmanager
    def away(self, party: int) -> Iterator[None]:
        """While its machine stands still; if its app alone did, its node would start another."""
        found = self.processes(f"party-{party}", "")
        for process in found:
            process.suspend()
        try:
            yield
        finally:
            for process in found:
                process.resume()

    def end(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                stop(process)


@contextmanager
def reserved_ports(count: int) -> Iterator[int]:
    """The first of so many loopback ports in a row that nobody else is given while this lasts."""
    for _ in range(100):
        with ExitStack() as held:
            first = held.enter_context(reserved_port())
            try:
                for port in range(first + 1, first + count):
                    bind(held.enter_context(socket.socket()), port)
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise OSError("no ports in a row are free")


def bind(server: socket.socket, port: int) -> None:
    """As servers do that reuse addresses: it fails where somebody listens."""
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with reserved_ports(PORTS) as port:
        here = Deployed(tmp_path_factory.mktemp("deployed"), port)
        try:
            here.start()
            yield here
        finally:
            here.end()
        until(lambda: not processes_of(here.home))  # a ServerApp sees later that it is alone
        for number in range(port, port + PORTS):
            with socket.socket() as server:
                bind(server, number)


def test_the_scripts_train_and_predict_as_in_process_and_a_stranger_gets_nothing(
    deployed: Deployed, tmp_path: Path
) -> None:
    # A SuperNode with a key that nobody has registered, from before the run begins.
    words = f"{deployed.words[0]} partition-id=2 num-partitions=3"
    superlink = f"127.0.0.1:{deployed.port}"
    stranger = ["deploy/supernode.sh", str(deployed.home / "stranger"), superlink, words]
    assert deployed.command(stranger, "made.log").wait(STARTING) == 0
    assert "start again when the label holder has registered it" in deployed.log("made.log")
    shutil.copy(deployed.home / "superlink/superlink.crt", deployed.home / "stranger")
    refused = deployed.command(stranger, "stranger.log", PORT=str(deployed.port + 2 + PARTIES))

    keys = {**deployed.dataset, "strategy": "split-nn", "epochs": 10, "window": 8, "noise-seed": 0}
    run = Run(tmp_path / "deployed")
    assert deployed.flwr_run("train.log", **keys, out=str(run.folder)).wait(STARTING) == 0
    in_process = run_local(
        PARTIES, {**keys, "out": str(tmp_path / "in-process")}, node_configs=deployed.node_configs
    )
    assert run.summary["failure"] is None
    assert (run.summary["engine"], run.summary["transport"]) == ("supernodes", "stream")
    assert run.summary["parties"] == PARTIES
    assert_equals(run, in_process)
    assert run.summary["test_accuracy"] > 0.9

    assert refused.wait(STARTING) != 0
    assert "Failed to activate SuperNode" in deployed.log("stranger.log")
    kept = {path.name for path in (deployed.home / "stranger/vfl-flower").iterdir()}
    assert kept <= {"sums.key", ".lock"}  # its own, made at its first start

    new = {"task": "predict", "dataset": f"files:{deployed.files}/bank/new.csv"}
    scores = tmp_path / "scores.parquet"
    predicting = deployed.flwr_run("predict.log", **new, model=str(run.folder), out=str(scores))
    assert predicting.wait(STARTING) == 0
    predicted = pd.read_parquet(scores)
    of_in_process = {"model": str(in_process.folder), "out": str(tmp_path / "expected.parquet")}
    expected = pd.read_parquet(predict_local({**new, **of_in_process}, deployed.node_configs))
    assert list(predicted) == list(expected) and len(predicted) > 60
    np.testing.assert_array_equal(predicted.iloc[:, 0], expected.iloc[:, 0])
    np.testing.assert_array_equal(predicted["prediction"], expected["prediction"])
    for column in ("probability_0", "probability_1"):
        np.testing.assert_allclose(predicted[column], expected[column], atol=1e-5)
    assert json.loads(scores.with_suffix(".json").read_text())["accuracy"] > 0.9


def test_a_stranger_on_the_network_reaches_a_supernodes_calls_and_they_refuse_it(
    deployed: Deployed,
) -> None:
    port, certificate = deployed.port, deployed.home / "superlink/superlink.crt"
    seen = deployed.log("fleet/superlink.log").count("/v1/control")
    routes = superlink_routes()
    assert len(routes) > 60
    for method, path in routes:
        status = call(port, certificate, method, path).status_code
        of_fleet = 412 if path == "/v1/fleet/activate-node" else 401
        assert status == (of_fleet if path in FLEET else 404), path
        assert path not in FLEET or call(port, certificate, "GET", path).status_code == 403
    for path in FLEET:  # the key is sound, and nobody knows it
        status = call(port, certificate, "POST", path, **signature_of_nobody()).status_code
        assert status in (401, 412), path
    for path in (
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/pull-messages/../../control/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet/pull-messages/..;/control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/control/list-runs%00/v1/fleet/pull-messages",
        "/v1/control/list-runs#/v1/fleet/pull-messages",
        f"https://127.0.0.1:{deployed.port + 1}/v1/control/list-runs",
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        assert re.match(rb"HTTP/1.1 (400|404) ", raw(port, certificate, head.encode())), path
    # A second request in the body of the first, by two lengths that contradict each other.
    hidden = b"POST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for lengths in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 5",
    ):
        both = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n" + lengths + b"\r\n\r\n"
        assert b" 200 " not in raw(port, certificate, both + b"0\r\n\r\n" + hidden)
    assert deployed.log("fleet/superlink.log").count("/v1/control") == seen


MB = 1 << 20


def growth(
    process: psutil.Process, port: int, certificate: Path
) -> tuple[int, list[ssl.SSLSocket]]:
    """Bytes that a SuperLink takes for a hundred bodies that a stranger begins; and the calls."""
    before = most = process.memory_info().rss
    calls = []
    for number in range(100):
        size, sent = (5 * MB, 5 * MB - 100) if number % 10 else (100 * MB, 20 * MB)
        calls.append(begun(port, certificate, "/v1/fleet/push-messages", size, sent))
        most = max(most, process.memory_info().rss)
    return most - before, calls


def test_strangers_fill_neither_memory_nor_log_and_a_run_goes_on(
    deployed: Deployed, tmp_path: Path
) -> None:
    run = Run(tmp_path / "attacked")
    keys = {**deployed.dataset, "strategy": "split-nn", "epochs": 1000, "patience": 0, "window": 1}
    # Sessions are opened by the proxy.
    keys |= {"eval-every": 10.0, "session-seconds": 20, "out": str(run.folder)}
    running = deployed.flwr_run("attacked.log", **keys)
    until(lambda: evaluations(run) >= 1, STARTING)

    superlink = deployed.home / "superlink"
    [process] = [
        each
        for each in deployed.processes("superlink", "superlink")
        if {"vfl_flower.transport.nodes.superlink", "superlink"} <= set(each.cmdline())
        and "superexec" not in each.cmdline()
    ]
    written = (deployed.home / "superlink.log").stat().st_size
    port, certificate = deployed.port, superlink / "superlink.crt"
    before = process.memory_info().rss
    grown, calls = growth(process, port, certificate)
    assert running.poll() is None, "the run ended while strangers held bodies"
    for each in calls:
        with each:
            assert each.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 413", b"")  # or it is cut
    slow = [begun(port, certificate, "/v1/fleet/push-object", MB, 10) for _ in range(50)]
    assert {each.recv(12) for each in slow} == {b"HTTP/1.1 401"}
    began = time.monotonic()
    while slow:  # a byte now and then keeps no connection open
        assert time.monotonic() < began + 60
        time.sleep(0.5)
        slow = [each for each in slow if is_open(each)]
    path = "/v1/fleet/pull-messages"
    for number in range(300):
        of_nobody = signature_of_nobody() if number % 2 else {}
        assert call(port, certificate, "POST", path, **of_nobody).status_code == 401
    grown = max(grown, process.memory_info().rss - before)
    assert running.wait(2 * STARTING) == 0
    assert run.summary["failure"] is None and len(run.history) == 100
    written = (deployed.home / "superlink.log").stat().st_size - written
    assert grown < 64 * MB and written < 100_000, f"{grown / MB:.1f} MB; log: {written} bytes"

    # The control: a SuperLink as Flower starts it.
    port = deployed.port + PORTS - 1
    options = ["--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    options += ["--isolation", "process", "--ssl-keyfile", f"{superlink}/loopback.key"]
    options += ["--ssl-certfile", f"{superlink}/loopback.crt"]
    options += ["--ssl-ca-certfile", f"{superlink}/loopback.crt"]
    plain = deployed.command(["flower-superlink", *options], "plain.log", "plain")
    try:
        until(lambda: "Uvicorn running" in deployed.log("plain.log"))
        grown, calls = growth(psutil.Process(plain.pid), port, superlink / "loopback.crt")
        assert grown > 300 * MB
        for each in calls:
            each.close()
    finally:
        stop(plain)


def is_open(call: ssl.SSLSocket) -> bool:
    """Whether the other side still takes a byte of it."""
    try:
        call.send(b"\0")
        return True
    except OSError:
        call.close()
        return False


def test_another_user_of_the_host_starts_no_run_and_takes_no_task(deployed: Deployed) -> None:
    own = deployed.port + 1, deployed.home / "superlink/loopback.crt"
    for method, path in superlink_routes():
        if path.startswith("/v1/control") and path not in WITHOUT_TOKEN:
            assert call(*own, method, path).status_code == 401, path
            assert call(*own, method, path, authorization="Bearer x").status_code == 401, path
        elif path.startswith("/v1/runtime"):
            assert call(*own, method, path).status_code in (401, 403), path
    for path in WITHOUT_TOKEN:
        assert len(call(*own, "POST", path).content) < 200
    # The control: who has the token is let in.
    kept = FileCredentialStore(deployed.home / "superlink/credentials.yaml")
    token = kept.get(ACCESS_TOKEN_STORE_KEY % f"127.0.0.1:{own[0]}") or b""
    bearer = f"Bearer {token.decode()}"
    assert call(*own, "POST", "/v1/control/list-runs", authorization=bearer).status_code == 200
    for party in range(PARTIES):
        of_node = f"http://127.0.0.1:{deployed.port + 2 + party}/v1/runtime/acquire-task"
        assert httpx.post(of_node, headers={"content-type": PROTOBUF}).status_code in (401, 403)
    for folder in [deployed.home / "superlink", deployed.home / "party-0"]:
        modes = {path: path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}
        assert not [path for path, mode in modes.items() if mode and path.suffix != ".crt"]


@pytest.mark.nightly
def test_a_run_that_is_cut_short_is_resumed_and_ends_as_if_it_had_not_been(
    deployed: Deployed, tmp_path: Path
) -> None:
    keys = {**deployed.dataset, "strategy": "ef-vfl", "window": 1, "epochs": 120, "patience": 0}
    keys |= {"downlink-codec": "top-k", "downlink-compression": "error-feedback"}
    keys |= {"checkpoint-every": 40, "noise-seed": 0}
    run = Run(tmp_path / "deployed")

    # A party stays away: one sentence that names it, and what was trained is saved.
    patience = {"party-timeout": deployed.patience}
    stopped = deployed.flwr_run("stopped.log", **keys, **patience, out=str(run.folder))
    until(lambda: evaluations(run) >= 10, STARTING)
    sentence = f"Party 1 did not answer within {deployed.patience:g} s."
    with deployed.away(1):
        until(lambda: sentence in deployed.log("stopped.log"), STARTING)
    stopped.wait(STARTING)
    assert run.summary["failure"] == sentence
    assert sentence in deployed.log("stopped.log")
    assert "Traceback" not in deployed.log("stopped.log")
    assert (run.folder / "top.npz").exists()

    # The label holder's machine dies; its SuperLink is started again as at first.
    kept = checkpoint.load(run.folder)
    trained = len(kept.strategy["history"]["entries"])
    patience["party-timeout"] = 300
    resumed = deployed.flwr_run("resumed.log", **patience, resume=str(run.folder))
    until(lambda: evaluations(run) >= trained + 20, STARTING)
    for command in ("superlink", "flower-superexec", "flwr-serverapp"):
        for process in deployed.processes("superlink", command):
            process.send_signal(signal.SIGKILL)
    stop(resumed)
    assert run.history[:trained] == kept.strategy["history"]["entries"]
    assert checkpoint.load(run.folder).number > kept.number
    deployed.command(["deploy/superlink.sh", str(deployed.home / "superlink")], "again.log")
    until(lambda: "Uvicorn running" in deployed.log("again.log"))

    kept = checkpoint.load(run.folder)
    trained = len(kept.strategy["history"]["entries"])
    assert 20 <= trained < 120, "the run was not cut short in its middle"
    end = deployed.flwr_run("end.log", resume=str(run.folder))  # parties await the old for a minute
    out = str(tmp_path / "in-process")
    in_process = run_local(PARTIES, {**keys, "out": out}, node_configs=deployed.node_configs)
    assert end.wait(STARTING) == 0
    assert run.summary["failure"] is None and len(run.history) == 120
    assert run.history[:trained] == kept.strategy["history"]["entries"]
    assert_equals(run, in_process)


@pytest.mark.nightly
def test_an_asynchronous_run_goes_on_by_the_last_embeddings_of_a_party_that_stays_away(
    deployed: Deployed, tmp_path: Path
) -> None:
    keys = {**deployed.dataset, "strategy": "vafl", "window": 1, "epochs": 60, "patience": 0}
    keys |= {"party-timeout": deployed.patience, "on-party-failure": "continue"}
    run = Run(tmp_path / "deployed")
    process = deployed.flwr_run("asynchronous.log", **keys, out=str(run.folder))
    until(lambda: evaluations(run) >= 5, STARTING)
    said = (
        f"Party 1 did not answer within {deployed.patience:g} s. The run continues without it, "
        "with its last embeddings."
    )
    with deployed.away(1):
        until(lambda: said in deployed.log("asynchronous.log"), STARTING)
    assert process.wait(STARTING) == 0
    assert "Traceback" not in deployed.log("asynchronous.log")
    assert run.summary["failure"] is None
    assert run.summary["failed_parties"] == [1]
    there, gone = (each["exchanges"] for each in run.summary["by_party"])
    assert there > gone + 100
    assert run.summary["test_accuracy"] > 0.85


def test_all_can_be_ended_and_started_again_at_once(deployed: Deployed) -> None:
    deployed.here.terminate()
    assert deployed.here.wait(STARTING) == 143
    deployed.end()
    started = deployed.home / "superlink/started/1"  # a run that ended with its SuperLink
    started.parent.mkdir(mode=0o700, exist_ok=True)
    started.touch()
    deployed.start_nodes()
    assert not started.exists()
