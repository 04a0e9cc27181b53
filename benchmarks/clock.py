"""Accuracy against the virtual clock: synchronous, t-synchronous, asynchronous (VAFL Fig. 2).

Logistic regression on MNIST, divided among seven parties, whose delays are Poisson as in the
paper's appendix G.2: party m waits Poisson(2m) / 14 seconds before each upload. The time to a
target that all three reach is averaged over seeds. Prints one JSON object as its last line.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from tqdm.auto import tqdm

from benchmarks.common import mnist_of, parser, quiet_run, report
from vfl_flower.results.charts import Line, chart

PARTIES = 7
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"strategy": "split-nn"},
    "t-sync (4 of 7)": {"strategy": "vafl-t", "quorum": 4},
    "async": {"strategy": "vafl"},
}
LOGISTIC_REGRESSION: dict[str, Any] = {
    "bottom-model": "linear",
    "top-model": "sum",
    "regulariser-weight": 0.001,
    "batch-size": 600,  # a hundredth of the rows, as the paper
    "party-lr": 0.02,
    "delay": "poisson",
    "window": 1,
}


def seconds_to(target: float, history: list[dict[str, Any]]) -> float | None:
    """Virtual seconds at the first evaluation at or above the target."""
    reached = [e["virtual_seconds"] for e in history if e["test_accuracy"] >= target]
    return reached[0] if reached else None


def draw(histories: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw test accuracy against virtual seconds, a line for each schedule."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    lines = [
        Line(name, number, [(e["virtual_seconds"], e["test_accuracy"]) for e in history])
        for number, (name, history) in enumerate(histories.items())
    ]
    drawn = chart(figure.add_subplot(), lines, "virtual seconds", "test accuracy")
    figure.legend(list(drawn.values()), list(drawn), loc="outside right upper")
    figure.savefig(path, dpi=120)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--epochs", type=int, default=10)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--target", type=float, default=0.90)
    made.add_argument("--picture", type=Path, default=Path("benchmarks/clock.png"))
    options = made.parse_args()
    histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in SCHEDULES}
    jobs = [(name, seed) for seed in range(options.seeds) for name in SCHEDULES]
    with mnist_of(options) as mnist:
        common = {**LOGISTIC_REGRESSION, "dataset": f"npz:{mnist}", "epochs": options.epochs}
        for name, seed in tqdm(jobs, disable=None, leave=False):
            _, history = quiet_run(PARTIES, {**common, **SCHEDULES[name], "seed": seed})
            histories[name].append(history)
    draw({name: each[0] for name, each in histories.items()}, options.picture)
    figures: dict[str, Any] = {"target": options.target, "seeds": options.seeds}
    for name, each in histories.items():
        times = [seconds_to(options.target, history) for history in each]
        figures[name] = {
            "virtual_seconds_to_target": (
                round(mean(t for t in times if t is not None), 1) if None not in times else None
            ),
            "final_accuracy": round(mean(history[-1]["test_accuracy"] for history in each), 4),
            "final_virtual_seconds": round(mean(h[-1]["virtual_seconds"] for h in each), 1),
        }
        print(f"{name:16s}", figures[name])
    report("clock", figures)


if __name__ == "__main__":
    main()
