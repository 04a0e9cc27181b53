"""Cost of windows in accuracy on MNIST, for fixed windows and for those that follow the loss.

Four quadrant parties 196-16 with sigmoid and a linear top model on the mean by plain SGD, and the
default model by Adam; batch 64. Window 0 follows the loss, up to what messages between nodes allow.
Prints one JSON object as its last line.
"""

from __future__ import annotations

from statistics import mean
from typing import Any
from unittest.mock import patch

from tqdm.auto import tqdm

from benchmarks.common import ALL_ROWS, PARTIES, SIGMOID_MODEL, mnist_of, parser, quiet_run, report
from vfl_flower.transport.local import LocalGrid

SYSTEMS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # windows, epochs, keys
    "split-nn": ((1, 8, 16, 0), 3, SIGMOID_MODEL),
    "split-nn, Adam": ((1, 8, 16, 32, 0), 3, {"strategy": "split-nn", "optimizer": "adam"}),
    "cascaded": ((1, 16, 64, 0), 10, {**SIGMOID_MODEL, "party-lr": 0.003, "server-lr": 0.1}),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, help="instead of 3 and 10, to try it out")
    options = made.parse_args()
    figures: dict[str, Any] = {"seeds": options.seeds}
    with mnist_of(options) as mnist:
        for system, (windows, epochs, own) in SYSTEMS.items():
            epochs = options.epochs or epochs
            common = {**ALL_ROWS, "strategy": system, **own, "dataset": f"npz:{mnist}"}
            accuracies: dict[int, list[float]] = {window: [] for window in windows}
            exchanges: dict[int, list[float]] = {window: [] for window in windows}
            jobs = [(window, seed) for seed in range(options.seeds) for window in windows]
            for window, seed in tqdm(jobs, disable=None, leave=False):
                keys = {"epochs": epochs, "seed": seed, "noise-seed": seed, "eval-every": epochs}
                keys |= {"window": window} if window else {}
                with patch.object(LocalGrid, "cost", "free" if window else "dear"):
                    summary, _ = quiet_run(PARTIES, {**common, **keys})
                exchanges[window].append(summary["by_party"][0]["exchanges"])
                accuracies[window].append(summary["test_accuracy"])
            for window, each in accuracies.items():
                name = f"{system}, window {window or 'auto'}"
                figures[name] = {
                    "epochs": epochs,
                    "test_accuracy": round(mean(each), 4),
                    "by_seed": [round(value, 4) for value in each],
                    "exchanges": round(mean(exchanges[window])),
                }
                print(f"{name:22s}", figures[name], flush=True)
    report("windows", figures)


if __name__ == "__main__":
    main()
