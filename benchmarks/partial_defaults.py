"""Compare the defaults for partial rows with a grid of options, by test accuracy.

Each party has a row by chance ``--presence``. The grid is subsets x combine x optimizer x epochs,
each optimizer with its default rates. All cells run with ``--first`` seeds, and the best ``--kept``
of them and the defaults run with all seeds. The best cell is chosen by the test rows it is measured
on, so its figure is flattered. Prints one JSON object as its last line.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import parser, report
from vfl_flower.launch.engines import run_local

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight-decay": 0.05},
}
DEFAULTS = "defaults"


def grid(epochs: list[int]) -> dict[str, dict[str, Any]]:
    """Every cell by name, and the defaults."""
    cells: dict[str, dict[str, Any]] = {DEFAULTS: {}}
    for subsets, combine, name, most in itertools.product(
        ("off", "sampled", "laser"), ("concat", "mean"), OPTIMIZERS, epochs
    ):
        cells[f"{subsets}, {combine}, {name}, {most} epochs"] = {
            **{"subsets": subsets, "combine": combine, "epochs": most, "patience": most / 3},
            **OPTIMIZERS[name],
        }
    return cells


def accuracy(keys: dict[str, Any], parties: int) -> float:
    """Test accuracy of one run."""
    torch.set_num_threads(1)
    for name in ("flwr", "flwr.notice"):
        logging.getLogger(name).disabled = True
    with tempfile.TemporaryDirectory() as folder:
        run = run_local(parties, {**keys, "out": str(Path(folder, "run"))})
        return float(run.summary["test_accuracy"])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dataset", default="digits")
    made.add_argument("--parties", type=int, default=4)
    made.add_argument("--presence", type=float, default=0.5)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--first", type=int, default=2, help="seeds that every cell runs with")
    made.add_argument("--kept", type=int, default=8, help="cells that run with all seeds")
    made.add_argument("--epochs", type=int, nargs="*", default=[20, 60])
    made.add_argument("--jobs", type=int, default=2)
    options = made.parse_args()
    common = {"dataset": options.dataset, "presence": options.presence}
    cells, found = grid(options.epochs), dict[str, list[float]]()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:

        def measure(names: list[str], seeds: range) -> None:
            due = [(name, seed) for name in names for seed in seeds]
            runs = [
                pool.submit(accuracy, {**common, **cells[name], "seed": seed}, options.parties)
                for name, seed in due
            ]
            for (name, _), run in zip(due, runs, strict=True):
                found.setdefault(name, []).append(run.result())

        measure(list(cells), range(options.first))
        order = sorted(cells, key=lambda name: -float(np.mean(found[name])))
        for name in order:
            print(f"{np.mean(found[name]):.4f} {name}", flush=True)
        kept = dict.fromkeys([DEFAULTS, *order[: options.kept]])
        measure(list(kept), range(options.first, options.seeds))
    means = {name: float(np.mean(found[name])) for name in kept}
    for name in sorted(means, key=means.__getitem__, reverse=True):
        print(f"{means[name]:.4f} ± {np.std(found[name], ddof=1):.4f} {name}", flush=True)
    print(f"The defaults are {max(means.values()) - means[DEFAULTS]:.4f} below the best cell.")
    report("partial_defaults", {name: found[name] for name in means})


if __name__ == "__main__":
    main()
