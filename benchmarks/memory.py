"""What training a large party takes: peak memory of a step over the size of the model.

One party, an mlp of 20 million parameters unless --hidden says otherwise, answers one training
message and applies the feedback, in a process of its own for each estimator. The peak is that of
the process, less what it holds when the party has been built without its model; what Flower's
Context.state takes to keep the model between two messages is beside it. Prints one JSON object as
its last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from benchmarks.common import report
from vfl_flower.messages import DescribeOrder, TrainOrder
from vfl_flower.party.context import keep
from vfl_flower.party.party import Party
from vfl_flower.systems import resolve

KEYS: dict[str, Any] = {
    "embedding-size": 1_000,
    "batch-size": 16,
    "window": 1,
    "epochs": 1,
    "noise-seed": 0,
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "first-order": {"strategy": "vafl"},
    "one-sided": {"strategy": "cascaded"},
    "dpzv": {"strategy": "dpzv"},
}


def resident(key: str) -> float:
    """Resident memory of this process in MB: VmRSS is now, VmHWM the peak."""
    status = Path("/proc/self/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return float(values[key].split()[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, hidden: int) -> dict[str, Any]:
    """Peak of a party's step over its model's size, in this process."""
    torch.set_num_threads(1)
    raw = {**KEYS, **ESTIMATORS[name], "bottom-hidden": hidden}
    config = resolve(raw)
    small = Party(resolve({**raw, "bottom-hidden": 4}), 0, 4, 10)
    train(small)  # what torch and NumPy load at first use
    del small
    gc.collect()
    before = resident("VmRSS")
    party = Party(config, 0, 4, 10)
    size = sum(p.numel() for p in party.model.parameters())
    forget_peak()
    train(party)
    peak = resident("VmHWM")
    model = 4 * size / 2**20
    context = Context(1, 1, {}, RecordDict(), {})
    keep(party, context)
    keep(party, context)
    with_state = resident("VmHWM")
    return {
        "parameters": size,
        "model_mb": round(model, 1),
        "step_over_model": round((peak - before) / model, 3),
        "with_state_over_model": round((with_state - before) / model, 3),
    }


def train(party: Party, steps: int = 2) -> None:
    """Uploads, and updates by their feedback, which here is made up."""
    party.describe(DescribeOrder(outputs=10))
    feedback: dict[str, Any] = {}
    for exchange in range(1, steps + 2):
        order = TrainOrder(
            exchange=exchange, epoch=0, first=0, steps=1, coordinated=False, arrays=feedback
        )
        upload = party.train(order)
        feedback = {"difference": np.ones(1, np.float32)}
        if not party.estimator.answers_by_scalars:
            feedback = {"gradient": np.full_like(upload.arrays["embedding"], 1e-3)}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", choices=ESTIMATORS, help="measure one, in this process")
    made.add_argument("--hidden", type=int, default=20_000, help="units of the hidden layer")
    options = made.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.hidden)))
        return
    figures = {}
    for name in ESTIMATORS:
        command = [sys.executable, "-m", "benchmarks.memory", "--only", name]
        command += ["--hidden", str(options.hidden)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:12s}", figures[name])
    report("memory", figures)


if __name__ == "__main__":
    main()
