"""The stream: its frames, its two ends, and what a broken or hostile network does to a run."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from strategies.vertical import Vertical
from tests.conftest import assert_copies_agree, trained
from tests.relay import Relay
from vfl_flower import client_app
from vfl_flower.data.blocks import load_labels
from vfl_flower.errors import ConfigError, PartyError, VflError
from vfl_flower.flower_internals import from_bytes, state_from_bytes, state_to_bytes, to_bytes
from vfl_flower.messages import (
    DescribeOrder,
    EvaluateOrder,
    SessionEnd,
    SessionOrder,
    TrainOrder,
    Upload,
)
from vfl_flower.party import state_file as party_file
from vfl_flower.party.state import load_arrays, load_scalars
from vfl_flower.registry import SYSTEMS
from vfl_flower.runtimes import stream
from vfl_flower.runtimes.certificates import self_signed
from vfl_flower.runtimes.processes import free_port
from vfl_flower.runtimes.stream.frames import chunks, frames
from vfl_flower.runtimes.stream.grid import StreamGrid
from vfl_flower.systems import resolve
from vfl_flower.wire import read_order, read_reply, to_failure, to_message, to_reply

RUN, SERVER, FIRST = 7, 1, 2  # ids of the run, of the ServerApp, and of the first party's node
KEYS = {"dataset": "breast-cancer", "window": 5, "epochs": 4, "strategy": "split-nn"}
EF_VFL = {
    **KEYS,
    "strategy": "ef-vfl",
    "downlink-codec": "qsgd",
    "downlink-compression": "error-feedback",
}
ZEROTH = {**KEYS, "strategy": "syn-zoo", "noise-seed": 0, "batch-size": 64}
SHARED = {**KEYS, "strategy": "ef-vfl", "labels": "shared"}
METHOD = "/vfl_flower.Stream/Exchange"


class KilledError(BaseException):
    """A process that ends at once: it answers nothing, and keeps nothing in memory."""


class Nodes(Grid):
    """Flower with a SuperNode for each party, in threads: one message at a time, by a new process.

    It stands for the ClientApp too, and so sees each message, ordinary or from a stream; ``hook``
    is called with it, before the real ClientApp is (return None) or in its place.
    """

    engine = "supernodes"
    run: Any = SimpleNamespace(run_id=RUN)

    def __init__(self, parties: int, keys: dict[str, Any]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SERVER
        self.contexts = {
            FIRST + party: Context(
                run_id=RUN,
                node_id=FIRST + party,
                node_config={"partition-id": party, "num-partitions": parties},
                state=RecordDict(),
                run_config=keys,
            )
            for party in range(parties)
        }
        self.app = client_app.app
        self.hook: Callable[[int, str, int], Any] = lambda party, kind, number: None
        self.before_session: Callable[[int, SessionOrder], SessionOrder] = lambda party, order: (
            order
        )
        self.after: Callable[[int, str, int], None] = lambda party, kind, number: None
        self.seen: list[tuple[int, str]] = []  # party and kind of each message, in turn
        self.orders: dict[int, list[SessionOrder]] = {party: [] for party in range(parties)}
        self._lock = threading.Lock()
        self._pushed = 0
        self._replies: dict[str, Future[Message | None]] = {}
        self._threads = {node: ThreadPoolExecutor(1) for node in self.contexts}

    def sessions(self, party: int) -> int:
        return self.count(party, "query.session")

    def count(self, party: int, kind: str) -> int:
        return self.seen.count((party, kind))

    def __call__(self, message: Message, context: Context) -> Message:
        party, kind = message.metadata.dst_node_id - FIRST, message.metadata.message_type
        self.seen.append((party, kind))
        number = self.count(party, kind)
        if kind == "query.session":
            order = read_order(message, SessionOrder)
            self.orders[party].append(order)
            order = self.before_session(party, order)
            message.content = to_message(order, FIRST + party, ttl=60).content
        else:
            self.hook(party, kind, number)
        # In processes of their own, parties would not share torch's generator of initial weights.
        with self._lock if kind != "query.session" else nullcontext():
            reply: Message = self.app(message, context)
        self.after(party, kind, number)
        return reply

    def _serve(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        context = self.contexts[node]
        process = Context(
            run_id=RUN,
            node_id=node,
            node_config=context.node_config,
            state=state_from_bytes(state_to_bytes(context.state)),
            run_config=context.run_config,
        )
        try:
            reply: Message = client_app.app(from_bytes(to_bytes(message)), process)
        except KilledError:
            context.state = RecordDict()
            return None
        except Exception as error:  # as Flower's runtimes do
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code=code, reason=f"{error}"), reply_to=message)
        context.state = process.state
        return from_bytes(to_bytes(reply))

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            self._pushed += 1
            key = f"flower-{self._pushed}"
            message.metadata.__dict__["_message_id"] = key
            thread = self._threads[message.metadata.dst_node_id]
            self._replies[key] = thread.submit(self._serve, message)
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = []
        for key in set(message_ids) & self._replies.keys():
            if self._replies[key].done() and (reply := self._replies.pop(key).result()):
                found.append(reply)
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise NotImplementedError

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Flower folder of its own, short pauses, and messages of the run in this process."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setattr(stream, "_POLL", 0.05)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SERVER


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the loggers of Flower and of this application warn of, as it is said."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("flwr").addHandler(handler)
    yield lines
    logging.getLogger("flwr").removeHandler(handler)


class Streamed:
    """The fixture `streamed`: a run whose messages travel over streams, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.stack = ExitStack()

    def nodes(self, parties: int, keys: dict[str, Any]) -> Nodes:
        if "stream-ports" not in keys:
            keys = {**keys, "stream-ports": str(free_port())}
        nodes = Nodes(parties, keys)
        self.stack.callback(nodes.close)
        self.monkeypatch.setattr(client_app, "app", nodes)
        return nodes

    def train(self, nodes: Nodes) -> Vertical:
        config = resolve(nodes.contexts[FIRST].run_config)
        strategy = SYSTEMS[config.strategy](config, load_labels(config))
        try:
            with StreamGrid(nodes, config) as grid:
                strategy.start(grid)
        finally:
            self.monkeypatch.setattr(client_app, "app", nodes.app)
        return strategy


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streamed]:
    each = Streamed(monkeypatch)
    with each.stack:
        yield each


FIGURES = ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes", "failed_parties")


def assert_equals_in_process(strategy: Vertical, nodes: Nodes, atol: float = 1e-6) -> None:
    """The same models at both ends as a run in process gives, by the same traffic."""
    given_keys = dict(nodes.contexts[FIRST].run_config)
    expected, grid = trained(len(nodes.contexts), {**given_keys, "window": strategy.window})
    for name, values in expected.top_arrays().items():
        np.testing.assert_allclose(strategy.top_arrays()[name], values, atol=atol, err_msg=name)
    for here, there in zip(nodes.contexts.values(), grid.contexts.values(), strict=True):
        for name, values in load_arrays(there.state, "model").items():
            kept = load_arrays(here.state, "model")[name]
            np.testing.assert_allclose(kept, values, atol=atol, err_msg=name)
    figures, wanted = strategy.figures(), expected.figures()
    assert {name: figures[name] for name in FIGURES} == {name: wanted[name] for name in FIGURES}
    assert len(strategy.history) == len(expected.history)
    assert figures["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=1e-6)


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


# --- frames -------------------------------------------------------------------------------------


def near_multiples(size: int) -> st.SearchStrategy[bytes]:
    """Bodies about as long as some pieces of that size; short ones begin as messages do."""
    lengths = st.builds(lambda n, d: max(1, n * size + d), st.integers(0, 4), st.integers(-1, 1))
    bodies = lengths.flatmap(lambda length: st.binary(min_size=length, max_size=length))
    return bodies.map(lambda body: body if len(body) > size else b"\n" + body[1:])


@given(st.lists(near_multiples(16), max_size=6))
def test_frames_are_what_the_chunks_were_made_of(bodies: list[bytes]) -> None:
    with patch.object(stream, "_CHUNK", 16):
        sent = [chunk for body in bodies for chunk in chunks(body)]
        assert all(len(chunk) <= 16 for chunk in sent)
        assert list(frames(sent)) == bodies


@given(near_multiples(16).filter(lambda body: len(body) > 16), st.binary(min_size=1))
def test_a_frame_of_another_length_than_it_said_is_refused(body: bytes, more: bytes) -> None:
    with patch.object(stream, "_CHUNK", 16):
        head, *pieces = chunks(body)
        with pytest.raises(VflError, match="another length"):
            list(frames([head, *pieces[:-1], pieces[-1] + more]))
        with pytest.raises(VflError, match="another length"):
            list(frames([head, b"", *pieces]))


@given(near_multiples(16).filter(lambda body: len(body) > 16))
def test_a_frame_that_ends_too_early_is_refused(body: bytes) -> None:
    with patch.object(stream, "_CHUNK", 16):
        received: list[bytes] = []
        with pytest.raises(VflError, match="another length"):
            received += frames(list(chunks(body))[:-1])
        assert received == []


@pytest.mark.parametrize("length", [stream._LARGEST + 1, 2**40, 2**64 - 1])
def test_a_frame_above_the_limit_is_refused_by_its_length(length: int) -> None:
    def received() -> Iterator[bytes]:
        yield b"\0" + length.to_bytes(8, "big")
        raise AssertionError("it was waited for")

    with pytest.raises(VflError, match=f"frame of {length} bytes, above the limit"):
        list(frames(received()))


def plain(message: Message) -> dict[str, Any]:
    return {key: value for key, value in vars(message.metadata).items() if value}


ORDERS = [
    DescribeOrder(outputs=10),
    TrainOrder(
        exchange=3,
        epoch=2,
        first=5,
        steps=4,
        coordinated=False,
        arrays={
            "gradient": np.arange(12.0, dtype=np.float32).reshape(3, 4),
            "none": np.zeros((0, 4), np.float32),
            "bits": np.arange(256, dtype=np.uint8),
            "scalar": np.array(1.5, np.float16),
            "long": np.arange(2**17, dtype=np.int64),
        },
    ),
    EvaluateOrder(exchange=2**40),
    SessionOrder(address="[::1]:1", certificate="é\n", token="", keep=True),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_message_is_the_same_after_its_way_through_bytes(order: Any) -> None:
    sent = to_message(order, FIRST, ttl=60)
    sent.metadata.__dict__["_message_id"] = "stream-1"
    (frame,) = frames(chunks(to_bytes(sent)))
    message = from_bytes(frame)
    assert plain(message) == plain(sent)
    received = read_order(message, type(order))
    assert {**vars(received), "arrays": 0} == {**vars(order), "arrays": 0}
    assert received.arrays.keys() == order.arrays.keys()
    for name, array in order.arrays.items():
        assert received.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(received.arrays[name], array)
    upload = Upload(party=1, exchange=3, peak_memory_mb=0.5, arrays=order.arrays)
    reply = from_bytes(to_bytes(to_reply(upload, message)))
    assert reply.metadata.reply_to_message_id == "stream-1"
    assert (reply.metadata.src_node_id, reply.metadata.run_id) == (FIRST, RUN)
    assert read_reply(reply, Upload).peak_memory_mb == 0.5


def test_an_error_is_the_same_after_its_way_through_bytes() -> None:
    message = to_message(ORDERS[0], FIRST, ttl=60)
    error = from_bytes(to_bytes(Message(Error(code=3, reason="gone"), reply_to=message)))
    assert (error.error.code, error.error.reason) == (3, "gone")
    with pytest.raises(VflError, match=r"^failed: too few rows$"):
        read_reply(from_bytes(to_bytes(to_failure("too few rows", message))), Upload)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(VflError, match="no Flower message"):
        from_bytes(body)


@given(st.data())
def test_a_message_with_an_altered_byte_is_refused_or_another(data: st.DataObject) -> None:
    body = bytearray(to_bytes(to_message(ORDERS[2], FIRST, ttl=60)))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read_order(from_bytes(bytes(body)), EvaluateOrder)
    except VflError as error:
        assert "\n" not in str(error)


# --- the same run over streams ------------------------------------------------------------------


@pytest.mark.parametrize("keys", [KEYS, ZEROTH, EF_VFL, SHARED], ids=lambda k: str(k["strategy"]))
def test_a_synchronous_run_is_the_same_as_in_process(
    keys: dict[str, Any], streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(3, keys)
    strategy = streamed.train(nodes)
    assert (strategy.transport, strategy.engine) == ("stream", "supernodes")
    assert_equals_in_process(strategy, nodes)
    assert [nodes.sessions(party) for party in range(3)] == [1, 1, 1]
    assert logged == []


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "vafl", "epochs": 12, "party-lr": 0.1, "server-lr": 0.1},
        {"strategy": "cascaded", "epochs": 20, "noise-seed": 0, "window": 16, "party-lr": 1e-3},
        {
            "strategy": "dpzv",
            "epochs": 16,
            "noise-seed": 0,
            "window": 16,
            "noise-multiplier": 1.0,
        },
    ],
    ids=lambda keys: str(keys["strategy"]),
)
def test_an_asynchronous_run_learns_as_much_as_in_process(
    keys: dict[str, Any], streamed: Streamed
) -> None:
    # Uploads come in another order than in process, where no party is ever late.
    strategy = streamed.train(streamed.nodes(2, keys))
    expected, _ = trained(2, {**keys, "window": strategy.window})
    figures, wanted = strategy.figures(), expected.figures()
    assert figures["exchanges"] == wanted["exchanges"]
    assert figures["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=0.03)


@pytest.mark.parametrize("keys", [KEYS, EF_VFL], ids=lambda keys: str(keys["strategy"]))
def test_sessions_are_renewed_and_leave_the_state_in_a_file(
    keys: dict[str, Any], streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, {**keys, "session-seconds": 1e-3})
    strategy = streamed.train(nodes)
    assert_equals_in_process(strategy, nodes)
    for party, context in enumerate(nodes.contexts.values()):
        assert nodes.sessions(party) >= 16  # all 12 windows and 4 evaluations, and before them
        tokens = [order.token for order in nodes.orders[party]]
        assert len(set(tokens)) == len(tokens) and all(len(token) >= 32 for token in tokens)
        file = party_file.place(context)
        assert file.stat().st_mode & 0o777 == 0o600
        anew = Context(RUN, context.node_id, context.node_config, RecordDict(), {})
        party_file.restore(anew)
        assert load_scalars(anew.state) == load_scalars(context.state)
        assert state_to_bytes(anew.state) == state_to_bytes(context.state)
        party_file.restore(anew)  # what a Context holds is never replaced
        assert [each.name for each in file.parent.glob(f"*party-{party}*")] == [file.name]
    assert logged == []


# --- a party that is killed ---------------------------------------------------------------------


def killed(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], since: int
) -> tuple[Vertical, Nodes]:
    """A run in which party 1 is killed after its 6th train message, served but not answered.

    Its file is then as it was after its ``since``-th; with 0, there is none.
    """
    monkeypatch.setattr(stream, "_GRACE", 0.05)
    nodes = streamed.nodes(3, {**keys, "session-seconds": 1e-3} if since else keys)
    saved: dict[int, bytes] = {}
    file = party_file.place(nodes.contexts[FIRST + 1])

    def hook(party: int, kind: str, number: int) -> None:
        if (party, kind) == (1, "train") and since and number == since + 1:
            saved[0] = file.read_bytes()

    def after(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 6):
            if since:
                file.write_bytes(saved[0])
            raise KilledError

    nodes.hook, nodes.after = hook, after
    return streamed.train(nodes), nodes


EXACT = [KEYS, ZEROTH, EF_VFL]
BOTH_ENDS = ["uplink", "gradient"]


@pytest.mark.parametrize("keys", EXACT, ids=lambda keys: str(keys["strategy"]))
def test_a_party_killed_before_it_answered_loses_nothing_that_its_file_has(
    keys: dict[str, Any], streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    strategy, nodes = killed(streamed, monkeypatch, keys, since=5)
    assert_equals_in_process(strategy, nodes)
    assert nodes.count(1, "train") == nodes.count(0, "train") + 1
    assert logged == ["The stream of the party on node 3 broke."]


@pytest.mark.parametrize("since", [0, 2], ids=["no file", "older file"])
@pytest.mark.parametrize(
    "keys",
    [
        EF_VFL,
        ZEROTH,
        {**EF_VFL, "strategy": "vafl", "codec": "top-k", "compression": "error-feedback"},
    ],
    ids=lambda keys: str(keys["strategy"]),
)
def test_a_killed_party_with_an_older_state_or_none_is_brought_into_step(
    keys: dict[str, Any],
    since: int,
    streamed: Streamed,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    strategy, nodes = killed(streamed, monkeypatch, {**keys, "epochs": 8}, since)
    figures = strategy.figures()
    assert figures["failed_parties"] == [] and figures["epochs"] == 8
    assert figures["test_accuracy"] > 0.8
    grid: Any = nodes
    assert_copies_agree(strategy, grid, *BOTH_ENDS * (keys.get("downlink-codec") == "qsgd"))
    assert nodes.count(1, "query.rejoin") == 1
    broke, told = logged
    assert broke == "The stream of the party on node 3 broke."
    assert told.startswith("Party 1 got message " if since else "Party 1 has no state of this run.")
    assert "It goes on from there" in told


def test_with_shared_labels_a_killed_party_ends_the_run_with_a_sentence(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PartyError, match=r"^Party 1 failed: has no state of this run\.$"):
        killed(streamed, monkeypatch, SHARED, since=0)


def test_a_file_that_holds_no_state_is_told(streamed: Streamed, logged: list[str]) -> None:
    nodes = streamed.nodes(2, KEYS)
    file = party_file.place(nodes.contexts[FIRST + 1])
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no state")
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert logged == ["The party's state cannot be read: it begins without."]
    assert state_from_bytes(file.read_bytes()) == nodes.contexts[FIRST + 1].state


def test_a_folder_that_cannot_be_written_is_told(streamed: Streamed, logged: list[str]) -> None:
    nodes = streamed.nodes(2, {**KEYS, "session-seconds": 0.2})
    folder = party_file.place(nodes.contexts[FIRST]).parent
    folder.parent.mkdir()
    folder.write_text("in its way")
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert len(logged) == nodes.sessions(0) + nodes.sessions(1) > 0
    assert all("cannot be kept" in line for line in logged)


# --- a network that breaks ----------------------------------------------------------------------


@pytest.mark.parametrize("keys", [KEYS, EF_VFL, SHARED], ids=lambda keys: str(keys["strategy"]))
@pytest.mark.parametrize("served", [False, True], ids=["before serving", "before the answer"])
def test_a_connection_that_breaks_changes_nothing(
    keys: dict[str, Any], served: bool, streamed: Streamed, logged: list[str]
) -> None:
    port = free_port()
    with Relay(lambda number: port) as relay:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**keys, **address})
        cuts = []

        def cut(party: int, kind: str, number: int) -> None:
            if (party, kind) in ((0, "train"), (1, "evaluate")) and number in (2, 4):
                cuts.append(kind)
                relay.cut()

        if served:
            nodes.after = cut
        else:
            nodes.hook = cut
        strategy = streamed.train(nodes)
    assert sorted(cuts) == ["evaluate", "evaluate", "train", "train"]
    assert_equals_in_process(strategy, nodes)
    for seat in strategy.seats:  # every message was served once, and each session lasted
        mine = [kind for party, kind in nodes.seen if party == seat.party]
        assert mine.count("query.describe") == mine.count("query.session") == 1
        assert len(mine) == seat.exchange + 2
    broke = [line for line in logged if line.startswith("The stream of the party on node ")]
    assert 4 <= len(broke) <= 8 and all(line.endswith(" broke.") for line in broke)


# --- who is refused -----------------------------------------------------------------------------


def call(order: SessionOrder, token: str | None, sent: Iterable[bytes] = ()) -> Iterator[Any]:
    """A call such as a party makes: first the metadata that answer it, then what comes down."""
    credentials = grpc.ssl_channel_credentials(order.certificate.encode())
    options = [("grpc.ssl_target_name_override", "vfl-flower")]
    with grpc.secure_channel(order.address, credentials, options) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        metadata = (("vfl-token", token),) if token else ()
        answer = method(iter(sent), metadata=metadata)
        yield dict(answer.initial_metadata() or ())
        yield from answer


@pytest.mark.parametrize("token", ["", "wrong", "of the order", "ÿ"])
def test_a_call_without_a_token_that_serves_is_refused(
    token: str, streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, KEYS)
    codes = []

    def intrude(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            (order,) = nodes.orders[1]
            shown = {"of the order": order.token, "wrong": "0" * 64, "ÿ": "0" * 63}
            with pytest.raises(grpc.RpcError) as error:
                list(call(order, shown.get(token)))
            codes.append(error.value.code())

    nodes.hook = intrude
    strategy = streamed.train(nodes)
    assert codes == [grpc.StatusCode.UNAUTHENTICATED]
    assert_equals_in_process(strategy, nodes)
    (line,) = logged
    assert line.startswith("Refused a stream from ipv4:127.0.0.1:")
    assert line.endswith("which showed no valid token.")
    assert not any(order.token in line for order in nodes.orders[1] for line in logged)


def intruding(
    streamed: Streamed, sent: Callable[[Message], Iterable[bytes]], line: str, logged: list[str]
) -> None:
    """Party 1 first makes a call of its own, in which it answers the first message with ``sent``.

    It then connects as it should, by the token that this call was answered with.
    """
    nodes = streamed.nodes(2, KEYS)

    def intrude(party: int, order: SessionOrder) -> SessionOrder:
        if party != 1:
            return order
        got: list[Message] = []
        came = threading.Event()

        def answers() -> Iterator[bytes]:
            came.wait(10)
            yield from sent(got[0])

        answer = call(order, order.token, answers())
        again = next(answer)["vfl-token"]
        assert again != order.token
        got.append(from_bytes(next(answer)))
        came.set()
        with suppress(grpc.RpcError):
            list(answer)
        eventually(lambda: line in logged)
        return replace(order, token=again)

    nodes.before_session = intrude
    strategy = streamed.train(nodes)
    assert logged.count(line) == 1
    assert_equals_in_process(strategy, nodes)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([b"garbage"], "a frame that is no Flower message"),
        ([b"\n\x03"], "a frame that is no Flower message"),
        (
            [b"\0" + (stream._LARGEST + 1).to_bytes(8, "big"), b"more"],
            f"a frame of {stream._LARGEST + 1} bytes, above the limit of {stream._LARGEST}",
        ),
        ([b"\0" + (3).to_bytes(8, "big"), b"four"], "a frame of another length than it said"),
    ],
    ids=["garbage", "half a message", "too long", "another length"],
)
def test_a_party_that_sends_what_is_no_message_is_cut(
    sent: list[bytes], why: str, streamed: Streamed, logged: list[str]
) -> None:
    line = f"Cut the stream of the party on node 3: it sent {why}."
    intruding(streamed, lambda message: sent, line, logged)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("_run_id", 8, "run 8, node 3"), ("_src_node_id", 2, "run 7, node 2")],
    ids=["run", "node"],
)
def test_a_party_cannot_answer_for_another_run_or_node(
    field: str, value: int, said: str, streamed: Streamed, logged: list[str]
) -> None:
    def forged(message: Message) -> list[bytes]:
        reply: Message = to_failure("is forged", message)
        reply.metadata.__dict__[field] = value
        # What comes after it ends the call; the message has been refused by then.
        return [to_bytes(reply), b"garbage"]

    line = f"Refused a message of {said}, on the stream of node 3 of run 7."
    intruding(streamed, forged, line, logged)


@pytest.mark.parametrize("sent", [b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"])
def test_bytes_of_no_protocol_on_the_port_do_nothing(
    sent: bytes, streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, KEYS)

    def intrude(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            port = int(nodes.orders[1][0].address.rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass

    nodes.hook = intrude
    strategy = streamed.train(nodes)
    assert_equals_in_process(strategy, nodes)
    assert not [line for line in logged if "Refused" in line or "stream" in line]


# --- a party's end, and what a label holder may do to it ----------------------------------------


class Holder:
    """A server where a party takes it for the label holder's.

    Parameters
    ----------
    script : for each call, what it yields; the last is repeated.
    """

    def __init__(self, *script: Callable[[Iterator[bytes]], Iterable[bytes]]) -> None:
        self.tokens: list[str] = []  # shown in each call
        self.script = script
        key, self.certificate = self_signed("vfl-flower")
        self.server = grpc.server(ThreadPoolExecutor(4))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._exchange
        )
        service, method = METHOD[1:].split("/")
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        credentials = grpc.ssl_server_credentials([(key, self.certificate)])
        self.port = self.server.add_secure_port("127.0.0.1:0", credentials)

    def _exchange(self, received: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        self.tokens.append(str(dict(call.invocation_metadata())["vfl-token"]))
        call.send_initial_metadata((("vfl-token", f"token {len(self.tokens)}"),))
        number = min(len(self.tokens), len(self.script)) - 1
        yield from self.script[number](received)

    @property
    def order(self) -> SessionOrder:
        return SessionOrder(
            address=f"127.0.0.1:{self.port}",
            certificate=self.certificate.decode(),
            token="token 0",
            keep=True,
        )


@contextmanager
def holder(*script: Callable[[Iterator[bytes]], Iterable[bytes]]) -> Iterator[Holder]:
    each = Holder(*script)
    each.server.start()
    try:
        yield each
    finally:
        each.server.stop(None).wait()


def described(identity: str, **other: int) -> bytes:
    """The frame of a first message to party 0, with other metadata."""
    message = to_message(DescribeOrder(outputs=1), FIRST, ttl=60)
    message.metadata.__dict__["_message_id"] = identity
    message.metadata.__dict__.update({f"_{key}": value for key, value in other.items()})
    return to_bytes(message)


def serve(order: SessionOrder) -> tuple[SessionEnd, Context, list[str]]:
    """The end of a session of party 0, its Context, and the messages that its ClientApp saw."""
    seen: list[str] = []
    app = client_app.app

    def watch(message: Message, context: Context) -> Message:
        seen.append(message.metadata.message_id)
        reply: Message = app(message, context)
        return reply

    watching: Any = watch
    keys: dict[str, Any] = {**KEYS}
    context = Context(RUN, FIRST, {"partition-id": 0, "num-partitions": 2}, RecordDict(), keys)
    reply = stream.serve(watching, to_message(order, FIRST, ttl=60), context)
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
        ([b"\0" + b"\xff" * 8], f"a frame of {2**64 - 1} bytes, above the limit"),
    ],
    ids=["garbage", "too long"],
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


def test_a_party_whose_label_holder_vanished_gives_up_and_keeps_its_state(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(stream, "_PATIENCE", 0.2)
    answered = threading.Event()

    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        yield described("a")
        next(received)
        answered.set()
        next(received)

    with holder(script) as each:
        vanish = threading.Thread(
            target=lambda: (answered.wait(10), each.server.stop(None)), daemon=True
        )
        vanish.start()
        end, context, _ = serve(each.order)
        vanish.join()
    assert (end.connected, end.served) == (True, 1)
    assert end.cause.startswith(f"could not reach {each.order.address}")
    assert "\n" not in end.cause
    assert load_scalars(context.state)["exchange"] == 0
    assert party_file.place(context).read_bytes() == state_to_bytes(context.state)
    assert 1 <= len(logged) <= 2 and all(
        line.endswith("it tries on for a while.") for line in logged
    )


def test_a_party_shows_its_token_to_no_server_with_another_certificate(
    streamed: Streamed, logged: list[str]
) -> None:
    port = free_port()
    with (
        holder(lambda received: []) as impostor,
        Relay(lambda number: port if number >= 2 else impostor.port) as relay,
    ):
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address})
        strategy = streamed.train(nodes)
        assert relay.accepted >= 3 and impostor.tokens == []
    assert strategy.transport == "stream"
    assert_equals_in_process(strategy, nodes)
    assert 1 <= len(logged) <= 2 and all("could not reach" in line for line in logged)


# --- parties that cannot connect ----------------------------------------------------------------


def unreachable(monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    monkeypatch.setattr(stream, "_FIRST_SECONDS", 0.1)
    keys: dict[str, Any] = {**KEYS, "stream-address": f"127.0.0.1:{free_port()}", **more}
    return keys


@pytest.mark.parametrize("window", ["auto", 5])
def test_messages_travel_over_flower_where_parties_cannot_connect(
    window: Any, streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, unreachable(monkeypatch, window=window))
    strategy = streamed.train(nodes)
    assert strategy.transport == "messages"
    assert strategy.window == (16 if window == "auto" else window)
    assert_equals_in_process(strategy, nodes)
    (line,) = (line for line in logged if "travel over Flower" in line)
    assert line.startswith("A party could not reach 127.0.0.1:")
    tried = [line for line in logged if line.endswith("it tries on for a while.")]
    assert len(tried) == 2 and len(logged) == 3  # one of each party
    assert all(nodes.sessions(party) == 1 for party in range(2))


def test_a_stream_that_is_demanded_and_cannot_be_ends_the_run_with_a_sentence(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = streamed.nodes(2, unreachable(monkeypatch, transport="stream"))
    with pytest.raises(VflError, match=r"The party on node \d .*could not reach 127") as error:
        streamed.train(nodes)
    assert "\n" not in str(error.value)


def test_a_node_that_dies_before_it_connects_is_asked_again(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_STARTING", 0.3)
    nodes = streamed.nodes(2, KEYS)

    def die_at_first(party: int, order: SessionOrder) -> SessionOrder:
        if party == 1 and len(nodes.orders[1]) == 1:
            raise KilledError
        return order

    nodes.before_session = die_at_first
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert len(nodes.orders[1]) >= 2


def test_a_cut_that_meets_the_renewal_of_a_session_changes_nothing(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(stream, "_GRACE", 0.1)
    port = free_port()
    with Relay(lambda number: port) as relay:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address, "session-seconds": 0.3})

        def cut_the_second(party: int, order: SessionOrder) -> SessionOrder:
            relay.blocked = party == 1 and len(nodes.orders[1]) == 2
            return order

        nodes.before_session = cut_the_second
        strategy = streamed.train(nodes)
        assert strategy.transport == "stream"
        assert_equals_in_process(strategy, nodes)


def test_a_party_cannot_keep_calls_open(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_PARTIES", 4)
    nodes = streamed.nodes(2, KEYS)
    calls: list[Iterator[Any]] = []

    def hoard(party: int, order: SessionOrder) -> SessionOrder:
        while party == 1 and len(calls) < 10:
            calls.append(call(order, order.token, iter(())))  # it sends nothing, and reads no more
            order = replace(order, token=next(calls[-1])["vfl-token"])
        return order

    nodes.before_session = hoard
    assert_equals_in_process(streamed.train(nodes), nodes)


def test_ports_that_are_not_free_are_told_or_passed_over(streamed: Streamed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = resolve({"stream-ports": str(port)})
        with pytest.raises(ConfigError, match=f"No port of stream-ports = '{port}' is free"):
            StreamGrid(streamed.nodes(2, KEYS), config)
        last = min(port + 50, 2**16 - 1)
        nodes = streamed.nodes(2, {**KEYS, "stream-ports": f"{port}-{last}"})
        streamed.train(nodes)
        assert port < int(nodes.orders[0][0].address.removeprefix("127.0.0.1:")) <= last


def test_two_runs_cannot_listen_on_one_port(streamed: Streamed) -> None:
    nodes = streamed.nodes(2, KEYS)
    config = resolve(nodes.contexts[FIRST].run_config)
    with StreamGrid(nodes, config), pytest.raises(ConfigError, match="is free"):
        StreamGrid(nodes, config)


# --- the end ------------------------------------------------------------------------------------


def test_no_thread_outlives_the_grid(streamed: Streamed) -> None:
    before = set(threading.enumerate())
    nodes = streamed.nodes(2, {**KEYS, "epochs": 1})
    streamed.train(nodes)
    nodes.close()
    eventually(
        lambda: all(
            thread in before or thread.name == "tqdm_monitor" for thread in threading.enumerate()
        )
    )


def test_a_run_that_fails_ends_its_sessions(streamed: Streamed) -> None:
    nodes = streamed.nodes(2, KEYS)

    def hook(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            raise ValueError("broken")

    nodes.hook = hook
    with pytest.raises(PartyError, match=r"^Party 1 failed: ValueError"):
        streamed.train(nodes)
    nodes.close()  # which waits for the sessions
    for context in nodes.contexts.values():
        assert party_file.place(context).read_bytes() == state_to_bytes(context.state)
    assert load_scalars(nodes.contexts[FIRST].state)["exchange"] >= 2
