"""Cost of windows in accuracy, on full MNIST: `split-nn` at 1, 8 and 16, `cascaded` to 64.

Four quadrant parties 196-16 with sigmoid, a linear top model on the mean, batch 64. Prints one JSON
object as its last line.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import PARTIES, SIGMOID_MODEL, mnist_of, parser, quiet_run, report

SYSTEMS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # windows, epochs, keys
    "split-nn": ((1, 8, 16), 3, {}),
    "cascaded": ((1, 16, 64), 10, {"party-lr": 0.003, "server-lr": 0.1}),
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
            common = {**SIGMOID_MODEL, **own, "strategy": system, "dataset": f"npz:{mnist}"}
            accuracies: dict[int, list[float]] = {window: [] for window in windows}
            jobs = [(window, seed) for seed in range(options.seeds) for window in windows]
            for window, seed in tqdm(jobs, disable=None, leave=False):
                keys = {"epochs": epochs, "window": window, "seed": seed, "noise-seed": seed}
                keys["eval-every"] = epochs
                summary, _ = quiet_run(PARTIES, {**common, **keys})
                accuracies[window].append(summary["test_accuracy"])
            for window, each in accuracies.items():
                name = f"{system}, window {window}"
                figures[name] = {
                    "epochs": epochs,
                    "test_accuracy": round(mean(each), 4),
                    "by_seed": [round(value, 4) for value in each],
                }
                print(f"{name:22s}", figures[name], flush=True)
    report("windows", figures)


if __name__ == "__main__":
    main()
