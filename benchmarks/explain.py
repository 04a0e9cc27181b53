"""Seconds of `vfl explain` on 100 columns and 100,000 rows of two parties, by stage.

python -m benchmarks.explain [--rows N] [--columns N] [--repeats N]: prints a table, and JSON last.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import vfl_flower
from vfl_flower.launch.engines import explain_local
from vfl_flower.tasks.inference import explain as at_label_holder
from vfl_flower.tasks.inference.explain import _Turns
from vfl_flower.tasks.inference.importance import Score
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.party.explain import Explanation

TRAINED = 4_000  # rows that train the model; all other rows are explained
STAGES: dict[str, tuple[Any, str]] = {
    "parties embed permuted rows": (Explanation, "permuted"),
    "top model": (Predictor, "outputs"),
    "shares of the metric": (Score, "shares"),
    "intervals": (Score, "fall"),
    "label holder, with the two above": (_Turns, "take"),
    "all messages": (at_label_holder, "_permute"),
}


def write_data(path: Path, rows: int, columns: int) -> None:
    """Write a data set of two classes: some columns count, some in pairs, most do not."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows + TRAINED, columns)).astype(np.float32)
    weights = generator.standard_normal(columns) * (generator.random(columns) < 0.3)
    score = x @ weights + 2 * np.abs(x[:, 0] * x[:, columns // 2])
    y = (score + generator.logistic(size=len(x)) > np.median(score)).astype(np.int64)
    first, rest = slice(0, TRAINED), slice(TRAINED, None)
    np.savez(path, X_train=x[first], y_train=y[first], X_test=x[rest], y_test=y[rest])


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Yield seconds by stage, which are complete when the block ends."""
    seconds = dict.fromkeys(STAGES, 0.0)

    def timing(stage: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*given, **more)
            finally:
                seconds[stage] += time.perf_counter() - start

        return outer

    with ExitStack() as stack:
        for stage, (owner, name) in STAGES.items():
            stack.enter_context(patch.object(owner, name, timing(stage, getattr(owner, name))))
        yield seconds


def main() -> None:
    """Make data, train, explain, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "data.npz"), Path(folder, "run")
        write_data(data, given.rows, given.columns)
        keys = {"dataset": f"npz:{data}", "epochs": 1, "out": str(out)}
        start = time.perf_counter()
        process = get_context("spawn").Process(target=vfl_flower.run_local, args=(2, keys))
        process.start()  # another process, so that peak memory is the explanation's
        process.join()
        trained = time.perf_counter() - start
        with timed() as seconds:
            start, cpu = time.perf_counter(), time.process_time()
            figures = explain_local({"model": str(out), "repeats": given.repeats})
            whole, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    features = sum(len(each["features"]) for each in figures["parties"].values())
    print(f"{features} columns, {figures['rows']} rows, {torch.get_num_threads()} threads")
    print(f"training {trained:.1f} s; explanation {whole:.1f} s, of the processor {cpu:.1f} s")
    for stage, spent in seconds.items():
        print(f"{stage:<36}{spent:>8.1f} s {spent / whole:>6.0%}")
    print(f"peak memory {peak / 1024:.0f} MB")
    spans = {"training": trained, "explanation": whole, "processor": cpu, **seconds}
    spans = {stage: round(spent, 3) for stage, spent in spans.items()}
    print(json.dumps({"benchmark": "explain", "seconds": spans, "peak_memory_mb": peak // 1024}))


if __name__ == "__main__":
    main()
