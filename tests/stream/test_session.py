"""A party's end of a stream, and what a label holder may do to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websockets

from tests.relay import Relay
from tests.stream.nodes import FIRST, HANGING, KEYS, RUN, Streamed, assert_equals_in_process
from vfl_flower.client_app import PartyApp
from vfl_flower.config import checks
from vfl_flower.party import state_file
from vfl_flower.party.state import load_scalars
from vfl_flower.transport.flower_internals import from_bytes, state_to_bytes, to_bytes
from vfl_flower.transport.messages import SMALL, DescribeOrder
from vfl_flower.transport.nodes.certificates import self_signed
from vfl_flower.transport.stream import session
from vfl_flower.transport.stream.connections import context_of
from vfl_flower.transport.stream.frames import FRAME, MUTE
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder
from vfl_flower.transport.wire import read_reply, to_message


class Raw(bytes):
    """Bytes for the TLS socket, and no message."""


Script = Callable[[Iterator[Any]], Iterable[bytes]]


class Holder:
    """A server where a party takes it for the label holder's, of another implementation.

    Parameters
    ----------
    script : for each call, what it yields; the last is repeated.
    """

    def __init__(self, *script: Script) -> None:
        self.tokens: list[str] = []  # shown in each call
        self.script = script
        key, self.certificate = self_signed("vfl-flower")
        self.server = serve_websockets(
            self._exchange,
            "127.0.0.1",
            0,
            ssl=context_of(key, self.certificate),
            compression=None,
            process_response=self._answer,
            logger=MUTE,
        )
        self.port = int(self.server.socket.getsockname()[1])

    def _answer(self, made: ServerConnection, request: Request, response: Response) -> None:
        self.tokens.append(request.headers["vfl-token"])
        response.headers["vfl-token"] = f"token {len(self.tokens)}"

    def _exchange(self, made: ServerConnection) -> None:
        number = min(len(self.tokens), len(self.script)) - 1
        for each in self.script[number](iter(made)):
            if isinstance(each, Raw):
                made.socket.sendall(each)
            else:
                made.send(each)

    @property
    def order(self) -> SessionOrder:
        return SessionOrder(
            address=f"127.0.0.1:{self.port}",
            certificate=self.certificate.decode(),
            token="token 0",
            keep=True,
        )


@contextmanager
def holder(*script: Script) -> Iterator[Holder]:
    each = Holder(*script)
    thread = threading.Thread(target=each.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield each
    finally:
        each.server.shutdown()
        thread.join()


def described(identity: str, **other: int) -> bytes:
    """The frame of a first message to party 0, with other metadata."""
    message = to_message(DescribeOrder(outputs=1), FIRST, ttl=60)
    message.metadata.__dict__["_message_id"] = identity
    message.metadata.__dict__.update({f"_{key}": value for key, value in other.items()})
    return to_bytes(message)


def serve(order: SessionOrder) -> tuple[SessionEnd, Context, list[str]]:
    """The end of a session of party 0, its Context, and the messages that its ClientApp saw."""
    seen: list[str] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != SessionOrder.kind:
            seen.append(message.metadata.message_id)
        return call_next(message, context)

    keys: dict[str, Any] = {**KEYS}
    context = Context(RUN, FIRST, {"partition-id": 0, "num-partitions": 2}, RecordDict(), keys)
    reply = PartyApp(mods=[watch])(to_message(order, FIRST, ttl=60), context)
    return read_reply(reply, SessionEnd), context, seen


def test_a_message_that_is_sent_again_gets_the_same_answer() -> None:
    answers = []

    def first(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        answers.append(next(received))
        raise ValueError("the call breaks")

    def second(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        answers.append(next(received))
        yield described("b")
        answers.append(next(received))

    with holder(first, second) as each:
        end, _, seen = serve(each.order)
        assert each.tokens == ["token 0", "token 1"]
    assert end == SessionEnd(connected=True, served=2, cause="")
    assert seen == ["a", "b"]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("other", "said"),
    [({"run_id": 8}, "node 2 of run 8"), ({"dst_node_id": 3}, "node 3 of run 7")],
    ids=["run", "node"],
)
def test_a_party_serves_no_message_to_another_run_or_node(
    other: dict[str, int], said: str, logged: list[str]
) -> None:
    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("forged", **other)
        yield described("mine")
        assert from_bytes(next(received)).metadata.reply_to_message_id == "mine"

    with holder(script) as each:
        end, _, seen = serve(each.order)
    assert end == SessionEnd(connected=True, served=1, cause="") and seen == ["mine"]
    assert logged == [f"Refused a message to {said}, on the stream to node 2 of run 7."]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([b"garbage"], "a frame that is no Flower message"),
        (
            [Raw(b"\x82\x7f" + b"\xff" * 8)],
            f"an invalid frame (frame with {2**64 - 1} bytes exceeds",
        ),
        ([Raw(b"\x82\xfe")], "an invalid frame (incorrect masking"),
    ],
    ids=["garbage", "too long", "masked"],
)
def test_a_party_that_is_sent_what_is_no_message_calls_again(
    sent: list[bytes], why: str, logged: list[str]
) -> None:
    with holder(lambda received: sent, lambda received: []) as each:
        end, _, seen = serve(each.order)
        assert len(each.tokens) == 2
    assert end == SessionEnd(connected=True, served=0, cause="") and seen == []
    (line,) = logged
    assert line.startswith(f"The party was sent {why}") and line.endswith("for a while.")


def test_a_party_takes_no_frame_that_is_larger_than_what_its_rows_can_need(
    logged: list[str],
) -> None:
    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        next(received)
        for _ in range(2):
            yield Raw(b"\x02\x7f" + FRAME.to_bytes(8, "big") + bytes(FRAME))  # and more to come

    with holder(script, lambda received: []) as each:
        end, _, _ = serve(each.order)
    assert (end.cause, end.served) == ("", 1)
    rows, size = 455, 32
    most = 2 * 4 * rows * (size + 1) + 2 * SMALL
    said = f"frame with {FRAME} bytes exceeds limit of {most} bytes"
    (line,) = logged
    assert line.startswith("The party was sent an invalid frame") and said in line


def test_a_party_whose_label_holder_vanished_gives_up_and_keeps_its_state(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(session, "_PATIENCE", 0.2)
    answered = threading.Event()

    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        next(received)
        answered.set()
        next(received)

    with holder(script) as each:

        def go() -> None:
            answered.wait(HANGING)
            each.server.shutdown()

        vanish = threading.Thread(target=go, daemon=True)
        vanish.start()
        end, context, _ = serve(each.order)
        vanish.join()
    assert (end.connected, end.served) == (True, 1)
    assert end.cause.startswith(f"could not reach {each.order.address}")
    assert "\n" not in end.cause
    assert load_scalars(context.state)["exchange"] == 0
    kept = state_file.read(state_file.place(context))
    assert state_to_bytes(kept) == state_to_bytes(context.state)
    assert 1 <= len(logged) <= 2 and all(
        line.endswith("It tries again for a while.") for line in logged
    )


@pytest.mark.parametrize("pings", [True, False])
def test_a_party_calls_again_if_the_label_holder_gives_no_sign(
    pings: bool, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(session, "SILENT", 1.0)

    def script(received: Iterator[Any]) -> Iterator[bytes]:
        end = time.monotonic() + (1.5 if pings else HANGING)
        while time.monotonic() < end and len(each.tokens) < 2:
            time.sleep(0.05)
            if pings:
                yield Raw(b"\x89\0")

    with holder(script, lambda received: []) as each:
        end, *_ = serve(each.order)
        assert len(each.tokens) == 2 - pings
    assert end.cause == "" and len(logged) == 1 - pings


def test_a_party_tells_that_the_label_holder_speaks_grpc(logged: list[str]) -> None:
    key, certificate = self_signed("vfl-flower")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    address = f"127.0.0.1:{port}"
    order = SessionOrder(address=address, certificate=certificate.decode(), token="a", keep=True)
    end, *_ = serve(order)
    server.stop(None)
    cause = f"called {address}, where the label holder's earlier version speaks gRPC: streams need"
    assert not end.connected and end.cause.startswith(cause)
    assert logged == [f"The party {end.cause}."]


@pytest.mark.parametrize("allows", [True, False])
def test_a_stream_goes_through_the_proxy_that_the_environment_names(
    allows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "is_loopback", lambda host: False)
    monkeypatch.setattr(session, "_FIRST_SECONDS", 0.05)
    asked: list[bytes] = []

    def proxy(listener: socket.socket, each: Holder) -> None:
        with listener, suppress(OSError):
            while True:
                made, _ = listener.accept()
                asked.append(made.recv(2**16))
                if not allows:
                    made.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
                    made.close()
                    continue
                other = socket.create_connection(("127.0.0.1", each.port))
                made.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                for pair in ((made, other), (other, made)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener, holder(lambda received: []) as each:
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        threading.Thread(target=proxy, args=(listener, each), daemon=True).start()
        end, *_ = serve(each.order)
        listener.shutdown(socket.SHUT_RDWR)
    assert end.connected is allows and "secret" not in end.cause
    assert asked[0].startswith(f"CONNECT 127.0.0.1:{each.port} HTTP/1.1\r\n".encode())
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in asked[0]


def test_a_party_shows_its_token_to_no_server_with_another_certificate(
    streamed: Streamed, logged: list[str]
) -> None:
    port = streamed.reserved_port()
    with (
        holder(lambda received: []) as impostor,
        Relay(lambda number: port if number >= 2 else impostor.port) as relay,
    ):
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address})
        strategy = streamed.train(nodes)
        assert relay.accepted >= 3 and impostor.tokens == []
    assert strategy.run.transport.medium == "stream"
    assert_equals_in_process(strategy, nodes)
    assert 1 <= len(logged) <= 2 and all("could not reach" in line for line in logged)


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
@pytest.mark.parametrize("told", [True, False])
def test_a_stream_on_this_machine_uses_no_proxy(
    told: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    if not told:  # the control
        monkeypatch.setattr(checks, "is_loopback", lambda host: False)
        monkeypatch.setattr(session, "_FIRST_SECONDS", 0.05)

    def ends(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        next(received)

    with holder(ends) as each:
        end, *_ = serve(each.order)
    assert end.connected is told
