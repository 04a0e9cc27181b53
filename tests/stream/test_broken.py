"""Effects of killed parties and broken networks on a run over streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
)
from vfl_flower import client_app
from vfl_flower.config.errors import PartyError
from vfl_flower.party import session as between
from vfl_flower.party import state_file
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.stream import grid, session
from vfl_flower.transport.stream.messages import SessionOrder

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
