"""Parties that share actors."""

import json
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from flwr.app import Context, Error, Message, RecordDict

from strategies.vertical import Vertical, strategy_of
from tests.conftest import ALL_ROWS, trained
from tests.fleet import ray_cluster
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.launch.engines import predict_local, run_local, run_ray
from vfl_flower.launch.processes import ray_cpus
from vfl_flower.party import session as between
from vfl_flower.party import stacked
from vfl_flower.party.state import load_arrays
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport import flower_internals, shared_actor, wire
from vfl_flower.transport.base import Transport
from vfl_flower.transport.messages import Arrays, DescribeOrder, Order, TrainOrder, Upload
from vfl_flower.transport.shared_actor import SharedActorAnswer, SharedActorOrder, SharedActors

PARTIES = 20
KEYS: dict[str, Any] = {
    **ALL_ROWS,
    **{"dataset": "breast-cancer", "epochs": 2, "batch-size": 128, "noise-seed": 0},
    **{"bottom-hidden": 4, "embedding-size": 2, "window": 2},
}


class Nodes(Transport):
    """Nodes that serve bytes; where they ``forget``, each message is served by a new process."""

    engine, medium, cost = "ray", "messages", "cheap"

    def __init__(self, nodes: int, keys: dict[str, Any], forget: bool = False) -> None:
        self.contexts_of = {
            10 + node: Context(
                run_id=77,
                node_id=10 + node,
                node_config={"partition-id": node, "num-partitions": nodes, "simulated": True},
                state=RecordDict(),
                run_config=keys,
            )
            for node in range(nodes)
        }
        self.forget = forget
        self.sent: list[Message] = []
        self.broken: set[int] = set()  # nodes that answer no more
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.contexts_of)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            self.sent.append(message)
            keys.append(str(len(self.sent)))
            flower_internals.set_message_id(message, keys[-1])
            arrived = flower_internals.from_bytes(flower_internals.to_bytes(message))
            if message.metadata.dst_node_id in self.broken:
                error = Error(code=1, reason="the node is gone")
                self._replies[keys[-1]] = Message(error, reply_to=message)
                continue
            context = self.contexts_of[message.metadata.dst_node_id]
            if self.forget:
                between.forget(77)
                shared_actor._served.clear()
                context.state = flower_internals.state_from_bytes(
                    flower_internals.state_to_bytes(context.state)
                )
            reply = client_app.app(arrived, context)
            self._replies[keys[-1]] = flower_internals.from_bytes(flower_internals.to_bytes(reply))
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None


@pytest.fixture(autouse=True)
def nothing_served() -> None:
    flower_internals.begin_task()
    between.forget(77)
    shared_actor._served.clear()


def started(transport: Nodes, keys: dict[str, Any], parties: int = PARTIES) -> Vertical:
    """Train virtual parties on these nodes."""
    config = resolve(keys)
    strategy = strategy_of(config)(config, load_labels(config))
    strategy.start(SharedActors(transport, parties))
    return strategy


def shared(
    keys: dict[str, Any], nodes: int = 3, forget: bool = False
) -> tuple[Vertical, Nodes, dict[int, Arrays]]:
    """A run of virtual parties, their nodes, and what the parties have learned."""
    keys = {**keys, "parties": PARTIES}
    transport = Nodes(nodes, keys, forget)
    strategy = started(transport, keys)
    models = {
        party: load_arrays(context.state, f"{party}/model")
        for context in transport.contexts_of.values()
        for party in range(PARTIES)
        if f"{party}/model" in context.state
    }
    return strategy, transport, models


def assert_as_in_process(
    keys: dict[str, Any], strategy: Vertical, models: dict[int, Arrays]
) -> None:
    """The loss and all bottom models are as in process."""
    there, grid = trained(PARTIES, keys)
    assert sorted(models) == list(range(PARTIES))
    for party, context in enumerate(grid.contexts.values()):
        for name, array in load_arrays(context.state, "model").items():
            np.testing.assert_allclose(models[party][name], array, rtol=1e-4, atol=2e-6)
    loss = there.run.history.entries[-1]["test_loss"]
    assert strategy.run.history.entries[-1]["test_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.one_by_day
@pytest.mark.parametrize("forget", [False, True], ids=["", "processes that forget"])
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn"},
        {"strategy": "ef-vfl", "epochs": 1},
        {"strategy": "vafl", "epochs": 1, "validation-fraction": 0.2, "patience": 1},
    ],
    ids=["split-nn", "ef-vfl", "vafl"],
)
def test_parties_that_share_actors_learn_what_they_do_in_process(
    keys: dict[str, Any], forget: bool
) -> None:
    keys = {**KEYS, **keys}
    strategy, _, models = shared(keys, forget=forget)
    assert_as_in_process(keys, strategy, models)


@pytest.mark.one_by_day
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_stacked_parties_of_one_actor_learn_what_they_do_in_process(
    aggregation: str, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 40), np.float32)
    np.savez(tmp_path / "rows.npz", X=x, y=(x.sum(1) > 0).astype(np.int64))
    keys = {**KEYS, "dataset": f"npz:{tmp_path}/rows.npz", "window": 1, "batch-size": 64}
    keys |= {"combine": "mean", "aggregation": aggregation}
    with patch.object(stacked, "_together", wraps=stacked._together) as together:
        strategy, _, models = shared(keys, nodes=1)
        assert {len(call.args[0]) for call in together.call_args_list} == {PARTIES}
    assert_as_in_process(keys, strategy, models)


def test_an_actor_gets_one_message_for_all_of_its_parties() -> None:
    strategy, transport, _ = shared({**KEYS, "epochs": 1})
    turns = sum(seat.exchange for seat in strategy.run.records) + PARTIES  # and descriptions
    assert {m.metadata.message_type for m in transport.sent} == {"query.host"}
    assert len(transport.sent) * PARTIES == 3 * turns


@pytest.mark.nightly
def test_if_an_actor_fails_all_of_its_parties_fail() -> None:
    keys = {**KEYS, "strategy": "vafl", "on-party-failure": "continue", "epochs": 3}
    transport = Nodes(2, keys)
    pushed = transport.push_messages

    def push(messages: Iterable[Message]) -> list[str]:
        transport.broken = {11} if len(transport.sent) > 4 else set()
        return pushed(messages)

    transport.push_messages = push  # type: ignore[method-assign]
    strategy = started(transport, keys)
    failed = [seat.party for seat in strategy.run.records if not seat.alive]
    assert failed == list(range(PARTIES // 2, PARTIES))


def test_an_answer_may_be_as_large_as_was_due_when_it_was_asked_for() -> None:
    """Whatever is sent to another node meanwhile."""
    transport = Nodes(2, {**KEYS, "parties": PARTIES})
    there = SharedActors(transport, PARTIES)
    there.expect({TrainOrder.kind: 10**6, DescribeOrder.kind: 0})

    def large(message: Message, context: Context) -> Message:
        found = wire.unpack_many(wire.read_order(message, SharedActorOrder).arrays["packed"])
        answers = []
        for node, order in found:
            call = wire.to_message(cast(Order, order), node, 60.0, call=True)
            arrays: Arrays = {"embedding": np.zeros((500, 100), np.float32)}
            answers.append(wire.to_reply(Upload(party=0, exchange=1, arrays=arrays), call))
        return wire.to_reply(SharedActorAnswer(arrays={"packed": wire.pack_many(answers)}), message)

    order = TrainOrder(exchange=1, epoch=0, first=0, steps=1, coordinated=False)
    nodes = there.get_node_ids()
    with patch.object(client_app, "app", large):
        first = there.push_messages(
            [wire.to_message(order, node, 60.0, call=True) for node in nodes[:9]]
        )
        there.push_messages([wire.to_message(DescribeOrder(outputs=1), nodes[-1], 60.0, call=True)])
    for reply in there.pull_messages(first):
        assert wire.read_reply(reply, Upload).arrays["embedding"].shape == (500, 100)


def test_a_real_node_is_no_shared_actor() -> None:
    transport = Nodes(1, KEYS)
    context = transport.contexts_of[10]
    del context.node_config["simulated"]
    order = wire.to_message(DescribeOrder(outputs=1), 2, 60.0, call=True)
    message = SharedActorOrder(parties=2, arrays={"packed": wire.pack_many([order])})
    (key,) = transport.push_messages([wire.to_message(message, 10, 60.0)])
    (reply,) = transport.pull_messages([key])
    with pytest.raises(VflError, match="is one party, and no shared actor"):
        wire.read_reply(reply, SharedActorAnswer)


# --- many messages as one -------------------------------------------------------------------------


ORDER = TrainOrder(exchange=1, epoch=2, first=3, steps=4, coordinated=True)


def test_what_is_packed_comes_as_it_was() -> None:
    arrays: dict[str, Any] = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.ones((0, 4)),
        "c": np.bool_([1]),
    }
    order = replace(ORDER, arrays=arrays)
    calls = [wire.to_message(order, 7, 60.0, call=True), wire.to_message(order, 8, 60.0, call=True)]
    upload = wire.to_reply(Upload(party=1, exchange=1, arrays=arrays), calls[0])
    failure = wire.to_failure("is broken.", calls[1], out_of_step=True)
    found = wire.unpack_many(wire.pack_many([*calls, upload, failure]))
    assert [node for node, _ in found[:2]] == [7, 8]
    for _, payload in found[:3]:
        assert not isinstance(payload, VflError)
        for name, array in arrays.items():
            np.testing.assert_array_equal(payload.arrays[name], array)
            assert payload.arrays[name].dtype == array.dtype
    came: Any = found[0][1]
    again = wire.to_message(came, 7, 60.0, call=True)
    assert wire.read_order(again, TrainOrder).steps == 4
    assert str(found[3][1]) == "is broken." and type(found[3][1]).__name__ == "OutOfStepError"


def test_a_call_that_was_looked_at_is_packed_as_it_then_says() -> None:
    call = wire.to_message(ORDER, 7, 60.0, call=True)
    assert call.content["scalars"]
    ((node, payload),) = wire.unpack_many(wire.pack_many([call]))
    assert node == 7 and isinstance(payload, TrainOrder) and payload.steps == 4


def test_a_failure_that_does_not_say_why_is_told_so() -> None:
    call = wire.to_message(ORDER, 7, 60.0, call=True)
    ((_, cause),) = wire.unpack_many(wire.pack_many([Message(Error(code=1), reply_to=call)]))
    assert isinstance(cause, VflError) and str(cause) == "it did not say why"


@pytest.mark.parametrize(
    "head",
    [
        [[[]]],
        [{"node": "x", "failure": ["a", False]}],
        [{"node": 1, "kind": "TrainOrder", "scalars": [], "arrays": []}],
        [{"node": 1, "kind": "TrainOrder", "scalars": [1] * 5, "arrays": [["a", "<f4", [-1]]]}],
        7,
        b"[" * 100_000,
    ],
    ids=["a list", "no node", "too few scalars", "a negative shape", "no list", "without end"],
)
def test_odd_heads_are_refused_with_a_sentence(head: Any) -> None:
    said = head if isinstance(head, bytes) else json.dumps(head).encode()
    packed = np.frombuffer(len(said).to_bytes(8, "big") + said, np.uint8)
    with pytest.raises(VflError, match="messages that do not decode"):
        wire.unpack_many(packed)


@pytest.mark.parametrize(
    "cut",
    [slice(0), slice(5), slice(20), slice(-3), slice(3, None)],
    ids=["nothing", "no head", "half a head", "too few bytes", "moved"],
)
def test_what_does_not_unpack_is_refused_with_a_sentence(cut: slice) -> None:
    order = replace(ORDER, arrays={"a": np.ones(9)})
    packed = wire.pack_many([wire.to_message(order, 7, 60.0, call=True)])
    assert len(wire.unpack_many(packed)) == 1
    with pytest.raises(VflError, match="messages that do not decode"):
        wire.unpack_many(packed[cut])


# --- Ray ------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_virtual_parties_on_a_cluster_of_two_ray_nodes_learn_what_they_do_in_process(
    tmp_path: Path,
) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 128), np.float32)
    np.savez(tmp_path / "rows.npz", X=x, y=(x.sum(1) > 0).astype(np.int64))
    keys = {**KEYS, "dataset": f"npz:{tmp_path}/rows.npz", "window": 1, "epochs": 4}
    actors: dict[str, int] = {}

    def look(nodes: dict[str, psutil.Process]) -> None:
        """Note the most actors that each node has."""
        while not done.wait(0.2):
            for address, node in nodes.items():
                with suppress(psutil.Error):
                    names = [each.name() for each in node.children(recursive=True)]
                    found = sum("ClientAppActor" in name for name in names)
                    actors[address] = max(actors.get(address, 0), found)

    done = threading.Event()
    with ray_cluster(tmp_path, 2) as nodes:
        assert ray_cpus() == 2
        watch = threading.Thread(target=look, args=(nodes,))
        watch.start()
        try:
            there = {**keys, "out": str(tmp_path / "ray"), "stream-address": "127.0.0.2"}
            on_cluster = run_ray(64, there)
        finally:
            done.set()
            watch.join()
    here = run_local(64, {**keys, "out": str(tmp_path / "local")})
    assert actors == {"127.0.0.2": 1, "127.0.0.3": 1}
    predicted = predict_local({"model": str(on_cluster.folder), "out": str(tmp_path / "p.csv")})
    accuracy = json.loads(predicted.with_suffix(".json").read_text())["accuracy"]
    assert accuracy == pytest.approx(on_cluster.summary["test_accuracy"])
    assert on_cluster.summary["transport"] == "stream" and on_cluster.summary["parties"] == 64
    ours, theirs = (run.history[-1] for run in (on_cluster, here))
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
    assert ours["exchanges"] == theirs["exchanges"] and ours["bytes_up"] == theirs["bytes_up"]


def test_a_cluster_that_is_not_there_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:1")
    with pytest.raises(ConfigError, match="is not a Ray cluster that this machine belongs to"):
        ray_cpus()
