"""Exchanges and steps a second of each runtime: in process, and Flower's Ray simulation.

The first 12,800 rows of MNIST (200 steps an epoch), four quadrant parties 196-128, top model
512-128-10, batch 64, `split-nn` at several windows. Rates are taken between the first and the last
evaluation, so that starting up does not count and evaluating does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import CASCADED_MODEL, PARTIES, parser, part_of_mnist, quiet_run, report
from vfl_flower.engines import Run, run_local, run_ray

ENGINES: dict[str, Callable[[int, Mapping[str, Any]], Run]] = {"local": run_local, "ray": run_ray}
EPOCHS = {1: 2, 8: 5, 32: 9}  # by window; the first epoch warms up
ROWS = 12_800


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    made.add_argument("--windows", nargs="+", type=int, default=list(EPOCHS))
    options = made.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dataset = part_of_mnist(options.mnist, ROWS, folder)
        for engine in options.engines:
            for window in options.windows:
                keys = {
                    **CASCADED_MODEL,
                    "dataset": dataset,
                    "epochs": EPOCHS.get(window, 5),
                    "window": window,
                }
                _, history = quiet_run(PARTIES, keys, ENGINES[engine])
                first, last = history[0], history[-1]
                seconds = last["seconds"] - first["seconds"]
                figures[f"{engine}_window_{window}"] = {
                    "exchanges_a_second": round(
                        (last["exchanges"] - first["exchanges"]) / seconds, 1
                    ),
                    "steps_a_second": round((last["steps"] - first["steps"]) / seconds, 1),
                    "test_accuracy": round(last["test_accuracy"], 4),
                }
                print(f"{engine} window {window:2d}", figures[f"{engine}_window_{window}"])
    report("runtimes", figures)


if __name__ == "__main__":
    main()
