"""Worth of each party: by one model of any subset, and by a model for each subset.

Each of four parties has a quadrant of the digits. `vfl contribution` computes Shapley values of
test accuracy from one run with random subsets. Separate models, one trained for each of the 15
subsets of the parties, give the values beside them. Means and deviations are over seeds. Prints one
JSON object as its last line.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.common import ALL_ROWS, report
from vfl_flower.launch.engines import run_local
from vfl_flower.tasks.inference.contribution import contribution

PARTIES = 4
KEYS: dict[str, Any] = {"combine": "mean", "optimizer": "adam", "party-lr": 3e-3, "server-lr": 3e-3}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=30)
    options = made.parse_args()
    images, labels = load_digits(return_X_y=True)
    square = images.reshape(-1, 8, 8)
    quarters = [
        square[:, down : down + 4, across : across + 4].reshape(len(square), -1)
        for down in (0, 4)
        for across in (0, 4)
    ]
    by_one, apart = [], []
    for seed in range(options.seeds):
        keys = {**KEYS, **ALL_ROWS, "epochs": options.epochs, "seed": seed, "noise-seed": seed}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run(folder, {**keys, "subsets": "sampled"}, quarters, labels)
            found = contribution(folder / "run-0123", "accuracy")
            by_one.append([each["value"] for each in found["parties"]])
            apart.append(shapley(folder, keys, quarters, labels, float(found["nobody"])))
        print(f"seed {seed}: one model {by_one[-1]}, separate models {apart[-1]}", flush=True)
    one, many = np.array(by_one), np.array(apart)
    figures = {
        "one model": {"mean": one.mean(0).tolist(), "deviation": one.std(0).tolist()},
        "separate models": {"mean": many.mean(0).tolist(), "deviation": many.std(0).tolist()},
        "furthest apart": float(np.abs(one.mean(0) - many.mean(0)).max()),
    }
    report("worth", figures)


def run(
    folder: Path,
    keys: dict[str, Any],
    quarters: list[Any],
    labels: Any,
    some: tuple[int, ...] = (0, 1, 2, 3),
) -> float:
    """Return the test accuracy of these parties, where each has the columns of its quarter."""
    of = "".join(map(str, some)) + ("-alone" if "subsets" not in keys else "")
    np.savez(folder / f"{of}.npz", X=np.hstack([quarters[party] for party in some]), y=labels)
    words = {**keys, "dataset": f"npz:{folder / of}.npz", "out": str(folder / f"run-{of}")}
    return float(run_local(len(some), words).summary["test_accuracy"])


def shapley(
    folder: Path, keys: dict[str, Any], quarters: list[Any], labels: Any, nobody: float
) -> list[float]:
    """Values by models that were trained for each subset."""
    reached: dict[tuple[int, ...], float] = {(): nobody}
    for size in range(1, PARTIES + 1):
        for some in combinations(range(PARTIES), size):
            reached[some] = run(folder, keys, quarters, labels, some)
    values = []
    for party in range(PARTIES):
        value = 0.0
        for some, before in reached.items():
            if party not in some:
                gain = reached[tuple(sorted((*some, party)))] - before
                value += gain / (PARTIES * comb(PARTIES - 1, len(some)))
        values.append(value)
    return values


if __name__ == "__main__":
    main()
