"""Golden runs: what configurations across all axes give, to hold a refactoring against.

    python -m tests.golden record FILE    before the first move
    python -m tests.golden check FILE     after every move: bit for bit, on the same machine

Another processor rounds otherwise, so `tests/golden.json` holds of the small ones what survives
that, and `tests/test_golden.py` compares with it; ``figures`` writes it anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # another number of threads rounds otherwise

import numpy as np
import torch
from flwr.app import Context, Message

from tests.conftest import ALL_ROWS
from tests.organisations import cancer, cut
from vfl_flower import client_app
from vfl_flower.start import Finished as Run
from vfl_flower.start import predict_local, run_local

FIGURES = Path(__file__).parent / "golden.json"

CANCER: dict[str, Any] = {
    **ALL_ROWS,
    "dataset": "breast-cancer",
    "bottom-hidden": 8,
    "batch-size": 64,
    "embedding-size": 4,
    "top-hidden": 8,
    "noise-seed": 0,
    "epochs": 3,
}
BOTH_WAYS = {"downlink-codec": "top-k", "downlink-compression": "error-feedback"}
VAFL = {"strategy": "vafl", "party-lr": 0.2, "server-lr": 0.2}
RATED = ("asyrevel", "synrevel", "cascaded", "syn-zoo", "dpzv")
"""Systems with rates of their own; others had 0.2 when the figures were recorded."""
DPZV = {"strategy": "dpzv", "noise-multiplier": 1.0, "party-lr": 0.01, "server-lr": 0.1}

SMALL: dict[str, dict[str, Any]] = {
    "split-nn": {},
    "split-nn, windows, momentum, l2": {
        **{"window": 4, "optimizer": "momentum", "party-lr": 0.05, "server-lr": 0.05},
        **{"regulariser-weight": 0.01},
    },
    "split-nn, adam, Poisson": {
        **{"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01, "sampling": "poisson"},
    },
    "split-nn, mean, regulariser": {
        **{"combine": "mean", "top-model": "linear", "embedding-activation": "sigmoid"},
        **{"regulariser": "nonconvex", "regulariser-weight": 0.01, "window": 2},
    },
    "split-nn, sum, class weights": {
        **{"top-model": "sum", "embedding-size": "auto", "bottom-model": "linear"},
        **{"class-weights": "balanced"},
    },
    "split-nn, zeroth-order server": {"server-update": "zeroth-order", "server-lr": 0.02},
    "split-nn, full batch": {"batch-size": 1000, "epochs": 8},
    "vafl": {**VAFL, "delay": "exponential"},
    "vafl, momentum, window": {
        **{"strategy": "vafl", "optimizer": "momentum", "window": 4, "party-lr": 0.05},
        **{"server-lr": 0.05, "delay": "poisson"},
    },
    "vafl, bounded delay": {
        **{**VAFL, "max-delay": 6, "window": 3, "delay": "exponential"},
    },
    "vafl-t, Poisson": {"strategy": "vafl-t", "quorum": 2, "sampling": "poisson", "window": 3},
    "vafl-t, adam, class weights": {
        **{"strategy": "vafl-t", "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
        **{"class-weights": "1,3", "delay": "poisson"},
    },
    "vafl, perturbed": {**VAFL, "privacy": "perturbed-embedding", "window": 2},
    "split-nn, perturbed, inner noise, momentum": {
        **{"privacy": "perturbed-embedding", "inner-noise": 0.1, "optimizer": "momentum"},
        **{"party-lr": 0.05, "server-lr": 0.05, "window": 2},
    },
    "asyrevel": {"strategy": "asyrevel", "window": 4},
    "asyrevel, sphere, sgd, Poisson": {
        **{"strategy": "asyrevel", "directions": "sphere", "optimizer": "sgd", "window": 4},
        **{"party-lr": 0.02, "server-lr": 0.02, "sampling": "poisson"},
    },
    "synrevel": {"strategy": "synrevel", "window": 4, "regulariser-weight": 0.1},
    "cascaded": {"strategy": "cascaded", "delay": "straggler", "window": 4},
    "cascaded, bounded delay, window 1": {
        **{"strategy": "cascaded", "max-delay": 6, "window": 1, "delay": "exponential"},
    },
    "cascaded, perturbed": {
        **{"strategy": "cascaded", "privacy": "perturbed-embedding", "mu": 0.1, "window": 4},
        **{"embedding-noise": 0.01, "embedding-bound": 10.0},
    },
    "cascaded, black box": {
        **{"strategy": "cascaded", "bottom-model": "scorecard", "mu": 1.0, "party-lr": 1.0},
    },
    "cascaded, compressed": {
        **{"strategy": "cascaded", "codec": "top-k", "compression": "error-feedback"},
        **{"window": 4},
    },
    "syn-zoo, two-sided, qsgd": {
        **{"strategy": "syn-zoo", "differences": "two-sided", "codec": "qsgd", "window": 4},
        **{"compression": "error-feedback"},
    },
    "syn-zoo, in place": {"strategy": "syn-zoo", "window": 1},
    "ef-vfl": {"strategy": "ef-vfl", "keep": 0.3},
    "ef-vfl, qsgd both ways": {
        **{"strategy": "ef-vfl", "codec": "qsgd", "downlink-codec": "qsgd", "window": 2},
        **{"downlink-compression": "error-feedback"},
    },
    "ef-vfl, shared labels": {
        **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2, **BOTH_WAYS},
        **{"class-weights": "balanced", "window": 2, "regulariser-weight": 0.01},
    },
    "ef-vfl, shared labels, sum": {
        **{"strategy": "ef-vfl", "labels": "shared", "top-model": "sum"},
        **{"embedding-size": "auto", "privacy": "perturbed-embedding"},
    },
    "cvfl": {"strategy": "cvfl", **BOTH_WAYS},
    "vafl, compressed both ways": {
        **{**VAFL, "codec": "qsgd", "compression": "error-feedback"},
        **{"downlink-codec": "qsgd", "downlink-compression": "error-feedback", "window": 3},
    },
    "dpzv": {**DPZV, "window": 4},
    "dpzv, qsgd": {**DPZV, "codec": "qsgd", "window": 4, "compression": "error-feedback"},
    "dpzv, zeroth-order server, budget": {
        **{**DPZV, "epsilon": 2.0, "delta": 1e-3, "server-update": "zeroth-order"},
        **{"server-lr": 0.02, "window": 4, "noise-multiplier": 8.0},
    },
    "dpzv, synchronous": {**DPZV, "quorum": 3, "window": 4, "top-clip": 0.1},
    "dpzv, joint": {
        **{**DPZV, "quorum": 3, "perturbs": "all", "server-update": "zeroth-order"},
        **{"server-lr": 0.02},
    },
    "dpzv, secret mini-batches": {
        **{**DPZV, "sampling": "poisson", "calibration": "secret", "window": 4},
    },
    "dpzv, budget calibrated": {
        **{"strategy": "dpzv", "party-lr": 0.01, "server-lr": 0.1},
        **{"epsilon": 1.0, "delta": 1e-3, "window": 4},
    },
    "dpzv, calibrated by the paper": {
        **{
            "party-lr": 0.01,
            "server-lr": 0.1,
            "strategy": "dpzv",
            "calibration": "paper",
            "epsilon": 1.0,
            "delta": 1e-3,
        },
        **{"sampling": "poisson"},
    },
    "frozen": {"strategy": "frozen"},
    "alone": {"strategy": "alone"},
    "joined": {"strategy": "joined", "optimizer": "momentum", "party-lr": 0.05},
}
LARGE: dict[str, dict[str, Any]] = {
    "digits, split-nn": {"dataset": "digits", "batch-size": 32},
    "digits, cnn": {"dataset": "digits", "bottom-model": "cnn", "party-lr": 0.05, "window": 8},
    "digits, lstm": {"dataset": "digits", "bottom-model": "lstm", **VAFL},
    "digits, lstm, cascaded": {
        **{"dataset": "digits", "bottom-model": "lstm", "strategy": "cascaded", "epochs": 1},
    },
    "digits, bands, ef-vfl": {
        **{"dataset": "digits", "image-split": "rows", "strategy": "ef-vfl", "batch-size": 32},
        **BOTH_WAYS,
    },
    "digits, dpzv": {**DPZV, "dataset": "digits", "batch-size": 32},
    "digits, vafl-t, top-k": {
        **{"dataset": "digits", "strategy": "vafl-t", "codec": "top-k", "quorum": 2},
        **{"delay": "poisson"},
    },
    "digits, binarised": {
        **{"dataset": "digits", "strategy": "cascaded", "bottom-model": "binarised"},
        **{"party-lr": 1.0, "mu": 1.0},
    },
}
CUT_SHORT: dict[str, dict[str, Any]] = {
    "split-nn": {"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
    "vafl-t, bounded delay": {
        **{"strategy": "vafl-t", "quorum": 2, "max-delay": 5, "window": 4},
        **{"delay": "exponential"},
    },
    "ef-vfl, shared labels": {
        **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2, **BOTH_WAYS},
    },
    "cascaded": {"strategy": "cascaded", "window": 4, "delay": "straggler"},
    "dpzv": {**DPZV, "window": 4},
    "perturbed": {**VAFL, "privacy": "perturbed-embedding"},
}
OF_FILES: dict[str, dict[str, Any]] = {
    "vafl": VAFL,
    "cascaded, regression": {"strategy": "cascaded", "target": "regression", "label": "f2"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "dpzv, zeroth-order server": {**DPZV, "server-update": "zeroth-order", "server-lr": 0.02},
    "alone": {"strategy": "alone"},
    "joined": {"strategy": "joined"},
}


class _Cut(BaseException):
    """Somebody stops the run."""


class _Failing:
    """The ClientApp, which at some of the messages of party 0 fails, or cuts the run short."""

    def __init__(self, at: range, error: type[BaseException]) -> None:
        self.at = at
        self.error = error
        self.messages = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            self.messages += 1
            if self.messages in self.at:
                raise self.error
        reply: Message = client_app.app(message, context)
        return reply


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_TIMES = ("seconds", "reply_seconds", "peak_memory_mb", "versions", "code", "config")


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A summary or history entry, without what differs from run to run."""
    return {
        key: [_figures(each) for each in value] if key == "by_party" else value
        for key, value in entry.items()
        if key not in _TIMES
    }


_AROUND = ("out", "resume", "observer")  # which have no part in what is computed


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _AROUND}


def outcome(run: Run) -> dict[str, Any]:
    """All that a run has left."""
    parameters: dict[str, dict[str, str]] = {}
    norms: dict[str, float] = {}
    for path in sorted(run.folder.glob("*.npz")):
        if path.name != "checkpoint.npz":
            arrays = run.parameters(path.stem)
            parameters[path.stem] = {name: digest(each.tobytes()) for name, each in arrays.items()}
            norms[path.stem] = float(sum(np.square(each).sum() for each in arrays.values()) ** 0.5)
    return {
        "parameters": parameters,
        "norms": norms,
        "history": [_figures(entry) for entry in run.history],
        "summary": _figures(run.summary),
        "config": digest(json.dumps(_lasting(run.summary["config"]), sort_keys=True).encode()),
    }


def on_cancer(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run on breast-cancer."""
    own = keys.get("strategy") in RATED
    return {**CANCER, **({} if own else {"party-lr": 0.2, "server-lr": 0.2}), **keys}


def small(name: str, folder: Path) -> dict[str, Any]:
    """A run of three parties on breast-cancer."""
    return outcome(run_local(3, {**on_cancer(SMALL[name]), "out": str(folder)}))


def _large(name: str, folder: Path) -> dict[str, Any]:
    keys = {**ALL_ROWS, "epochs": 2, "noise-seed": 0, **LARGE[name]}
    return outcome(run_local(4, {**keys, "out": str(folder)}))


def _cut_short(name: str, folder: Path) -> dict[str, Any]:
    """A run that is cut short, gone on with, and predicts."""
    keys = {**on_cancer(CUT_SHORT[name]), "checkpoint-every": 8}
    at = 9 if "window" in keys else 21
    client: Any = _Failing(range(at, at + 1), _Cut)
    try:
        run_local(3, {**keys, "out": str(folder)}, client)
        raise AssertionError("it was not cut short")
    except _Cut:
        pass

    run = run_local(3, {"resume": str(folder)})

    return {
        **outcome(run),
        "predictions": digest(predict_local({"model": str(folder)}).read_bytes()),
    }


def _of_files(name: str, folder: Path) -> dict[str, Any]:
    """Two parties and a bank with files, aligned by private set intersection; predictions."""
    table = cancer()
    organisations = cut(folder, table, own=3)
    keys = {key: CANCER[key] for key in CANCER if key != "dataset"}
    run = organisations.run("run", {**keys, **OF_FILES[name]})
    found = outcome(run)
    found["summary"].pop("dataset")
    found["config"] = ""  # it has the folder in it
    if (run.folder / "checkpoint.npz").exists():
        organisations.predict("run", **{k: v for k, v in OF_FILES[name].items() if k == "label"})
        found["predictions"] = digest((run.folder / "predictions.csv").read_bytes())
    return found


def _failure(name: str, folder: Path) -> dict[str, Any]:
    """A party that fails for a while, or for good, where the others go on."""
    client: Any = _Failing(range(8, 20 if name == "for good" else 9), RuntimeError)
    keys = {**CANCER, **VAFL, "quorum": 1, "on-party-failure": "continue", "window": 2}
    return outcome(run_local(3, {**keys, "out": str(folder)}, client))


KINDS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "small": (small, SMALL),
    "large": (_large, LARGE),
    "cut short": (_cut_short, CUT_SHORT),
    "of files": (_of_files, OF_FILES),
    "failure": (_failure, {"for a while": 0, "for good": 0}),
}


def everything() -> dict[str, Any]:
    """The outcome of every golden run, by name."""
    found = {}
    for kind, (function, names) in KINDS.items():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found[f"{kind}: {name}"] = function(name, Path(folder, "run"))
    return found


def compare(then: Any, now: Any, where: str = "") -> list[str]:
    """Where two outcomes differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        return [
            line
            for key in keys
            for line in compare(then.get(key, "-"), now.get(key, "-"), f"{where} / {key}")
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [line for n, (a, b) in pairs for line in compare(a, b, f"{where} / {n}")]
    return [] if then == now else [f"{where}: {then} became {now}"]


def robust(found: dict[str, Any]) -> dict[str, Any]:
    """What of an outcome another processor gives too, nearly."""
    summary = found["summary"]
    names = ("steps", "exchanges", "bytes_up", "bytes_down", "virtual_seconds", "epsilon")
    figures = {name: summary[name] for name in (*names, "test_loss", "test_accuracy")}
    losses = [entry["test_loss"] for entry in found["history"]]
    return {**figures, "test_losses": losses, "norms": found["norms"]}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("task", choices=("record", "check", "figures"))
    made.add_argument("file", type=Path, nargs="?", help="of the outcomes; not for figures")
    options = made.parse_args()
    task, file = options.task, options.file
    if (task == "figures") != (file is None):
        made.error("record and check need a file, figures none")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if task == "figures":
        with tempfile.TemporaryDirectory() as folder:
            figures = {
                name: robust(small(name, Path(folder, str(n)))) for n, name in enumerate(SMALL)
            }
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        return
    found = json.loads(json.dumps(everything()))
    if task == "record":
        file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} golden runs")
        return
    then = json.loads(file.read_text())
    for name in then:
        differences = compare(then[name], found.get(name, "-"))
        if differences:
            print(name, *differences[:6], sep="\n    ")
    equal = sum(then[name] == found.get(name) for name in then)
    print(f"{equal} of {len(then)} golden runs are equal")
    sys.exit(equal < len(then))


if __name__ == "__main__":
    main()
