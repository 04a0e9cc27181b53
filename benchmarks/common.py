"""What the benchmarks share: MNIST, the paper's models as configuration keys, quiet runs."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strategies.enrolment import enrol
from strategies.run import Run
from vfl_flower.client_app import app as client_app
from vfl_flower.data.blocks import load_labels
from vfl_flower.registry import SYSTEMS
from vfl_flower.runtimes.local import LocalGrid
from vfl_flower.start import Finished, run_local
from vfl_flower.systems import resolve

PARTIES = 4

CASCADED_MODEL: dict[str, Any] = {  # 196-128 at each of four parties, 512-128-10 on top
    "bottom-model": "linear",
    "embedding-size": 128,
    "top-hidden": 128,
    "batch-size": 64,
    "party-lr": 0.1,
    "server-lr": 0.1,
}
SIGMOID_MODEL: dict[str, Any] = {  # 196-16 sigmoid, a linear top model on the mean
    "bottom-model": "linear",
    "embedding-size": 16,
    "embedding-activation": "sigmoid",
    "top-model": "linear",
    "combine": "mean",
    "batch-size": 64,
    "party-lr": 0.5,
    "server-lr": 0.5,
}

ZEROTH_ORDER: dict[str, dict[str, Any]] = {  # learning rates for the 196-16 model, plain SGD
    "cascaded": {"party-lr": 0.006, "server-lr": 0.1},
    "asyrevel": {
        "optimizer": "sgd",
        "batch-size": 64,
        "party-lr": 0.01,
        "server-lr": 0.03,
        "delay": "none",
    },
    "syn-zoo": {"optimizer": "sgd", "batch-size": 64, "party-lr": 0.01, "server-lr": 0.03},
    "dpzv": {"party-lr": 0.05, "server-lr": 0.1, "clip": 0.5},
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the place of MNIST."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--mnist",
        default="../shared/data/mnist.npz",
        metavar="PATH",
        help="MNIST: an npz of X_train, y_train, X_test, y_test (default: %(default)s)",
    )
    return made


def quiet_run(
    parties: int,
    keys: Mapping[str, Any],
    engine: Callable[[int, Mapping[str, Any]], Finished] = run_local,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and history of a run, whose results folder is thrown away."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        finished = engine(parties, {**keys, "out": f"{folder}/run"})
        return finished.summary, finished.history


def local_epoch(parties: int, run_config: dict[str, Any]) -> tuple[float, float]:
    """Seconds and test accuracy of a configuration's training on a LocalGrid, without its start."""
    config = resolve(run_config)
    strategy = SYSTEMS.load(config.strategy).load_strategy()(config, load_labels(config))
    grid, labels = LocalGrid(client_app, parties, run_config, config), strategy.labels
    strategy.run = Run(grid, enrol(grid, config, labels), config, labels)
    start = time.perf_counter()
    strategy.train()
    return time.perf_counter() - start, strategy.run.history.entries[-1]["test_accuracy"]


def part_of_mnist(path: str, rows: int, folder: str) -> str:
    """An npz of the first rows of MNIST, as a data set name."""
    with np.load(path, allow_pickle=False) as file:
        part = {name: file[name][:rows] for name in ("X_train", "y_train", "X_test", "y_test")}
    place = Path(folder) / "part.npz"
    np.savez(place, **part)
    return f"npz:{place}"


def report(name: str, figures: Mapping[str, Any]) -> None:
    """The last line."""
    print(json.dumps({"benchmark": name, **figures}))
