"""What first-order windows cost in accuracy: `split-nn` on full MNIST, windows 1, 8 and 16.

Four quadrant parties 196-16 with sigmoid, a linear top model on the mean, batch 64.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import PARTIES, SIGMOID_MODEL, parser, quiet_run, report

WINDOWS = (1, 8, 16)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    accuracies: dict[int, list[float]] = {window: [] for window in WINDOWS}
    jobs = [(window, seed) for seed in range(options.seeds) for window in WINDOWS]
    for window, seed in tqdm(jobs, disable=None):
        keys = {**SIGMOID_MODEL, "epochs": options.epochs, "window": window, "seed": seed}
        summary, _ = quiet_run(PARTIES, {**keys, "dataset": f"npz:{options.mnist}"})
        accuracies[window].append(summary["test_accuracy"])
    figures: dict[str, Any] = {"epochs": options.epochs}
    for window, each in accuracies.items():
        figures[f"window_{window}"] = {
            "test_accuracy": round(mean(each), 4),
            "by_seed": [round(value, 4) for value in each],
        }
        print(f"window {window:2d}", figures[f"window_{window}"])
    report("windows", figures)


if __name__ == "__main__":
    main()
