"""Whole runs on Flower's own runtimes, with a SuperLink of their own; all processes end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Start
from tests.fleet import EF_VFL, processes_of
from vfl_flower.errors import VflError
from vfl_flower.runtimes import processes as flower_processes
from vfl_flower.runtimes.processes import SuperLink
from vfl_flower.start import Finished as Run
from vfl_flower.start import run_ray, run_supernodes

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The FLWR_HOME of every SuperLink that a test starts."""
    seen: list[Path] = []
    enter = SuperLink.__enter__

    def remember(self: SuperLink) -> SuperLink:
        entered = enter(self)
        seen.append(self.home)
        return entered

    monkeypatch.setattr(SuperLink, "__enter__", remember)
    return seen


@pytest.mark.parametrize(
    ("engine", "parties", "keys"),
    [
        pytest.param(run_ray, 3, {"epochs": 2, "transport": "messages"}, id="ray"),
        pytest.param(run_ray, 2, EF_VFL, id="ray, private labels", marks=pytest.mark.nightly),
        pytest.param(
            run_ray,
            2,
            {**EF_VFL, "labels": "shared"},
            id="ray, shared labels",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            run_supernodes,  # a fresh process draws the directions of the last one's window again
            2,
            {"strategy": "syn-zoo", "epochs": 2, "batch-size": 128, "window": 12, "noise-seed": 0},
            id="supernodes, zeroth order",
        ),
    ],
)
def test_a_synchronous_run_is_the_same_as_in_process(
    engine: Callable[[int, Mapping[str, Any]], Run],
    parties: int,
    keys: dict[str, Any],
    run: Start,
    tmp_path: Path,
    homes: list[Path],
) -> None:
    on_flower = engine(parties, {**keys, "out": str(tmp_path / "on-flower")})
    window = on_flower.summary["window"]
    in_process = run(parties, {**keys, "window": window})
    for key, values in in_process.parameters("top").items():
        np.testing.assert_allclose(on_flower.parameters("top")[key], values, atol=1e-5)
    for name in ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert on_flower.summary[name] == in_process.summary[name]
    assert on_flower.summary["test_accuracy"] == in_process.summary["test_accuracy"]
    assert on_flower.summary["code"] == in_process.summary["code"]
    assert on_flower.summary["engine"] == engine.__name__.removeprefix("run_")
    assert (on_flower.folder / "curves.png").stat().st_size > 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in on_flower.folder.iterdir()}
    assert modes["flower.log"] == 0o600 and set(modes.values()) == {0o600}
    assert not any(name.endswith(".lock") for name in modes)
    assert len(homes) == 1 and processes_of(homes[0]) == []


@pytest.mark.nightly
def test_asynchronous_systems_learn_on_ray_and_a_failing_party_ends_it_with_a_sentence(
    tmp_path: Path, homes: list[Path]
) -> None:
    finished = run_ray(2, {"strategy": "vafl", "epochs": 8, "out": str(tmp_path / "vafl")})
    assert finished.summary["test_accuracy"] > 0.8
    assert finished.summary["exchanges"] == 2 * 8 * 6
    private = {"strategy": "dpzv", "epochs": 6, "epsilon": 3.0, "delta": 1e-3}
    finished = run_ray(2, {**private, "out": str(tmp_path / "dpzv")})
    assert finished.summary["test_accuracy"] > 0.7
    assert 2.9 < finished.summary["epsilon"] <= 3.0
    with pytest.raises(VflError, match="too few to divide among 80"):
        run_ray(80, {"bottom-model": "lstm", "out": str(tmp_path / "too-many")})
    log = (tmp_path / "too-many" / "flower.log").read_text()
    assert "too few to divide among 80" in log and "Traceback" not in log
    assert [processes_of(home) for home in homes] == [[], [], []]


@pytest.mark.nightly
def test_the_code_that_runs_is_that_of_the_app_that_was_named(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another checkout, whose code differs by a comment, from a folder where it could be imported.
    other = tmp_path / "vfl-flower-copy"
    for package in ("vfl_flower", "strategies"):
        without = shutil.ignore_patterns("__pycache__")  # where another process may write just now
        shutil.copytree(CHECKOUT / package, other / package, ignore=without)
    shutil.copy(CHECKOUT / "pyproject.toml", other / "pyproject.toml")
    with (other / "vfl_flower" / "axes" / "codecs" / "channel.py").open("a") as file:
        file.write("# another checkout\n")
    monkeypatch.setattr(flower_processes, "CHECKOUT", other)
    there = run_ray(2, {"epochs": 1, "out": str(tmp_path / "out")}).summary["code"]
    assert there != run(2, {"epochs": 1}).summary["code"]


def test_a_process_group_ends_as_a_whole(tmp_path: Path) -> None:
    with SuperLink(simulation=True) as superlink:
        home = superlink.home
        child = superlink.start(["python", "-c", "import time; time.sleep(600)"], tmp_path / "log")
        assert processes_of(home) != []
        flower_processes.stop(child)
        assert child.returncode is not None
    assert processes_of(home) == []
    assert not home.exists()
    assert "FLWR_HOME" not in os.environ or Path(os.environ["FLWR_HOME"]) != home
