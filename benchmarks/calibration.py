"""Calibration: Brier score and calibration error on test rows, before and after, by class weights.

Each run trains one model, and each method is fitted on the validation rows of that model. The
expected calibration error has ten bins with the same number of rows: the mean distance between a
bin's mean probability and its share of positive rows. With several classes, the Brier score is a
sum over the classes, and the calibration error is of the likeliest class. Prints one JSON object as
its last line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import check_there, report
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.calibration import fit, probabilities
from vfl_flower.launch.engines import run_local
from vfl_flower.tasks.inference.model import Predictor

PARTIES = 3
DATA = ["credit", "breast-cancer", "digits"]
Array = NDArray[Any]


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--credit",
        default="../shared/data/uci_credit_default.npz",
        metavar="PATH",
        help="the credit-default table: an npz of X, y (default: %(default)s)",
    )
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, help="instead of the default, to try it out")
    made.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    options = made.parse_args()
    if "credit" in options.data:
        check_there("--credit", options.credit)
    figures: dict[str, Any] = {"seeds": options.seeds}
    places = {"credit": f"npz:{options.credit}"}
    for name in options.data:
        for weights in ("", "balanced"):
            more = {"epochs": options.epochs} if options.epochs else {}
            keys = {"dataset": places.get(name, name), "class-weights": weights, **more}
            runs = [measured({**keys, "seed": seed}) for seed in range(options.seeds)]
            found = {method: _over_seeds([run[method] for run in runs]) for method in runs[0]}
            title = f"{name}, {weights or 'equal'} weights"
            print(title, found, flush=True)
            figures[title] = found
    report("calibration", figures)


def measured(keys: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return figures on the test rows of one run, by method."""
    with tempfile.TemporaryDirectory() as folder:
        run_local(PARTIES, {**keys, "out": str(Path(folder, "run"))})
        found = checkpoint.load(Path(folder, "run"))
    labels, predictor = load_labels(found.config), Predictor(found, 0)
    rows = torch.from_numpy(found.arrays["test_table.rows"])
    everyone = np.ones((len(rows), PARTIES), bool)
    outputs = predictor.outputs(rows, np.zeros((len(rows), 0), np.float32), everyone)
    first, truth = labels.validation, torch.from_numpy(labels.test)
    figures = {}
    for method in ("none", "platt", "isotonic"):
        kept = None if method == "none" else fit(method, outputs[:first], truth[:first])
        figures[method] = of(probabilities(outputs[first:], kept), labels.test[first:])
    return figures


def of(chances: Array, truth: Array) -> dict[str, float]:
    """Return the Brier score and the expected calibration error of probabilities [R, classes]."""
    classes = chances.shape[1]
    squares = (chances - np.eye(classes)[truth]) ** 2
    chance, right = chances[:, 1], truth == 1
    if classes > 2:
        chance, right = chances.max(1), chances.argmax(1) == truth
    bins = np.array_split(np.argsort(chance, kind="stable"), 10)
    gaps = [len(rows) * abs(chance[rows].mean() - right[rows].mean()) for rows in bins]
    brier = float(squares.sum(1).mean() if classes > 2 else squares[:, 1].mean())
    return {"brier": brier, "ece": sum(gaps) / len(truth)}


def _over_seeds(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return mean and deviation of each figure."""
    values = {figure: [run[figure] for run in runs] for figure in runs[0]}
    return {
        figure: [round(float(np.mean(each)), 4), round(float(np.std(each)), 4)]
        for figure, each in values.items()
    }


if __name__ == "__main__":
    main()
