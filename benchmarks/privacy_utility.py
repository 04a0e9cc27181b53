"""Accuracy at equal epsilon: DPZV against perturbed embeddings (DPZV, Figure 3), on full MNIST.

Four quadrant parties 196-16 with sigmoid, a linear top model on the mean, batch 64, delta 1e-3.
`dpzv` calibrates its scalar noise to epsilon. `vafl`, `cascaded` and `asyrevel` perturb their
embeddings with the noise at which a record's uploads are worth the same epsilon. The two protect
different data: scalar noise protects labels from the parties and whoever gets the model, embedding
noise protects a party's features from the label holder. `frozen` sends its embeddings without
noise. Prints one JSON object as its last line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from dp_accounting import get_sigma_gaussian
from tqdm.auto import tqdm

from benchmarks.common import (
    PARTIES,
    SIGMOID_MODEL,
    ZEROTH_ORDER,
    mnist_of,
    parser,
    quiet_run,
    report,
)

DELTA = 1e-3
EPSILONS = (0.1, 1.0, 10.0)
SYSTEMS: dict[str, dict[str, Any]] = {
    "dpzv": ZEROTH_ORDER["dpzv"],
    "vafl": {"party-lr": 0.1, "server-lr": 0.1, "window": 8},
    "cascaded": ZEROTH_ORDER["cascaded"],
    "asyrevel": ZEROTH_ORDER["asyrevel"],
}
TIGHT = {"party-lr": 0.03, "clip": 0.1}  # of dpzv below epsilon 1: less noise, and smaller steps


def privacy_keys(system: str, epsilon: float, epochs: int) -> dict[str, Any]:
    """The keys that make a run worth this epsilon."""
    if system == "dpzv":
        return {"epsilon": epsilon, "delta": DELTA, **(TIGHT if epsilon < 1 else {})}
    uploads = epochs * (1 if system == "vafl" else 2)  # a zeroth-order pair is two
    # An upload's sensitivity is twice its bound, 1.
    noise = 2 * math.sqrt(uploads) * float(get_sigma_gaussian(epsilon, DELTA))
    return {"privacy": "perturbed-embedding", "embedding-noise": noise, "delta": DELTA}


def draw(figures: dict[str, Any], epsilons: Sequence[float], path: Path) -> None:
    """Accuracy against epsilon, with the systems without noise beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for system in SYSTEMS:
        points = [figures[f"{system} {epsilon:g}"] for epsilon in epsilons]
        x = [point["epsilon"] for point in points]
        axes.plot(x, [p["test_accuracy"] for p in points], marker="o", label=system)
    axes.axhline(figures["frozen"]["test_accuracy"], color="grey", linestyle="--", label="frozen")
    axes.axhline(
        figures["dpzv without noise"]["test_accuracy"],
        color="grey",
        linestyle=":",
        label="dpzv without noise",
    )
    axes.set_xscale("log")
    axes.set_xlabel(f"epsilon, as accounted, at delta = {DELTA:g}")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    made.add_argument("--picture", type=Path, default=Path("benchmarks/privacy_utility.png"))
    options = made.parse_args()
    common = {**SIGMOID_MODEL, "window": 64}
    common |= {"epochs": options.epochs, "eval-every": options.epochs}
    jobs: dict[str, dict[str, Any]] = {
        "frozen": {"strategy": "frozen"},
        "dpzv without noise": {"strategy": "dpzv", **SYSTEMS["dpzv"], "noise-multiplier": 0.0},
    }
    for system, keys in SYSTEMS.items():
        for epsilon in options.epsilons:
            privacy = privacy_keys(system, epsilon, options.epochs)
            jobs[f"{system} {epsilon:g}"] = {"strategy": system, **keys, **privacy}
    figures: dict[str, Any] = {"epochs": options.epochs, "delta": DELTA, "seeds": options.seeds}
    with mnist_of(options) as mnist:
        common["dataset"] = f"npz:{mnist}"
        for name, keys in tqdm(jobs.items(), disable=None, leave=False):
            each = [
                quiet_run(PARTIES, {**common, **keys, "seed": seed})[0]
                for seed in range(options.seeds)
            ]
            accuracies = [summary["test_accuracy"] for summary in each]
            last = each[-1]
            figures[name] = {
                "test_accuracy": round(mean(accuracies), 4),
                "by_seed": [round(value, 4) for value in accuracies],
                "epsilon": last["epsilon"] and round(max(one["epsilon"] for one in each), 4),
                "epsilon_of_paper": last["epsilon_of_paper"],
                "delta": last["delta"],
            }
            print(f"{name:20s}", figures[name], flush=True)
    draw(figures, options.epsilons, options.picture)
    report("privacy_utility", figures)


if __name__ == "__main__":
    main()
