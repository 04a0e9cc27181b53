"""A run's log names the parties that the run waits for."""

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Message

from vfl_flower.config.errors import VflError
from vfl_flower.transport import gather
from vfl_flower.transport.base import Transport


class Slow(Transport):
    """A transport whose replies come when a test says."""

    engine, medium, cost = "supernodes", "stream", "cheap"

    def __init__(self, now: list[float]) -> None:
        self.due: dict[str, float] = {}
        self.now = now

    def get_node_ids(self) -> list[int]:
        return [7, 8, 9]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        return [key for key in message_ids if self.due.get(key, 1e9) <= self.now[0]]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


class Box(gather.Outbox):
    def failed(self, node: int, error: VflError) -> None:
        raise error


@pytest.fixture
def box(now: list[float], caplog: pytest.LogCaptureFixture) -> Box:
    caplog.set_level("INFO", "flwr.notice")
    transport = Slow(now)
    transport.numbers = {7: 0, 8: 1}
    return Box(transport, 600.0)


def received(box: Box, seconds: float = 90.0) -> list[Any]:
    return [*box.receive(box.transport.now[0] + seconds)]  # type: ignore[attr-defined]


def sent(box: Box, key: str, node: int, seconds: float) -> None:
    """Send a message whose reply comes after so many seconds."""
    transport: Any = box.transport
    box.out[key] = node, transport.now[0]
    transport.due[key] = transport.now[0] + seconds


def test_the_log_names_a_party_that_is_late_and_no_other(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    sent(box, "a", 7, 0.0)
    assert received(box) == ["a"]
    del box.out["a"]
    sent(box, "b", 8, 9.0)
    assert received(box) == ["b"]  # the control: soon enough
    assert not caplog.messages
    del box.out["b"]
    sent(box, "c", 8, 15.0)
    assert received(box) == ["c"]
    assert caplog.messages == ["The run waits for party 1: no answer for 10 s."]
    sent(box, "d", 9, 15.0)  # it has not introduced itself
    del box.out["c"]
    assert received(box) == ["d"]
    assert caplog.messages[1:] == ["The run waits for node 9: no answer for 10 s."]


def test_the_log_names_it_again_once_in_a_while_until_the_deadline(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    sent(box, "a", 7, 1e6)
    sent(box, "b", 8, 1e6)
    assert received(box, 130.0) == []
    who = "The run waits for party 0, party 1: no answer for"
    assert caplog.messages == [f"{who} 10 s.", f"{who} 70 s."]
