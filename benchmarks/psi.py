"""Private set intersection of two sets of ids: seconds of each step, bytes and peak memory.

Ids are whole numbers, and nine in ten are on both sides. Both sides are in this process, one step
after the other, and each step uses all cores. So the sum is also the time of both sides on this
machine. With a machine each, the two first blindings could happen at the same time. Processor
seconds, over all cores, depend less on other work of the machine. The floor is four multiplications
and two hashes to the group for each id, on all cores, with nothing else. It is measured on some ids
before and after. The peak is this process's, with the data of both sides. Prints one JSON object as
its last line.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from vfl_flower.alignment import psi
from vfl_flower.alignment.psi import Blinding, answer, is_answer, match, outputs, question, shuffled
from vfl_flower.config.provenance import peak_memory_mb
from vfl_flower.data.ids import chosen, encode_ids

SAMPLE = 10_000  # ids that a party asks about, as `vfl_flower.alignment.at_party` has it


class Watch:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done within, and print it."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name:36s} {self.seconds[name]:7.1f} s", flush=True)


def floor_seconds(ids: int) -> float:
    """Return the seconds of four multiplications and two hashes for each id, on all cores."""
    hash_to_group, multiply, _ = psi._libsodium()

    def work(number: int) -> None:
        digest, scalar = os.urandom(64), os.urandom(32)
        point, product = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        for _ in range(2 * number):
            hash_to_group(point, digest)
            multiply(product, scalar, point)
            multiply(product, scalar, point)

    cores = os.cpu_count() or 1
    start = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, [ids // cores] * cores))
    return time.perf_counter() - start


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ids", type=int, default=1_000_000, metavar="N", help="of each side")
    n = made.parse_args().ids
    numbers = np.random.default_rng(0).permutation(n + n // 10)
    mine, theirs = numbers[:n], numbers[-n:]
    watch, load = Watch(), os.getloadavg()[0]
    some = max(os.cpu_count() or 1, min(n, n // 20 + 1000))  # ids of the floor
    floors = [floor_seconds(some)]

    a, b = Blinding(), Blinding()
    with watch.step("label holder: ids, blinded"):
        my_order = shuffled(n, a.secret)
        my_ids = encode_ids(mine, "The label holder's file")
        sent = a.of_ids(my_ids, my_order)
    with watch.step("party: ids, blinded"):
        their_order, their_ids = shuffled(n, b.secret), encode_ids(theirs, "The party's file")
        of_party = b.of_ids(their_ids, their_order)
        own = outputs(chosen(their_ids, their_order), of_party)
        del of_party
    with watch.step("party: label holder's, blinded again"):
        returned = b.again(sent)
    with watch.step("label holder: its own blinding away"):
        by_party = outputs(chosen(my_ids, my_order), a.undone(returned))
    with watch.step("label holder: match"):
        in_mine, in_theirs = match(by_party, own)
    with watch.step("party: a question, answered"):
        rows = their_order[in_theirs[:SAMPLE]].tolist()
        ids = [their_ids[row] for row in rows]
        asked, secret = question(ids)
        answered = answer(ids, asked)
    if not (mine[my_order[in_mine]] == theirs[their_order[in_theirs]]).all():
        raise SystemExit("ids that differ have been matched")
    if not is_answer(secret, answered):
        raise SystemExit("the label holder has not answered")

    floors.append(floor_seconds(some))
    floor = n / some * sum(floors) / 2

    blindings = list(watch.seconds.values())[:2]
    total = sum(watch.seconds.values())
    figures = {
        "ids": n,
        "common": len(in_mine),
        "seconds": watch.seconds,
        "seconds_in_all": round(total, 1),
        "floor_seconds": round(floor, 1),
        "over_the_floor": round(total / floor, 3),
        "seconds_on_a_machine_each": round(total - min(blindings), 1),
        "processor_seconds": round(sum(os.times()[:2]), 1),
        "bytes_to_party": sent.nbytes + 4 * len(in_theirs),
        "bytes_to_label_holder": returned.nbytes + own.nbytes,
        "peak_mb": round(peak_memory_mb()),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    from benchmarks.common import report  # here, since it imports torch, which takes memory

    report("psi", figures)


if __name__ == "__main__":
    main()
