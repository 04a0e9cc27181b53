"""Milliseconds of a party's step, and memory, as parties grow from two to a thousand.

Rows are synthetic, with four columns for each party. Options are the defaults (embedding 32,
mini-batches of 32), but bottom models are `mlp`, windows have one step, and all rows are for
training. `--options` changes them, as `vfl run -c` does. Times run from the end of the first epoch
to the end of the second, with its evaluation. Memory is the peak of the process that holds all
parties. "one by one" computes the same parties one after the other instead of together. A number as
a way is a number of Ray actors that parties share, over streams. The slope is in logarithms, from
one number of parties to the next: 1 is linear. Every run has a new process. Draws steps a second
against parties, and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message

from benchmarks.common import ALL_ROWS, report
from vfl_flower import client_app
from vfl_flower.config.run_config import pairs
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.launch.engines import run_local, run_ray

COLUMNS, BATCH = 4, 32  # of a party, and rows of a mini-batch


def one_by_one(message: Message, context: Context) -> Message:
    """The ClientApp, as one that knows no turns of many parties."""
    reply: Message = client_app.app(message, context)
    return reply


class Clock(Callback):
    """The seconds that this process has computed, at each evaluation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def evaluated(self, entry: Mapping[str, Any]) -> None:
        """Look at them."""
        self.seconds.append(time.process_time())


def run(parties: int, steps: int, way: str, folder: str, options: str = "") -> dict[str, Any]:
    """Return the time and memory of one run, in this process."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((math.ceil(steps * BATCH / 0.8), COLUMNS * parties), np.float32)
    y = (x @ generator.standard_normal(COLUMNS * parties, np.float32) > 0).astype(np.int64)
    np.savez(f"{folder}/rows.npz", X=x, y=y)
    keys: dict[str, Any] = {**ALL_ROWS, "dataset": f"npz:{folder}/rows.npz", "epochs": 2}
    keys |= {"out": f"{folder}/run", "window": 1, "bottom-model": "mlp"}
    keys |= pairs([options], "--options")
    clock = Clock()
    if way.isdecimal():
        finished = run_ray(parties, keys, actors=int(way))
    else:
        client: Any = client_app.app if way == "together" else one_by_one
        finished = run_local(parties, keys, client, observers=[clock])
    first, last = finished.history[0], finished.history[-1]
    seconds, done = last["seconds"] - first["seconds"], last["steps"] - first["steps"]
    computed = clock.seconds[-1] - clock.seconds[0] if clock.seconds else 0.0  # elsewhere
    return {
        "ms_a_partys_step": round(1000 * seconds / done / parties, 4),
        "of_them_computing_here": round(1000 * computed / done / parties, 4),
        "steps_a_second": round(done / seconds, 2),
        "seconds_to_first_evaluation": first["seconds"],
        "peak_memory_mb": round(finished.summary["peak_memory_mb"]),
        "test_loss": round(last["test_loss"], 5),
    }


def measure(parties: int, steps: int, way: str, options: str) -> dict[str, Any]:
    """Return the same, from a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.parties", "--one", way, "--in", folder]
        command += ["--parties", str(parties), "--steps", str(steps), "--options", options]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured: dict[str, Any] = json.loads(said.splitlines()[-1])
        return measured


def draw(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Steps a second against parties, a line for each way, by logarithms."""
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, float]]] = {}
    for name, found in figures.items():
        way, parties = name.removesuffix(" parties").rsplit(", ", 1)
        lines.setdefault(way, []).append((int(parties), found["steps_a_second"]))
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for way, points in lines.items():
        called = (
            f"Ray, {way} actor{'s'[: int(way) > 1]}" if way.isdecimal() else f"in process, {way}"
        )
        axes.plot(*zip(*points, strict=True), marker=".", label=called)
    axes.set(xscale="log", yscale="log", xlabel="parties", ylabel="steps a second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--parties", type=int, nargs="+", default=[2, 16, 64, 256, 1000])
    made.add_argument("--steps", type=int, default=50, help="of an epoch")
    made.add_argument("--ways", nargs="+", default=["together", "one by one"])
    made.add_argument("--options", default="", help="options of the runs, as of `vfl run -c`")
    made.add_argument("--picture", type=Path, help="where to draw steps a second")
    made.add_argument("--one", default="", help=argparse.SUPPRESS)
    made.add_argument("--in", dest="folder", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.one:
        of_one = options.parties[0], options.steps, options.one, options.folder, options.options
        print(json.dumps(run(*of_one)))
        return
    figures: dict[str, Any] = {}
    for way in options.ways:
        before: tuple[int, dict[str, Any]] | None = None
        for parties in options.parties:
            found = measure(parties, options.steps, way, options.options)
            if before:
                grown = math.log(parties / before[0])
                for name, value in (("ms_a_partys_step", 1), ("peak_memory_mb", 0)):
                    ratio = math.log(found[name] / before[1][name]) / grown
                    found[f"slope_of_{'step' if value else 'memory'}"] = round(value + ratio, 2)
            before = parties, found
            figures[f"{way}, {parties} parties"] = found
            print(f"{way}, {parties} parties:", found, flush=True)
    if options.picture:
        draw(figures, options.picture)
    report("parties", figures)


if __name__ == "__main__":
    main()
