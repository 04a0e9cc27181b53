"""Which party is worth asking? Values before training beside values after it, on four tables.

Five parties have random columns of a table, from few to many, and a sixth has noise. Before
training: the baseline `frozen` gets one upload of untrained embeddings, and `vfl contribution`
computes Shapley values of its top model. After it: the same of `split-nn`. Each seed divides the
columns anew. Prints the mean rank correlation (Spearman) of both lists with its 95 % interval, how
often they agree on the best party, and how often noise is last. One JSON object is the last line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr, t
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

from benchmarks.common import report
from vfl_flower.launch.engines import run_local
from vfl_flower.tasks.inference.contribution import contribution

TABLES = {
    "breast cancer": datasets.load_breast_cancer,
    "digits": datasets.load_digits,
    "wine": datasets.load_wine,
    "diabetes": datasets.load_diabetes,
}
SHARES = np.array([0.05, 0.1, 0.2, 0.25, 0.4])  # of the columns
NOISE = len(SHARES)
_SEEDS_OF_TABLE = 1000


def parties_of(x: np.ndarray[Any, Any], seed: int) -> list[np.ndarray[Any, Any]]:
    """Return the columns of each party; each table column has one owner."""
    generator = np.random.default_rng(_SEEDS_OF_TABLE + seed)
    order = generator.permutation(x.shape[1])
    ends = np.maximum(np.cumsum(SHARES) * x.shape[1], np.arange(1, NOISE + 1)).round().astype(int)
    columns = np.split(order, ends[:-1])
    noise = generator.standard_normal((len(x), max(1, x.shape[1] // NOISE)))
    return [*(x[:, some] for some in columns), noise]


def values(strategy: str, parts: list[np.ndarray[Any, Any]], y: Any, seed: int) -> list[float]:
    """Return the Shapley value of each party's columns."""
    width = max(each.shape[1] for each in parts)  # parties of a file have equally many columns
    x = np.hstack([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in parts])
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place, "rows.npz"), X=x.astype(np.float32), y=y)
        keys = {"strategy": strategy, "subsets": "sampled", "seed": seed, "noise-seed": seed}
        keys |= {"dataset": f"npz:{place}/rows.npz", "out": f"{place}/run"}
        keys |= {} if len(np.unique(y)) < 20 else {"target": "regression"}
        run_local(len(parts), keys)
        found = contribution(Path(place, "run"))
    return [float(each["value"]) for each in found["parties"]]


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = made.parse_args()
    figures = {}
    for name in options.tables:
        x, y = TABLES[name](return_X_y=True)
        x, alike, best, last = StandardScaler().fit_transform(x), [], [], []
        for seed in range(options.seeds):
            parts = parties_of(x, seed)
            before, after = (values(each, parts, y, seed) for each in ("frozen", "split-nn"))
            alike.append(float(spearmanr(before, after).statistic))
            best.append(int(np.argmax(before)) == int(np.argmax(after)))
            last.append(int(np.argmin(before)) == NOISE)
        half = t.ppf(0.975, len(alike) - 1) * np.std(alike, ddof=1) / np.sqrt(len(alike))
        figures[name] = {
            "rank correlation": round(float(np.mean(alike)), 3),
            "half interval": round(float(half), 3),
            "same best party": f"{sum(best)} of {len(best)}",
            "noise is last": f"{sum(last)} of {len(last)}",
        }
        print(f"{name:14}", figures[name], flush=True)
    report("before", figures)


if __name__ == "__main__":
    main()
