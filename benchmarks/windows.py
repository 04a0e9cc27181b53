"""What windows cost in accuracy, on full MNIST: `split-nn` at 1, 8 and 16, `cascaded` to 64.

Four quadrant parties 196-16 with sigmoid, a linear top model on the mean, batch 64.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import PARTIES, SIGMOID_MODEL, parser, quiet_run, report

SYSTEMS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # windows, epochs, keys
    "split-nn": ((1, 8, 16), 3, {}),
    "cascaded": ((1, 16, 64), 10, {"party-lr": 0.003, "server-lr": 0.1, "eval-every": 10}),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    figures: dict[str, Any] = {}
    for system, (windows, epochs, own) in SYSTEMS.items():
        accuracies: dict[int, list[float]] = {window: [] for window in windows}
        jobs = [(window, seed) for seed in range(options.seeds) for window in windows]
        for window, seed in tqdm(jobs, disable=None, leave=False):
            keys = {**SIGMOID_MODEL, **own, "strategy": system, "epochs": epochs, "window": window}
            keys |= {"seed": seed, "noise-seed": seed, "dataset": f"npz:{options.mnist}"}
            summary, _ = quiet_run(PARTIES, keys)
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
