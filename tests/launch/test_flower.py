"""Real nodes, by streams and by Flower's messages: processes on loopback, that all end."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Start
from tests.fleet import EF_VFL, Fleet, assert_equals, fleet

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SYNCHRONOUS: list[dict[str, Any]] = [
    {**EF_VFL, "window": 8},
    {"strategy": "split-nn", "epochs": 5, "window": 8},
    {**EF_VFL, "epochs": 1, "labels": "shared"},
    {**EF_VFL, "epochs": 1, "initial-surrogates": "embeddings"},
    {"strategy": "split-nn", "presence": 0.6, "epochs": 3, "window": 4, "calibrate": "platt"},
    {"strategy": "syn-zoo", "epochs": 2, "batch-size": 128, "window": 12, "noise-seed": 0},
]
ASYNCHRONOUS: list[dict[str, Any]] = [
    {"strategy": "vafl", "epochs": 12, "party-lr": 0.1, "server-lr": 0.1},
    {"strategy": "cascaded", "epochs": 20, "noise-seed": 0, "window": 16, "party-lr": 1e-3},
    {"strategy": "dpzv", "epochs": 16, "noise-seed": 0, "window": 16, "noise-multiplier": 1.0},
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(2, tmp_path_factory.mktemp("fleet")) as each:
        yield each


def test_a_run_over_messages_is_the_same_as_in_process(nodes: Fleet, run: Start) -> None:
    keys = {**EF_VFL, "epochs": 1}
    before = nodes.ends_of_sessions()
    finished = nodes.finish(nodes.submit({**keys, "transport": "messages"}))
    assert finished.summary["transport"] == "messages"
    assert finished.summary["exchanges"] == 2
    assert_equals(finished, run(2, keys))
    assert nodes.ends_of_sessions() == before


@pytest.mark.parametrize("keys", SYNCHRONOUS, ids=lambda keys: str(keys["strategy"]))
def test_a_synchronous_system_gives_over_streams_what_it_gives_in_process(
    keys: dict[str, Any], nodes: Fleet, run: Start
) -> None:
    finished = nodes.finish(nodes.submit({**keys, "transport": "stream"}))
    assert finished.summary["transport"] == "stream"
    assert_equals(finished, run(2, keys))


@pytest.mark.parametrize("keys", ASYNCHRONOUS, ids=lambda keys: str(keys["strategy"]))
def test_an_asynchronous_system_learns_over_streams_as_in_process(
    keys: dict[str, Any], nodes: Fleet, run: Start
) -> None:
    summary = nodes.finish(nodes.submit({**keys, "transport": "stream"})).summary
    assert summary["transport"] == "stream"
    expected = run(2, keys).summary["test_accuracy"]
    assert summary["test_accuracy"] == pytest.approx(expected, abs=0.1)  # as they come
