"""Calibration: Brier score and calibration error on test rows, before and after, by class weights.

Each run trains one model, and each method is fitted on the validation rows of that model. The
expected calibration error has ten bins with the same number of rows: the mean distance between a
bin's mean probability and its share of positive rows. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import report
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.calibration import fit, probabilities
from vfl_flower.label_holder.predictor import Predictor
from vfl_flower.launch.engines import run_local

PARTIES = 3
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
    options = made.parse_args()
    figures: dict[str, Any] = {"seeds": options.seeds}
    for name, place in (("breast-cancer", "breast-cancer"), ("credit", f"npz:{options.credit}")):
        for weights in ("", "balanced"):
            more = {"epochs": options.epochs} if options.epochs else {}
            keys = {"dataset": place, "class-weights": weights, **more}
            runs = [measured({**keys, "seed": seed}) for seed in range(options.seeds)]
            found = {
                method: {
                    figure: [
                        round(float(f([run[method][figure] for run in runs])), 4)
                        for f in (np.mean, np.std)
                    ]
                    for figure in ("brier", "ece")
                }
                for method in runs[0]
            }
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
        chances = probabilities(outputs[first:], kept)[:, 1]
        figures[method] = of(chances, labels.test[first:])
    return figures


def of(chances: Array, truth: Array) -> dict[str, float]:
    """Return the Brier score and the expected calibration error of probabilities [R]."""
    bins = np.array_split(np.argsort(chances, kind="stable"), 10)
    gaps = [len(rows) * abs(chances[rows].mean() - truth[rows].mean()) for rows in bins]
    return {"brier": float(np.mean((chances - truth) ** 2)), "ece": sum(gaps) / len(truth)}


if __name__ == "__main__":
    main()
