"""`vfl doctor --superlink`: what a party sees of a label holder, and ports for streams."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from select import select
from tempfile import gettempdir
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import doctored
from tests.doctored import HOST, Proxy, dated, found, keys, quick
from tests.fleet import is_running, until
from vfl_flower.config.checks import direct_to_loopback
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import locked
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.descendants import MARK
from vfl_flower.launch.processes import reserved_port
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main
from vfl_flower.tools.doctor import machine, network, runs
from vfl_flower.tools.doctor.examine import examine
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding

__all__ = ["keys", "quick"]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def superlink(keys: Path) -> Iterator[Proxy]:
    with doctored.proxy(keys) as server:
        yield server


@pytest.fixture
def node(keys: Path, superlink: Proxy, tmp_path: Path) -> Path:
    """A party whose key is registered."""
    folder = doctored.party(tmp_path / "party", keys / "superlink.crt")
    superlink.register(folder)
    return folder


def test_a_party_reaches_its_superlink_which_knows_its_key(
    keys: Path, node: Path, superlink: Proxy
) -> None:
    with reserved_port() as port:
        every = found(node, superlink=superlink.address, ports=str(port))
    checks = ("port", "clock", "SuperLink", "registration")
    assert [each.result for check in checks for each in every[check]] == [OK] * 4
    assert "is valid until" in every["port"][0].said
    assert every["stream port"][0].result == UNKNOWN
    of_holder = found(keys, superlink=superlink.address)
    assert [of_holder[check][0].result for check in checks[:3]] == [OK] * 3
    assert "registration" not in of_holder


def test_a_closed_port_is_a_problem(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        every = found(node, superlink=f"{HOST}:{port}", ports=str(port))
        assert every["port"][0].result == PROBLEM
        assert "refuses connections" in every["port"][0].said
        assert every["clock"][0].result == UNKNOWN and "SuperLink" not in every
        assert main(["doctor", str(node), "--superlink", f"{HOST}:{port}"]) == 1


def test_an_error_of_the_network_says_what_to_do() -> None:
    for error, words in {
        socket.gaierror(-2, "unknown"): "No machine is called",
        TimeoutError(): "Open the port in the firewalls",
        OSError(101, "Network is unreachable"): "(Network is unreachable)",
    }.items():
        assert words in network.unreachable(network.Address("h", 1), error)


def test_a_server_without_tls_is_a_problem(node: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        address = network.Address(HOST, server.getsockname()[1])
        server.settimeout(30)

        def answer() -> None:
            with server.accept()[0] as plain:
                plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with doctored.in_thread(answer):
            finding = network.certified(address, node / "superlink.crt", True)
    assert finding.result == PROBLEM and "does not speak TLS" in finding.said


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("first", "last", "host", "words"),
    [
        (-9, -1, "127.0.0.1", "an expired certificate"),
        (1, 9, "127.0.0.1", "not valid yet"),
        (-1, 300, "other.example", "for another address"),
    ],
)
def test_a_certificate_that_tls_refuses_says_why(
    first: float, last: float, host: str, words: str, keys: Path, tmp_path: Path
) -> None:
    dated(keys, first, last, host)
    folder = doctored.party(tmp_path / "party", keys / "superlink.crt")
    with doctored.proxy(keys) as server:
        every = found(folder, superlink=server.address)
        assert every["port"][0].result == PROBLEM and words in every["port"][0].said
        assert every["clock"][0].result == OK  # so the clocks are not the reason
        assert server.calls == 0  # nothing is signed for somebody else


def test_a_renewed_certificate_is_unknown_until_it_is_given_out(
    keys: Path, node: Path, superlink: Proxy, tmp_path: Path
) -> None:
    renewed = doctored.label_holder(tmp_path / "renewed")
    shutil.copy(renewed / "superlink.crt", node)
    finding = found(node, superlink=superlink.address)["port"][0]
    assert finding.result == PROBLEM and "Ask the label holder" in finding.said
    finding = found(renewed, superlink=superlink.address)["port"][0]  # the proxy has the old one
    assert finding.result == PROBLEM and "Restart deploy/superlink.sh" in finding.said


def test_a_party_trusts_a_certificate_and_its_successor_until_it_expires(
    keys: Path, tmp_path: Path
) -> None:
    node = doctored.party(tmp_path / "party", keys / "superlink.crt")
    renewed = doctored.label_holder(tmp_path / "renewed")
    both = [(folder / "superlink.crt").read_bytes() for folder in (keys, renewed)]
    for shown in (keys, renewed):
        with doctored.proxy(shown) as server:
            for text in (both[0] + both[1], both[1] + both[0]):
                (node / "superlink.crt").write_bytes(text)
                assert found(node, superlink=server.address)["port"][0].result == OK
    dated(keys, -1, 20, HOST)  # which is told where it is shown
    shutil.copy(keys / "superlink.crt", node)
    with doctored.proxy(keys) as server:
        assert found(node, superlink=server.address)["port"][0].result == WARNING


CLOCKS = [(0, OK), (1.5, OK), (3.5, WARNING), (8, PROBLEM), (-3, OK), (-9, WARNING), (-90, PROBLEM)]


def test_a_clock_may_be_behind_by_seconds_and_hardly_ahead(node: Path, superlink: Proxy) -> None:
    address = network.address(superlink.address)
    for ahead, result in CLOCKS:
        superlink.ahead, superlink.dates = -ahead, True
        finding = network.clock(address, network.measured(address))
        assert finding.result == result
        direction = "ahead of" if ahead > 0 else "behind"
        assert not ahead or f" s {direction} " in finding.said
        assert abs(float(finding.said.split()[3]) - abs(ahead)) <= 1
        assert ("305 s behind" in finding.said) == (result != OK)
    superlink.dates = False  # so nothing is compared
    assert network.clock(address, network.measured(address)).result == UNKNOWN


def test_a_proxy_without_its_superlink_is_told_from_another_server(
    node: Path, superlink: Proxy
) -> None:
    for superlink.status in (502, 504, 404, 401):
        every = found(node, superlink=superlink.address)
        assert every["SuperLink"][0].result == (PROBLEM if superlink.status > 500 else UNKNOWN)
        assert "registration" not in every


def test_a_key_that_is_not_registered_is_a_problem(node: Path, superlink: Proxy) -> None:
    superlink.known.clear()
    finding = found(node, superlink=superlink.address)["registration"][0]
    assert finding.result == PROBLEM and "register supernode.pub" in finding.said
    (node / "supernode.key").write_bytes(b"no key")
    assert found(node, superlink=superlink.address)["registration"][0].result == UNKNOWN


def test_a_label_holder_has_a_free_port_for_streams(keys: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        finding = found(keys, ports=str(port))["stream ports"][0]
        assert finding.result == PROBLEM and "End the programs" in finding.said
    assert found(keys, ports=str(port))["stream ports"][0].result == OK
    with pytest.raises(ConfigError, match="stream-ports"):
        examine([keys], "", "9600-9500", None)


def test_the_ports_of_a_named_run_are_checked(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").touch()
    monkeypatch.setattr(network, "_is_free", lambda port: True)

    def checked(ports: str = "") -> list[str]:
        every = found(keys, run, ports=ports)["stream ports"]
        return [each.said.partition(" are free")[0].rpartition(" ")[2] for each in every]

    assert checked() == ["9500-9599"]  # the control: the run has no checkpoint
    trained = SimpleNamespace(config=resolve({"stream-ports": "9700"}))
    monkeypatch.setattr(checkpoint, "load", lambda folder: trained)
    monkeypatch.setattr(runs, "about", lambda *given: [])
    assert checked() == ["9700-9700"]
    assert checked("9600-9601") == ["9600-9601"]
    with locked(run / "serve.lock", "A service holds its port."):
        assert checked() == ["9500-9599"]


def test_a_party_reaches_the_port_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as server:
        ports = range(server.getsockname()[1], server.getsockname()[1] + 1)
        assert network.stream_port(HOST, ports).result == OK
    assert network.stream_port(HOST, ports).result == UNKNOWN

    def dropped(*arguments: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", dropped)
    assert network.stream_port(HOST, ports).result == WARNING


# --- a clock that is wrong ----------------------------------------------------------------------


def problems(every: dict[str, list[Finding]]) -> list[str]:
    """Return the checks that found a problem or a warning."""
    ours = (check for check in every if check != "space")
    return [c for c in ours for each in every[c] if each.result in (PROBLEM, WARNING)]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("first", "last", "ahead"),
    [
        (300, 700, -400),  # not valid yet by this clock
        (-700, -300, 400),  # expired by this clock
        (-1, 300, 400),  # expires soon by this clock, and not yet by the other one
    ],
)
def test_a_clock_that_is_wrong_by_months_is_the_only_cause(
    first: float, last: float, ahead: float, keys: Path, tmp_path: Path
) -> None:
    dated(keys, first, last, HOST)
    node = doctored.party(tmp_path / "party", keys / "superlink.crt")
    with doctored.proxy(keys) as server:
        server.register(node)
        server.ahead = -ahead * 86400
        every = found(node, superlink=server.address)
        assert problems(every) == ["clock"]
        for check in ("certificate", "port", "registration"):
            assert [each.result for each in every[check]] == [UNKNOWN], check
        assert every["SuperLink"][0].result == OK and server.calls == 1  # nothing is signed
        assert problems(found(keys, superlink=server.address)) == ["clock"]
        server.ahead = 0.0  # the control
        expected = [] if last == 300 else ["certificate", "port"]
        assert problems(found(node, superlink=server.address)) == expected


def test_a_refused_clock_is_not_called_an_unknown_key(node: Path, superlink: Proxy) -> None:
    superlink.known.clear()
    for ahead in (8, -400):
        superlink.ahead = -ahead
        every = found(node, superlink=superlink.address)
        assert problems(every) == ["clock"]
        assert "Set the clock first" in every["registration"][0].said
    superlink.ahead = 0.0  # the control
    every = found(node, superlink=superlink.address)
    assert problems(every) == ["registration"]
    assert "this clock" not in every["registration"][0].said
    superlink.dates = False
    every = found(node, superlink=superlink.address)
    assert "or refuses this clock" in every["registration"][0].said


# --- proxies ------------------------------------------------------------------------------------

ELSEWHERE = "vfl.bank.example"
HERE = "http://user:secret@P"
PROXIES: list[tuple[dict[str, str], bool]] = [  # and whether a party uses it
    ({}, False),
    ({"https_proxy": HERE}, True),
    ({"HTTPS_PROXY": HERE}, True),
    ({"http_proxy": HERE}, False),
    ({"ALL_PROXY": HERE}, True),
    ({"all_proxy": HERE.removeprefix("http://")}, True),
    ({"grpc_proxy": HERE}, False),
    ({"https_proxy": HERE, "no_proxy": "bank.example"}, False),
    ({"https_proxy": HERE, "NO_PROXY": ".bank.example"}, False),
    ({"https_proxy": HERE, "no_proxy": "other.example"}, True),
    ({"https_proxy": HERE, "no_proxy": "*"}, False),
]


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.usefixtures("without_proxies")
def test_a_party_is_told_which_proxy_it_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, uses in PROXIES:
        with monkeypatch.context() as patch:
            for name, value in named.items():
                patch.setenv(name, value.replace("P", "10.0.0.1:3128"))
            said = list(network.proxy_to(ELSEWHERE))
            assert not list(network.proxy_to(HOST))  # a SuperNode on this machine
        assert [each.result for each in said] == [OK] * uses
        for each in said:
            assert "call vfl.bank.example through the proxy 10.0.0.1:3128" in each.said
            assert "secret" not in each.said


_CALLS = f"""
import httpx
try: httpx.Client(timeout=5).get("https://{ELSEWHERE}:8000/")
except httpx.HTTPError: pass
"""
_STREAMS = f"""
from flwr.app import Context, RecordDict
from vfl_flower.transport.nodes.certificates import self_signed
from vfl_flower.transport.stream import session
from vfl_flower.transport.stream.messages import SessionOrder
session._FIRST_SECONDS = 0
certificate = self_signed("x")[1].decode()
order = SessionOrder(address="{ELSEWHERE}:9500", certificate=certificate, token="", keep=False)
context = Context(1, 1, {{"stream-address": "{ELSEWHERE}"}}, RecordDict(), {{}})
session.serve(None, order, context, lambda: 0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("named", "uses"), PROXIES)
@pytest.mark.usefixtures("without_proxies")
def test_httpx_and_streams_use_the_proxy_that_doctor_names(
    named: dict[str, str], uses: bool
) -> None:
    for code in (_CALLS, _STREAMS):
        with socket.create_server((HOST, 0)) as server:
            server.settimeout(0.0)
            place = f"{HOST}:{server.getsockname()[1]}"
            own = {name: value.replace("P", place) for name, value in named.items()}
            environment = {**os.environ, **own}
            environment |= direct_to_loopback(environment)  # as each SuperNode sets them
            subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
            came = False
            with suppress(BlockingIOError):
                server.accept()[0].close()
                came = True
            assert came == uses, (code, named)


def passes(made: socket.socket, target: int) -> None:
    """Pass one CONNECT on to a port of this machine, as a proxy does."""
    head = made.recv(2**16)
    to_port = head.startswith(f"CONNECT {ELSEWHERE}:8000 ".encode())
    if not to_port or b"dXNlcjpzZWNyZXQ=" not in head:
        made.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        made.close()
        return
    made.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
    with made, socket.create_connection((HOST, target)) as other, suppress(OSError):
        pair = {made: other, other: made}
        while True:
            for each in select(list(pair), [], [])[0]:
                if not (part := each.recv(2**16)):
                    return
                pair[each].sendall(part)


@pytest.mark.usefixtures("without_proxies")
def test_a_superlink_is_checked_through_the_proxy_that_the_node_uses(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated(keys, -1, 300, ELSEWHERE)
    node = doctored.party(tmp_path / "party", keys / "superlink.crt")
    with doctored.proxy(keys) as server, socket.create_server((HOST, 0)) as between:
        server.register(node)

        def serve() -> None:
            while True:
                try:
                    made, _ = between.accept()
                except OSError:
                    return
                Thread(target=passes, args=(made, server.server_port), daemon=True).start()

        Thread(target=serve, daemon=True).start()
        place = f"http://user:secret@{HOST}:{between.getsockname()[1]}"
        monkeypatch.setenv("https_proxy", place)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        every = found(node, superlink=f"{ELSEWHERE}:8000", ports="9500")
        for check in ("port", "clock", "SuperLink", "registration"):
            assert [each.result for each in every[check]] == [OK], check
        refused = found(node, superlink=f"{ELSEWHERE}:8001", ports="9500")["port"][0]
        assert refused.result == PROBLEM and "Have the proxy allow it" in refused.said
        assert "403" in refused.said and "secret" not in refused.said
        between.shutdown(socket.SHUT_RDWR)


# --- processes ----------------------------------------------------------------------------------

_SLEEPS = "import time; time.sleep(600)"
_STARTS = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL)
print(process.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def started(home: Path, *words: str, **more: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield the number of a process whose starter waits, and what ends the starter."""
    command = [sys.executable, "-c", _SLEEPS, *words]
    environment = {**os.environ, MARK: "", "FLWR_HOME": str(home), **more}
    command, pipe = [sys.executable, "-c", _STARTS, *command], subprocess.PIPE
    starter = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe)
    assert starter.stdin and starter.stdout
    number = int(starter.stdout.readline())

    def end() -> None:
        starter.kill()
        starter.wait()

    try:
        yield number, end
    finally:
        end()
        process = psutil.Process(number)
        process.kill()
        until(lambda: not is_running(process))  # else it may be told once more
        starter.stdin.close()
        starter.stdout.close()


def told(home: Path, number: int) -> bool:
    """Return whether a process is called one of an earlier run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "_AGAIN", 0.0)
        [finding] = machine.left_over([home])
    assert finding.result == WARNING or finding.said == "No process of an earlier run is left."
    return f"{number} (" in finding.said


@pytest.mark.parametrize(
    ("program", "place", "marked"),
    [
        (("vfl_flower.transport.nodes.superlink", "superlink"), "keys", False),
        (("nginx: master process", "-c", "FOLDER/proxy.conf"), "other", False),
        (("vfl_flower.transport.nodes.superlink", "superexec"), "keys", False),
        (("vfl_flower.transport.nodes.superlink", "supernode"), "temporary", True),
    ],
)
def test_a_process_that_has_outlived_its_starter_is_found(
    program: tuple[str, ...], place: str, marked: bool, tmp_path: Path
) -> None:
    keys, mark = tmp_path / "keys", "0" * 32
    home = {"keys": keys, "other": tmp_path, "temporary": Path(gettempdir(), "vfl-flower-x")}[place]
    words = [each.replace("FOLDER", str(keys)) for each in program]
    more = {MARK: mark} if marked else {}
    with ExitStack() as exits:
        number, end = exits.enter_context(started(home, *words, **more))
        with started(tmp_path, "watcher", *([mark] if marked else [])) as (_, end_watcher):
            assert not told(keys, number)  # the control: somebody will end it
            end()
            assert told(keys, number) == (not marked)
            end_watcher()
        assert told(keys, number)
        assert place != "keys" or not told(tmp_path / "another", number)


def test_a_supernode_and_other_programs_may_stand_alone(tmp_path: Path) -> None:
    for words in (("vfl_flower.transport.nodes.superlink", "supernode"), ("python", "train.py")):
        with started(tmp_path, *words) as (number, end):
            end()
            assert not told(tmp_path, number)
