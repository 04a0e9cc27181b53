"""Masked sums on Flower's own runtimes: Ray and SuperNodes, over streams and messages."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Start
from tests.fleet import evaluations, fleet, until
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_ray, run_supernodes

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

KEYS: dict[str, Any] = {
    **{"dataset": "breast-cancer", "combine": "mean", "aggregation": "secure", "window": 4},
    **{"embedding-size": 4, "bottom-hidden": 8, "top-hidden": 8, "batch-size": 64, "epochs": 2},
    **{"noise-seed": 0},
}
JOINT: dict[str, Any] = {"strategy": "syn-zoo", "perturbs": "all"}


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        pytest.param(run_ray, JOINT, id="ray, streams"),
        pytest.param(  # by streams they go from session to session, below
            run_supernodes, {"transport": "messages", "window": 8}, id="supernodes, messages"
        ),
    ],
)
def test_a_run_is_the_same_as_in_process(
    engine: Callable[[int, Mapping[str, Any]], Run],
    keys: dict[str, Any],
    run: Start,
    tmp_path: Path,
) -> None:
    on_flower = engine(3, {**KEYS, **keys, "out": str(tmp_path / "on-flower")})
    in_process = run(3, {**KEYS, **keys})
    for key, values in in_process.parameters("top").items():
        np.testing.assert_array_equal(on_flower.parameters("top")[key], values)
    for name in ("steps", "exchanges", "bytes_up", "bytes_down", "test_accuracy"):
        assert on_flower.summary[name] == in_process.summary[name]


def test_nodes_go_from_session_to_session_predict_and_after_a_kill_are_resumed(
    run: Start, tmp_path: Path
) -> None:
    long = {**KEYS, "transport": "stream", "window": 1, "epochs": 150, "checkpoint-every": 60}
    expected = run(3, {**long, "patience": 0.0})
    with fleet(3, tmp_path) as nodes:
        keys = {**long, "patience": 0.0, "session-seconds": 6.0}  # a small part of the run
        process, unfinished = nodes.submit(keys)
        until(lambda: len(nodes.ends_of_sessions()) == 3)
        since = evaluations(unfinished)
        until(lambda: evaluations(unfinished) >= since + 2)
        (app,) = nodes.client_apps(0)
        app.kill()
        process.wait(400)
        failure = json.loads((unfinished.folder / "summary.json").read_text())["failure"]
        assert "from its last checkpoint" in failure or "to its last checkpoint" in failure
        again = {"resume": str(unfinished.folder), "session-seconds": 600.0}
        nodes.superlink.submit(again, 3, tmp_path / "resumed.log").wait(400)
        assert unfinished.summary["failure"] is None
        for key, values in expected.parameters("top").items():
            np.testing.assert_allclose(unfinished.parameters("top")[key], values, atol=1e-6)
        given = {"task": "predict", "model": str(unfinished.folder)}
        out = tmp_path / "predictions.csv"
        nodes.superlink.submit({**given, "out": str(out)}, 3, tmp_path / "predict.log").wait(400)
        said = json.loads(out.with_suffix(".json").read_text())
        assert said["accuracy"] == pytest.approx(expected.summary["test_accuracy"])
        keys_of = list(nodes.superlink.home.rglob("sums.key"))
        assert [path.stat().st_mode & 0o777 for path in keys_of] == [0o600]
