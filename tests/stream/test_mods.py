"""Flower's client mods run around every message of a party, whatever brings it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Context, Message
from flwr.clientapp.mod import arrays_size_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

from strategies.vertical import Vertical
from tests.conftest import trained
from tests.examples import EXAMPLES
from tests.party.test_shared_actors import Nodes as Actors
from tests.party.test_shared_actors import nothing_served, started
from tests.stream.nodes import KEYS, Streamed
from vfl_flower import client_app
from vfl_flower.client_app import PartyApp
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.party import stacked
from vfl_flower.party.state import load_arrays
from vfl_flower.transport import flower_internals

__all__ = ["nothing_served"]

PARTIES = 3
SHORT: dict[str, Any] = {**KEYS, "epochs": 1}
SHARED = {**SHORT, "parties": PARTIES}
CARRIERS = "query.session", "query.host"
"""Kinds of messages that bring others."""
Runtime = Callable[[list[Mod]], Vertical]


class Counting:
    """A mod that counts messages by kind, of each node."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, str]] = Counter()

    def __call__(self, message: Message, context: Context, serve: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if kind not in CARRIERS:
            self.seen[context.node_id, kind] += 1
        return serve(message, context)


@pytest.fixture(params=["in process", "over streams", "shared actors"])
def runtime(request: pytest.FixtureRequest, streamed: Streamed) -> Runtime:
    """Trains with a ClientApp that has these mods."""

    def in_process(mods: list[Mod]) -> Vertical:
        return trained(PARTIES, SHORT, PartyApp(mods))[0]

    def over_streams(mods: list[Mod]) -> Vertical:
        nodes = streamed.nodes(PARTIES, SHORT)
        nodes.app = PartyApp([nodes.watch, *mods])
        strategy = streamed.train(nodes)
        assert [nodes.sessions(party) for party in range(PARTIES)] == [1] * PARTIES
        return strategy

    def shared(mods: list[Mod]) -> Vertical:
        actor = Actors(1, SHARED)
        with patch.object(client_app, "app", PartyApp(mods)):
            strategy = started(actor, SHARED, PARTIES)
        assert {message.metadata.message_type for message in actor.sent} == {"query.host"}
        return strategy

    runtimes: dict[str, Runtime] = {
        "in process": in_process,
        "over streams": over_streams,
        "shared actors": shared,
    }
    return runtimes[request.param]


@pytest.mark.one_by_day
def test_mods_run_around_every_message_of_a_party_and_change_nothing(
    runtime: Runtime, own_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    plain = runtime([])
    assert not [line for line in own_log if "array elements" in line]  # the control
    counting = Counting()
    strategy = runtime([arrays_size_mod, counting])
    messages = sum(record.exchange for record in strategy.run.records) + PARTIES  # descriptions
    assert counting.seen.total() == messages
    assert {kind for _, kind in counting.seen} == {"train", "evaluate", "query.describe"}
    assert len({node for node, _ in counting.seen}) == PARTIES
    sizes = [line for line in own_log if line.startswith("Total array elements sent: ")]
    assert len(sizes) >= messages  # also of messages that bring others
    for name, values in plain.top_arrays().items():
        np.testing.assert_array_equal(strategy.top_arrays()[name], values, err_msg=name)


def test_a_mod_that_makes_a_new_message_in_a_shared_actor_is_a_sentence() -> None:
    def anew(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return Message(call_next(message, context).content, reply_to=message)

    with (
        patch.object(client_app, "app", PartyApp([anew])),
        pytest.raises(VflError, match="a mod made a new message"),
    ):
        started(Actors(1, SHARED), SHARED, PARTIES)
    trained(PARTIES, SHORT, PartyApp([anew]))  # in one process it serves


def test_turns_are_served_together_only_without_mods() -> None:
    keys = {**SHORT, "window": 1, "epochs": 1, "batch-size": 256, "bottom-hidden": 4}
    parties = stacked.FEWEST
    counting = Counting()
    with patch.object(PartyApp, "serve_turns", autospec=True, side_effect=RuntimeError) as many:
        trained(parties, keys, PartyApp([counting]))
        assert not many.called
        with pytest.raises(RuntimeError):
            trained(parties, keys, PartyApp())
    assert len({node for node, _ in counting.seen}) == parties


def test_a_mod_can_change_what_a_party_answers() -> None:
    def silence(message: Message, context: Context, serve: ClientAppCallable) -> Message:
        reply = serve(message, context)
        if message.metadata.message_type == "train":
            arrays = reply.content.array_records["arrays"]
            for name, array in list(arrays.items()):
                arrays[name] = Array(np.zeros_like(array.numpy()))
        return reply

    assert trained(PARTIES, SHORT)[0].run.holder.table.of(0).any()
    assert not trained(PARTIES, SHORT, PartyApp([silence]))[0].run.holder.table.of(0).any()


def test_a_party_refuses_what_a_mod_has_spoilt() -> None:
    def spoil(message: Message, context: Context, serve: ClientAppCallable) -> Message:
        if message.metadata.message_type == "train":
            version = message.content.config_records["scalars"]["version"]
            message.content["scalars"] = ConfigRecord({"exchange": 1, "version": version})
        return serve(message, context)

    with pytest.raises(PartyError, match="TrainOrder whose of_parties is missing"):
        trained(PARTIES, SHORT, PartyApp([spoil]))


def test_an_app_of_a_file_counts_messages_as_contributing_says() -> None:
    names: dict[str, Any] = {"__name__": "counted"}
    exec(EXAMPLES["counted.py"], names)
    strategy, grid = trained(PARTIES, SHORT, names["app"])
    counts = names["counts"]
    assert counts["train"] > 0 and counts["query.describe"] == PARTIES
    assert all(load_arrays(node.state, "model") for node in grid.contexts.values())
    assert counts.total() == sum(record.exchange for record in strategy.run.records) + PARTIES


@pytest.mark.parametrize("looks", [False, True])
def test_flowers_records_are_made_only_for_a_mod_that_looks(
    looks: bool, streamed: Streamed
) -> None:
    def look(message: Message, context: Context, serve: ClientAppCallable) -> Message:
        assert not looks or message.content
        return serve(message, context)

    nodes = streamed.nodes(PARTIES, SHORT)
    nodes.app = PartyApp([nodes.watch, look])
    with patch.object(flower_internals, "to_records", wraps=flower_internals.to_records) as made:
        streamed.train(nodes)
    served = sum(kind not in CARRIERS for _, kind in nodes.seen)
    made_for_mods = made.call_count - 2 * PARTIES  # a session's order and its end have records
    assert made_for_mods == (served if looks else 0) and served > PARTIES * 3
