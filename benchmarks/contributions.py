"""Latency of one score with and without the parties' contributions (`explain`).

The service is a process of this machine, and so are its parties. The client asks for one id a
request, in turn with and without contributions.

    OMP_NUM_THREADS=1 python -m benchmarks.contributions
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from examples.serve_scores import service, wait_for
from vfl_flower.client import Scores
from vfl_flower.launch.engines import run_local

KINDS: dict[str, dict[str, Any]] = {"all parties": {}, "any subset": {"subsets": "sampled"}}


def main() -> None:
    """Print a table of latencies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="of each kind")
    parser.add_argument("--parties", type=int, nargs="+", default=[2, 8, 10, 12], metavar="N")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for parties in given.parties:
        for kind, keys in KINDS.items():
            with tempfile.TemporaryDirectory(prefix="vfl-explain-") as folder:
                out = f"{folder}/run"
                run_local(parties, {"dataset": "breast-cancer", "epochs": 1, "out": out, **keys})
                found = latencies(Path(out), given.requests)
            said = ", ".join(f"{name} {each:.1f} ms" for name, each in found.items())
            print(f"{parties} parties, a model of {kind}: {said}")
            figures[f"{parties} {kind}"] = found
    report("contributions", figures)


def latencies(run: Path, requests: int) -> dict[str, float]:
    """Return the median and the 99th percentile without and with contributions, in ms."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with service(run) as (url, process):
        wait_for(url, run, process)
        with Scores(url, run / "serve.token") as scores:
            for number in range(-20, requests):
                for explain, mine in took.items():
                    began = time.perf_counter()
                    (answer,) = scores.predict([number % 100], explain)
                    if number >= 0:  # the first ones warm the service up
                        mine.append(1000 * (time.perf_counter() - began))
                    assert ("contributions" in answer) == explain
    names = {False: "plain", True: "explained"}
    return {
        f"{names[explain]} {name}": float(np.percentile(mine, at))
        for explain, mine in took.items()
        for name, at in (("median", 50), ("99 %", 99))
    }


if __name__ == "__main__":
    main()
