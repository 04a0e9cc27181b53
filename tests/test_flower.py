"""Streams between real nodes: processes on loopback, that all end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.fleet import (
    EF_VFL,
    assert_equals,
    fleet,
)

pytestmark = pytest.mark.slow

SYNCHRONOUS: list[dict[str, Any]] = [
    {"strategy": "split-nn", "epochs": 5},
    {**EF_VFL, "window": 8},
]
ASYNCHRONOUS: list[dict[str, Any]] = [
    {"strategy": "vafl", "epochs": 12, "party-lr": 0.1, "server-lr": 0.1},
    {"strategy": "cascaded", "epochs": 20, "noise-seed": 0, "window": 16, "party-lr": 1e-3},
    {"strategy": "dpzv", "epochs": 16, "noise-seed": 0, "window": 16, "noise-multiplier": 1.0},
]


def test_the_systems_run_over_streams_as_in_process(run: Start, tmp_path: Path) -> None:
    with fleet(2, tmp_path) as nodes:
        for keys in SYNCHRONOUS + ASYNCHRONOUS:
            finished = nodes.finish(nodes.submit({**keys, "transport": "stream"}))
            summary = finished.summary
            assert summary["transport"] == "stream"
            in_process = run(2, {**keys, "window": summary["window"]})
            if keys in SYNCHRONOUS:
                assert_equals(finished, in_process)
            expected = in_process.summary["test_accuracy"]
            assert summary["test_accuracy"] == pytest.approx(expected, abs=0.03)


def test_a_run_over_messages_is_the_same_as_in_process(run: Start, tmp_path: Path) -> None:
    keys = {**EF_VFL, "epochs": 1}
    with fleet(2, tmp_path) as nodes:
        finished = nodes.finish(nodes.submit({**keys, "transport": "messages"}))
        assert finished.summary["transport"] == "messages"
        assert finished.summary["exchanges"] == 2
        assert_equals(finished, run(2, keys))
        assert [path for path in nodes.states() if "checkpoint" not in path.name] == []
