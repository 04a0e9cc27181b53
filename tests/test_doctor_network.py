"""`vfl doctor --superlink`: what a party sees of a label holder, and ports for streams."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import doctored
from tests.doctored import HOST, Proxy, dated, found, keys, quick
from vfl_flower.config.errors import ConfigError
from vfl_flower.launch.processes import reserved_port
from vfl_flower.tools.cli import main
from vfl_flower.tools.doctor import network
from vfl_flower.tools.doctor.examine import examine
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING

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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "unknown"), "No machine is called"),
        (TimeoutError(), "Open the port in the firewalls"),
        (OSError(101, "Network is unreachable"), "(Network is unreachable)"),
    ],
)
def test_an_error_of_the_network_says_what_to_do(error: OSError, words: str) -> None:
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


def test_a_party_trusts_a_certificate_and_its_successor(keys: Path, tmp_path: Path) -> None:
    node = doctored.party(tmp_path / "party", keys / "superlink.crt")
    renewed = doctored.label_holder(tmp_path / "renewed")
    both = [(folder / "superlink.crt").read_bytes() for folder in (keys, renewed)]
    for text in (both[0] + both[1], both[1] + both[0]):
        (node / "superlink.crt").write_bytes(text)
        for shown in (keys, renewed):
            with doctored.proxy(shown) as server:
                assert found(node, superlink=server.address)["port"][0].result == OK


def test_a_certificate_that_expires_soon_is_a_warning_where_it_is_shown(
    keys: Path, tmp_path: Path
) -> None:
    dated(keys, -1, 20, HOST)
    folder = doctored.party(tmp_path / "party", keys / "superlink.crt")
    with doctored.proxy(keys) as server:
        assert found(folder, superlink=server.address)["port"][0].result == WARNING


@pytest.mark.parametrize(
    ("ahead", "result"),
    [(0, OK), (1.5, OK), (3.5, WARNING), (8, PROBLEM), (-3, OK), (-9, WARNING), (-90, PROBLEM)],
)
def test_a_clock_may_be_behind_by_seconds_and_hardly_ahead(
    ahead: float, result: str, node: Path, superlink: Proxy
) -> None:
    superlink.ahead = -ahead
    address = network.address(superlink.address)
    finding = network.clock(address)
    assert finding.result == result
    direction = "ahead of" if ahead > 0 else "behind"
    assert not ahead or f" s {direction} " in finding.said
    assert abs(float(finding.said.split()[3]) - abs(ahead)) <= 1
    assert ("305 s behind" in finding.said) == (result != OK)


def test_a_server_that_does_not_tell_the_time_is_not_compared(superlink: Proxy) -> None:
    superlink.dates = False
    assert network.clock(network.address(superlink.address)).result == UNKNOWN


@pytest.mark.parametrize(
    ("status", "result"), [(502, PROBLEM), (504, PROBLEM), (404, UNKNOWN), (401, UNKNOWN)]
)
def test_a_proxy_without_its_superlink_is_told_from_another_server(
    status: int, result: str, node: Path, superlink: Proxy
) -> None:
    superlink.status = status
    every = found(node, superlink=superlink.address)
    assert every["SuperLink"][0].result == result
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


def test_a_party_reaches_the_port_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as server:
        ports = range(server.getsockname()[1], server.getsockname()[1] + 1)
        assert network.stream_port(HOST, ports).result == OK
    assert network.stream_port(HOST, ports).result == UNKNOWN

    def dropped(*arguments: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", dropped)
    assert network.stream_port(HOST, ports).result == WARNING
