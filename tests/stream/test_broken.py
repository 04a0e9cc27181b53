"""Effects of killed parties, broken networks and intruders on a run over streams."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State

from strategies.vertical import Vertical
from tests.conftest import assert_copies_agree
from tests.relay import Relay
from tests.stream.nodes import (
    EF_VFL,
    FIRST,
    KEYS,
    SHARED,
    ZEROTH,
    KilledError,
    Nodes,
    Streamed,
    assert_equals_in_process,
    call,
    eventually,
)
from vfl_flower import client_app
from vfl_flower.config.errors import PartyError
from vfl_flower.party import session as between
from vfl_flower.party import state_file
from vfl_flower.transport.flower_internals import from_bytes, state_to_bytes, to_bytes
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.stream import grid, session
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import to_failure

# --- a party that is killed ---------------------------------------------------------------------


def killed(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], since: int
) -> tuple[Vertical, Nodes]:
    """A run in which party 1 is killed after its 6th train message, served but not answered.

    Its file is then as it was after its ``since``-th; with 0, there is none.
    """
    monkeypatch.setattr(grid, "_GRACE", 0.05)
    nodes = streamed.nodes(3, {**keys, "session-seconds": 1e-3} if since else keys)
    saved: dict[int, bytes] = {}
    file = state_file.place(nodes.contexts[FIRST + 1])

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


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", EXACT, ids=lambda keys: str(keys["strategy"]))
def test_a_party_killed_before_it_answered_loses_nothing_that_its_file_has(
    keys: dict[str, Any], streamed: Streamed, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    strategy, nodes = killed(streamed, monkeypatch, keys, since=5)
    assert_equals_in_process(strategy, nodes)
    assert nodes.count(1, "train") == nodes.count(0, "train") + 1
    assert logged == ["The stream of the party on node 3 broke."]


@pytest.mark.one_by_day
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
    assert figures["test_accuracy"] > (0.6 if keys is ZEROTH else 0.8)  # zeroth order is slower
    grid: Any = nodes
    assert_copies_agree(strategy, grid, *BOTH_ENDS * (keys.get("downlink-codec") == "qsgd"))
    assert nodes.count(1, "query.rejoin") == 1
    broke, told = logged
    assert broke == "The stream of the party on node 3 broke."
    cause = "got message " if since else "has no state of this run)"
    assert told.startswith(f"Party 1 has an older state ({cause}")
    assert "It continues from that state" in told


def overfitted(folder: Path) -> dict[str, Any]:
    """Keys of a run that does best in its third epoch: a quarter of the labels is wrong."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((300, 8)).astype(np.float32)
    y = (x[:, 0] + x[:, 5] > 0) ^ (generator.random(300) < 0.25)
    np.savez(folder / "noisy.npz", X=x, y=y.astype(int))
    return {
        **{"dataset": f"npz:{folder / 'noisy.npz'}", "bottom-hidden": 32, "top-hidden": 32},
        **{"optimizer": "adam", "party-lr": 0.02, "server-lr": 0.02, "epochs": 8, "patience": 0},
    }


@pytest.mark.one_by_day
@pytest.mark.parametrize("told", [True, False])
def test_a_killed_party_comes_back_to_the_best_model_of_both_sides(
    told: bool, streamed: Streamed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grid, "_GRACE", 0.05)
    if not told:  # the control: no party writes its copies to its disk
        monkeypatch.setattr(client_app, "_keeps_states", lambda context: False)
    keys = overfitted(tmp_path)
    nodes = streamed.nodes(2, keys)
    for context in nodes.contexts.values():
        context.node_config["dataset"] = keys["dataset"]  # which each party permits

    def after(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 5 * 7 + 3):  # of the sixth epoch
            raise KilledError

    nodes.after = after
    strategy = streamed.train(nodes)
    history, run = strategy.history, strategy.run
    assert nodes.count(1, "query.rejoin") == 1 and history.best is not None
    losses = [entry["validation_loss"] for entry in history.entries]
    assert min(losses) == losses[2]  # it was away after the best epoch
    assert (losses[history.best] == min(losses)) == told
    # Both ends have the model of that epoch again.
    entry = history.entries[history.best]
    assert run.holder.evaluate().test.loss == entry["test_loss"]
    for party, context in nodes.contexts.items():
        h = between.resume(context).party.upload_test_rows(0.0).arrays["embedding"]
        np.testing.assert_allclose(h, run.holder.held_out.table.of(party - FIRST), atol=1e-6)


def test_with_shared_labels_a_killed_party_ends_the_run_with_a_sentence(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PartyError, match=r"^Party 1 failed: has no state of this run\.$"):
        killed(streamed, monkeypatch, SHARED, since=0)


def test_a_file_that_holds_no_state_is_told(streamed: Streamed, logged: list[str]) -> None:
    nodes = streamed.nodes(2, KEYS)
    file = state_file.place(nodes.contexts[FIRST + 1])
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no state")
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert logged == [f"The party's state in {file} cannot be read and is ignored."]
    kept, there = state_file.read(file), nodes.contexts[FIRST + 1].state
    assert state_to_bytes(kept) == state_to_bytes(there)


def test_a_folder_that_cannot_be_written_is_told(streamed: Streamed, logged: list[str]) -> None:
    nodes = streamed.nodes(2, {**KEYS, "session-seconds": 0.2})
    folder = state_file.place(nodes.contexts[FIRST]).parent
    folder.parent.mkdir()
    folder.write_text("in its way")
    assert_equals_in_process(streamed.train(nodes), nodes)
    assert len(logged) == nodes.sessions(0) + nodes.sessions(1) > 0
    assert all("cannot be saved" in line for line in logged)


# --- a network that breaks ----------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", [KEYS, EF_VFL, SHARED], ids=lambda keys: str(keys["strategy"]))
@pytest.mark.parametrize("served", [False, True], ids=["before serving", "before the answer"])
def test_a_connection_that_breaks_changes_nothing(
    keys: dict[str, Any], served: bool, streamed: Streamed, logged: list[str]
) -> None:
    port = streamed.reserved_port()
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
    for seat in strategy.run.records:  # every message was served once, and each session lasted
        mine = [kind for party, kind in nodes.seen if party == seat.party]
        assert mine.count("query.describe") == mine.count("query.session") == 1
        assert len(mine) == seat.exchange + 2
    broke = [line for line in logged if line.startswith("The stream of the party on node ")]
    assert 4 <= len(broke) <= 8 and all(line.endswith(" broke.") for line in broke)


@pytest.mark.nightly
def test_a_cut_that_meets_the_renewal_of_a_session_changes_nothing(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(grid, "_GRACE", 0.1)
    port = streamed.reserved_port()
    with Relay(lambda number: port) as relay:
        address = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        nodes = streamed.nodes(2, {**KEYS, **address, "session-seconds": 0.3})

        def cut_the_second(party: int, order: SessionOrder) -> SessionOrder:
            relay.blocked = party == 1 and len(nodes.orders[1]) == 2
            return order

        nodes.before_session = cut_the_second
        strategy = streamed.train(nodes)
        assert strategy.run.transport.medium == "stream"
        assert_equals_in_process(strategy, nodes)


# --- who is refused -----------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("token", ["", "wrong", "of the order", "ÿ"])
def test_a_call_without_a_token_that_serves_is_refused(
    token: str, streamed: Streamed, logged: list[str]
) -> None:
    nodes = streamed.nodes(2, KEYS)
    codes = []

    def intrude(party: int, kind: str, number: int) -> None:
        if (party, kind, number) == (1, "train", 3):
            (order,) = nodes.orders[1]
            shown = {"of the order": order.token, "wrong": "0" * 64, "ÿ": "ÿ"}
            with pytest.raises(InvalidStatus) as error, call(order, shown.get(token)):
                pass
            codes.append(error.value.response.status_code)

    nodes.hook = intrude
    strategy = streamed.train(nodes)
    assert codes == [401]
    assert_equals_in_process(strategy, nodes)
    assert logged == ["Refused calls to the stream's port without a valid token: 1."]


def intruding(
    streamed: Streamed, sent: Callable[[Message], Iterable[bytes]], line: str, logged: list[str]
) -> None:
    """Party 1 first makes an extra call, in which it answers the first message with ``sent``.

    It then connects as it should, by the token that this call was answered with.
    """
    nodes = streamed.nodes(2, KEYS)

    def intrude(party: int, order: SessionOrder) -> SessionOrder:
        if party != 1:
            return order
        with suppress(ConnectionClosed, OSError), call(order, order.token) as made:
            again = made.response.headers["vfl-token"]
            assert again != order.token
            for each in sent(from_bytes(made.recv())):
                if each == ENDS:
                    made.close_socket()
                elif each.startswith(RAW):
                    made.socket.sendall(each.removeprefix(RAW))
                else:
                    made.send(each)
            eventually(lambda: line in logged)
        return replace(order, token=again)

    nodes.before_session = intrude
    strategy = streamed.train(nodes)
    assert logged.count(line) == 1
    assert_equals_in_process(strategy, nodes)


RAW, ENDS = b"raw: ", b"the end of the connection"
"""The first begins what is sent as it is, over TLS and as no message."""


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([b"garbage"], "a frame that is no Flower message"),
        ([b"\n\x03"], "a frame that is no Flower message"),
        (
            [RAW + b"\x82\xff" + (600_000_000).to_bytes(8, "big"), b"more"],
            f"an invalid frame (frame with 600000000 bytes exceeds limit of {2 * SMALL} bytes)",
        ),
        ([RAW + b"GET / HTTP/1.1\r\n\r\n"], "an invalid frame (reserved bits must be 0)"),
        ([RAW + b"\x82\x04four"], "an invalid frame (incorrect masking)"),
    ],
    ids=["garbage", "half a message", "too long", "no frame", "unmasked"],
)
def test_a_party_that_sends_what_is_no_message_is_cut(
    sent: list[bytes], why: str, streamed: Streamed, logged: list[str]
) -> None:
    line = f"Cut the stream of the party on node 3: it sent {why}."
    intruding(streamed, lambda message: sent, line, logged)


def test_half_a_frame_ends_with_its_connection(streamed: Streamed, logged: list[str]) -> None:
    sent = [RAW + b"\x82\x8a\0\0\0\0half", ENDS]
    intruding(streamed, lambda message: sent, "The stream of the party on node 3 broke.", logged)


@pytest.mark.one_by_day
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
        return [to_bytes(reply)]

    line = f"Refused a message of {said}, on the stream of node 3 of run 7."
    intruding(streamed, forged, line, logged)


@pytest.mark.one_by_day
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
                with suppress(ConnectionResetError):
                    while connection.recv(1000):
                        pass

    nodes.hook = intrude
    strategy = streamed.train(nodes)
    assert_equals_in_process(strategy, nodes)
    assert not [line for line in logged if "Refused" in line or "stream" in line]


def test_a_party_cannot_keep_calls_open(streamed: Streamed) -> None:
    nodes = streamed.nodes(2, KEYS)
    with ExitStack() as stack:
        calls: list[Any] = []

        def hoard(party: int, order: SessionOrder) -> SessionOrder:
            while party == 1 and len(calls) < 10:
                made = call(order, order.token, ping_interval=None)  # it sends nothing
                calls.append(stack.enter_context(made))
                order = replace(order, token=calls[-1].response.headers["vfl-token"])
            eventually(lambda: not calls or all(map(closed, calls[:-1])))
            return order

        nodes.before_session = hoard
        assert_equals_in_process(streamed.train(nodes), nodes)
        assert len(calls) == 10
        eventually(lambda: closed(calls[-1]))


def closed(made: Any) -> bool:
    return bool(made.protocol.state is State.CLOSED)
