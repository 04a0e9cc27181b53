"""Runs on nodes that `flwr stop` or SIGTERM ends, or that lose their SuperLink."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Context, Message

from strategies import callbacks
from tests.fleet import EF_VFL, evaluations, fleet, is_running, until
from tests.launch.test_interrupts import signalled
from tests.strategy.test_checkpoint import CANCER
from vfl_flower import client_app, server_app
from vfl_flower.config.errors import Terminated, VflError, terminating
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import run_local
from vfl_flower.launch.processes import reserved_port
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.nodes import watch

LONG: dict[str, Any] = {**EF_VFL, "window": 1, "epochs": 1000, "patience": 0.0}


@pytest.fixture
def on_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in this process takes itself for one on nodes, with the handlers of its ServerApp."""
    monkeypatch.setattr(LocalGrid, "engine", "supernodes")
    monkeypatch.setattr(LocalGrid, "run", SimpleNamespace(run_id=7))
    monkeypatch.setattr(server_app, "watched", lambda transport: terminating())
    with terminating(signal.SIGINT):
        yield


STOPS = {signal.SIGINT: "`flwr stop`", signal.SIGTERM: "SIGTERM"}


@pytest.mark.parametrize("number", STOPS)
def test_a_run_that_is_stopped_keeps_a_checkpoint_and_a_summary(
    number: signal.Signals, tmp_path: Path, on_nodes: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with (
        caplog.at_level("INFO", "flwr.notice"),
        signalled(number, 1, again=True),
        pytest.raises(Terminated),
    ):  # Flower may signal twice
        run_local(2, {**CANCER, "epochs": 3, "out": str(folder)})
    said = json.loads((folder / "summary.json").read_text())["failure"]
    assert said == f"{STOPS[number]} ended the run after 1 epochs."
    found = checkpoint.load(folder)
    assert not found.finished and len(found.strategy["history"]["entries"]) == 1
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    (early,) = re.findall("The label holder can end this run by `flwr stop 7`.*", caplog.text)
    assert early.endswith(f"It then keeps a checkpoint in {folder}.")


def test_a_run_that_is_stopped_before_it_trains_leaves_its_folder_to_the_next(
    tmp_path: Path, on_nodes: None
) -> None:
    keys = {**CANCER, "epochs": 1, "out": str(tmp_path / "run")}
    stops = iter([True])

    def party(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.describe" and next(stops, False):
            signal.raise_signal(signal.SIGINT)
        return client_app.app(message, context)

    with pytest.raises(Terminated, match=r"^`flwr stop` ended the run\.$"):
        run_local(2, keys, party)  # type: ignore[arg-type]
    said = json.loads((tmp_path / "run/summary.json").read_text())
    assert said["failure"] == "`flwr stop` ended the run."
    assert run_local(2, keys).summary["failure"] is None


def test_the_log_says_what_has_stopped_a_run_and_where_its_checkpoint_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stopped(*given: Any) -> None:
        raise Terminated(signal.SIGINT, "`flwr stop` ended the run after 2 epochs.", "/runs/a")

    told: list[int] = []
    monkeypatch.setattr(server_app, "serve", stopped)
    transport = SimpleNamespace()
    monkeypatch.setattr(server_app, "transport_of", lambda grid: transport)
    monkeypatch.setattr(signal, "raise_signal", told.append)
    sentence = "`flwr stop` ended the run after 2 epochs. Set resume='/runs/a' to continue."
    for engine, said in (("supernodes", [sentence]), ("local", [])):  # the caller says the second
        transport.engine = engine
        caplog.clear()
        with pytest.raises(Terminated):
            server_app.main(*2 * [cast(Any, None)])
        assert [each.getMessage() for each in caplog.records] == said
    assert told == [signal.SIGINT]


@pytest.mark.parametrize("medium", ["none", "messages"])
def test_it_waits_for_no_party_that_has_ended_too(
    medium: str, tmp_path: Path, on_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_SAVING", 1)
    monkeypatch.setattr(LocalGrid, "medium", medium)
    hangs, keys = Event(), {"out": str(tmp_path / "run"), "transport": "messages"}

    def party(message: Message, context: Context) -> Message:
        saves = message.metadata.message_type == "query.checkpoint"
        if saves and (tmp_path / "run/history.jsonl").stat().st_size:
            hangs.wait(60)
        return client_app.app(message, context)

    began = time.monotonic()
    with signalled(signal.SIGTERM, 1), pytest.raises(Terminated):
        run_local(2, {**CANCER, "epochs": 3, **keys}, party)  # type: ignore[arg-type]
    assert time.monotonic() < began + 30
    said = json.loads((tmp_path / "run/summary.json").read_text())["failure"]
    assert said == "SIGTERM ended the run after 1 epochs. Its last checkpoint is older."


# --- a SuperLink that is silent -------------------------------------------------------------------


class Asked:
    """A transport whose SuperLink answers as a test says."""

    def __init__(self, answers: Event, error: Exception | None = None) -> None:
        self.answers, self.error, self.silent = answers, error, False

    def get_node_ids(self) -> list[int]:
        self.answers.wait()
        if self.error:
            raise self.error
        return []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK", "_APART", "_SILENT", "_TOLD", "_GONE", "_AGAIN"):
        monkeypatch.setattr(watch, name, getattr(watch, name) / 50)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    own = SimpleNamespace(getpid=os.getpid, kill=lambda pid, number: found.append(number))
    monkeypatch.setattr(watch, "os", own)
    return found


def test_a_run_without_its_superlink_says_so_and_ends(
    quick: None,
    signals: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport: Any = Asked(Event())
    monkeypatch.setattr(watch, "senders", senders := dict[int, str]())
    with caplog.at_level("INFO", "flwr.notice"), watch.watched(transport):
        until(lambda: transport.silent, 30)
        until(lambda: "has not answered for" in caplog.text, 30)
        until(lambda: len(signals) >= 2, 30)  # each ends one call that waits
    assert set(signals) == {signal.SIGTERM}
    # For the summary.
    assert senders == {signal.SIGTERM: "A SuperLink that did not answer for 0.4 s"}
    transport.answers.set()


@pytest.mark.one_by_day
@pytest.mark.parametrize("error", [None, VflError("Not any more.")])
def test_a_superlink_that_answers_or_refuses_is_there(
    error: Exception | None, quick: None, signals: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    transport: Any = Asked(Event(), error)
    with caplog.at_level("INFO", "flwr.notice"), watch.watched(transport):
        until(lambda: "has not answered for" in caplog.text, 30)
        transport.answers.set()
        until(lambda: "answers again" in caplog.text, 30)
        until(lambda: not transport.silent, 30)
        told = caplog.text
        Event().wait(2 * watch._GONE)
        assert caplog.text == told
    assert signals == []


# --- real nodes -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["stream", "messages"])
def test_flwr_stop_keeps_a_checkpoint_and_a_summary(transport: str, tmp_path: Path) -> None:
    epochs = 1000 if transport == "stream" else 3
    keys = {**LONG, "transport": transport, "epochs": epochs}
    with fleet(2, tmp_path) as nodes:
        _, run = nodes.submit({**keys, **({} if transport == "stream" else {"window": 10})})
        until(lambda: evaluations(run) >= (3 if transport == "stream" else 1))
        (app,) = nodes.server_apps()
        (number,) = set(re.findall(r"started run (\d+)", (run.folder / "flower.log").read_text()))
        stop = nodes.superlink.start(["flwr", "stop", number, "own"], tmp_path / "stop.log")
        assert stop.wait(60) == 0
        until(lambda: not is_running(app), 60)
    assert (
        f"by `flwr stop {number}`. It then keeps a checkpoint in {run.folder}."
        in (run.folder / "flower.log").read_text()
    )
    assert run.summary["failure"].startswith("`flwr stop` ended the run after ")
    found = checkpoint.load(run.folder)
    done = len(found.strategy["history"]["entries"])
    assert not found.finished
    assert done == len(run.history) if transport == "stream" else done == 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("party_too", [True, False])
def test_a_service_without_its_superlink_ends(party_too: bool, tmp_path: Path) -> None:
    with fleet(2, tmp_path) as nodes, reserved_port() as port:
        keys = {"strategy": "split-nn", "dataset": "breast-cancer", "epochs": 2}
        run, log = nodes.finish(nodes.submit(keys)), tmp_path / "serve.log"
        keys = {"task": "serve", "model": str(run.folder), "serve-address": f"127.0.0.1:{port}"}
        nodes.superlink.submit(keys, 2, log)
        until(lambda: "is served at" in log.read_text())
        (app,) = nodes.server_apps()
        assert nodes.superlink._process
        nodes.superlink._process.kill()  # nobody asks how it ended, so its number stays
        if party_too:
            nodes.kill(1)
        until(lambda: not is_running(app), 60)
    assert not (run.folder / "serve.pid").exists()
