"""Runs over streams in this process: a Flower of threads, and what a run over it must equal."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from websockets.sync.client import connect

from strategies.vertical import Vertical, strategy_of
from tests.conftest import ALL_ROWS, trained
from vfl_flower.client_app import PartyApp
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.launch.processes import reserved_port
from vfl_flower.party.state import load_arrays
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.base import transport_of
from vfl_flower.transport.flower_internals import (
    from_bytes,
    state_from_bytes,
    state_to_bytes,
    to_bytes,
)
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.stream.grid import StreamGrid
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import read_order, to_message

RUN, SERVER, FIRST = 7, 1, 2  # ids of the run, of the ServerApp, and of the first party's node
KEYS = {"dataset": "breast-cancer", "window": 5, "epochs": 4, "strategy": "split-nn"}
KEYS |= ALL_ROWS
KEYS |= {"checkpoint-every": 0}  # so that no party keeps a state but at the end of a session
EF_VFL = {
    **KEYS,
    "strategy": "ef-vfl",
    "downlink-codec": "qsgd",
    "downlink-compression": "error-feedback",
}
ZEROTH = {**KEYS, "strategy": "syn-zoo", "noise-seed": 0, "batch-size": 64, "bottom-model": "mlp"}
SHARED = {**KEYS, "strategy": "ef-vfl", "labels": "shared"}
HANGING = 300.0  # seconds that only what hangs takes


class KilledError(BaseException):
    """A process that ends at once: it answers nothing, and keeps nothing in memory."""


class Nodes(Grid):
    """Flower with a SuperNode for each party, in threads: one message at a time, by a new process.

    As a mod it sees each message, ordinary or from a stream; ``hook`` is called with it, before the
    party serves it.
    """

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
        self.app = PartyApp(mods=[self.watch])
        self.hook: Callable[[int, str, int], Any] = lambda party, kind, number: None
        self.before_session: Callable[[int, SessionOrder], SessionOrder] = lambda party, order: (
            order
        )
        self.after: Callable[[int, str, int], None] = lambda party, kind, number: None
        self.seen: list[tuple[int, str]] = []  # party and kind of each message, in turn
        self.orders: dict[int, list[SessionOrder]] = {party: [] for party in range(parties)}
        self._pushed = 0
        self._replies: dict[str, Future[Message | None]] = {}
        self._threads = {node: ThreadPoolExecutor(1) for node in self.contexts}

    def sessions(self, party: int) -> int:
        return self.count(party, "query.session")

    def count(self, party: int, kind: str) -> int:
        return self.seen.count((party, kind))

    def watch(self, message: Message, context: Context, serve: ClientAppCallable) -> Message:
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
        reply = serve(message, context)
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
            reply = self.app(from_bytes(to_bytes(message)), process)
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


class Streamed:
    """The fixture `streamed`: a run whose messages travel over streams, in this process."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def reserved_port(self) -> int:
        """One that nobody else is given during the test, and on which nobody listens yet."""
        return self.stack.enter_context(reserved_port())

    def nodes(self, parties: int, keys: dict[str, Any]) -> Nodes:
        if "stream-ports" not in keys:
            keys = {**keys, "stream-ports": str(self.reserved_port())}
        nodes = Nodes(parties, keys)
        self.stack.callback(nodes.close)
        return nodes

    def train(self, nodes: Nodes) -> Vertical:
        config = resolve(nodes.contexts[FIRST].run_config)
        strategy = strategy_of(config)(config, load_labels(config))
        with StreamGrid(transport_of(nodes), config) as grid:
            strategy.start(grid)
        return strategy


FIGURES = ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes", "failed_parties")


@cache
def in_process(
    parties: int, keys: tuple[tuple[str, Any], ...], cost: str
) -> tuple[Vertical, LocalGrid]:
    """Train in this process, once for all tests with these options."""
    dear = cost == "dear"  # else windows are the same by themselves
    with patch.object(LocalGrid, "cost", "dear" if dear else "free"):
        return trained(parties, dict(keys))


def assert_equals_in_process(strategy: Vertical, nodes: Nodes, atol: float = 1e-6) -> None:
    """The same models at both ends as a run in process gives, by the same traffic."""
    of_streams = ("stream-", "session-")
    given = nodes.contexts[FIRST].run_config.items()
    keys = tuple(sorted(each for each in given if not each[0].startswith(of_streams)))
    expected, grid = in_process(len(nodes.contexts), keys, strategy.run.transport.cost)
    for name, values in expected.top_arrays().items():
        np.testing.assert_allclose(strategy.top_arrays()[name], values, atol=atol, err_msg=name)
    for here, there in zip(nodes.contexts.values(), grid.contexts.values(), strict=True):
        for name, values in load_arrays(there.state, "model").items():
            kept = load_arrays(here.state, "model")[name]
            np.testing.assert_allclose(kept, values, atol=atol, err_msg=name)
    figures, wanted = strategy.figures(), expected.figures()
    assert {name: figures[name] for name in FIGURES} == {name: wanted[name] for name in FIGURES}
    assert len(strategy.run.history.entries) == len(expected.run.history.entries)
    assert figures["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=1e-6)


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANGING
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        threading.Event().wait(0.005)


@contextmanager
def call(order: SessionOrder, token: str | None, **options: Any) -> Iterator[Any]:
    """A call such as a party makes, by another implementation of the same protocol."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=order.certificate)
    connecting: Any = connect
    with connecting(
        f"wss://{order.address}/",
        **{"ssl": context, "server_hostname": "vfl-flower", "compression": None, "proxy": None},
        additional_headers={"vfl-token": token} if token else {},
        legacy=True,
        **options,
    ) as made:
        yield made
