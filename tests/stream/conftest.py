"""Fixtures for tests of streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore.task_identity import TaskIdentity

from tests.stream.nodes import RUN, SERVER, Streamed
from vfl_flower.transport.stream import grid, session


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a temporary Flower folder, short pauses, and the run's messages in this process."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    for module in (grid, session):
        monkeypatch.setattr(module, "POLL", 0.05)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SERVER


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Collect the warnings of Flower's logger and of this application's."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("flwr").addHandler(handler)
    yield lines
    logging.getLogger("flwr").removeHandler(handler)


@pytest.fixture
def streamed() -> Iterator[Streamed]:
    each = Streamed()
    with each.stack:
        yield each
