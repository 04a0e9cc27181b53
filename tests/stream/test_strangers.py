"""Strangers at the stream's port, who have no token; and where a party lets itself be sent."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.relay import Relay
from tests.stream.nodes import (
    FIRST,
    HANGING,
    KEYS,
    RUN,
    Nodes,
    Streamed,
    assert_equals_in_process,
    call,
    eventually,
)
from vfl_flower.config.errors import VflError
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.flower_internals import to_bytes
from vfl_flower.transport.messages import SMALL, DescribeOrder
from vfl_flower.transport.stream import links, session
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder
from vfl_flower.transport.wire import to_failure, to_message

# --- strangers ----------------------------------------------------------------------------------


@contextmanager
def connected(port: int, number: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), HANGING))
            for _ in range(number)
        ]


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have half a second."""
    monkeypatch.setattr(links, "_HANDSHAKE", 0.5)
    monkeypatch.setattr(links, "_SWEEP", 0.05)


def closed(each: socket.socket) -> bool:
    """Waits until the other side has closed it."""
    try:
        return each.recv(1) == b""
    except ConnectionResetError:
        return True


def calls(order: SessionOrder, number: int) -> list[int]:
    """Return the status of many concurrent calls without a token or with a wrong one."""

    def once(number: int) -> int:
        try:
            with call(order, "0" * 64 if number % 2 else None):
                return 101
        except InvalidStatus as error:
            return error.response.status_code

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(once, range(number)))


def port_of(order: SessionOrder) -> int:
    return int(order.address.rsplit(":", 1)[1])


@pytest.mark.nightly
def test_a_thousand_strangers_change_nothing(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    quickly(monkeypatch)
    nodes = streamed.nodes(2, KEYS)
    codes: list[int] = []
    strangers: list[socket.socket] = []

    def crowd(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            codes.extend(calls(nodes.orders[1][0], 500))
            strangers.extend(stack.enter_context(connected(port_of(nodes.orders[1][0]), 500)))
        elif (party, kind, number) == (0, "evaluate", 4):
            assert all(closed(each) for each in strangers)

    nodes.hook = crowd
    with ExitStack() as stack:
        strategy = streamed.train(nodes)
    assert len(strangers) == 500
    assert codes == [401] * 500
    assert_equals_in_process(strategy, nodes)
    assert nodes.sessions(0) == nodes.sessions(1) == 1
    said = "Refused calls to the stream's port without a valid token: "
    assert logged == [f"{said}1.", f"{said}499."]


@pytest.mark.nightly
def test_parties_come_back_to_a_port_that_strangers_had_filled(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch)
    monkeypatch.setattr(links, "_CONNECTIONS", 10)
    port = streamed.reserved_port()
    with Relay(lambda number: port) as relay:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address})
        crowds: list[list[socket.socket]] = []

        def crowd(party: int, kind: str, number: int) -> None:
            if (party, kind, number) == (1, "train", 3):
                with connected(port, 30) as strangers:
                    assert sum(map(closed, strangers)) == 30  # the oldest make room at once
                    crowds.append(strangers)
                crowds.append(stack.enter_context(connected(port, 30)))
                relay.cut()

        nodes.hook = crowd
        with ExitStack() as stack:
            strategy = streamed.train(nodes)
    assert len(crowds) == 2
    assert_equals_in_process(strategy, nodes)


def test_the_files_that_can_be_open_are_as_many_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        connections = links._connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert connections == min(1024, hard // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CROWDED = """
import resource, os
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from vfl_flower.transport.stream import links
from vfl_flower.protocol.systems import resolve
streams = links.Streams(7, resolve({"stream-ports": "9500-9999"}).running)
streams.start()
print(streams.address.rsplit(":", 1)[1], flush=True)
input()
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
print(len(held), flush=True)
input()
streams.stop()
"""


@pytest.fixture
def port() -> Iterator[links.Streams]:
    """The label holder's port, which admits node 2 by token "first"."""
    streams = links.Streams(RUN, resolve({"stream-address": "127.0.0.1"}).running)
    streams.links[FIRST] = links.Link(FIRST)
    streams.admit_by("first", streams.links[FIRST])
    streams.start()
    yield streams
    streams.stop()


def at(port: links.Streams) -> SessionOrder:
    certificate = port.certificate.decode()
    return SessionOrder(address=port.address, certificate=certificate, token="", keep=False)


@contextmanager
def secured(port: links.Streams) -> Iterator[ssl.SSLSocket]:
    """A connection by TLS that says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=port.certificate.decode())
    host, number = port.address.split(":")
    with (
        socket.create_connection((host, int(number)), HANGING) as plain,
        context.wrap_socket(plain, server_hostname="vfl-flower") as made,
    ):
        yield made


def admitted(port: links.Streams, token: str) -> str:
    """Return the token for the next call; empty if this one is refused."""
    try:
        with call(at(port), token) as made:
            return str(made.response.headers["vfl-token"])
    except InvalidStatus as error:
        assert error.response.status_code == 401
        return ""


def test_a_token_serves_one_call(port: links.Streams, logged: list[str]) -> None:
    assert not any(admitted(port, wrong) for wrong in ("second", "", "ÿ"))
    again = admitted(port, "first")
    assert again and not admitted(port, "first")
    third = admitted(port, again)
    assert third and not admitted(port, again)
    with port.lock:
        port.end(port.links[FIRST])  # the session: its last token is no longer valid
    assert not admitted(port, third)
    assert logged[0] == "Refused calls to the stream's port without a valid token: 1."


@pytest.mark.parametrize("sent", [b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"])
def test_bytes_of_no_protocol_and_wrong_tokens_do_nothing(
    port: links.Streams, sent: bytes, logged: list[str]
) -> None:
    put(port, "a")
    with call(at(port), "first") as party:
        assert party.recv() == b"order"
        with socket.create_connection(("127.0.0.1", port_of(at(port))), HANGING) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
        assert logged == [] and not admitted(port, "wrong")
        party.send(to_bytes(reply(RUN, FIRST, "a")))  # as if nobody had called
        eventually(lambda: "a" in port.replies)


CUT = "Cut the stream of the party on node 2: it sent"


@pytest.mark.parametrize(
    ("sent", "raw", "said"),
    [
        (b"garbage", False, f"{CUT} a frame that is no Flower message."),
        (b"\n\x03", False, f"{CUT} a frame that is no Flower message."),
        (
            b"\x82\xff" + (600_000_000).to_bytes(8, "big") + b"more",
            *(True, f"{CUT} an invalid frame (frame with 600000000 bytes exceeds limit of "),
        ),
        (b"GET / HTTP/1.1\r\n\r\n", True, f"{CUT} an invalid frame (invalid opcode)."),
        (b"\x82\x04four", True, f"{CUT} an invalid frame (incorrect masking)."),
        (b"\x82\x8a\0\0\0\0half", True, "The stream of the party on node 2 broke."),
    ],
    ids=["garbage", "half a message", "too long", "no frame", "unmasked", "half a frame"],
)
def test_a_party_that_sends_what_is_no_message_is_cut_and_may_call_again(
    port: links.Streams, sent: bytes, raw: bool, said: str, logged: list[str]
) -> None:
    put(port, "a")
    with suppress(ConnectionClosed, OSError), call(at(port), "first") as made:
        again = made.response.headers["vfl-token"]
        made.recv()
        if raw:  # over TLS, and as no message
            made.socket.sendall(sent)
        else:
            made.send(sent)
        if "broke" in said:
            made.close_socket()
        eventually(lambda: logged)
    assert len(logged) == 1 and logged[0].startswith(said)
    with call(at(port), again) as made:
        assert made.recv() == b"order"  # it was not answered


def test_no_call_but_a_websocket_s_uses_a_token_up(port: links.Streams) -> None:
    for head, status in (
        (b"GET / HTTP/1.1\r\nvfl-token: first\r\n\r\n", b"401"),
        (b"GET / HTTP/1.1\r\n" + b"vfl-token: first\r\n" * 2 + UPGRADE, b"401"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + UPGRADE, b""),  # too long
        (b"GET / HTTP/1.1\r\n" + b"vfl-token: first\r\n" + UPGRADE, b"101"),
    ):
        with secured(port) as made, suppress(OSError):
            made.sendall(head)
            said = made.recv(1000)
            assert said[9:12] == status or (not status and said[9:12] == b"431")
    assert port.links[FIRST].used == "first"


UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


CLOSE = b"\x88\x80\0\0\0\0"


@pytest.mark.parametrize("frames", [CLOSE, b"\xff" * 9])
def test_frames_before_the_answer_to_a_call_end_it_alone(
    port: links.Streams, frames: bytes
) -> None:
    with secured(port) as made:
        made.sendall(b"GET / HTTP/1.1\r\n" + UPGRADE + frames)
        with suppress(ssl.SSLError):
            assert not made.recv(1)
    assert port._thread.is_alive() and admitted(port, "first")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the command openssl")
def test_updates_of_tls_keys_count_as_bytes_of_a_stranger(
    port: links.Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL serves them for as long as they come, if it reads the socket."""
    monkeypatch.setattr(links, "_HANDSHAKE", HANGING)  # so that only bytes count
    command = ["openssl", "s_client", "-connect", port.address]
    with (
        secured(port),
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        ) as client,
        suppress(BrokenPipeError),
    ):
        assert client.stdin
        deadline = time.monotonic() + HANGING
        while client.poll() is None and time.monotonic() < deadline:
            client.stdin.write(b"k\n" * 2**12)  # an update for each 8 KiB
        eventually(lambda: len(port._connections) == 1)  # the other, which sends nothing
        client.stdin.close()
    assert time.monotonic() < deadline and admitted(port, "first")


def test_a_session_that_ends_while_its_party_serves_is_over(port: links.Streams) -> None:
    """The party sends a large reply, which nobody awaits, before it reads of the end."""

    def app(message: Message, context: Context) -> Message:
        with port.lock:
            port.end(port.links[FIRST])
        return Message(RecordDict({"x": ConfigRecord({"x": bytes(2**24)})}), reply_to=message)

    order = replace(at(port), token="first")
    message = to_message(DescribeOrder(outputs=1), FIRST, ttl=60)
    message.metadata.__dict__.update({"_message_id": "a", "_run_id": RUN})
    put(port, "a", to_bytes(message))
    context = Context(RUN, FIRST, {"partition-id": 0}, RecordDict(), {})
    end = session.serve(cast(ClientApp, app), order, context, lambda: 2**30)
    assert end == SessionEnd(connected=True, served=1, cause="")


def reply(run: int, node: int, to: str) -> Any:
    made = to_failure("is late", to_message(DescribeOrder(outputs=1), node, ttl=60))
    about = {"_run_id": run, "_src_node_id": node, "_reply_to_message_id": to}
    made.metadata.__dict__.update(about)
    return made


def put(port: links.Streams, key: str, frame: bytes = b"order", largest: int = 1000) -> None:
    port.put(key, frame, to_message(DescribeOrder(outputs=1), FIRST, ttl=60), largest)


def test_a_reply_counts_from_its_party_and_to_the_message_that_waits(
    port: links.Streams, logged: list[str]
) -> None:
    link = port.links[FIRST]
    put(port, "a")
    for other in ((RUN, FIRST + 1, "a"), (RUN + 1, FIRST, "a"), (RUN, FIRST, "b")):
        port._take(link, reply(*other))
        assert not port.replies and link.in_flight
    assert logged == [
        f"Refused a message of run {run}, node {node}, on the stream of node 2 of run 7."
        for run, node in ((7, 3), (8, 2))
    ]
    port._take(link, reply(RUN, FIRST, "a"))
    assert list(port.replies) == ["a"] and not link.in_flight


def test_a_party_answers_a_message_once_and_on_its_latest_stream(port: links.Streams) -> None:
    put(port, "a")
    link, body = port.links[FIRST], to_bytes(reply(RUN, FIRST, "a"))
    with call(at(port), "first") as earlier:
        again = earlier.response.headers["vfl-token"]
        assert earlier.recv() == b"order"
        with call(at(port), again) as latest:
            assert latest.recv() == b"order"  # it was not answered
            with pytest.raises(ConnectionClosed):
                earlier.recv()
            latest.send(body)
            port.receive({"a"}, HANGING)
            assert list(port.replies) == ["a"] and not link.in_flight
            put(port, "b")
            latest.send(body)
            port.receive({"b"}, 0.2)
            assert list(port.replies) == ["a"] and link.in_flight
    assert link.largest == (1000 + SMALL, 1000 + SMALL)
    put(port, "c", largest=10)
    assert link.largest == (1000 + SMALL, 10 + SMALL)  # the earlier reply may come once more


def test_a_party_that_reads_nothing_takes_no_memory(port: links.Streams) -> None:
    """Neither by a large message, which stays one copy, nor by pings that ask for answers."""
    with call(at(port), "first", ping_interval=None) as made, suppress(ConnectionClosed, OSError):
        made.recv_flow_control.acquire()  # it reads no more
        eventually(lambda: port.links[FIRST].stream)
        stream: Any = port.links[FIRST].stream
        put(port, "a", bytes(2**26))
        assert stream.is_full and sum(map(len, stream._out)) <= 2**20 + 2**12
        with suppress(OSError):
            for _ in range(20_000):  # more bytes than what is left of a frame, and the bound
                with made.protocol_mutex:
                    made.protocol.send_ping(b"x" * 125)
                    made.send_data()
        eventually(lambda: port.links[FIRST].cuts)
        assert not port.links[FIRST].stream and len(stream._out) < 10_000
        made.recv_flow_control.release()


def test_bytes_after_the_end_of_tls_take_no_memory(port: links.Streams) -> None:
    """OpenSSL reads nothing after the end, so nothing else would take the bytes away."""
    with suppress(OSError, ValueError, EOFError), call(at(port), "first", ping_interval=None) as up:
        eventually(lambda: port.links[FIRST].stream)
        stream: Any = port.links[FIRST].stream
        up.recv_flow_control.acquire()  # its thread reads no more
        up.socket.settimeout(0.2)
        raw = socket.socket(fileno=os.dup(up.socket.fileno()))
        with raw, suppress(OSError):
            with suppress(OSError):
                up.socket.unwrap()
            for _ in range(400):
                raw.sendall(bytes(2**16))
                port.receive({"none"}, 0)
        up.recv_flow_control.release()
    assert stream._sealed._in.pending < 2**20


def test_a_silent_stream_is_pinged_and_its_machine_must_confirm(
    port: links.Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_SWEEP", 0.02)
    with call(at(port), "first", ping_interval=None) as made:
        pings: list[bytes] = []
        made.process_event = pings.append
        eventually(lambda: len(pings) > 3)
        stream: Any = port.links[FIRST].stream
        option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
        assert stream.socket.getsockopt(*option) == 40_000


def test_calls_by_grpc_are_logged_as_calls_of_an_older_version(
    port: links.Streams, logged: list[str]
) -> None:
    credentials = grpc.ssl_channel_credentials(port.certificate)
    options = [("grpc.ssl_target_name_override", "vfl-flower"), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(port.address, credentials, options) as channel:
        method: Any = channel.stream_stream("/vfl_flower.Stream/Exchange")
        with pytest.raises(grpc.RpcError):
            list(method(iter([b"x"]), metadata=(("vfl-token", "first"),)))
    assert logged == ["Refused calls by gRPC, as parties of earlier versions make them: 1."]
    assert admitted(port, "first")  # the control


def test_a_party_may_send_something_invalid_three_times(port: links.Streams) -> None:
    put(port, "a")
    token = "first"
    for _ in range(4):
        assert not port.replies
        with suppress(ConnectionClosed), call(at(port), token) as made:
            token = made.response.headers["vfl-token"]
            made.send(b"nonsense")
            made.recv()
            made.recv()
    eventually(lambda: port.replies)
    said = "sent a frame that is no Flower message, again and again."
    assert port.replies["a"].error.reason == said


@pytest.mark.nightly
def test_a_crowd_leaves_files_for_the_label_holder_s_own(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        port = int(process.stdout.readline())
        with connected(port, 400):  # twice what it could have open
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "50\n"
        process.communicate("\n", HANGING)
    assert process.returncode == 0


# --- where a party connects ---------------------------------------------------------------------


def sent_to(streamed: Streamed, host: str, rule: str = "", **more: Any) -> tuple[Nodes, int]:
    """Nodes of a run whose label holder says that it is at this host, which is this machine."""
    port = streamed.reserved_port()
    nodes = streamed.nodes(2, {**KEYS, "epochs": 1, "stream-ports": str(port), **more})
    for context in nodes.contexts.values():
        if rule:
            context.node_config["stream-address"] = rule.format(port=port)

    def elsewhere(party: int, order: SessionOrder) -> SessionOrder:
        return replace(order, address=f"{host}:{port}")

    nodes.before_session = elsewhere
    return nodes, port


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("host", "rule", "added"),
    [
        ("0.0.0.0", "", "0.0.0.0"),
        ("vfl.example", "", "vfl.example"),
        ("127.0.0.1", "127.0.0.1:1", "127.0.0.1"),
    ],
)
def test_a_party_connects_only_where_its_owner_has_said(
    host: str, rule: str, added: str, streamed: Streamed, logged: list[str]
) -> None:
    nodes, _ = sent_to(streamed, host, rule)
    strategy = streamed.train(nodes)
    assert strategy.run.transport.medium == "messages"
    assert_equals_in_process(strategy, nodes)
    told = [line for line in logged if line.startswith(f"A party may not connect to {host}: ")]
    assert len(told) == 1 and f"add stream-address='{added}' to party " in told[0]
    assert told[0].endswith("Messages travel over Flower now, not over streams.")
    assert sum(line.startswith("The party may not connect to") for line in logged) == 2


def test_a_label_holder_that_names_no_host_is_told_to_name_one(
    streamed: Streamed, logged: list[str]
) -> None:
    nodes, _ = sent_to(streamed, "127.0.0.1", "vfl.example, other.example:443")
    streamed.train(nodes)
    (told,) = [line for line in logged if line.startswith("A party may not connect to 127.0.0.1")]
    assert "set stream-address in the run configuration" in told
    assert "node configuration" not in told and "vfl.example" not in told


@pytest.mark.one_by_day
@pytest.mark.parametrize("rule", ["0.0.0.0", "vfl.example, 0.0.0.0:{port}", "simulated"])
def test_a_party_connects_where_its_owner_has_said(rule: str, streamed: Streamed) -> None:
    nodes, _ = sent_to(streamed, "0.0.0.0", "" if rule == "simulated" else rule)
    for context in nodes.contexts.values():
        context.node_config["simulated"] = rule == "simulated"  # the run configuration suffices
    assert streamed.train(nodes).run.transport.medium == "stream"


def test_a_stream_that_is_demanded_and_not_allowed_is_one_sentence(streamed: Streamed) -> None:
    nodes, _ = sent_to(streamed, "0.0.0.0", transport="stream")
    with pytest.raises(
        VflError, match=r"The party on node \d failed: may not connect to 0\.0"
    ) as e:
        streamed.train(nodes)
    assert "add stream-address='0.0.0.0' to party " in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("address", ["unix:/tmp/socket", "dns:///vfl.example:1", "127.0.0.1:99999"])
def test_what_is_no_address_is_not_tried(address: str, streamed: Streamed) -> None:
    nodes = streamed.nodes(2, {**KEYS, "transport": "stream"})
    nodes.before_session = lambda party, order: replace(order, address=address)
    with pytest.raises(VflError, match="is no address") as error:
        streamed.train(nodes)
    assert "\n" not in str(error.value)
