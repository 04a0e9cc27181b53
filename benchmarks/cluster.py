"""Many nodes on one machine: Ray nodes with thousands of virtual parties, and many SuperNodes.

**Ray**: a cluster of one, two and four Ray nodes with a CPU each, at addresses of this machine
(127.0.0.2 and on), trains virtual parties of four columns over streams. Times run from the first
evaluation to the second, with that evaluation. "in process" is the same run without Ray. All nodes
share this machine's cores, so more nodes than cores show only their cost.

**SuperNodes**: a SuperLink and as many SuperNodes as ``--supernodes`` says or memory allows. The
first SuperNode's memory says how many fit. They train `vafl` on the handwritten digits. After three
evaluations, ``--kill`` of them are killed with all their processes. The run goes on with the
others, because of ``on-party-failure='continue'``, until its last epoch.

Memory is the proportional set size: what several processes share is counted once. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import ALL_ROWS, report
from tests.fleet import ACTIVE, Fleet, evaluations, fleet, ray_cluster, until
from vfl_flower.launch.engines import run_local, run_ray

COLUMNS, BATCH = 4, 32  # of a party, and rows of a mini-batch
TASK_MB = 150.0  # of a SuperNode, beyond its memory before a run
SPARE_MB = 5000.0  # that stay free


def memory(processes: list[psutil.Process]) -> float:
    """Proportional set size of all these processes together, in MB."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


def settled(processes: Callable[[], list[psutil.Process]], pause: float) -> float:
    """Memory of these processes in MB, once they have imported all that tasks need.

    It looks every ``pause`` seconds.
    """
    before, after = 0.0, 1.0
    while after - before > 0.005 * after:
        before = memory(processes())
        time.sleep(pause)
        after = memory(processes())
    return after


class Watch:
    """The most memory in MB, and the processor seconds, of processes that come and go."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes, self._done = processes, threading.Event()
        self._seconds: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0.0

    @property
    def seconds(self) -> float:
        """Processor seconds of all, which miss at most two seconds at the end of each."""
        return sum(self._seconds.values())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(2):
            there = self._processes()
            self.peak = max(self.peak, memory(there))
            for process in there:
                with suppress(psutil.Error):
                    self._seconds[process.pid] = sum(process.cpu_times()[:2])


# --- Ray ------------------------------------------------------------------------------------------


def on_ray(nodes: int, parties: int, steps: int) -> dict[str, Any]:
    """Train on so many Ray nodes; on none, in this process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generator = np.random.default_rng(0)
        rows = -(-steps * BATCH * 5 // 4)  # a fifth is for tests
        x = generator.standard_normal((rows, COLUMNS * parties), np.float32)
        y = (x @ generator.standard_normal(COLUMNS * parties, np.float32) > 0).astype(np.int64)
        np.savez(folder / "rows.npz", X=x, y=y)
        keys = {**ALL_ROWS, "dataset": f"npz:{folder}/rows.npz", "epochs": 2, "window": 1}
        keys |= {"out": str(folder / "run"), "stream-address": "127.0.0.2"}
        start = time.perf_counter()
        with ExitStack() as stack:
            roots = stack.enter_context(ray_cluster(folder, nodes)) if nodes else {}
            started = time.perf_counter()
            here = psutil.Process()

            def all_processes() -> list[psutil.Process]:
                found = {here, *here.children(recursive=True)}
                for root in roots.values():
                    with suppress(psutil.Error):
                        found |= {root, *root.children(recursive=True)}
                return list(found)

            with Watch(all_processes) as watch:
                finished = (run_ray if nodes else run_local)(parties, keys)
        first, last = finished.history[0], finished.history[-1]
        seconds, done = last["seconds"] - first["seconds"], last["steps"] - first["steps"]
        return {
            "ms_a_partys_step": round(1000 * seconds / done / parties, 4),
            "steps_a_second": round(done / seconds, 2),
            "seconds_to_start_nodes": round(started - start, 1),
            "seconds_to_first_evaluation": round(first["seconds"], 1),
            "processor_seconds": round(watch.seconds),
            "memory_mb": round(watch.peak),
            "test_loss": round(last["test_loss"], 5),
        }


# --- SuperNodes -----------------------------------------------------------------------------------


def of_flower(each: Fleet) -> list[psutil.Process]:
    """Processes of the SuperLink and its SuperNodes."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == str(each.superlink.home):
                found.append(process)
    return found


def until_accepted(each: Fleet, party: int) -> None:
    """Wait until the SuperLink has accepted a SuperNode."""
    log = each.superlink.home / f"supernode-{party}.log"
    until(lambda: ACTIVE in log.read_text())


def on_supernodes(
    asked: int, kill: int, epochs: int, timeout: float, pause: float
) -> dict[str, Any]:
    """Start SuperNodes, train, kill some, and end."""
    with tempfile.TemporaryDirectory() as folder, fleet(0, Path(folder)) as each:
        each.start(0)
        until_accepted(each, 0)
        root = psutil.Process(each.nodes[0][1].pid)
        one = settled(lambda: [root, *root.children(recursive=True)], pause)
        superlink = memory(of_flower(each)) - one
        free = psutil.virtual_memory().available / 1e6 - SPARE_MB
        parties = min(asked, int(free / (one + TASK_MB)))
        if parties < asked:
            print(f"{parties} SuperNodes of {one:.0f} MB fit, not {asked}.", flush=True)
        each.nodes.pop(0)[0].close()
        each.parties = parties
        begin = time.perf_counter()
        for party in range(parties):
            each.start(party)
        for party in range(parties):
            until_accepted(each, party)
        started = time.perf_counter()
        idle = settled(lambda: of_flower(each), pause)
        keys = {**ALL_ROWS, "strategy": "vafl", "dataset": "digits", "epochs": epochs}
        keys |= {"on-party-failure": "continue", "party-timeout": timeout, "eval-every": 1}
        with Watch(lambda: of_flower(each)) as watch:
            process, finished = each.submit(keys)
            submitted = time.perf_counter()
            until(lambda: evaluations(finished) or process.poll() is not None)
            first = time.perf_counter()
            until(lambda: evaluations(finished) >= 3 or process.poll() is not None)
            gone = range(parties - min(kill, parties - 1), parties)
            killed = time.perf_counter()
            for party in gone:
                each.kill(party)
            before = evaluations(finished)
            process.wait()
            ended = time.perf_counter()
        summary, history = finished.summary, finished.history
        times = [entry["seconds"] for entry in history]
        after = [b - a for a, b in zip(times[before - 1 :], times[before:], strict=False)]
        closing = time.perf_counter()
    return {
        "supernodes": parties,
        "mb_of_superlink": round(superlink),
        "mb_of_a_supernode": round(one),
        "seconds_to_start": round(started - begin, 1),
        "mb_before_the_run": round(idle),
        "mb_in_the_run": round(watch.peak),
        "seconds_to_first_evaluation": round(first - submitted, 1),
        "seconds_an_epoch_before": round(float(np.median(np.diff(times[:before]))), 2),
        "killed": len(gone),
        "longest_epoch_after": round(max(after, default=0.0), 1),
        "seconds_an_epoch_after": round(float(np.median(after[1:])), 2) if after[1:] else 0.0,
        "seconds_from_kill_to_end": round(ended - killed, 1),
        "seconds_to_close": round(time.perf_counter() - closing, 1),
        "failure": summary["failure"] or "",
        "failed_parties": len(summary["failed_parties"]),
        "test_accuracy": [round(entry["test_accuracy"], 4) for entry in (history[0], history[-1])],
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", choices=["ray", "supernodes"])
    made.add_argument("--nodes", type=int, nargs="+", default=[0, 1, 2, 4], help="of Ray")
    made.add_argument("--parties", type=int, default=4000, help="virtual parties on Ray")
    made.add_argument("--steps", type=int, default=5, help="of an epoch on Ray")
    made.add_argument("--supernodes", type=int, default=64)
    made.add_argument("--kill", type=int, default=10, help="SuperNodes")
    made.add_argument("--epochs", type=int, default=60, help="on SuperNodes")
    made.add_argument("--party-timeout", type=float, default=60.0, metavar="SECONDS")
    made.add_argument("--settle", type=float, default=20.0, metavar="SECONDS")
    options = made.parse_args()
    figures: dict[str, Any] = {}
    for nodes in options.nodes if "supernodes" not in (options.only or ()) else ():
        name = f"ray, {nodes} nodes" if nodes else "in process"
        figures[name] = on_ray(nodes, options.parties, options.steps)
        print(f"{name}:", figures[name], flush=True)
    if "ray" not in (options.only or ()):
        words = (options.supernodes, options.kill, options.epochs, options.party_timeout)
        figures["supernodes"] = on_supernodes(*words, options.settle)
        print(json.dumps(figures["supernodes"]), flush=True)
    report("cluster", figures)


if __name__ == "__main__":
    main()
