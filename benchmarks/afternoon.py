"""How long ten organisations with a hundred million people would take: measured here, calculated.

Measured on this machine, in one epoch in process with at most ten parties: bytes a row, and
processor seconds of a row's step at both ends. There is one measurement for each system, codec and
window. Also measured: seconds to blind an id, the memory of an id in
`benchmarks.psi`, and the label holder's checkpoint of a row. Calculated: an epoch over real
networks, where all parties share one line of the label holder, both ways at once. In a synchronous
system the parts of a window follow one another: parties compute, embeddings travel, the label
holder computes, gradients travel back, and the round trip. An asynchronous system is as fast as the
slowest of these alone. The alignment comes before: each party blinds its ids and the label
holder's, and the label holder unblinds for each party. Also calculated are the memory of an
alignment, the label holder's table and checkpoint, and the ids at which a party's answer no longer
fits in one message. It is a calculation: nothing of that size has been run. Prints one JSON object
as its last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from benchmarks.common import ALL_ROWS, report
from vfl_flower.alignment.psi import Blinding, shuffled
from vfl_flower.client_app import app
from vfl_flower.data.ids import encode_ids
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.launch.engines import run_local

COLUMNS, BATCH, EMBEDDING = 20, 4096, 8
MEASURED = 10  # parties, at most
QSGD = {"codec": "qsgd", "bits": 8, "downlink-codec": "qsgd", "downlink-bits": 8}
WAYS: dict[str, dict[str, Any]] = {
    "split-nn": {},
    "split-nn, 8 bits": QSGD,
    "vafl": {"strategy": "vafl"},
    "vafl, 8 bits": {"strategy": "vafl", **QSGD},
    "ef-vfl": {"strategy": "ef-vfl"},
    "cascaded": {"strategy": "cascaded"},
}
SYNCHRONOUS = ("split-nn", "split-nn, 8 bits", "ef-vfl")
MOST = 2**31  # bytes of a message in protobuf
ALIGNED = 64e-6, 39e-6  # megabytes of an id to the label holder and to a party (`benchmarks.psi`)


class Clock(Callback):
    """Processor seconds of the parties and of all, until the last evaluation."""

    def __init__(self) -> None:
        self.first = self.of_parties = 0.0
        self.parties = self.all = 0.0

    def client(self, message: Message, context: Context) -> Message:
        """The ClientApp. A party also learns from feedback that comes with an evaluation."""
        start = time.process_time()
        reply: Message = app(message, context)
        if message.metadata.message_type == "train":
            self.first = self.first or start
        if self.first:
            self.of_parties += time.process_time() - start
        return reply

    def evaluated(self, entry: Mapping[str, Any]) -> None:
        """Look: what a run saves afterwards is no training."""
        self.parties, self.all = self.of_parties, time.process_time() - self.first


def measured(keys: dict[str, Any], dataset: str, parties: int, rows: int) -> dict[str, float]:
    """Of one epoch: seconds and bytes of a party, and seconds of the label holder, by row."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        base = {
            **ALL_ROWS,
            "epochs": 1,
            "batch-size": BATCH,
            "embedding-size": EMBEDDING,
            "out": out,
            "optimizer": "adam",
        }
        base |= {
            "party-lr": 0.003,
            "server-lr": 0.003,
            "dataset": dataset,
            "test-fraction": 0.01,
            "checkpoint-every": 0,
            "window": 8,
        }
        client: Any = clock.client
        summary = run_local(parties, {**base, **keys}, client, observers=[clock]).summary
        checkpoint = Path(out, "checkpoint.npz").stat().st_size
    each = parties * summary["epochs"] * rows
    return {
        "party": clock.parties / each,
        "label_holder": (clock.all - clock.parties) / each,
        "up": summary["bytes_up"] / each,
        "down": summary["bytes_down"] / each,
        "checkpoint": checkpoint / parties / rows,
        "accuracy": summary["test_accuracy"],
    }


def blinding(ids: int) -> float:
    """Processor seconds of blinding an id."""
    start = time.process_time()
    blinds = Blinding()
    blinds.of_ids(encode_ids(np.arange(ids), "A file"), shuffled(ids, blinds.secret))
    return (time.process_time() - start) / ids


def memory_of_an_id(few: int, many: int) -> float:
    """Bytes that an id takes in an alignment, of both sides together."""
    peaks = []
    for ids in (few, many):
        # A process starts with its parent's peak, so the parent is a small one.
        command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-m", "benchmarks.psi"]
        command += ["--ids", str(ids)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peaks.append(json.loads(said.splitlines()[-1])["peak_mb"] * 2**20)
    return float(peaks[1] - peaks[0]) / (many - few)


def hours(
    one: dict[str, float], window: int, waits: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Of an epoch: hours in all, and of what takes most by itself."""
    rows, parties = options.people, options.parties
    line = options.mbit * 1e6 / 8
    parts = {
        "parties": rows * one["party"],
        "label holder": rows * parties * one["label_holder"],
        "up": rows * parties * one["up"] / line,
        "down": rows * parties * one["down"] / line,
        "round trips": rows / (BATCH * window) * options.rtt / 1000,
    }
    total = sum(parts.values()) if waits else max(parts.values())
    return {"hours": total / 3600, **{name: each / 3600 for name, each in parts.items()}}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--people", type=float, default=1e8)
    made.add_argument("--parties", type=int, default=10)
    made.add_argument(
        "--mbit", type=float, default=100, help="a second, of the line to the label holder"
    )
    made.add_argument("--rtt", type=float, default=20, help="milliseconds there and back")
    made.add_argument("--cores", type=int, default=32, help="for blinding, at each organisation")
    made.add_argument("--rows", type=int, default=200_000, help="to measure by")
    made.add_argument("--ids", type=int, default=200_000, help="to measure the alignment by")
    options = made.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    parties = min(options.parties, MEASURED)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((options.rows, COLUMNS * parties), dtype=np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.npz")
        np.savez(path, X=x, y=y)
        measured({}, f"npz:{path}", parties, options.rows)  # warms up
        for name, keys in WAYS.items():
            one = measured(keys, f"npz:{path}", parties, options.rows)
            waits = name in SYNCHRONOUS
            found = {window: hours(one, window, waits, options) for window in (1, 8, 64)}
            figures[name] = {"measured": one, "windows": found}
            said = ", ".join(f"window {w}: {each['hours']:.2f} h" for w, each in found.items())
            slowest = max(found[8], key=lambda part: (part != "hours") * found[8][part])
            accuracy = f"{one['accuracy']:.3f} after {options.rows} rows"
            print(f"{name:18} {said}; most of it: {slowest}; {accuracy}", flush=True)
    of_id = blinding(20_000)
    line = options.mbit * 1e6 / 8
    figures["alignment"] = {
        "seconds_of_blinding_an_id": of_id,
        "label_holder_hours": (1 + options.parties) * options.people * of_id / options.cores / 3600,
        "party_hours": 2 * options.people * of_id / options.cores / 3600,
        "line_hours": max(ALIGNED) * 1e6 * options.parties * options.people / line / 3600,
        "rows_of_the_largest_message": MOST / 4,  # common rows; ids come in pieces
    }
    print("alignment:", figures["alignment"], flush=True)
    of_id_bytes = memory_of_an_id(options.ids // 2, options.ids)
    of_row = figures["vafl"]["measured"]["checkpoint"] * options.parties
    figures["memory"] = {
        "bytes_of_an_id_in_the_alignment": of_id_bytes,
        "gb_of_the_alignment": options.people * of_id_bytes / 1e9,
        "gb_of_an_asynchronous_table": options.people * options.parties * EMBEDDING * 4 / 1e9,
        "gb_of_an_asynchronous_checkpoint": options.people * of_row / 1e9,
    }
    print("memory:", figures["memory"])
    report("afternoon", figures)


if __name__ == "__main__":
    main()
