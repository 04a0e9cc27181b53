"""Seconds from `flwr run` to the first step: of the first run on new SuperNodes, and of later runs.

Two parties and a label holder on this machine, over TLS. To compare another checkout, alternate
with PYTHONPATH=CHECKOUT python benchmarks/start.py. It first measures the processor time to import
a party's app, with `import torch, flwr` as 1, and with Flower's process for an app as 1. Python has
compiled all modules. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.common import report
from vfl_flower.launch.processes import SuperLink

APP = "vfl_flower.client_app"
RUN = {"strategy": "split-nn", "dataset": "digits", "epochs": 1, "eval-every": 0.02}


BASES = {
    "torch, flwr": "import torch, flwr",
    "Flower's process": "import torch, flwr.supernode.runtime.run_clientapp",
}


def imports(turns: int) -> dict[str, float]:
    """Return ratios of median processor times. Each turn runs every program once."""
    programs = [each for base in BASES.values() for each in (base, f"{base}, {APP}")]
    spent: dict[str, list[float]] = {each: [] for each in programs}
    writes = {name: of for name, of in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for turn in range(turns + 1):
        for program, found in spent.items():
            text = f"{program}\nimport time; print(time.process_time())"
            command = [sys.executable, "-c", text]
            said = subprocess.run(command, env=writes, check=True, stdout=subprocess.PIPE)
            if turn:  # in the first, Python compiles
                found.append(float(said.stdout))
    return {
        name: round(median(spent[f"{base}, {APP}"]) / median(spent[base]), 3)
        for name, base in BASES.items()
    }


def seconds(runs: int, settle: float) -> list[float]:
    """Return each run's seconds until its first evaluation, a fiftieth of an epoch after its start.

    Parameters
    ----------
    settle : seconds between the start of the SuperNodes and the first run.
    """
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["VFL_HOME"] = str(folder / "home")
        superlink = stack.enter_context(SuperLink(simulation=False))
        for party in range(2):
            stack.enter_context(superlink.supernode(party, 2))
        time.sleep(settle)
        for run in range(runs):
            out = folder / str(run)
            history, start = out / "history.jsonl", time.perf_counter()
            process = superlink.submit({**RUN, "out": str(out)}, 2, folder / "log")
            while not (history.exists() and history.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.01)
            found.append(round(time.perf_counter() - start, 2))
            process.wait()
    return found


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--runs", type=int, default=3, help="on the same SuperNodes")
    made.add_argument("--turns", type=int, default=3, help="with new SuperNodes")
    made.add_argument("--settle", type=float, default=10.0, metavar="SECONDS")
    made.add_argument("--imports", type=int, default=5, metavar="TURNS")
    options = made.parse_args()
    ratios = imports(options.imports)
    print("import of a party's app over", ratios, flush=True)
    found = []
    for _ in range(options.turns):
        found.append(seconds(options.runs, options.settle))
        print(found[-1], flush=True)
    later = [each for turn in found for each in turn[1:]]
    first = median(turn[0] for turn in found)
    report("start", {"first": first, "later": median(later or [first]), "import": ratios})


if __name__ == "__main__":
    main()
