"""Strangers at the stream's port, who have no token; and where a party lets itself be sent."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.relay import Relay
from tests.stream.nodes import (
    FIRST,
    HANGING,
    KEYS,
    METHOD,
    RUN,
    Nodes,
    Streamed,
    assert_equals_in_process,
)
from vfl_flower.config.errors import VflError
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import SMALL, DescribeOrder
from vfl_flower.transport.stream import links
from vfl_flower.transport.stream.frames import TOKEN
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import to_message

# --- strangers ----------------------------------------------------------------------------------


@contextmanager
def connected(port: int, number: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), HANGING))
            for _ in range(number)
        ]


def quickly(monkeypatch: pytest.MonkeyPatch, handshake: int) -> None:
    """The port has this timeout, in milliseconds."""
    options = [
        (name, handshake if name == "grpc.server_handshake_timeout_ms" else value)
        for name, value in links._OPTIONS
    ]
    monkeypatch.setattr(links, "_OPTIONS", options)


def closed(each: socket.socket) -> bool:
    """Waits until the other side has closed it."""
    try:
        return each.recv(1) == b""
    except ConnectionResetError:
        return True


def calls(order: SessionOrder, number: int) -> list[grpc.StatusCode]:
    """Return the status of many concurrent calls without a token or with a wrong one."""
    credentials = grpc.ssl_channel_credentials(order.certificate.encode())
    options = [("grpc.ssl_target_name_override", "vfl-flower")]
    with grpc.secure_channel(order.address, credentials, options) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)

        def call(number: int) -> grpc.StatusCode:
            metadata = (("vfl-token", "0" * 64),) if number % 2 else ()
            try:
                list(method(iter([b"x" * 1000]), metadata=metadata))
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(call, range(number)))


def port_of(nodes: Nodes) -> int:
    return int(nodes.orders[1][0].address.rsplit(":", 1)[1])


@pytest.mark.nightly
def test_a_thousand_strangers_change_nothing(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    quickly(monkeypatch, 500)
    monkeypatch.setattr(links, "_PARTIES", 2)  # threads: each is a party's
    nodes = streamed.nodes(2, KEYS)
    codes: list[grpc.StatusCode] = []
    strangers: list[socket.socket] = []

    def crowd(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            codes.extend(calls(nodes.orders[1][0], 500))
            strangers.extend(stack.enter_context(connected(port_of(nodes), 500)))
        elif (party, kind, number) == (0, "evaluate", 4):
            assert all(closed(each) for each in strangers)

    nodes.hook = crowd
    with ExitStack() as stack:
        strategy = streamed.train(nodes)
    assert len(strangers) == 500
    # As if nobody were here: no stranger is given a thread, or the word that there is none left.
    assert codes == [grpc.StatusCode.UNIMPLEMENTED] * 500
    assert_equals_in_process(strategy, nodes)
    assert nodes.sessions(0) == nodes.sessions(1) == 1
    said = "Refused calls to the stream's port without a valid token: "
    assert logged == [f"{said}1.", f"{said}499."]


@pytest.mark.nightly
def test_parties_come_back_to_a_port_that_strangers_had_filled(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch, 500)
    monkeypatch.setattr(links, "_CONNECTIONS", 10)
    port = streamed.reserved_port()
    with Relay(lambda number: port) as relay:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address})
        crowds: list[list[socket.socket]] = []

        def crowd(party: int, kind: str, number: int) -> None:
            if (party, kind, number) == (1, "train", 3):
                with connected(port, 30) as strangers:
                    assert sum(map(closed, strangers)) == 30  # most at once, as there is no place
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
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from vfl_flower.transport.stream import links
from vfl_flower.transport.stream.frames import METHOD
from vfl_flower.protocol.systems import resolve
import grpc, os
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
    yield streams
    streams.stop()


class Call:
    """A call that gRPC hands to the label holder, with a token."""

    def __init__(self, token: str) -> None:
        self.token, self.again = token, ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(TOKEN, self.token)]

    def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.again = dict(metadata)[TOKEN]

    def add_callback(self, ends: object) -> bool:
        return True

    def cancel(self) -> None: ...

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise VflError(details)


def admitted(port: links.Streams, token: str) -> str:
    """Return the token for the next call; empty if this one is refused."""
    call: Any = Call(token)
    try:
        port._admit(call)
    except VflError:
        return ""
    return str(call.again)


def handled(port: links.Streams, token: str, method: str = METHOD) -> bool:
    call: Any = SimpleNamespace(method=method, invocation_metadata=[(TOKEN, token)])
    return port.service(call) is not None


def test_a_token_serves_one_call(port: links.Streams) -> None:
    assert handled(port, "first") and handled(port, "first")  # two calls, before either is served
    assert not handled(port, "first", "/vfl_flower.Stream/Other") and not handled(port, "second")
    again = admitted(port, "first")
    assert again and not admitted(port, "first") and not handled(port, "first")
    assert handled(port, again)
    third = admitted(port, again)
    assert third and not admitted(port, again)
    with port.lock:
        port.end(port.links[FIRST])  # the session: its last token is no longer valid
    assert not handled(port, third) and not admitted(port, third)


def stream_of(link: links.Link) -> links.Stream:
    """A stream on which the party may answer message "a"."""
    call: Any = Call("")
    message: Any = to_message(DescribeOrder(outputs=1), link.node, ttl=60)
    link.in_flight, link.answered = links.InFlight("a", b"", message), False
    link.stream = links.Stream(link, call, SimpleQueue())
    return link.stream


def test_a_reply_counts_from_its_party_and_to_the_message_that_waits(port: links.Streams) -> None:
    link = port.links[FIRST]
    stream_of(link)

    def reply(run: int, node: int, to: str) -> Any:
        said = SimpleNamespace(run_id=run, src_node_id=node, reply_to_message_id=to)
        return SimpleNamespace(metadata=said)

    for other in ((RUN, FIRST + 1, "a"), (RUN + 1, FIRST, "a"), (RUN, FIRST, "b")):
        port._take(link, reply(*other))
        assert not port.replies and link.in_flight
    port._take(link, reply(RUN, FIRST, "a"))
    assert list(port.replies) == ["a"] and not link.in_flight


def test_a_party_answers_a_message_once_and_on_its_latest_stream(port: links.Streams) -> None:
    link = port.links[FIRST]
    earlier = stream_of(link)
    latest = stream_of(link)
    port._read(earlier, iter([b"earlier"]))
    assert port._inbox.empty() and link.stream is latest
    port._read(latest, iter([b"first", b"second"]))
    assert port._inbox.get_nowait() == (latest, b"first") and port._inbox.empty()
    port.put("b", b"", to_message(DescribeOrder(outputs=1), FIRST, ttl=60), 1000)
    port.put("c", b"", to_message(DescribeOrder(outputs=1), FIRST, ttl=60), 10)
    assert link.largest == (1000 + SMALL, 10 + SMALL)  # the earlier reply may come once more


def test_a_party_may_send_something_invalid_three_times(port: links.Streams) -> None:
    link = port.links[FIRST]
    for time in range(4):
        assert not port.replies
        port._cut(stream_of(link), VflError(f"nonsense {time}"))
    assert port.replies["a"].error.reason == "sent nonsense 3, again and again."


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
    nodes = streamed.nodes(2, {**KEYS, "stream-ports": str(port), **more})
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
@pytest.mark.parametrize("rule", ["0.0.0.0", "vfl.example, 0.0.0.0:{port}"])
def test_a_party_connects_where_its_owner_has_said(rule: str, streamed: Streamed) -> None:
    nodes, _ = sent_to(streamed, "0.0.0.0", rule)
    strategy = streamed.train(nodes)
    assert strategy.run.transport.medium == "stream"


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


def test_in_a_simulation_the_run_configuration_suffices(streamed: Streamed) -> None:
    nodes, _ = sent_to(streamed, "0.0.0.0")
    for context in nodes.contexts.values():
        context.node_config["simulated"] = True
    assert streamed.train(nodes).run.transport.medium == "stream"
