"""How time, memory and bytes grow with rows, parties, columns, the window and embeddings.

One quantity grows at a time, from 100,000 rows of 4 parties x 8 columns, batch 256, window 8,
embedding 8. Each run is one epoch of `split-nn` in a new process, beside a PyTorch loop of the same
model that has all columns. Rows come from parquet files with ids, as organisations have them. With
more than four parties, each has 4 columns and 10,000 rows, in batches of 1,000. Seconds are of
training and the evaluation at its end, not of reading. Memory is the peak of the process (VmHWM).
Both include Python, torch, Flower and scikit-learn. ``parts`` has megabytes of the arrays that last
through training. The rest of the peak is reading, aligning, and freed memory. A slope is in
logarithms, between the two largest sizes: 1 means that twice as much takes twice as long. Draws the
growth, and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sklearn.metrics  # noqa: F401  # an evaluation needs it, and its import is no part of one
import torch
from flwr.app import Context, Message
from torch import nn

from benchmarks.common import ALL_ROWS, report
from vfl_flower.client_app import app
from vfl_flower.config.provenance import peak_memory_mb
from vfl_flower.data.ids import WholeIds
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.launch.engines import run_local
from vfl_flower.party.party import Party

BASE = {"rows": 100_000, "parties": 4, "columns": 8, "window": 8, "embedding": 8, "batch": 256}
MANY = {"rows": 10_000, "columns": 4, "batch": 1000}  # where parties grow
AXES: dict[str, tuple[int, ...]] = {
    "rows": (10**4, 10**5, 10**6, 10**7),
    "parties": (2, 10, 32, 100, 320, 1000),
    "columns": (8, 32, 128, 512),
    "window": (1, 8, 64, 391),
    "embedding": (8, 32, 128, 512),
}
PIECE = 500_000


def write(folder: Path, point: dict[str, int]) -> list[Path]:
    """Parquet files of the parties, and of the label holder: signs of a random linear function."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    parties, columns = point["parties"], point["columns"]
    paths = [*(folder / f"party-{party}.parquet" for party in range(parties)), folder / "y.parquet"]
    writers: list[Any] = [None] * len(paths)
    weights = generator.standard_normal((parties, columns), dtype=np.float32)
    for start in range(0, point["rows"], PIECE):
        ids = np.arange(start, min(start + PIECE, point["rows"]))
        total = np.zeros(len(ids), np.float32)
        frames = []
        for each in weights:
            x = generator.standard_normal((len(ids), columns), dtype=np.float32)
            total += x @ each
            named = {f"c{number}": x[:, number] for number in range(columns)}
            frames.append(pd.DataFrame({"id": ids, **named}))
        frames.append(pd.DataFrame({"id": ids, "label": (total > 0).astype(np.int64)}))
        for number, (path, frame) in enumerate(zip(paths, frames, strict=True)):
            table = pa.Table.from_pandas(frame, preserve_index=False)
            writers[number] = writers[number] or pq.ParquetWriter(path, table.schema)
            writers[number].write_table(table)
    for writer in writers:
        writer.close()
    return paths


def parts(found: list[Any], nodes: int) -> dict[str, float]:
    """Return megabytes of the arrays that last through training, by part, from the objects."""
    holder = next(each for each in found if isinstance(each, LabelHolder))
    labels = next(each for each in found if isinstance(each, Labels))
    blocks = [each.inputs.block for each in found if isinstance(each, Party)]
    orders = [order for kept in holder.sampling._orders.values() for order in kept.values()]
    assert labels.places is not None and labels.test_places is not None and labels.people
    places = [labels.places, labels.test_places, *labels.people]
    ids = [each._numbers for each in found if isinstance(each, WholeIds)]
    rows = len(labels.train) + len(labels.test)
    sizes: dict[str, int] = {
        "features": sum(
            getattr(part, "nbytes", 0) for each in blocks for part in (each.train, each.test)
        ),
        "embeddings": holder.table.rows.nbytes,
        "embeddings of test rows": holder.held_out.table.rows.nbytes,
        "labels": labels.train.nbytes + labels.test.nbytes,
        "ids and rows of the label holder": sum(each.nbytes for each in (*places, *ids)),
        "aligned rows of the parties": 8 * rows * nodes,
        "orders of rows": sum(each.nbytes for each in orders),
    }
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def ours(folder: Path, point: dict[str, int]) -> dict[str, Any]:
    """One epoch by the library."""
    keys: dict[str, Any] = {
        **ALL_ROWS,
        **{"strategy": "split-nn", "epochs": 1, "test-fraction": 0.1, "checkpoint-every": 0},
        **{
            "bottom-model": "mlp",
            "bottom-hidden": 16,
            "embedding-size": point["embedding"],
            "align": "ids",
            "noise-seed": 0,
        },
        **{"batch-size": point["batch"], "window": point["window"], "party-lr": 0.1},
        **{"server-lr": 0.1, "dataset": f"files:{folder}/y.parquet", "out": f"{folder}/run"},
    }
    nodes = [{"file": f"{folder}/party-{party}.parquet"} for party in range(point["parties"])]
    began: list[float] = []
    found: list[Any] = []
    start_mb = peak_memory_mb()

    def client(message: Message, context: Context) -> Message:
        """The application, which notes when training begins."""
        if message.metadata.message_type == "train" and not began:
            kinds = LabelHolder, Labels, Party, WholeIds
            found.extend(each for each in gc.get_objects() if type(each) in kinds)
            began.append(time.perf_counter())
        reply: Message = app(message, context)
        return reply

    summary = run_local(point["parties"], keys, client, nodes).summary  # type: ignore[arg-type]
    seconds = time.perf_counter() - began[0]
    figures = {"seconds": seconds, **{name: summary[name] for name in ("steps", "test_accuracy")}}
    figures["megabytes"] = (summary["bytes_up"] + summary["bytes_down"]) / 1e6
    by_part = {"imports": round(start_mb, 1), **parts(found, len(nodes))}
    by_part["rest"] = round((peak := peak_memory_mb()) - sum(by_part.values()), 1)
    return {**figures, "peak_memory_mb": peak, "parts": by_part}


def plain(folder: Path, point: dict[str, int]) -> dict[str, Any]:
    """One epoch of the same model in one place, by the usual loop."""
    files = [folder / f"party-{party}.parquet" for party in range(point["parties"])]
    blocks = [
        torch.from_numpy(pd.read_parquet(file).drop(columns="id").to_numpy(np.float32))
        for file in files
    ]
    labels = torch.from_numpy(pd.read_parquet(folder / "y.parquet")["label"].to_numpy(np.float32))
    order = torch.randperm(len(labels))
    test, train = order[: len(order) // 10], order[len(order) // 10 :]
    size = point["embedding"]
    bottoms = nn.ModuleList(
        nn.Sequential(nn.Linear(point["columns"], 16), nn.ReLU(), nn.Linear(16, size), nn.ReLU())
        for _ in blocks
    )
    top = nn.Sequential(nn.Linear(size * len(blocks), 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD([*bottoms.parameters(), *top.parameters()], lr=0.1)

    def said(rows: torch.Tensor) -> torch.Tensor:
        pairs = zip(bottoms, blocks, strict=True)
        out: torch.Tensor = top(torch.cat([bottom(x[rows]) for bottom, x in pairs], 1))[:, 0]
        return out

    start, steps = time.perf_counter(), 0
    for rows in train.split(point["batch"]):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(said(rows), labels[rows]).backward()
        optimizer.step()
        steps += 1
    with torch.no_grad():
        right = sum(float(((said(at) > 0) == labels[at]).sum()) for at in test.split(10_000))
    seconds = time.perf_counter() - start
    accuracy = right / len(test)
    found = {"seconds": seconds, "steps": steps, "test_accuracy": accuracy}
    return {**found, "peak_memory_mb": peak_memory_mb()}


def measure(point: dict[str, int], folder: Path) -> dict[str, Any]:
    """Measure both, each in a new process, so that neither has the peak of the other."""
    figures = {}
    for way in ("write", "ours", "plain"):
        command = [sys.executable, "-m", "benchmarks.scale", "--of", way, str(folder)]
        command += [json.dumps(point)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        if way != "write":
            figures[way] = json.loads(done.stdout.splitlines()[-1])
    for found in figures.values():
        found["ms_a_step"] = 1000 * found["seconds"] / found["steps"]
    return figures


def slope(points: list[dict[str, Any]], axis: str, key: str, way: str) -> float:
    """Of the logarithms, between the two largest."""
    first, last = points[-2:]
    rise = math.log(last[way][key] / first[way][key])
    return rise / math.log(last[axis] / first[axis])


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Seconds, memory and megabytes against what grows, by logarithms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(found), 7), layout="constrained")
    kinds = {"seconds": "seconds", "peak_memory_mb": "peak memory, MB", "megabytes": "MB sent"}
    all_axes = figure.subplots(3, len(found), squeeze=False)
    for line, (key, title) in zip(all_axes, kinds.items(), strict=True):
        for axes, (axis, points) in zip(line, found.items(), strict=True):
            at = [point[axis] for point in points]
            for way, colour in (("ours", "tab:blue"), ("plain", "tab:grey")):
                if key in points[0][way]:
                    figures = [point[way][key] for point in points]
                    name = "vfl-flower" if way == "ours" else "plain loop"
                    if len(points) > 1:
                        name += f", slope {slope(points, axis, key, way):.2f}"
                    axes.plot(at, figures, marker=".", color=colour, label=name)
            axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=title)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", choices=AXES, default=list(AXES), help="what grows")
    made.add_argument("--most", type=int, help="no more of anything than so many, to try it out")
    made.add_argument("--picture", type=Path, help="where to draw the growth")
    made.add_argument("--of", nargs=3, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.of:
        way, folder, point = options.of
        if way == "write":
            write(Path(folder), json.loads(point))
            return
        print(json.dumps({"ours": ours, "plain": plain}[way](Path(folder), json.loads(point))))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for axis in options.only:
        found[axis] = []
        for size in AXES[axis]:
            if options.most and size > options.most:
                continue
            point = {**BASE, **(MANY if axis == "parties" else {}), axis: size}
            if options.most:
                point["rows"] = min(point["rows"], options.most)
            with tempfile.TemporaryDirectory() as name:
                found[axis].append({axis: size, **measure(point, Path(name))})
            last = found[axis][-1]
            print(f"{axis} {size}:", json.dumps({way: last[way] for way in ("ours", "plain")}))
    if options.picture:
        draw(found, options.picture)
    slopes = {
        axis: {
            f"{way}, {key}": round(slope(points, axis, key, way), 2)
            for way in ("ours", "plain")
            for key in ("seconds", "peak_memory_mb")
        }
        for axis, points in found.items()
        if len(points) > 1
    }
    report("scale", {"points": found, "slopes": slopes})


if __name__ == "__main__":
    main()
