"""Information values of credit data by labels with noise, beside exact counts.

Two parties have the columns of credit defaults. Each epsilon has several draws of noise, by the
option noise-seed. Error is noisy minus exact. An exact value is covered if it lies in the noisy
value's interval. The rank correlation compares the order of columns. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import check_there, report
from vfl_flower.data import evidence
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import partition_columns
from vfl_flower.launch.engines import run_local
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.information.label_holder import events_of, of_column

PARTIES = 2


def noisy(dataset: str, **keys: Any) -> Any:
    """Return value, low and high of each column by labels with noise, [columns, 3]."""
    with tempfile.TemporaryDirectory() as name:
        given = {"task": "information", "dataset": dataset, "out": name, **keys}
        found = json.loads((run_local(PARTIES, given).folder / "information.json").read_text())
    features = [each for party in found["parties"].values() for each in party["features"]]
    ends = ("value", "low", "high")
    return np.array([[each[end] for end in ends] for each in features], np.float64)


def exact(dataset: str) -> Any:
    """Return the value of each column by true labels, [columns]."""
    config = resolve({"task": "information", "dataset": dataset})
    events = events_of(config, load_labels(config))
    found = []
    for party in range(PARTIES):
        for name, values in partition_columns(config, party, PARTIES).read():
            value = of_column(name, values, events, config.min_bin).information
            found.append(value.value if value else np.nan)
    return np.array(found)


def main() -> None:
    """Print a line for each epsilon, and a line for each column at the first one."""
    from scipy.stats import spearmanr

    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    made.add_argument("--draws", type=int, default=20)
    made.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 0.5, 2.0, 4.0])
    options = made.parse_args()
    check_there("--npz", options.npz)
    evidence._draw = lambda path, columns: None  # only figures are needed
    dataset = f"npz:{Path(options.npz).absolute()}"
    true = exact(dataset)
    figures: dict[str, Any] = {"exact": true.tolist()}
    for number, epsilon in enumerate(options.epsilons):
        draws = np.stack(
            [
                noisy(dataset, epsilon=epsilon, **{"noise-seed": seed})
                for seed in range(options.draws)
            ]
        )
        values, low, high = np.moveaxis(draws, 2, 0)
        error = np.sqrt(np.square(values - true).mean(0))
        ranks = [spearmanr(true, each).statistic for each in values]
        about = {
            "root mean square error": float(np.sqrt(np.square(error).mean())),
            "largest error of a column": float(error.max()),
            "mean error": float((values - true).mean()),
            "covered": float(((low <= true) & (true <= high)).mean()),
            "rank correlation": float(np.mean(ranks)),
        }
        figures[f"epsilon {epsilon:g}"] = about
        print(epsilon, about, flush=True)
        if number == 0:
            for at in np.argsort(-true):
                print(
                    f"{true[at]:8.4f} {values[0][at]:8.3f} {low[0][at]:8.3f} to {high[0][at]:.3f}"
                )
    report("information", figures)


if __name__ == "__main__":
    main()
