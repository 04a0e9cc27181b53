"""A table larger than memory: memory of a party's process, and speed of training.

Each of two parties has a parquet file of random numbers with the same ids: 2 million rows and 200
columns, unless --rows and --columns say otherwise. Parties run in separate processes, as on real
nodes, and this process is the label holder. It prints figures of one epoch for each way of reading
the tables: seconds of the epoch, a party's peak memory and processor seconds, and seconds until
training begins. The peak is VmHWM, which includes pages of files, and
RssAnon, which does not. Both ways are compared on --both rows, which fit into memory. Prints one
JSON object as its last line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict

from benchmarks.common import ALL_ROWS, report

KEYS: dict[str, Any] = {
    **ALL_ROWS,
    "strategy": "split-nn",
    "align": "ids",
    "epochs": 1,
    "batch-size": 256,
    "optimizer": "momentum",
    "party-lr": 0.01,
    "server-lr": 0.01,
    "test-fraction": 0.1,
    "checkpoint-every": 0,
}
PARTIES = 2
PIECE = 20_000


def write_tables(folder: Path, rows: int, columns: int) -> list[Path]:
    """The parties' files and the label holder's, written in pieces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    names = [f"c{number}" for number in range(columns)]
    paths = [folder / f"party-{party}.parquet" for party in range(PARTIES)]
    schema = pa.schema([("id", pa.int64()), *((name, pa.float64()) for name in names)])
    writers = [pq.ParquetWriter(path, schema, compression="none") for path in paths]
    labels = []
    for start in range(0, rows, PIECE):
        ids = np.arange(start, min(start + PIECE, rows))
        total = np.zeros(len(ids))
        for writer in writers:
            values = generator.standard_normal((columns, len(ids)), dtype=np.float32)
            total += values[:10].sum(0)
            arrays = [pa.array(ids), *(pa.array(each.astype(np.float64)) for each in values)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        labels.append((total > 0).astype(np.int64))
    for writer in writers:
        writer.close()
    path = folder / "labels.parquet"
    known = {"id": np.arange(rows), "label": np.concatenate(labels)}
    pq.write_table(pa.table(known), path)
    return [*paths, path]


# --- a party's process ----------------------------------------------------------------------------


def serve(wire: Connection, node_config: dict[str, Any], keys: dict[str, Any], large: bool) -> None:
    """Serve a party's messages, and at the end tell of its memory."""
    from vfl_flower.client_app import app
    from vfl_flower.data import on_disk
    from vfl_flower.transport.flower_internals import from_bytes, to_bytes

    torch.set_num_threads(1)
    on_disk._LARGE = 0 if large else 2**60
    base, most = memory("VmRSS"), [0.0]

    def watch() -> None:
        while True:
            most[0] = max(most[0], memory("RssAnon"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    context = Context(1, 1, node_config, RecordDict(), keys)
    training = 0.0
    while content := wire.recv_bytes():
        message = from_bytes(content)
        if message.metadata.message_type == "train" and not training:
            training = time.process_time()
        wire.send_bytes(to_bytes(app(message, context)))
    told = {"peak_mb": memory("VmHWM"), "own_mb": most[0], "at_start_mb": base}
    wire.send({**told, "cpu_seconds": time.process_time() - training})


def memory(key: str) -> float:
    """Memory of this process in MB, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return round(float(line.split()[1]) / 1024)
    return 0.0


class Processes:
    """A ClientApp that has each party's process serve its messages."""

    def __init__(self, folder: Path, keys: Mapping[str, Any], large: bool) -> None:
        os.environ["FLWR_HOME"] = str(folder)
        spawn = multiprocessing.get_context("spawn")
        self._wires: list[Connection] = []
        for party in range(PARTIES):
            words: dict[str, Any] = {
                "partition-id": party,
                "num-partitions": PARTIES,
                "simulated": True,
            }
            words |= {"file": str(folder / f"party-{party}.parquet"), "states": str(folder)}
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, words, dict(keys), large))
            process.daemon = True
            process.start()
            self._wires.append(ours)
        self.training = 0.0  # when the first training message came

    def __call__(self, message: Message, context: Context) -> Message:
        """The answer of the party's process."""
        from vfl_flower.transport.flower_internals import from_bytes, to_bytes

        if message.metadata.message_type == "train" and not self.training:
            self.training = time.perf_counter()
        wire = self._wires[int(context.node_config["partition-id"])]
        wire.send_bytes(to_bytes(message))
        return from_bytes(wire.recv_bytes())

    def end(self) -> list[dict[str, float]]:
        """Return the figures that the processes print at their end."""
        for wire in self._wires:
            wire.send_bytes(b"")
        return [wire.recv() for wire in self._wires]


def measure(folder: Path, labels: Path, large: bool) -> dict[str, Any]:
    """One epoch, with tables in pieces or in memory."""
    from vfl_flower.launch.engines import run_local

    keys = {**KEYS, "dataset": f"files:{labels}"}
    parties = Processes(folder, keys, large)
    words = [{"file": str(folder / f"party-{party}.parquet")} for party in range(PARTIES)]
    start = time.perf_counter()
    finished = run_local(PARTIES, {**keys, "out": str(folder / "run")}, parties, words)  # type: ignore[arg-type]
    seconds = time.perf_counter() - parties.training
    parties_end = parties.end()
    return {
        "seconds_before_training": round(parties.training - start, 1),
        "seconds_of_epoch": round(seconds, 2),
        "cpu_seconds_of_party": round(max(each["cpu_seconds"] for each in parties_end), 2),
        "peak_mb": max(each["peak_mb"] for each in parties_end),
        "own_mb": max(each["own_mb"] for each in parties_end),
        "at_start_mb": max(each["at_start_mb"] for each in parties_end),
        "test_accuracy": finished.summary["test_accuracy"],
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=int, default=2_000_000)
    made.add_argument("--columns", type=int, default=200)
    made.add_argument("--both", type=int, default=200_000, help="rows of the comparison")
    made.add_argument("--folder", help="where to write the tables (default: a temporary folder)")
    options = made.parse_args()
    figures: dict[str, Any] = {}
    for name, rows, large in (
        ("in_memory", options.both, False),
        ("in_pieces", options.both, True),
        ("large", options.rows, True),
    ):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            *_, labels = write_tables(Path(folder), rows, options.columns)
            figures[name] = {"rows": rows, **measure(Path(folder), labels, large)}
            print(f"{name:10s}", figures[name], flush=True)
    for key in ("seconds_of_epoch", "cpu_seconds_of_party"):
        ratio = figures["in_pieces"][key] / figures["in_memory"][key]
        figures[f"{key}_over_in_memory"] = round(ratio, 2)
    report("large_table", figures)


if __name__ == "__main__":
    main()
