"""Align once, train often: seconds from a run's start to its first training order, of three runs.

A label holder and two parties have a file each (csv, parquet, csv), of which nine in ten ids are
common to all. The first run aligns; the second is on the same files; before the third, one row of
a party's file is removed. In process each run is a process of its own, whose imports are not
counted; on nodes (--engines supernodes) the SuperNodes go on from run to run, and what counts
is from the call of the ServerApp on. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from benchmarks.common import ALL_ROWS, report
from vfl_flower import server_app
from vfl_flower.flower_internals import app_of_this_package
from vfl_flower.runtimes import processes
from vfl_flower.runtimes.carrier import Carrier
from vfl_flower.runtimes.processes import SuperLink
from vfl_flower.start import run_local

TIMES = "REALIGN_TIMES"  # the variable that names the file for what is timed
KEYS: dict[str, Any] = {**ALL_ROWS, "epochs": 1, "batch-size": 4096, "window": 8}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What `vfl_flower.server_app` does, timed."""
    note_first_training_order()
    server_app.app(grid, context)


def note_first_training_order() -> None:
    """Write down when which kinds of orders are sent, in seconds from now, until one trains."""
    start, send = time.perf_counter(), Carrier.send
    kinds: list[str] = []

    def noting(self: Carrier, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        kind = messages[0].metadata.message_type.removeprefix("query.")
        seconds = time.perf_counter() - start
        if not kinds or kinds[-1] != "train":
            kinds.append(kind)
            with Path(os.environ[TIMES]).open("a") as file:
                file.write(f"{kind} {seconds:.2f}\n")
        return send(self, messages)

    Carrier.send = noting  # type: ignore[method-assign]


def write_files(folder: Path, ids: int) -> list[Path]:
    """The label holder's file, and the parties'."""
    generator = np.random.default_rng(0)
    numbers = generator.permutation(10 * ids)[: ids + ids // 20]
    files = [folder / "labels.csv", folder / "a.parquet", folder / "b.csv"]
    for file, there in zip(files, (slice(ids), slice(-ids, None), slice(-ids, None)), strict=True):
        rows = generator.permutation(numbers[there])
        table = pd.DataFrame(generator.standard_normal((ids, 10)).round(4))
        table.columns = [f"c{number}" for number in range(10)]
        if file == files[0]:
            table = pd.DataFrame({"label": generator.integers(0, 2, ids)})
        write(table.assign(id=rows), file)
    return files


def write(table: pd.DataFrame, file: Path) -> None:
    """A csv or parquet file."""
    if file.suffix == ".csv":
        table.to_csv(file, index=False)
    else:
        table.to_parquet(file, index=False)


def run_in_process(keys: dict[str, Any], node_configs: list[dict[str, str]]) -> None:
    """A run in this process, which ends with it."""
    note_first_training_order()
    run_local(len(node_configs), keys, node_configs=node_configs)


def three_runs(engine: str, folder: Path, ids: int) -> dict[str, Any]:
    """Of each run the kinds of orders up to the first that trains, and when each was sent."""
    labels, *parties = write_files(folder, ids)
    os.environ["VFL_HOME"] = str(folder / f"home-{engine}")
    times = folder / "times"
    os.environ[TIMES] = str(times)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    node_configs: list[dict[str, str]] = [{"file": str(file)} for file in parties]
    figures = {}
    with ExitStack() as stack:
        superlink = None
        if engine == "supernodes":
            superlink = stack.enter_context(SuperLink(simulation=False))
            for party, words in enumerate(node_configs):
                stack.enter_context(superlink.supernode(party, len(parties), words))
        for run in ("first", "second", "changed"):
            if run == "changed":
                table = pd.read_parquet(parties[0])
                write(table[1:], parties[0])
            out = str(folder / f"{engine}-{run}")
            keys = {**KEYS, "dataset": f"files:{labels}", "out": out}
            if superlink:
                superlink.submit(keys, len(parties), folder / "flower.log").wait()
            else:
                given = keys, node_configs
                child = multiprocessing.get_context("spawn").Process(
                    target=run_in_process, args=given
                )
                child.start()
                child.join()
            lines = [line.split() for line in times.read_text().splitlines()]
            figures[run] = {kind: float(seconds) for kind, seconds in lines}
            print(f"{engine:10s} {run:8s} {figures[run]}", flush=True)
            times.unlink()
    return figures


def own_server_app() -> str:
    """The App of this package, with the ServerApp that is timed."""
    return app_of_this_package().replace("vfl_flower.server_app:app", "benchmarks.realign:app")


if __name__ == "__main__":
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ids", type=int, default=300_000, metavar="N", help="of each file")
    made.add_argument("--engines", nargs="+", default=["local", "supernodes"])
    options = made.parse_args()
    setattr(processes, "app_of_this_package", own_server_app)  # noqa: B010
    results = {}
    for name in options.engines:
        with tempfile.TemporaryDirectory() as place:
            results[name] = three_runs(name, Path(place), options.ids)
    report("realign", {"ids": options.ids, **results})
