"""Predictions, services and explanations reach parties as the run of their model did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Start
from vfl_flower import server_app
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import earlier_run
from vfl_flower.launch.engines import of_server
from vfl_flower.transport.base import FlowerTransport

THEN = {"stream-address": "vfl.bank.example:443", "stream-ports": "9511-9512"}


class ListenedError(Exception):
    """The run got as far as listening for streams."""


@pytest.fixture
def model(run: Start) -> Path:
    keys = {"dataset": "breast-cancer", "epochs": 1, "strategy": "split-nn", **THEN}
    return run(2, keys).folder


@pytest.fixture
def listened(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Address and ports of each run on nodes that would listen for streams."""
    found: list[tuple[str, str]] = []

    @contextmanager
    def streams(transport: Any, config: RunConfig, nonce: str = "") -> Iterator[None]:
        found.append((config.running.stream_address, config.running.stream_ports))
        raise ListenedError
        yield

    monkeypatch.setattr(server_app, "_streams", streams)
    return found


def start(keys: dict[str, Any]) -> None:
    transport: Any = FlowerTransport.__new__(FlowerTransport)
    transport.simulated, transport.engine = False, "supernodes"
    transport.grid = SimpleNamespace(run=SimpleNamespace(override_config=keys))
    with pytest.raises(ListenedError):
        server_app.serve(transport, of_server(keys, 1))


def test_a_task_with_a_model_listens_where_the_model_s_run_did(
    model: Path, listened: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("predict", "serve", "explain"):
        listened.clear()
        keys = {"task": task, "model": str(model), "out": str(model / "out.csv")}
        start(keys)
        start({**keys, "stream-address": "127.0.0.1"})  # the default, but given
        start({**keys, "stream-ports": "9600"})
        assert listened == [
            (THEN["stream-address"], THEN["stream-ports"]),
            ("127.0.0.1", THEN["stream-ports"]),
            (THEN["stream-address"], "9600"),
        ]
    monkeypatch.setattr(earlier_run, "reached_as_before", lambda config, given: config)
    start(keys)  # the control
    assert listened[-1] == ("127.0.0.1", "9500-9599")


@pytest.mark.parametrize("strategy", ["split-nn", "vafl"])
def test_a_warm_start_with_any_strategy_listens_there_too(strategy: str, model: Path) -> None:
    running = earlier_run.configured({"grow": str(model), "strategy": strategy}).running
    assert (running.stream_address, running.stream_ports) == tuple(THEN.values())
