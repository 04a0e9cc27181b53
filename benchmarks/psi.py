"""Private set intersection of two sets of ids: seconds of each step, bytes and peak memory.

Whole numbers, of which both sides have nine in ten. Both sides are in this process, one step after
the other, and each step has all cores; so the sum is also what both on this machine would take. On
a machine for each, the two first blindings happen at the same time. Processor seconds, of all cores
together, depend less on what else the machine does. The peak is that of this process, with the data
of both sides, and of its workers together. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil

from vfl_flower.data.psi import Blinding, encode_ids, match, shuffled


class Watch:
    """Seconds of each step, and resident memory in MB at its peak: this process and its workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak = self.of_workers = 0.0
        threading.Thread(target=self._watch_memory, daemon=True).start()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done within, and print it."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name:36s} {self.seconds[name]:7.1f} s")

    def _watch_memory(self) -> None:
        process = psutil.Process()
        while True:
            workers = 0
            for child in process.children():
                try:
                    workers += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.of_workers = max(self.of_workers, workers / 2**20)
            self.peak = max(self.peak, (workers + process.memory_info().rss) / 2**20)
            time.sleep(0.05)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ids", type=int, default=1_000_000, metavar="N", help="of each side")
    n = made.parse_args().ids
    numbers = np.random.default_rng(0).permutation(n + n // 10)
    mine, theirs = numbers[:n], numbers[-n:]
    watch, load = Watch(), os.getloadavg()[0]

    a, b = Blinding(), Blinding()
    with watch.step("label holder: ids, blinded"):
        my_order = shuffled(n, a.secret)
        sent = a.of_ids(encode_ids(mine[my_order], "The label holder's file"))
    with watch.step("party: ids, blinded"):
        their_order = shuffled(n, b.secret)
        own = b.of_ids(encode_ids(theirs[their_order], "The party's file"))
    with watch.step("party: label holder's, blinded again"):
        returned = b.again(sent)
    with watch.step("label holder: party's, blinded again"):
        both = a.again(own)
    with watch.step("label holder: match"):
        in_mine, in_theirs = match(returned, both)
    if not (mine[my_order[in_mine]] == theirs[their_order[in_theirs]]).all():
        raise SystemExit("ids that differ have been matched")

    blindings = list(watch.seconds.values())[:2]
    total = sum(watch.seconds.values())
    figures = {
        "ids": n,
        "common": len(in_mine),
        "seconds": watch.seconds,
        "seconds_in_all": round(total, 1),
        "seconds_on_a_machine_each": round(total - min(blindings), 1),
        "processor_seconds": round(sum(os.times()[:4]), 1),
        "bytes_to_party": sent.nbytes + in_theirs.astype(np.int32).nbytes,
        "bytes_to_label_holder": returned.nbytes + own.nbytes,
        "peak_mb": round(watch.peak),
        "peak_mb_of_workers": round(watch.of_workers),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    from benchmarks.common import report  # here, since it imports torch, which takes memory

    report("psi", figures)


if __name__ == "__main__":
    main()
