"""The online service in this process: its answers, its deadline, and what it refuses."""

import ast
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Context, Message

from tests.fleet import until
from tests.ledgers import numbers_in
from tests.organisations import ID, Organisations, cancer, change, cut, read, write
from tests.serving import TOKEN, Served, SlowGrid, served, serving, with_newcomers
from vfl_flower import client_app
from vfl_flower.client import Scores
from vfl_flower.config.audit_chain import find, verify
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.data.ids import encoded
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.party import inputs
from vfl_flower.protocol.systems import resolve
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.inference.party import scoring
from vfl_flower.tasks.inference.party.model import in_use
from vfl_flower.tasks.inference.serving import joining, web
from vfl_flower.tasks.inference.serving import serve as serve_module
from vfl_flower.tasks.inference.serving.serve import lasting, serve
from vfl_flower.transport.early_messages import ConfirmOrder, Reused
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.gather import gather
from vfl_flower.transport.http import listening as listening_module
from vfl_flower.transport.http.tokens import Tokens
from vfl_flower.transport.messages import (
    Predicted,
    PredictOrder,
    Scored,
    ScoreOrder,
    ServeOrder,
    Serving,
)
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder
from vfl_flower.transport.wire import read_reply, to_failure, to_reply

SHORT = {"epochs": 3, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Two parties and a label holder with columns; "run" needs both parties, "any" does not."""
    organisations = cut(tmp_path_factory.mktemp("served"), cancer(columns=9, rows=260), own=3)
    organisations.run("run", SHORT)
    organisations.run("any", {**SHORT, "subsets": "sampled"})
    return organisations


@pytest.fixture
def whole(trained: Organisations, tmp_path: Path) -> Iterator[Served]:
    """A service whose model needs both parties."""
    with serving(trained, tmp_path) as found:
        yield found


@pytest.fixture
def some(trained: Organisations, tmp_path: Path) -> Iterator[Served]:
    """A service whose model needs no party."""
    with serving(trained, tmp_path, "any") as found:
        yield found


@pytest.fixture(scope="module")
def shared(trained: Organisations, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service like `some`, for tests that only ask it."""
    folder = tmp_path_factory.mktemp("shared")
    with serving(trained.copy(folder / "copy"), folder, "any") as found:
        yield found


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["run", "any"])
def test_answers_equal_what_vfl_predict_writes(
    trained: Organisations, tmp_path: Path, run: str
) -> None:
    table = trained.predict(run, out=str(tmp_path / "p.csv")).set_index(ID)
    with serving(trained, tmp_path, run) as found:
        answers = found.ask(*table.index.tolist())
    assert [each["id"] for each in answers] == table.index.tolist()
    assert [each["prediction"] for each in answers] == table["prediction"].tolist()
    for label in ("0", "1"):
        chances = [each["probabilities"][label] for each in answers]
        np.testing.assert_allclose(chances, table[f"probability_{label}"], atol=1e-6)
    if run == "any":
        used = ["+".join(map(str, each["parties"])) or "none" for each in answers]
        assert used == table["parties"].tolist()


@pytest.mark.nightly
def test_numbers_are_served_in_units_of_the_labels(tmp_path: Path) -> None:
    table = cancer(columns=6, rows=200)
    table["label"] = 100 * table["f0"] + 7
    organisations = cut(tmp_path, table, known=1.0)
    organisations.run("run", {**SHORT, "target": "regression"})
    predicted = organisations.predict("run").set_index(ID)["prediction"]
    with serving(organisations, tmp_path) as found:
        answers = found.ask(*predicted.index.tolist())
    np.testing.assert_allclose([each["prediction"] for each in answers], predicted, rtol=1e-5)
    assert "probabilities" not in answers[0]


def test_repeated_and_unknown_ids_have_their_own_answers(shared: Served) -> None:
    first, second = shared.loaded.rows.ids[:2].tolist()
    answers = shared.ask(second, first, second, -1)
    assert [each["id"] for each in answers] == [second, first, second, -1]
    assert answers[0] == answers[2] != answers[1]
    assert answers[3]["prediction"] is None
    (digits,) = shared.ask(str(second))  # ids are texts: the digits of a number are its text
    assert digits["id"] == str(second)
    assert digits["probabilities"] == pytest.approx(answers[0]["probabilities"])
    assert shared.ask(f"0{second}")[0]["prediction"] is None


def test_requests_at_the_same_time_do_not_mix(shared: Served) -> None:
    ids = shared.loaded.rows.ids.tolist()
    alone = {one: shared.ask(one)[0] for one in ids[:40]}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda n: shared.ask(*ids[n : n + 3]), range(37)))
    for at, answers in enumerate(together):
        for one, answer in zip(ids[at : at + 3], answers, strict=True):
            expected = alone[one]
            assert answer["id"] == one and answer["parties"] == expected["parties"]
            got, due = answer["probabilities"]["1"], expected["probabilities"]["1"]
            assert got == pytest.approx(due, abs=1e-6)


def test_the_client_asks_for_many_ids_and_says_what_the_service_refuses(shared: Served) -> None:
    ids = np.resize(shared.loaded.rows.ids, 10_001)
    with Scores(shared.url, TOKEN) as scores:
        answers = scores.predict(ids.tolist())
        assert [each["id"] for each in answers] == ids.tolist()
        assert scores.model()["parties"] == 2
        assert scores.predict(["a"])[0]["prediction"] is None
        with pytest.raises(VflError, match="64 bits"):
            scores.predict([2**64])
    with Scores(shared.url, TOKEN) as scores, pytest.raises(ConfigError, match="list of ids"):
        scores.predict("C-10000")
    for wrong in ("wrong", "nowhere/serve.token"):
        with Scores(shared.url, wrong) as stranger, pytest.raises(VflError, match="check its path"):
            stranger.predict([0])


# --- ids outside the alignment -------------------------------------------------------------------


@pytest.fixture
def newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Organisations, list[int]]:
    """Organisations whose label holder does not know the last 40 people of its table."""
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))  # where parties count ids
    return with_newcomers(tmp_path, SHORT, {**SHORT, "subsets": "sampled"})


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["run", "any"])
def test_ids_outside_the_alignment_are_found_in_one_more_round_trip(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path, run: str
) -> None:
    organisations, new = newcomers
    with serving(organisations, tmp_path, run) as found:
        old = int(found.loaded.rows.ids[0])
        answers = found.ask(new[0], old, *new[1:], -5)
        again = found.ask(*new)
    assert answers[-1]["prediction"] is None
    assert all(each["missing"] == {} for each in answers[:-1])
    table = organisations.predict(run, tmp_path / "everyone.csv").set_index(ID)
    for each in [*answers[:-1], *again]:
        due = table.loc[each["id"], "probability_1"]
        assert each["probabilities"]["1"] == pytest.approx(due, abs=1e-6)


def test_an_id_that_one_party_lacks_is_scored_without_it(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    for run, scored in (("any", True), ("run", False)):
        change(organisations.files[1], lambda frame: frame[frame[ID] != new[0]])
        with serving(organisations, tmp_path, run) as found:
            first, second = found.ask(*new[:2])
        assert first["missing"] == {"1": "unknown"} and (first["prediction"] is not None) == scored
        assert second["missing"] == {}


@pytest.mark.nightly
def test_people_who_come_to_a_partys_file_are_found_while_it_serves(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    path = organisations.files[1]
    whole = read(path)
    write(whole[whole[ID] != new[0]], path)
    with serving(organisations, tmp_path, "any") as found:
        assert found.ask(new[0])[0]["missing"] == {"1": "unknown"}
        write(whole, path)
        until(lambda: found.ask(new[0])[0]["missing"] == {})


def test_made_up_ids_count_and_stop_at_the_partys_rule(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    nodes: list[Any] = [dict(each) for each in organisations.node_configs]
    nodes[1] |= {"max-ids": 6}  # half of them for services
    for _ in range(2):  # the count outlives the service, and an id counts once
        with serving(organisations, tmp_path, "any", nodes) as found:
            assert found.ask(new[0], new[1])[0]["missing"] == {}
            assert found.ask(new[0])[0]["missing"] == {}
            first, *others = found.ask(*range(-9, 0))  # one id is left
            assert first["missing"]["1"] == "unknown"
            assert {each["missing"]["1"] for each in others} == {"refused"}
            assert found.ask(new[2])[0]["missing"] == {"1": "refused"}
            mixed = found.ask(new[2], new[0])  # a known id is free, also beside a refused one
            assert [each["missing"] for each in mixed] == [{"1": "refused"}, {}]
    seeks = (organisations.folder / "any" / "party-1-audit.jsonl").read_text()
    assert seeks.count('"event":"seek"') == 10  # the log shows who probes
    assert seeks.count('"outcome":"refused"') == 2 and seeks.count('"refused":8') == 2
    with opened(lasting_home() / "party-1.ids") as ledger:
        assert ledger.count("asked") == ledger.count("served") == 3


def test_a_place_without_a_right_proof_is_refused_and_counted(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    organisations, new = newcomers
    nodes = [{**each, "max-ids": 1000} for each in organisations.node_configs]
    with serving(organisations, tmp_path, "any", nodes) as found:
        assert found.ask(new[0])[0]["missing"] == {}  # control
        seeker = found.loaded.parties.seeker
        assert seeker is not None
        right = seeker.proofs
        monkeypatch.setattr(seeker, "proofs", lambda party, *ids: right(party, *ids) ^ (party == 1))
        assert found.ask(new[1])[0]["missing"] == {"1": "refused"}
        monkeypatch.setattr(seeker, "proofs", right)
        assert found.ask(new[1])[0]["missing"] == {}
    with opened(lasting_home() / "party-1.ids") as ledger:
        assert ledger.count("wrong") == 1


@pytest.mark.nightly
def test_a_party_that_is_slow_to_find_an_id_does_not_cost_the_others(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    with serving(organisations, tmp_path, "any", score_timeout=2.0) as found:
        old = int(found.loaded.rows.ids[0])
        until(lambda: found.ask(old, new[0])[1]["missing"] == {})
        found.grid.late[found.node(1)] = 30.0
        answers = found.ask(old, new[0])
    assert [each["missing"] for each in answers] == [{"1": "late"}] * 2
    assert [each["parties"] for each in answers] == [[0]] * 2


@pytest.mark.nightly
def test_a_limit_of_epochs_does_not_limit_new_ids_and_a_limit_of_uploads_does(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    for rule, missing in (("max-epochs", {}), ("max-uploads", {"1": "refused"})):
        organisations.words = [{}, {rule: 1000}]  # type: ignore[dict-item]
        organisations.run(rule, {**SHORT, "subsets": "sampled"})
        with serving(organisations, tmp_path, rule) as found:
            old = int(found.loaded.rows.ids[0])
            assert found.ask(old)[0]["missing"] == {}
            assert found.ask(new[0])[0]["missing"] == missing


def test_masked_sums_stay_together_when_somebody_asks_for_a_new_id(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    organisations.run("sum", {"epochs": 3, "aggregation": "secure", "top-model": "sum"})
    table = organisations.predict("sum").set_index(ID)["probability_1"]
    with serving(organisations, tmp_path, "sum") as found:
        old = int(found.loaded.rows.ids[0])
        for _ in range(2):
            first, second = found.ask(old, new[0])
            assert first["probabilities"]["1"] == pytest.approx(table[old], abs=1e-4)
            assert second["prediction"] is None
        # A party that has started anew knows neither its rows nor the others' keys.
        in_use.pop((found.grid.run_id, 1)).audit.close()
        found.grid.contexts[found.node(1)].state.clear()
        ask = partial(found.http.post, "/v1/predict", json={"ids": [old]})
        assert ask().status_code == 503
        until(lambda: ask().status_code == 200)
        chance = found.ask(old)[0]["probabilities"]["1"]
        assert chance == pytest.approx(table[old], abs=1e-4)


# --- parties that are missing -------------------------------------------------------------------


@pytest.mark.nightly
def test_a_late_party_costs_one_deadline_and_is_flagged(
    trained: Organisations, tmp_path: Path
) -> None:
    with serving(trained, tmp_path, "any", score_timeout=3.0) as some:
        ids = some.known(3)
        until(lambda: some.ask(*ids)[0]["missing"] == {})
        some.grid.late[some.node(1)] = 9.0
        began = time.monotonic()
        assert some.ask(*ids)[0]["missing"] == {"1": "late"}
        assert time.monotonic() - began >= 3.0
        began = time.monotonic()
        answer = some.ask(*ids)[0]
        assert answer["parties"] == [0] and answer["missing"] == {"1": "late"}
        assert time.monotonic() - began < 3.0  # it is not waited for again
        some.grid.late.clear()
        until(lambda: some.ask(*ids)[0]["missing"] == {})


def test_scores_without_a_party_are_those_that_predict_gives_without_it(
    trained: Organisations, some: Served, tmp_path: Path
) -> None:
    out = str(tmp_path / "without.csv")
    table = trained.predict("any", without="1", out=out).set_index(ID)
    some.grid.away.add(some.node(1))
    answers = some.ask(*table.index.tolist())
    chances = [each["probabilities"]["1"] for each in answers]
    np.testing.assert_allclose(chances, table["probability_1"], atol=1e-6)
    assert {each["missing"].get("1") for each in answers} <= {"down", "unknown"}


def started_anew(found: Served, party: int) -> None:
    """Have a party forget all that its process knew."""
    in_use.pop((found.grid.run_id, party)).audit.close()
    found.grid.contexts[found.node(party)].state.clear()


def test_a_party_that_was_left_out_at_the_start_comes_in_when_it_is_ready(
    trained: Organisations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests are answered while it aligns."""
    here: list[int] = []
    every = SlowGrid.get_node_ids
    monkeypatch.setattr(joining, "_FIRST", 0.1)
    monkeypatch.setattr(SlowGrid, "get_node_ids", lambda grid: list(every(grid))[: 1 + len(here)])
    table = trained.predict("any", out=f"{tmp_path}/p.csv")
    table = table[table["parties"] == "0+1"].set_index(ID)
    ids = table.index[:20].tolist()
    with serving(trained, tmp_path, "any", party_timeout=0.5) as found:
        assert {tuple(each["parties"]) for each in found.ask(*ids)} == {(0,)}
        found.grid.late[found.node(1)] = 0.2
        here.append(1)
        for restarts in range(2):
            until(lambda: found.ask(ids[0])[0]["parties"] == [0, 1])
            found.grid.late.clear()
            chances = [each["probabilities"]["1"] for each in found.ask(*ids)]
            np.testing.assert_allclose(chances, table["probability_1"][:20], atol=1e-6)
            if not restarts:
                started_anew(found, 1)
                assert found.ask(ids[0])[0]["missing"] == {"1": "down"}
    assert "Party 1 has joined the service." in caplog.text and "anew" not in caplog.text


def test_a_party_that_fails_at_the_end_of_the_alignment_is_left_out_and_comes_in(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [True]

    def client(message: Message, context: Context) -> Message:
        first, kind = context.node_config["partition-id"] == 0, message.metadata.message_type
        if first and kind == ConfirmOrder.kind and any(failures):
            failures.clear()
            return to_failure("The disk is full.", message)
        return client_app.app(message, context)

    monkeypatch.setattr(joining, "_FIRST", 0.1)
    with serving(trained, tmp_path, "any", client=client) as found:
        loaded, (one,) = found.loaded, found.known()
        assert set(loaded.rows.nodes or ()) == {1}
        until(lambda: found.ask(one)[0]["parties"] == [0, 1])
        started_anew(found, 1)
        assert found.ask(one)[0]["missing"] == {"1": "down"}
        until(lambda: found.ask(one)[0]["parties"] == [0, 1])
        assert loaded.parties._all[1].alignment == loaded.rows.alignment  # it was not aligned anew


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["any", "run"])
def test_a_party_that_started_anew_with_another_file_is_aligned_again(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    monkeypatch.setattr(joining, "_FIRST", 0.1)
    own = trained.copy(tmp_path / "copy")
    with serving(own, tmp_path, run) as found:
        gone, kept = found.known(2)
        before = found.ask(kept)[0]
        change(own.files[1], lambda frame: frame[frame[ID] != gone].iloc[::-1])
        started_anew(found, 1)

        def is_whole() -> bool:
            reply = found.http.post("/v1/predict", json={"ids": [kept]})
            return reply.status_code == 200 and not reply.json()["predictions"][0]["missing"]

        until(is_whole)
        after = found.ask(gone, kept)
        assert after[0]["missing"]["1"] == "unknown"
        got, due = after[1]["probabilities"]["1"], before["probabilities"]["1"]
        assert got == pytest.approx(due, abs=1e-6)


def lost(number: int) -> Any:
    """Return what a party answers which says, as this number, that it has lost its rows."""
    return lambda **said: Reused(**{**said, "party": number, "became": "gone"})


@pytest.mark.one_by_day
@pytest.mark.parametrize("number", [1, 0, 99])
def test_a_party_that_answers_as_another_harms_only_itself(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The control: party 1 gives its own number."""
    monkeypatch.setattr(joining, "_FIRST", 3600.0)
    monkeypatch.setattr("vfl_flower.alignment.reuse.Reused", lost(number))
    with serving(trained, tmp_path, "any") as found:
        records = found.loaded.parties._all
        (one,) = found.known()
        started_anew(found, 1)
        assert found.ask(one)[0]["missing"] == {"1": "down"}
        until(lambda: "aligned anew" in records[1].why)
        assert (records[0].node, records[1].node) == (found.node(0), None)
        assert found.ask(one)[0]["parties"] == [0]


@pytest.mark.one_by_day
@pytest.mark.parametrize("number", [1, 0, 99])
@pytest.mark.parametrize("serves", [True, False])
def test_a_party_that_loads_as_another_is_left_out(
    trained: Organisations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    serves: bool,
) -> None:
    """Else its embeddings would count as another's. The control: party 1 gives its number."""
    kinds: dict[str, Any] = {ServeOrder.kind: Serving, PredictOrder.kind: Predicted}
    honest = client_app.app

    def client(message: Message, context: Context) -> Message:
        reply: Message = honest(message, context)
        kind = kinds.get(message.metadata.message_type)
        if context.node_config["partition-id"] == 0 or not kind:
            return reply
        return to_reply(replace(read_reply(reply, kind), party=number), message)

    if not serves:
        alone = trained.predict("any", without="1", out=f"{tmp_path}/1.csv").set_index(ID)
        monkeypatch.setattr(client_app, "app", client)
        table = trained.predict("any", out=f"{tmp_path}/2.csv").set_index(ID).loc[alone.index]
        equal = np.allclose(table["probability_1"], alone["probability_1"], atol=1e-6)
        assert equal == (number != 1)
        return
    with serving(trained, tmp_path, "any", client=client) as found:
        (one,) = found.known()
        assert found.ask(one)[0]["parties"] == ([0, 1] if number == 1 else [0])
        assert found.loaded.parties._all[0].node == found.node(0)


def test_equal_ids_are_compared_with_all_parties_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With align = 'ids', a party is not aligned apart."""
    monkeypatch.setattr(joining, "_FIRST", 0.1)
    own = cut(tmp_path, cancer(columns=6, rows=200), known=1.0)
    own.run("run", {**SHORT, "subsets": "sampled", "align": "ids"})
    with serving(own, tmp_path) as found:
        first, one = found.loaded, int(found.loaded.rows.ids[0])
        before = found.ask(one)
        with monkeypatch.context() as patched:
            patched.setattr("vfl_flower.alignment.reuse.Reused", lost(1))
            started_anew(found, 1)
            assert found.ask(one)[0]["missing"] == {"1": "down"}
            until(lambda: "aligned anew" in first.parties._all[1].why)
        until(lambda: not found.ask(one)[0]["missing"])
        assert found.ask(one) == before
        assert found.loaded is not first


def test_a_model_of_all_parties_refuses_and_names_the_party(whole: Served) -> None:
    one = int(whole.loaded.rows.ids[0])
    assert whole.ask(one)[0]["parties"] == [0, 1]
    assert whole.http.get("/readyz").status_code == 200
    whole.grid.away.add(whole.node(1))
    reply = whole.http.post("/v1/predict", json={"ids": [one]})
    assert reply.status_code == 503 and "party 1 (down)" in reply.json()["error"]
    assert whole.http.get("/readyz").status_code == 503
    assert whole.http.get("/healthz").status_code == 200
    whole.grid.away.clear()
    until(lambda: whole.http.post("/v1/predict", json={"ids": [one]}).status_code == 200)


def test_a_changed_file_of_a_party_stalls_no_request(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trained.copy(tmp_path / "copy")
    reading, read_on = threading.Event(), threading.Event()

    def slow(context: Context) -> Any:
        reading.set()
        assert read_on.wait(30)
        return inputs.own_source(context)

    with serving(own, tmp_path, "any") as found:
        gone, kept = found.known(2)
        before = found.ask(gone, kept)
        monkeypatch.setattr(scoring, "own_source", slow)
        monkeypatch.setattr(scoring, "_LOOK", 0.0)
        change(own.files[1], lambda frame: frame[frame[ID] != gone].iloc[::-1])
        try:
            for _ in range(2):  # it answers while it reads, by the earlier rows
                assert found.ask(gone, kept) == before
            assert reading.wait(30)
        finally:
            read_on.set()
        until(lambda: found.ask(gone)[0]["missing"] == {"1": "unknown"})
        assert found.ask(kept)[0]["missing"] == {}


def test_the_end_of_a_session_gives_back_what_was_counted_ahead(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[Any] = [dict(each) for each in trained.node_configs]
    states = tmp_path / "states"
    shutil.copytree(trained.folder / "any", states, ignore=shutil.ignore_patterns("*audit*"))
    nodes[1] |= {"max-predictions": 1000, "states": str(states)}

    def counted() -> int:
        return numbers_in(states / "party-1.predictions", "rows")[0]

    with serving(trained, tmp_path, "any", nodes) as found:
        assert found.ask(*found.known())[0]["missing"] == {}
        assert counted() == 10  # a hundredth of the limit, ahead
        found.service.queue.close()
        over = SessionEnd(connected=True, served=1, cause="")
        monkeypatch.setattr("vfl_flower.client_app.stream.serve", lambda *_: over)
        context = found.grid.contexts[found.node(1)]
        order = SessionOrder(address="a", certificate="", token="t", keep=False)
        assert client_app.app.stream(context, order) is over
        assert counted() == 1


# --- the audit log ------------------------------------------------------------------------------


def test_each_request_is_in_the_audit_logs_of_both_ends(
    trained: Organisations, tmp_path: Path
) -> None:
    states = tmp_path / "states"
    shutil.copytree(trained.folder / "any", states, ignore=shutil.ignore_patterns("*audit*"))
    nodes = [{**each, "states": str(states)} for each in trained.node_configs]
    with serving(trained, tmp_path, "any", nodes) as found:
        one, other = found.known(2)
        name = found.http.post("/v1/predict", json={"ids": [one]}).json()["request"]
        found.ask(other)
    log = tmp_path / "audit" / "audit.jsonl"
    said = [fields for _, fields in find(log, [encoded(one)])]
    assert [each["request"] for each in said] == [name]
    assert said[0]["caller"] == "bank" and said[0]["parties"] == {"0": 1, "1": 1}
    assert verify(log).lines == 3
    assert '"event":"seek"' not in (states / "party-0-audit.jsonl").read_text()
    for party in (0, 1):
        log = states / f"party-{party}-audit.jsonl"
        assert len(list(find(log, [encoded(one)]))) == 1
        assert verify(log).lines == 3
        assert f"{one}" not in [str(each) for each in said[0].values()]


# --- new versions -------------------------------------------------------------------------------


def test_a_new_version_of_the_model_is_served_without_a_restart(
    trained: Organisations, tmp_path: Path
) -> None:
    own = trained.copy(tmp_path / "copy")
    with serving(own, tmp_path, "any") as found:
        (one,) = found.known()
        first, name = found.ask(one)[0], found.loaded.name
        folder = own.folder
        own.run("grown", {**SHORT, "grow": str(folder / "any")})
        for path in (folder / "grown").glob("run-*.state"):
            shutil.copy2(path, folder / "any")
        shutil.copy2(folder / "grown" / "checkpoint.npz", folder / "any")
        until(lambda: found.loaded.name != name)
        second = found.ask(one)[0]
        assert second["missing"] == {} and second["probabilities"] != first["probabilities"]
        assert found.http.get("/v1/model").json()["model"] == found.loaded.name


def test_a_version_that_cannot_be_loaded_leaves_the_last_in_service(
    trained: Organisations, tmp_path: Path
) -> None:
    own = trained.copy(tmp_path / "copy")
    with serving(own, tmp_path, "any") as found:
        (one,) = found.known()
        before, files = found.ask(one), found.loaded.files
        (own.folder / "any" / "checkpoint.npz").write_bytes(b"no checkpoint")
        until(lambda: found.loaded.files != files)
        until(lambda: found.ask(one) == before)


def test_a_person_who_has_gone_is_not_scored_even_if_the_new_file_is_wrong(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, _ = newcomers
    with serving(organisations, tmp_path, "any") as found:
        gone, kept = found.loaded.rows.ids[:2].tolist()
        before = found.ask(kept)

        def broken(frame: Any) -> Any:
            frame = frame[frame[ID] != gone].copy()
            feature = next(name for name in frame if name != ID)
            frame.loc[frame[ID] == kept, feature] = np.nan  # which the party's file must not have
            return frame

        change(organisations.files[1], broken)
        until(lambda: found.ask(gone)[0]["missing"] == {"1": "unknown"})
        assert found.ask(kept) == before  # by its earlier columns


# --- rules --------------------------------------------------------------------------------------


# --- attacks ------------------------------------------------------------------------------------


def test_only_callers_with_a_token_are_served(shared: Served) -> None:
    for header in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"):
        for path in ("/v1/predict", "/v1/model", "/metrics", "/v1/else"):
            headers = {b"Authorization": header.encode("latin-1")}
            reply = shared.stranger.get(path, headers=headers)
            assert reply.status_code == 401, (header, path)
    assert shared.stranger.get("/healthz").status_code == 200  # control: no token needed
    assert shared.http.get("/v1/model").status_code == 200  # control: the right token


BODIES: list[tuple[bytes, int]] = [
    *((body, 422) for body in (b"{", b"[1]", b'{"ids": []}', b'{"ids": [1], "more": 1}')),
    *(
        (b'{"ids": [%s]}' % one, 422)
        for one in (b"1.5", b"true", b"null", b"[1]", b"1" + 99 * b"0")
    ),
    (json.dumps({"ids": list(range(10_001))}).encode(), 422),
    (b"[" * 100_000, 422),
    (b" " * (2**20 + 1), 413),
    (b" " * 10_000_000, 413),
    (b'{"ids": [1, 1, 1]}', 200),
]


def test_bodies_that_are_no_question_are_refused_in_a_sentence(shared: Served) -> None:
    for body, status in BODIES:
        reply = shared.http.post("/v1/predict", content=body)
        assert reply.status_code == status, (body[:20], reply.text)
        if status != 200:
            assert reply.json()["error"].endswith(".") and "Traceback" not in reply.text


def test_a_body_without_length_is_cut_off(shared: Served) -> None:
    reply = shared.http.post("/v1/predict", content=(b" " * 65536 for _ in range(100)))
    assert reply.status_code == 413


def test_answers_are_counted_and_refused_calls_are_in_the_audit_log(
    some: Served, tmp_path: Path
) -> None:
    bad, port = {"Authorization": "Bearer x"}, int(some.url.rsplit(":", 1)[1])
    due = {
        200: some.http.get("/v1/model"),
        401: some.stranger.get("/v1/predict", headers=bad),
        404: some.http.get("/v1/else"),
        405: some.http.put("/v1/predict"),
        413: some.http.post("/v1/predict", content=b" " * (2**20 + 1)),
        422: some.http.post("/v1/predict", content=b"{"),
    }
    assert list(due) == [each.status_code for each in due.values()]
    for number, sent in ((400, b"\0\r\n\r\n"), (431, b"GET /" + b"x" * 2**14)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent)
            assert stranger.recv(2**16).startswith(b"HTTP/1.1 %d" % number)
        due[number] = due[200]
    shown = some.http.get("/metrics").text
    assert all(f'vfl_http_answers_total{{status="{each}"}} 1.0' in shown for each in due)
    some.service.queue.close()
    some.service.work()  # as its end does
    path = tmp_path / "audit" / "audit.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[str, dict[str, int]] = {"refused": {}, "stranger": {}}
    for each in lines:
        for number, calls in each.get("statuses", {}).items():
            assert each.get("caller") == ("bank" if each["event"] == "refused" else None)
            found[each["event"]][number] = found[each["event"]].get(number, 0) + calls
    assert found["refused"] == {"404": 1, "405": 1, "413": 1}
    assert found["stranger"] == {"400": 1, "401": 1, "431": 1}
    assert [each["outcome"] for each in lines if each["event"] == "score"] == ["invalid"]


def test_nothing_redirects_to_the_host_that_a_caller_names(shared: Served) -> None:
    for path in ("/v1/model/", "//v1/model", "/docs/", "/healthz/", "/v1/predict/"):
        reply = shared.http.get(f"{shared.url}{path}", headers={"Host": "evil.example"})
        assert reply.status_code == 404, path
    for path in ("/docs", "/openapi.json", "/v1/model", "/healthz"):
        named = {"Host": "evil.example", "X-Forwarded-Prefix": "/evil.example"}
        reply = shared.http.get(path, headers={**named, "X-Forwarded-Host": "evil.example"})
        assert reply.status_code == 200 and "evil" not in reply.text + str(reply.headers)


def test_pages_answer_head_too_and_are_rendered_once(shared: Served) -> None:
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        head, get = shared.stranger.head(path), shared.stranger.get(path)
        assert head.status_code == get.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == str(len(get.content))
    assert shared.stranger.head("/v1/model").status_code == 401
    with patch.object(web, "_page", side_effect=AssertionError):
        assert shared.stranger.get("/docs").status_code == 200


def test_a_service_is_not_ready_while_its_tokens_cannot_be_used(
    some: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfl_flower.transport.http.tokens._LOOK", 0.0)
    tokens = tmp_path / "tokens"
    assert some.stranger.get("/readyz").status_code == 200
    tokens.chmod(0o644)
    assert some.stranger.get("/readyz").status_code == 503
    assert some.http.get("/v1/model").status_code == 401
    assert some.stranger.get("/healthz").status_code == 200
    tokens.chmod(0o600)
    assert some.stranger.get("/readyz").status_code == 200
    assert some.http.get("/v1/model").status_code == 200


def test_a_service_is_not_ready_while_nothing_can_be_answered(
    whole: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, here or at a party whose audit log is refused."""
    monkeypatch.setattr("vfl_flower.tasks.inference.serving.parties._FAILING", 1.5)
    one = int(whole.loaded.rows.ids[0])
    body = {"ids": [one]}

    def status(path: str) -> int:
        return whole.stranger.get(path).status_code

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert (status("/readyz"), status("/healthz")) == (200, 200)
    with monkeypatch.context() as broken:
        broken.setattr("vfl_flower.config.audit_log.write_all", full)
        for ids in ([one], []):  # a refusal needs its line too
            reply = whole.http.post("/v1/predict", json={"ids": ids})
            assert reply.status_code == 503 and "audit log" in reply.json()["error"]
        assert (status("/readyz"), status("/healthz")) == (503, 200)
    until(lambda: status("/readyz") == 200)
    party = in_use[whole.grid.run_id, 1]
    with monkeypatch.context() as broken:
        broken.setattr(party.audit, "_failure", "The disk is full.")
        broken.setattr(party.audit, "_seal", lambda: full())
        assert whole.http.post("/v1/predict", json=body).status_code == 503
        assert (status("/readyz"), status("/healthz")) == (503, 200)
    until(lambda: status("/readyz") == 200)
    assert whole.ask(one)


def test_a_service_is_ready_while_its_parties_are_asked(whole: Served) -> None:
    one, node = int(whole.loaded.rows.ids[0]), whole.node(1)
    with ThreadPoolExecutor(1) as pool:
        whole.grid.late[node] = 30.0
        asked = pool.submit(whole.ask, one)
        until(lambda: whole.loaded.parties._all[1].state == "asked")
        assert whole.stranger.get("/readyz").status_code == 200
        assert whole.http.get("/v1/model").json()["parties_ready"] == [0, 1]
        whole.grid._held = [(0.0, message) for _, message in whole.grid._held]
        whole.grid.late.clear()
        assert asked.result()


def test_a_full_queue_answers_429(some: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one = int(some.loaded.rows.ids[0])
    some.grid.late[some.node(0)] = 0.15
    monkeypatch.setattr(some.service.queue, "_most", 2)
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(some.http.post, "/v1/predict", json={"ids": [one]}) for _ in range(12)]
        found = [call.result() for call in calls]
    statuses = {reply.status_code for reply in found}
    assert statuses == {200, 429}
    assert all(reply.headers.get("retry-after") for reply in found if reply.status_code == 429)


@pytest.mark.one_by_day
@pytest.mark.parametrize("how", ["shape", "nan", "huge", "type", "extra"])
def test_embeddings_that_do_not_fit_are_left_out(
    trained: Organisations, tmp_path: Path, how: str
) -> None:
    arrays: dict[str, Any] = {"embedding": np.ones((2 + (how == "shape"), 4), np.float32)}
    if how in ("nan", "huge"):
        arrays["embedding"][0, 0] = {"nan": np.nan, "huge": 1e30}[how]
    elif how == "type":
        arrays = {"embedding": np.ones((2, 4))}
    elif how == "extra":
        arrays["gone"] = np.array([5], np.int32)
    lies = False

    def lying(message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        is_score = message.metadata.message_type == ScoreOrder.kind
        if lies and is_score and context.node_config["partition-id"] == 1:
            return to_reply(Scored(arrays=arrays), message)
        return reply

    with serving(trained, tmp_path, "any", client=lying) as found:
        ids = found.known(2)
        assert found.ask(*ids)[0]["missing"] == {}
        lies = True
        assert [each["missing"] for each in found.ask(*ids)] == [{"1": "faulty"}] * 2
        lies = False
        assert found.ask(*ids)[0]["missing"] == {}


def test_a_party_embeds_only_rows_that_it_serves(trained: Organisations, tmp_path: Path) -> None:
    with serving(trained, tmp_path, "any") as found:
        node, most = found.node(0), int(found.loaded.embeddings.present[:, 0].sum())
        found.service.queue.close()  # so that only this test uses the grid

        def ask(rows: Any) -> Scored:
            order = ScoreOrder(arrays={"rows": np.array(rows, np.int32)})
            return gather(found.grid, {node: order}, Scored, 5)[node]

        for rows in ([most], [-1], [], [[0]]):
            with pytest.raises(PartyError, match=r"rows that it does not serve|list of rows"):
                ask(rows)
        assert ask([most - 1]).arrays["embedding"].shape == (1, 4)  # control


# --- files of the service -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"bank {TOKEN}", 0o644, "chmod 600"),
        *((f"bank {TOKEN}", 0o600 | 1 << bit, "chmod 600") for bit in range(6)),
        (f"bank {'x' * 19}", 0o600, "20 letters"),
        ("bank short", 0o600, "20 letters"),
        ("bank", 0o600, "20 letters"),
        ("\n# nobody\n", 0o600, "no token"),
    ],
)
def test_files_of_tokens_that_are_not_safe_are_refused(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        Tokens(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_files_of_tokens_that_only_their_owner_can_use_are_read(tmp_path: Path, mode: int) -> None:
    path, short = tmp_path / "tokens", "x" * 20
    path.write_text(f"bank {TOKEN}\nshop {short}\n")
    path.chmod(mode)
    tokens = Tokens(path)
    assert [tokens.caller(each) for each in (TOKEN, short, short[1:], f"{short}x", "")] == [
        *("bank", "shop"),
        *(None, None, None),
    ]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"serve-address": "0.0.0.0:0"}, "unencrypted"),
        ({"serve-address": "nowhere"}, "HOST:PORT"),
        ({"serve-certificate": "a.pem"}, "belong together"),
        ({"serve-certificate": "a.pem", "serve-key": "b.pem"}, "cannot be used"),
    ],
)
def test_addresses_that_cannot_serve_are_refused(
    trained: Organisations, tmp_path: Path, keys: dict[str, str], said: str
) -> None:
    options: Any = {name.replace("-", "_"): value for name, value in keys.items()}
    with pytest.raises(ConfigError, match=said), serving(trained, tmp_path, "any", **options):
        pass


def test_an_address_is_taken_before_anybody_answers_there() -> None:
    with listening_module._bound("127.0.0.1", 0, "") as first:
        host, port = first.getsockname()
        with pytest.raises(ConfigError, match="use"), listening_module._bound(host, port, "x"):
            pass


def test_a_service_over_flowers_messages_is_refused() -> None:
    config = resolve({"task": "serve", "model": "runs/a", "transport": "messages"})
    slow: Any = SimpleNamespace(medium="messages")
    with pytest.raises(ConfigError, match="needs streams"):
        serve(slow, config, {}, "1")
    assert lasting(config).running.transport == "messages"
    assert lasting(resolve({"task": "serve", "model": "runs/a"})).running.transport == "stream"


def test_the_page_about_the_calls_loads_nothing_from_elsewhere(shared: Served) -> None:
    page = shared.stranger.get("/docs")
    schema = shared.stranger.get("/openapi.json").json()
    assert page.status_code == 200 and "POST /v1/predict" in page.text
    assert all(
        f"<h2>GET {path}</h2>" in page.text for path in set(schema["paths"]) - {"/v1/predict"}
    )
    assert not re.search(r"<script|<link|src=|url\(|https?://", page.text)
    assert len(page.content) < 16_000 and page.content == shared.stranger.get("/docs").content


def test_the_calls_on_the_page_give_the_answers_on_the_page(shared: Served) -> None:
    page = shared.stranger.get("/docs").text
    shown = [unescape(each) for each in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    answers = shared.ask(*shared.loaded.rows.ids[:50].tolist())
    known = [each["id"] for each in answers if not each["missing"]][:1]
    environment = {**os.environ, "URL": shared.url, "TOKEN": TOKEN, "NO_PROXY": "*"}
    for shell, python, text in zip(shown[0:9:3], shown[1:9:3], shown[2:9:3], strict=True):
        expected = json.loads(text)
        if "predictions" in expected:
            web.Answer.model_validate(expected, strict=True)
        ids = json.dumps(known)[1:-1]
        python = python.replace('"u1"', ids)
        command = [sys.executable, "-c", python]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answer = ast.literal_eval(found.stdout)
        for each, due in zip(answer, expected.get("predictions", []), strict=False):
            assert each.keys() == due.keys() and type(each["missing"]) is dict
            assert bool(each["missing"]) == bool(due["missing"])
        assert len(answer) == len(expected.get("predictions", expected))
        if shutil.which("curl"):
            command = ["bash", "-c", shell.replace('"u1"', ids).replace("curl", "curl -s", 1)]
            found = subprocess.run(command, env=environment, capture_output=True, text=True)
            said = json.loads(found.stdout)
            assert said.keys() == expected.keys()
            assert said.get("predictions", said) == answer


@pytest.mark.parametrize("stuck", [True, False])
def test_a_service_that_cannot_finish_gets_a_second_signal(
    stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "_FINISHING", 0.2)
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    ending = threading.Event()
    try:
        with serve_module._ended_by_signal(ending.set):
            signal.raise_signal(signal.SIGTERM)
            assert ending.wait(60) and not came
            if stuck:
                until(lambda: came)
        time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM] * stuck


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["to the command", "to the service"])
def test_the_command_serves_on_supernodes_and_ends_by_a_signal(tmp_path: Path, order: str) -> None:
    folder = tmp_path / "run"
    run_local(2, {"dataset": "breast-cancer", "epochs": 2, "out": str(folder)})
    words = ["serve", str(folder), "--engine", "supernodes", "-c", "serve-address='127.0.0.1:0'"]
    said = tmp_path / "said.txt"
    with said.open("w") as file:
        command = subprocess.Popen(
            [sys.executable, "-m", "vfl_flower.tools.cli", *words], stdout=file, stderr=file
        )
    until(lambda: "The tokens" in said.read_text() or command.poll() is not None)
    url = re.search(r"http://127\.0\.0\.1:\d+", said.read_text())
    assert url, said.read_text()
    with Scores(url[0], str(folder / "serve.token")) as scores:
        until(lambda: scores.predict([0])[0]["parties"] == [0, 1])
    number = command.pid if order == "to the command" else int((folder / "serve.pid").read_text())
    os.kill(number, signal.SIGTERM)
    command.wait(120)
    assert not (folder / "serve.pid").exists()
    if order == "to the service":  # the command is not killed by it
        assert command.returncode == 0 and "The service has ended." in said.read_text()


WITH_CHECKPOINT = [
    each for each in SYSTEMS.known if each not in ("local-only", "intersection-only")
]


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", WITH_CHECKPOINT)
def test_every_system_serves_what_it_predicts(tmp_path: Path, strategy: str) -> None:
    options = {"strategy": strategy, "epochs": 1, "dataset": "breast-cancer"}
    run = run_local(3, {**options, "out": str(tmp_path / "run")})
    table = read(predict_local({"model": str(run.folder)}))
    with served(run.folder, tmp_path) as found:
        chances = [each["probabilities"]["1"] for each in found.ask(*table["id"].tolist())]
        assert set(found.ask(10**6)[0]["missing"].values()) == {"unknown"}
    np.testing.assert_allclose(chances, table["probability_1"], atol=1e-6)


# --- noise on embeddings: fresh for each score, and counted for each row --------------------------

LINEAR = {"epochs": 2, "bottom-model": "linear", "embedding-size": 4, "top-hidden": 8}
NOISE = {"privacy": "perturbed-embedding", "embedding-noise": 4.0}


def embedded(found: Served, *rows: int) -> Any:
    """Return the embeddings that party 0 uploads for these rows."""
    order = ScoreOrder(arrays={"rows": np.array(rows, np.int32)})
    node = found.node(0)
    return np.asarray(gather(found.grid, {node: order}, Scored, 30)[node].arrays["embedding"])


@pytest.mark.one_by_day
@pytest.mark.parametrize("seed", [{}, {"noise-seed": 0}], ids=["secret", "seed"])
@pytest.mark.parametrize("noise", [{}, NOISE], ids=["plain", "noise"])
def test_no_two_scores_have_the_same_noise(
    tmp_path: Path, noise: dict[str, Any], seed: dict[str, int]
) -> None:
    """Equal noise of two rows would vanish in their difference. The control is without noise."""
    organisations = cut(tmp_path, cancer(columns=6, rows=200), known=1.0)
    organisations.run("run", {**LINEAR, **noise, **(seed if noise else {})})
    with serving(organisations, tmp_path) as found:
        found.service.queue.close()  # so that only this test uses the grid
        once, again = embedded(found, 0), embedded(found, 0)
        assert np.array_equal(once, again) == (not noise)
        first, second = embedded(found, 1), embedded(found, 2)
        together = embedded(found, 1, 2)
        alike = np.allclose(first - second, together[:1] - together[1:], atol=1e-4)
        assert alike == (not noise)


def test_each_release_of_a_row_counts_also_of_an_id_outside_the_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    keys = {**LINEAR, **NOISE, "subsets": "sampled"}
    organisations, (new, other, *_) = with_newcomers(tmp_path, keys)
    spent = []

    def ask(found: Served, *ids: int) -> None:
        for asked in ids:
            missing = {"0": "unknown", "1": "unknown"} if asked == -1 else {}
            assert found.ask(asked)[0]["missing"] == missing
            spent.append(found.http.get("/v1/model").json()["epsilon"])

    with serving(organisations, tmp_path) as found:
        (one,) = found.known()
        ask(found, new, other, one, new, one, new, -1, -1, -1, -1)  # nobody has id -1
    with serving(organisations, tmp_path) as found:
        ask(found, one, other)  # a restart forgets which row it was
    first, of_other, of_one, again, also, last, *of_nobody, restarted, _ = spent
    assert first == of_other == of_one < again == also < last < restarted
    assert of_nobody == [last] * 4
