"""Cost of masked sums: bytes, time of a step, and accuracy, beside the same run without masks.

MNIST, four quadrant parties 196-16 with sigmoid or 196-128 with ReLU, a linear top model on the
mean, batch 64. Runs are in process, without a network, where masks weigh most against a step. First
order runs at windows 1 and 8, joint zeroth order at its window of 16. Each repeat times an epoch of
each, with and without masks, one after the other. A longer training of each then gives its
accuracy. Prints one JSON object as its last line.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import (
    PARTIES,
    SIGMOID_MODEL,
    mnist_of,
    parser,
    quiet_run,
    report,
    trained,
)
from vfl_flower.label_holder.callbacks import Callback

WIDE = {**SIGMOID_MODEL, "embedding-size": 128, "embedding-activation": "relu", "party-lr": 0.2}
JOINT = {"strategy": "syn-zoo", "perturbs": "all", "optimizer": "sgd", "batch-size": 64}
KEYS = PARTIES * (128 + (128 + 16) * PARTIES)  # bytes of all offers there and back, and tags
RUNS: dict[str, dict[str, Any]] = {
    "split-nn 196-16, window 1": {**SIGMOID_MODEL, "window": 1},
    "split-nn 196-16, window 8": {**SIGMOID_MODEL, "window": 8},
    "split-nn 196-128, window 1": {**WIDE, "window": 1},
    "split-nn 196-128, window 8": {**WIDE, "window": 8},
    "syn-zoo 196-16, window 16": {
        **{**SIGMOID_MODEL, **JOINT, "window": 16, "party-lr": 0.01, "server-lr": 0.03}
    },
}


class Stopwatch(Callback):
    """Seconds of a run, from where its parties are to enrol to its last progress: as a clock has
    them, and the processor's.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter(), time.process_time()
        self.seconds = self.processor = 0.0

    def progressed(self, done: int, planned: int) -> None:
        """Note the times."""
        self.seconds = time.perf_counter() - self.begun[0]
        self.processor = time.process_time() - self.begun[1]


def cost(keys: dict[str, Any], repeats: int) -> dict[str, float]:
    """Milliseconds of a step with and without masks, and their ratios; ratio of bytes.

    Medians. Where others use the machine too, the processor's time says more than a clock's.
    """
    milliseconds: dict[str, list[float]] = {"plain": [], "secure": []}
    processor: dict[str, list[float]] = {"plain": [], "secure": []}
    sent = {}
    for repeat in range(repeats + 1):  # the first warms up
        for aggregation, each in milliseconds.items():
            watch = Stopwatch()
            given = {**keys, "epochs": 1, "aggregation": aggregation}
            strategy, _, _ = trained(PARTIES, given, lambda strategy: watch)  # noqa: B023
            last = strategy.run.history.last
            sent[aggregation] = last["bytes_up"] + last["bytes_down"] + last["evaluation_bytes"]
            if repeat:
                each.append(1e3 * watch.seconds / last["steps"])
                processor[aggregation].append(1e3 * watch.processor / last["steps"])
    sent["secure"] += KEYS
    return {
        "plain_ms": round(statistics.median(milliseconds["plain"]), 3),
        "secure_ms": round(statistics.median(milliseconds["secure"]), 3),
        "time_ratio": ratio(milliseconds),
        "processor_ratio": ratio(processor),
        "bytes_ratio": round(sent["secure"] / sent["plain"], 4),
    }


def ratio(of: dict[str, list[float]]) -> float:
    """The median of the ratios of runs that followed each other."""
    pairs = zip(of["secure"], of["plain"], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--epochs", type=int, default=5, help="of the training for accuracy")
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    figures: dict[str, Any] = {"repeats": options.repeats, "epochs": options.epochs}
    with mnist_of(options) as mnist:
        for name, keys in tqdm(RUNS.items(), disable=None, leave=False):
            keys = {**keys, "dataset": f"npz:{mnist}"}
            figures[name] = cost(keys, options.repeats)
            apart = []
            for seed in range(options.seeds):
                of_run = {**keys, "seed": seed, "noise-seed": seed, "epochs": options.epochs}
                of_run["eval-every"] = options.epochs
                plain, secure = (
                    quiet_run(PARTIES, {**of_run, "aggregation": each})[0]["test_accuracy"]
                    for each in ("plain", "secure")
                )
                apart.append(abs(secure - plain))
            figures[name] |= {"test_accuracy": round(plain, 4), "apart": round(max(apart), 5)}
            print(f"{name:27s}", figures[name], flush=True)
    report("secure_sum", figures)


if __name__ == "__main__":
    main()
