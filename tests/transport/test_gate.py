"""A SuperLink bounds what it reads, keeps and logs of calls by strangers and hostile parties."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app

from tests.stranger import FLEET, signed_by
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.flower_processes import guard_fleet
from vfl_flower.transport.nodes import gate
from vfl_flower.transport.nodes.certificates import supernode_keys
from vfl_flower.transport.nodes.gate import AT_ONCE, LIMITS, Gate, Limit, LogBudget
from vfl_flower.transport.wire import pack

CHECKOUT = Path(__file__).parents[2]
PIECE = 1 << 20
MUCH = 40 * PIECE


class Called:
    """One call of a SuperLink's application: its answer, and how much of its body was read."""

    def __init__(self, path: str, headers: dict[str, str], body: Iterator[bytes]) -> None:
        headers = {"content-type": PROTOBUF_MEDIA_TYPE, **headers}
        names = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
        self.scope |= {"headers": names}
        self.scope |= {"query_string": b"", "scheme": "https", "server": ("here", 1)}
        self.scope |= {"client": ("there", 1), "http_version": "1.1", "raw_path": path.encode()}
        self.body, self.next = body, next(body, b"")
        self.read = self.status = 0
        self.text = b""
        self.hold: asyncio.Event | None = None  # until which the last piece does not come
        self.whole, self.gone = False, asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.whole:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        piece, self.next = self.next, next(self.body, b"")
        if self.hold and not self.next:
            await self.hold.wait()
        self.read += len(piece)
        self.whole = not self.next
        return {"type": "http.request", "body": piece, "more_body": bool(self.next)}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"")

    async def by(self, app: Any) -> Called:
        await app(self.scope, self.receive, self.send)
        return self


def call(app: Any, path: str, headers: dict[str, str], body: Iterator[bytes]) -> Called:
    return asyncio.run(Called(path, headers, body).by(app))


def large() -> Iterator[bytes]:
    """A body of a field that no message has: protobuf keeps it."""
    yield b"\x7a\x80\x80\x80\x14"
    for _ in range(MUCH // PIECE):
        yield bytes(PIECE)


@pytest.fixture(scope="module")
def key() -> Any:
    return load_ssh_private_key(supernode_keys()[0], None)


@pytest.fixture(scope="module")
def app(key: Any) -> Any:
    """A SuperLink's application behind the gate, where one key is registered."""
    with pytest.MonkeyPatch.context() as patch:
        extensions = import_module("flwr.superlink.extensions")
        patch.setattr(extensions, "get_middleware", extensions.get_middleware)
        guard_fleet(Gate)
        made = create_app()
    register(made, key)
    return made


def register(app: Any, key: Any) -> int:
    state = app.state.linkstate_factory.state()
    public = public_key_to_bytes(key.public_key())
    return int(state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0))


def stranger() -> Any:
    return load_ssh_private_key(supernode_keys()[0], None)


def mixed(key: Any) -> dict[str, str]:
    """The registered key, which everybody may know, and the signature of another."""
    of_key = signed_by(key)
    return {**signed_by(stranger()), "flwr-public-key": of_key["flwr-public-key"]}


def later(key: Any) -> dict[str, str]:
    """A signature whose time was changed."""
    return {**signed_by(key), "flwr-timestamp": "2099-01-01T00:00:00+00:00"}


STRANGERS: dict[str, Callable[[Any], dict[str, str]]] = {
    "no signature": lambda key: {},
    "a key that nobody has registered": lambda key: signed_by(stranger()),
    "a registered key and another's signature": mixed,
    "a time that was not signed": later,
    "no base64": lambda key: {**signed_by(key), "flwr-public-key": "?"},
}


@pytest.mark.parametrize("of", STRANGERS)
def test_nothing_is_read_of_a_strangers_body(app: Any, key: Any, of: str) -> None:
    for path in FLEET:
        called = call(app, path, STRANGERS[of](key), large())
        assert called.read == 0, path
        assert called.status == (412 if path.endswith("/activate-node") else 401), path


def test_flower_alone_reads_a_strangers_whole_body() -> None:
    """The control."""
    called = call(create_app(), "/v1/fleet/push-messages", {}, large())
    assert called.read > MUCH and called.status == 401


def test_a_signature_serves_for_minutes_and_a_key_until_it_is_withdrawn(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = stranger()
    node = register(app, own)
    body = ActivateNodeRequest(
        public_key=public_key_to_bytes(own.public_key()), heartbeat_interval=30
    ).SerializeToString()
    headers = signed_by(own)

    def status() -> int:
        return call(app, "/v1/fleet/activate-node", headers, iter([body])).status

    assert status() == 200
    auth = import_module("flwr.superlink.routers.fleet.node_auth")
    then = datetime.fromisoformat(headers["flwr-timestamp"])
    with monkeypatch.context() as patch:
        patch.setattr(auth, "now", lambda: then + timedelta(seconds=306))
        assert status() == 412
    app.state.linkstate_factory.state().delete_node(NOOP_FLWR_AID, node)
    assert status() == 412


@pytest.mark.parametrize("path", sorted(FLEET))
def test_a_registered_party_can_send_what_a_call_may_have_and_no_more(
    app: Any, key: Any, path: str
) -> None:
    most = LIMITS.get(path.rpartition("/")[2], gate._SMALL).size
    called = call(app, path, signed_by(key), large())
    assert called.status == 413
    assert most < called.read <= most + PIECE


def test_a_body_must_come_in_time(app: Any, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "push-object", Limit(PIECE, 0.05))
    called = Called("/v1/fleet/push-object", signed_by(key), iter([b"a", b"b"]))

    async def never() -> Called:
        called.hold = asyncio.Event()
        return await called.by(app)

    assert asyncio.run(never()).status == 408
    assert called.read == 1


def test_a_key_has_few_calls_of_a_kind_at_once(app: Any, key: Any) -> None:
    other = stranger()
    register(app, other)

    async def play() -> None:
        waiting = [
            Called("/v1/fleet/push-object", signed_by(key), iter([b"a", b"b"]))
            for _ in range(AT_ONCE)
        ]
        for each in waiting:
            each.hold = asyncio.Event()
        tasks = [asyncio.create_task(each.by(app)) for each in waiting]
        while not all(each.read for each in waiting):
            await asyncio.sleep(0.001)

        async def status(call: str, of: Any) -> int:
            return (await Called(f"/v1/fleet/{call}", signed_by(of), iter([b"x"])).by(app)).status

        assert await status("push-object", key) == 503  # which a SuperNode tries again
        assert await status("pull-messages", key) == await status("push-object", other) == 400
        for each in waiting:
            assert each.hold
            each.hold.set()
        await asyncio.gather(*tasks)
        assert await status("push-object", key) == 400

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "status", "hears"),
    [
        ("/v1/runtime/push-messages", 200, True),
        ("/v1/runtime/push-object", 200, True),
        ("/v1/runtime/push-messages", 401, False),
        ("/v1/runtime/push-logs", 200, False),
    ],
)
def test_a_node_hears_of_a_message_at_once_and_its_questions_are_few(
    path: str, status: int, hears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HELD", 5.0 if hears else 0.1)
    served: list[str] = []

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await send({"type": "http.response.start", "status": status})

    made = Gate(flower, lambda scope: scope["headers"][-1][1])

    async def play() -> float:
        def asked(who: str) -> Any:
            return Called("/v1/fleet/pull-messages", {"who": who}, iter([b"x"])).by(made)

        for who in ("a", "b"):
            await asked(who)  # the first question waits for nothing
        begun = asyncio.get_running_loop().time()
        waiting = [asyncio.create_task(asked(who)) for who in ("a", "b")]
        await asyncio.sleep(0)
        assert len(served) == 2
        for _ in range(3):  # a message, and its objects
            await Called(path, {}, iter([b"x"])).by(made)
        assert len(served) == 5
        await asyncio.gather(*waiting)
        took = asyncio.get_running_loop().time() - begun
        held = asyncio.create_task(asked("a"))  # one ring for all three, which it has heard
        await asyncio.sleep(0.05)
        assert len(served) == 7
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        return took

    took = asyncio.run(play())
    assert took < 1 if hears else took >= 0.1


@pytest.mark.parametrize("gone", [False, True])
def test_no_message_is_given_to_a_node_that_has_gone_while_its_question_was_held(
    gone: bool,
) -> None:
    served: list[str] = []

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await send({"type": "http.response.start", "status": 200})

    async def play() -> None:
        made = Gate(flower, lambda scope: b"key")
        first, held = (Called("/v1/fleet/pull-messages", {}, iter([b"x"])) for _ in range(2))
        await first.by(made)
        task = asyncio.create_task(held.by(made))
        while not held.whole:
            await asyncio.sleep(0.001)
        if gone:
            held.gone.set()
            await asyncio.sleep(0.01)
        await Called("/v1/runtime/push-messages", {}, iter([b"x"])).by(made)
        await asyncio.wait_for(task, 5.0)

    asyncio.run(play())
    assert len(served) == (2 if gone else 3)


def test_a_caller_that_goes_away_in_its_body_ends_in_no_traceback(app: Any, key: Any) -> None:
    def leave(app: Any, headers: dict[str, str]) -> Called:
        called = Called("/v1/fleet/push-object", headers, iter([b"a", b"b"]))

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        asyncio.run(app(called.scope, gone, called.send))
        return called

    assert leave(app, signed_by(key)).status == 0
    assert leave(app, {}).status == 401
    assert leave(create_app(), {}).status == 500


def test_the_largest_of_honest_messages_pass() -> None:
    begin_task()
    order = Message(RecordDict(), 7, "train")
    many = {f"{number:0128d}": np.full(1, float(number)) for number in range(1024)}
    large = {"large": np.random.default_rng(0).random(3 << 20)}
    for arrays in (large, many):
        reply = Message(RecordDict({"arrays": pack(arrays)}), reply_to=order)
        assert isinstance(reply.content["arrays"], ArrayRecord)
        objects = get_all_nested_objects(reply)
        largest = max(
            PushObjectRequest(
                node=Node(node_id=2**63), run_id=2**63, object_id=name, session_id="s" * 64,
                object_content=each.deflate(),
            ).ByteSize()
            for name, each in objects.items()
        )  # fmt: skip
        assert largest < LIMITS["push-object"].size
        pushed = PushMessagesRequest(
            node=Node(node_id=2**63),
            messages_list=[message_to_proto(Message(RecordDict(), reply_to=order))],
            message_object_trees=[get_object_tree(reply)],
        )
        assert pushed.ByteSize() < LIMITS["push-messages"].size / 4


def test_the_proxy_passes_bodies_as_large_as_the_gate_does() -> None:
    text = (CHECKOUT / "deploy/proxy.conf").read_text()
    [most] = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(most) << 20 == max(limit.size for limit in LIMITS.values())
    assert "proxy_request_buffering off;" in text  # else it reads a body before the gate is asked


# --- the log ------------------------------------------------------------------------------------


class Written(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def written() -> Iterator[tuple[logging.Logger, Written]]:
    logger, handler = logging.Logger("uvicorn.access"), Written()
    logger.addHandler(handler)
    yield logger, handler


def test_calls_write_a_bounded_log(
    written: tuple[logging.Logger, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, handler = written

    def flood() -> int:
        handler.lines.clear()
        for number in range(300):
            logger.info('%s - "POST /v1/fleet/%s HTTP/1.1" %d', "there", number, 401)
            try:
                raise ValueError("x" * 500)
            except ValueError:
                logger.exception("in a call: %s", 5000 * "%")
        return sum(map(len, handler.lines))

    assert flood() > 1_500_000  # the control
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: clock.now))
    budget = LogBudget()
    logger.addFilter(budget)
    assert 5_000 < flood() < LogBudget.A_MINUTE
    assert not any("401" in line for line in handler.lines)
    clock.now = 61.0
    handler.lines.clear()
    logger.info("another minute")
    assert handler.lines == ["another minute (lines left out before this one: 289)"]


def test_refused_calls_are_told_once_a_minute(
    app: Any, own_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = Gate(app, lambda scope: None)
    clock = SimpleNamespace(now=1000.0)
    strangers = import_module("vfl_flower.transport.nodes.strangers")
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for clock.now in (1000.0, 1001.0, 1002.0, 1061.0):
        for _ in range(10):
            assert call(made, "/v1/fleet/pull-messages", {}, iter([b""])).status == 401
    said = "Refused calls that no registered key has signed"
    assert own_log == [f"{said}: 1.", f"{said}: 30."]
