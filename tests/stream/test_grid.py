"""The same run over streams as in process; sessions, ports, and what is left of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from tests.conftest import ALL_ROWS, trained
from tests.stream.nodes import (
    EF_VFL,
    FIRST,
    KEYS,
    RUN,
    SHARED,
    ZEROTH,
    KilledError,
    Streamed,
    assert_equals_in_process,
    eventually,
)
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.party import state_file
from vfl_flower.party.state import load_scalars
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.base import transport_of
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.stream import grid, session
from vfl_flower.transport.stream.grid import StreamGrid
from vfl_flower.transport.stream.messages import SessionOrder

# --- the same run over streams ------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [KEYS, ZEROTH, EF_VFL, SHARED, {**SHARED, "initial-surrogates": "embeddings"}],
    ids=lambda k: str(k["strategy"]),
)
def test_a_synchronous_run_is_the_same_as_in_process(
    keys: dict[str, Any], streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(3, keys)
    strategy = streamed.train(nodes)
    assert (strategy.run.transport.medium, strategy.run.transport.engine) == (
        "stream",
        "supernodes",
    )
    assert_equals_in_process(strategy, nodes)
    assert [nodes.sessions(party) for party in range(3)] == [1, 1, 1]
    assert logged == []


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "vafl", "window": 8, "epochs": 12, "party-lr": 0.1, "server-lr": 0.1},
        {"strategy": "cascaded", "epochs": 20, "noise-seed": 0, "window": 16, "party-lr": 1e-3},
        {"strategy": "dpzv", "epochs": 16, "noise-seed": 0, "window": 16, "noise-multiplier": 1.0},
    ],
    ids=lambda keys: str(keys["strategy"]),
)
def test_an_asynchronous_run_learns_as_much_as_in_process(
    keys: dict[str, Any], streamed: Streamed
) -> None:
    # Uploads come in another order than in process, where no party is ever late. A machine that has
    # other work may let one party run far ahead of the other, which here waits.
    nodes = streamed.nodes(2, keys)

    def wait(party: int, kind: str, number: int) -> None:
        if kind == "train":
            eventually(lambda: nodes.count(1 - party, "train") > number - 3)

    nodes.hook = wait
    strategy = streamed.train(nodes)
    expected, _ = trained(2, {**keys, "window": strategy.run.schedule.window})
    figures, wanted = strategy.figures(), expected.figures()
    assert figures["exchanges"] == wanted["exchanges"]
    assert figures["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=0.06)


def test_a_small_run_with_default_options_is_the_same_in_process(streamed: Streamed) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 2}
    nodes = streamed.nodes(2, keys)
    strategy = streamed.train(nodes)
    assert strategy.run.transport.medium == "stream"
    assert_equals_in_process(strategy, nodes)
    # The control: with more than 64 steps an epoch, windows go by what exchanges take.
    nodes = streamed.nodes(2, {**keys, **ALL_ROWS, "bottom-model": "mlp", "batch-size": 5})
    strategy = streamed.train(nodes)
    with pytest.raises(AssertionError, match="Mismatch"):
        assert_equals_in_process(strategy, nodes)
    figures = strategy.figures()
    assert figures["window_measured"]["exchange_seconds"] > 0
    assert 1 <= figures["window"] <= 32 and strategy.run.budget.left == 0
    assert strategy.run.holder.steps == 2 * strategy.run.budget.per_epoch
    assert figures["test_accuracy"] > 0.85


@pytest.mark.one_by_day
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
        file = state_file.place(context)
        assert file.stat().st_mode & 0o777 == 0o600
        anew = Context(RUN, context.node_id, context.node_config, RecordDict(), {})
        state_file.load_latest(anew, str(RUN))
        assert load_scalars(anew.state) == load_scalars(context.state)
        assert state_to_bytes(anew.state) == state_to_bytes(context.state)
        state_file.load_latest(anew, str(RUN))  # the content of a Context is never replaced
        assert [each.name for each in file.parent.glob(f"*party-{party}*")] == [file.name]
    assert logged == []


# --- parties that cannot connect ----------------------------------------------------------------


def unreachable(streamed: Streamed, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    monkeypatch.setattr(session, "_FIRST_SECONDS", 0.1)
    return {**KEYS, "stream-address": f"127.0.0.1:{streamed.reserved_port()}", **more}


@pytest.mark.one_by_day
@pytest.mark.parametrize("window", ["auto", 5])
def test_messages_travel_over_flower_where_parties_cannot_connect(
    window: Any, streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, unreachable(streamed, monkeypatch, window=window))
    strategy = streamed.train(nodes)
    assert strategy.run.transport.medium == "messages"
    assert strategy.run.schedule.longest == (16 if window == "auto" else window)
    assert_equals_in_process(strategy, nodes)
    (line,) = (line for line in logged if "travel over Flower" in line)
    assert line.startswith("A party could not reach 127.0.0.1:")
    tried = [line for line in logged if line.endswith("It tries again for a while.")]
    assert len(tried) == 2 and len(logged) == 3  # one of each party
    assert all(nodes.sessions(party) == 1 for party in range(2))


def test_a_stream_that_is_demanded_and_cannot_be_ends_the_run_with_a_sentence(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = streamed.nodes(2, unreachable(streamed, monkeypatch, transport="stream"))
    with pytest.raises(VflError, match=r"The party on node \d .*could not reach 127") as error:
        streamed.train(nodes)
    assert "\n" not in str(error.value)


def test_a_node_that_dies_before_it_connects_is_asked_again(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_STARTING", 0.3)
    nodes = streamed.nodes(2, KEYS)

    def die_at_first(party: int, order: SessionOrder) -> SessionOrder:
        if party == 1 and len(nodes.orders[1]) == 1:
            raise KilledError
        return order

    nodes.before_session = die_at_first
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert len(nodes.orders[1]) >= 2


def test_ports_that_are_not_free_are_told_or_passed_over(streamed: Streamed) -> None:
    nodes = streamed.nodes(2, {**KEYS, "epochs": 1})
    config, transport = resolve(nodes.contexts[FIRST].run_config), transport_of(nodes)
    port = int(config.running.stream_ports)
    with StreamGrid(transport, config):  # another run on this port
        with (
            pytest.raises(ConfigError, match=f"No port of stream-ports = '{port}' is free"),
            StreamGrid(transport, config),
        ):
            pass
        last = min(port + 50, 2**16 - 1)
        nodes = streamed.nodes(2, {**KEYS, "epochs": 1, "stream-ports": f"{port}-{last}"})
        streamed.train(nodes)
        assert port < int(nodes.orders[0][0].address.removeprefix("127.0.0.1:")) <= last


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
    with pytest.raises(PartyError, match=r"^Party 1 failed: raised ValueError in hook"):
        streamed.train(nodes)
    nodes.close()  # which waits for the sessions
    for context in nodes.contexts.values():
        kept = state_file.read(state_file.place(context))
        assert state_to_bytes(kept) == state_to_bytes(context.state)
    assert load_scalars(nodes.contexts[FIRST].state)["exchange"] >= 2
