"""Shared parts of the benchmarks: MNIST, the papers' models as options, quiet runs."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.enrolment import enrol
from strategies.vertical import Vertical, strategy_of
from vfl_flower.api.training import train
from vfl_flower.client_app import app as client_app
from vfl_flower.data.at_label_holder import load_labels, with_row_masks
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid

logging.getLogger("flwr").setLevel(logging.WARNING)  # else a line for each evaluation

PARTIES = 4
ALL_ROWS = {"validation-fraction": 0.0}  # are trained on, as by a plain loop, and in the papers
Array = NDArray[Any]

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

_DATA = {
    "--mnist": ("file", "npz of X_train, y_train, X_test and y_test"),
    "--credit": ("file", "npz of X and y"),
    "--npz": ("file", "npz of X and y"),
    "--cifar": ("folder", "folder of train.parquet and test.parquet"),
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the place of MNIST, and how much of it to use."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--mnist",
        default="../shared/data/mnist.npz",
        metavar="PATH",
        help="MNIST: an npz of X_train, y_train, X_test, y_test (default: %(default)s)",
    )
    made.add_argument(
        "--rows", type=int, metavar="N", help="the first N rows of each part, to try it out"
    )
    return made


def check_there(option: str, place: str) -> None:
    """End the command with one sentence if the data of an option are missing."""
    if not Path(place).exists():
        kind, own = _DATA[option]
        raise SystemExit(f"{option}: there is no {kind} {place}; give your own {own}.")


@contextmanager
def mnist_of(options: argparse.Namespace, rows: int | None = None) -> Iterator[str]:
    """The place of MNIST, or of its first rows: as many as options or ``rows`` say, if fewer."""
    check_there("--mnist", options.mnist)
    most = min((each for each in (options.rows, rows) if each), default=None)
    if most is None:
        yield options.mnist
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        np.load(options.mnist, allow_pickle=False) as file,
    ):
        part = {name: file[name][:most] for name in ("X_train", "y_train", "X_test", "y_test")}
        place = str(Path(folder, "part.npz"))
        np.savez(place, **part)
        yield place


def plain_mnist(mnist: str) -> tuple[list[Array], list[Array], Array, Array]:
    """Return a plain loop's data: quarters [N, 196] of training rows and test rows, and labels.

    A quarter is scaled by the mean and deviation of its training rows, as a party does it.
    """
    train, test = [], []
    with np.load(mnist, allow_pickle=False) as file:
        images, labels = [file["X_train"], file["X_test"]], [file["y_train"], file["y_test"]]
    for down in (slice(14), slice(14, 28)):
        for across in (slice(14), slice(14, 28)):
            known, new = (each[:, down, across].reshape(len(each), -1) for each in images)
            mean, deviation = known.mean(dtype=float), known.std(dtype=float)
            train.append(((known - mean) / deviation).astype(np.float32))
            test.append(((new - mean) / deviation).astype(np.float32))
    known_labels, new_labels = (each.astype(np.int64) for each in labels)
    return train, test, known_labels, new_labels


def quiet_run(
    parties: int, keys: Mapping[str, Any], engine: str = "local"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and history of a run, whose results folder is thrown away."""
    model = train({**ALL_ROWS, **keys}, parties=parties, engine=engine)
    return model.summary, model.history


def local_epoch(parties: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The last history entry of a run in process, with the seconds of its training alone."""
    strategy, _, seconds = trained(parties, keys)
    last = strategy.run.history.last or strategy.figures()  # of a baseline that has several runs
    return {**last, "seconds": seconds}


def trained(
    parties: int,
    keys: Mapping[str, Any],
    callback_of: Callable[[Vertical], Callback] = lambda strategy: Callback(),
) -> tuple[Vertical, LocalGrid, float]:
    """The strategy of a run in process and its parties, and the seconds of its training alone.

    The seconds of a history also include building the label holder and its table. Here this happens
    before training, as a plain loop builds its model before training.
    """
    keys = {**ALL_ROWS, **keys}
    config = resolve(keys)
    strategy = strategy_of(config)(config, load_labels(config))
    strategy.callbacks = [callback_of(strategy)]
    grid = LocalGrid(client_app, parties, keys, config)
    nodes = enrol(grid, config, strategy.labels)
    strategy.labels = with_row_masks(strategy.labels, config, len(nodes))
    strategy.prepare(grid, nodes)
    start = time.perf_counter()
    strategy.train()
    return strategy, grid, time.perf_counter() - start


def report(name: str, figures: Mapping[str, Any]) -> None:
    """The last line."""
    print(json.dumps({"benchmark": name, **figures}))
