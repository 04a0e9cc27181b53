"""Runs on SuperNodes that are killed whole, at any moment, again and again."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Start
from tests.fleet import EF_VFL, Fleet, assert_equals, evaluations, fleet, until
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished as Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

KILLS = 20
PARTIES = 2
KEYS: dict[str, Any] = {
    **{**EF_VFL, "window": 1, "epochs": 400, "patience": 0, "eval-every": 4},
    **{"checkpoint-every": 50, "transport": "stream"},
}


def kill(nodes: Fleet) -> None:
    """The SuperLink, every SuperNode, and all that they have started: at once, by SIGKILL."""
    roots = [nodes.superlink._process, *(process for _, process in nodes.nodes.values())]
    family = [psutil.Process(each.pid) for each in roots]
    for root in list(family):
        family += root.children(recursive=True)
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=30)


def test_a_run_that_is_killed_twenty_times_ends_as_if_it_had_not_been(
    run: Start, tmp_path: Path
) -> None:
    moments = random.Random(0)
    folder = tmp_path / "nodes-0"
    states = {"states": str(tmp_path / "states")}
    for number in range(KILLS + 1):
        with fleet(PARTIES, tmp_path, states) as nodes:
            keys = {"resume": str(folder)}
            if not (folder / checkpoint.FILE).exists():  # it was killed before it began
                shutil.rmtree(folder, ignore_errors=True)
                keys = {**KEYS, "out": str(folder)}
            process = nodes.superlink.submit(keys, PARTIES, tmp_path / "flower.log")
            began = evaluations(Run(folder))
            if number == KILLS:
                assert process.wait(600) == 0
                break
            if number % 2:  # in the middle of training; else at a moment like any other
                until(lambda began=began: evaluations(Run(folder)) > began)  # type: ignore[misc]
                time.sleep(moments.uniform(0, 3))
            else:
                time.sleep(moments.uniform(3, 20))
            assert process.poll() is None, "the run is too short to be killed so often"
            kill(nodes)
    finished = Run(folder)
    assert finished.summary["failure"] is None
    in_process = run(PARTIES, KEYS)
    assert_equals(finished, in_process)  # all have gone back to the same best model
    assert finished.summary["best_epoch"] == in_process.summary["best_epoch"]
