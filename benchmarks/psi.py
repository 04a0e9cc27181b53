"""Private set intersection of two sets of ids: seconds of each step, bytes, memory of each side.

Whole numbers, of which both sides have nine in ten. The party is a process beside that of the label
holder, and what they send goes through a pipe. Each step waits for the one before, as it does in a
run, and has all cores. Processor seconds, of all cores and both sides, depend less on what else the
machine does. A side's peak is the most memory that its process has ever held, Python, NumPy and
pandas included. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vfl_flower.data.psi import Blinding, encode_ids, match, shuffled
from vfl_flower.provenance import peak_memory_mb


class Side:
    """One side's process: what it sends, and the seconds of its steps."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self.pipe = pipe
        self.name = name
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Time what is done within, and print it."""
        start = time.perf_counter()
        yield
        step = f"{self.name}: {what}"
        self.seconds[step] = round(time.perf_counter() - start, 1)
        print(f"{step:40s} {self.seconds[step]:7.1f} s", flush=True)

    def send(self, points: Any) -> None:
        """Points [n, 32]."""
        self.pipe.send(len(points))
        self.pipe.send_bytes(points.reshape(-1))

    def receive(self) -> Any:
        """Points that the other side has sent."""
        points = np.empty(32 * self.pipe.recv(), np.uint8)
        self.pipe.recv_bytes_into(points)
        return points.reshape(-1, 32)

    def figures(self) -> dict[str, Any]:
        """Seconds by step, and what the process took."""
        return {
            "seconds": self.seconds,
            "processor_seconds": sum(os.times()[:2]),
            "peak_mb": round(peak_memory_mb()),
        }


def numbers_of(n: int, start: int) -> Any:
    """The ids of one side."""
    return np.random.default_rng(0).permutation(n + n // 10)[start : start + n].copy()


def party(pipe: Connection, n: int) -> None:
    """The other process."""
    side, b = Side(pipe, "party"), Blinding()
    numbers = numbers_of(n, n // 10)
    sent = side.receive()
    with side.step("the label holder's, blinded again"):
        again = b.again(sent)
    del sent
    with side.step("ids, blinded"):
        order = shuffled(n, secrets.token_bytes(16))
        own = b.of_ids(encode_ids(numbers, "The party's file"), order)
    side.send(again)
    side.send(own)
    places = pipe.recv()
    pipe.send(numbers[order[places]])  # for the label holder to check, here alone
    pipe.send(side.figures())


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ids", type=int, default=1_000_000, metavar="N", help="of each side")
    n = made.parse_args().ids
    load = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    other = context.Process(target=party, args=(end, n))
    other.start()
    end.close()  # here: should the party end early, its pipe ends too
    side, a = Side(pipe, "label holder"), Blinding()
    numbers = numbers_of(n, 0)
    start = time.perf_counter()
    with side.step("ids, blinded"):
        order = shuffled(n, secrets.token_bytes(16))
        sent = a.of_ids(encode_ids(numbers, "The label holder's file"), order)
    side.send(sent)
    nbytes = {"bytes_to_party": sent.nbytes}
    del sent
    again, own = side.receive(), side.receive()
    nbytes["bytes_to_label_holder"] = again.nbytes + own.nbytes
    with side.step("the party's, blinded again"):
        both = a.again(own)
    del own
    with side.step("match"):
        here, there = match(again, both)
    total = time.perf_counter() - start
    pipe.send(there.astype(np.int32))
    if not (numbers[order[here]] == pipe.recv()).all():
        raise SystemExit("ids that differ have been matched")
    mine, theirs = side.figures(), pipe.recv()
    other.join()
    seconds = mine["seconds"] | theirs["seconds"]
    nbytes["bytes_to_party"] += 4 * len(there)
    figures = {
        "ids": n,
        "common": len(here),
        "seconds": seconds,
        "seconds_in_all": round(total, 1),
        "processor_seconds": round(mine["processor_seconds"] + theirs["processor_seconds"], 1),
        **nbytes,
        "peak_mb_of_label_holder": mine["peak_mb"],
        "peak_mb_of_party": theirs["peak_mb"],
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    from benchmarks.common import report  # here, since it imports torch, which takes memory

    report("psi", figures)


if __name__ == "__main__":
    main()
