"""What all tests share: short runs in this process, without logs and without network."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

os.environ["HF_HUB_OFFLINE"] = "1"  # before the datasets library is imported

import pytest
import torch
from flwr.clientapp import ClientApp
from hypothesis import settings

from vfl_flower import client_app, results
from vfl_flower.engines import Run, run_local

logging.getLogger("flwr").disabled = True
torch.set_num_threads(1)
settings.register_profile("vfl", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("vfl")


class Start(Protocol):
    """The fixture `run`: a run in this process, into a results folder of its own."""

    def __call__(
        self, parties: int, keys: Mapping[str, Any] | None = None, client: ClientApp = ...
    ) -> Run: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(results, "draw_curves", lambda histories, path: None)  # half of the time
    numbers = count()

    def start(
        parties: int, keys: Mapping[str, Any] | None = None, client: ClientApp = client_app.app
    ) -> Run:
        out = str(tmp_path / f"run-{next(numbers)}")
        return run_local(parties, {"out": out, **(keys or {})}, client)

    return start
