"""Memory and time as parties, rows and window grow; each run in a process of its own.

64 parties share the 64 pixels of `digits`. Rows are synthetic: 8 columns for each of four parties,
embedding 8, one epoch of `split-nn` in process, and of `ef-vfl` with its surrogates. The peak
includes Python, torch and the data set, since all parties live in one process. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report

COLUMNS = 8  # of a party


def synthetic(rows: int, parties: int, folder: str) -> str:
    """Rows whose label is the sign of a random linear function of all columns."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows, COLUMNS * parties), dtype=np.float32)
    y = (x @ generator.standard_normal(COLUMNS * parties, dtype=np.float32) > 0).astype(np.int64)
    place = Path(folder) / f"rows-{rows}.npz"
    np.savez(place, X=x, y=y)
    return f"npz:{place}"


def measure(parties: int, keys: dict[str, Any]) -> dict[str, Any]:
    """What one `vfl run` took, a process of its own."""
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vfl_flower.tools.cli", "run", "-c", pairs]
        command += ["--parties", str(parties), "--out", f"{folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return {
        "seconds": round(summary["seconds"], 2),
        "peak_memory_mb": round(summary["peak_memory_mb"]),
        "test_accuracy": round(summary["test_accuracy"], 4),
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=int, default=1_000_000)
    made.add_argument("--only", default="", metavar="TEXT", help="runs whose name has this in it")
    options = made.parse_args()
    figures: dict[str, Any] = {}

    def add(name: str, parties: int, keys: dict[str, Any]) -> None:
        if options.only in name:
            figures[name] = measure(parties, keys)
            print(f"{name:34s}", json.dumps(figures[name]), flush=True)

    for parties in (4, 16, 64):
        add(f"digits, {parties} parties, 5 epochs", parties, {"epochs": 5, "window": 8})
    small = {
        "epochs": 1,
        "embedding-size": 8,
        "bottom-hidden": 16,
        "batch-size": 256,
        "test-fraction": 0.1,
    }
    with tempfile.TemporaryDirectory() as folder:
        for rows in (options.rows // 100, options.rows // 10, options.rows):
            dataset = synthetic(rows, 4, folder)
            add(f"{rows} rows, window 8", 4, {**small, "dataset": dataset, "window": 8})
        for labels in ("private", "shared"):
            feedback = {"strategy": "ef-vfl", "labels": labels, "window": 8}
            add(f"{rows} rows, ef-vfl, {labels}", 4, {**small, "dataset": dataset, **feedback})
        for window in (1, 32):
            add(
                f"{rows // 10} rows, window {window}",
                4,
                {**small, "dataset": f"npz:{folder}/rows-{rows // 10}.npz", "window": window},
            )
    report("scale", figures)


if __name__ == "__main__":
    main()
