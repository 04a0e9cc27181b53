"""Fixtures for tests of the strategy's parts."""

import logging
from types import SimpleNamespace

import pytest

from strategies import history, messenger
from tests.strategy.parts import Warned
from vfl_flower.transport import base, gather


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when somebody sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, perf_counter=lambda: now[0])
    for module in (messenger, history, base, gather):
        monkeypatch.setattr(module, "time", clock)
    return now


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Warned:
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    return lambda: [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
