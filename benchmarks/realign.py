"""Align once, train often: seconds from a run's start to its first training order, of six runs.

A label holder and two parties have a file each (csv, parquet, csv). Nine in ten ids are common to
all. The first run aligns, and the second uses the same files. Before the third, one row of a
party's file is removed. Before the fourth, the label holder's file gets 1,000 more ids, and before
the fifth a party's does. The sixth predicts 100 new people, and is timed up to the order to
predict. Processor seconds stand beside the seconds, since they depend less on other work of the
machine. Ids blinded or unblinded are counted for the process: all sides in process, only the label
holder on nodes. In process each run has a new process, and imports are not counted. On nodes
(--engines supernodes) the SuperNodes continue from run to run, and time starts at the call of the
ServerApp. Prints one JSON object as its last line.
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
from vfl_flower.alignment import psi
from vfl_flower.launch import processes
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.launch.processes import SuperLink
from vfl_flower.transport.base import Transport
from vfl_flower.transport.flower_processes import app_of_this_package

TIMES = "REALIGN_TIMES"  # the variable that names the file for what is timed
KEYS: dict[str, Any] = {**ALL_ROWS, "epochs": 1, "batch-size": 4096, "window": 8}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the same as `vfl_flower.server_app`, timed."""
    note_first_training_order()
    server_app.app(grid, context)


def note_first_training_order() -> None:
    """Write down when which kinds of orders are sent, in seconds from now, until one trains.

    With them stands how many ids have been blinded until then.
    """
    start, send, rows = time.perf_counter(), Transport.send, psi._blinded_rows
    before = time.process_time()
    kinds: list[str] = []
    blinded = [0]

    def counting(blind: Any, n: int) -> Any:
        blinded[0] += n
        return rows(blind, n)

    def noting(self: Transport, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        kind = messages[0].metadata.message_type.removeprefix("query.")
        seconds = time.perf_counter() - start
        if not kinds or kinds[-1] != "train":
            kinds.append(kind)
            with Path(os.environ[TIMES]).open("a") as file:
                used = time.process_time() - before
                file.write(f"{kind} {seconds:.2f} {used:.2f} {blinded[0]}\n")
        return send(self, messages)

    Transport.send = noting  # type: ignore[method-assign]
    psi._blinded_rows = counting


def write_files(folder: Path, ids: int) -> list[Path]:
    """The label holder's file, the parties', and one of new people whom they know."""
    generator = np.random.default_rng(0)
    numbers = generator.permutation(10 * ids)[: ids + ids // 20]
    files = [folder / "labels.csv", folder / "a.parquet", folder / "b.csv"]
    new = folder / "new.csv"
    write(pd.DataFrame({"id": numbers[-100:]}), new)
    for file, there in zip(files, (slice(ids), slice(-ids, None), slice(-ids, None)), strict=True):
        rows = generator.permutation(numbers[there])
        table = pd.DataFrame(generator.standard_normal((ids, 10)).round(4))
        table.columns = [f"c{number}" for number in range(10)]
        if file == files[0]:
            table = pd.DataFrame({"label": generator.integers(0, 2, ids)})
        write(table.assign(id=rows), file)
    return [*files, new]


def grow(file: Path, ids: Iterable[int]) -> None:
    """Add rows of these ids to a file, in the place of nobody."""
    table = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
    more = [*ids]
    write(pd.concat([table[: len(more)].assign(id=more), table]), file)


def write(table: pd.DataFrame, file: Path) -> None:
    """A csv or parquet file."""
    if file.suffix == ".csv":
        table.to_csv(file, index=False)
    else:
        table.to_parquet(file, index=False)


def run_in_process(keys: dict[str, Any], node_configs: list[dict[str, str]]) -> None:
    """A run in this process, which ends with it."""
    note_first_training_order()
    if "model" in keys:
        predict_local(keys, node_configs)
    else:
        run_local(len(node_configs), keys, node_configs=node_configs)


def runs_of(engine: str, folder: Path, ids: int) -> dict[str, Any]:
    """Of each run the kinds of orders up to the first that trains, when each was sent, and ids."""
    labels, *parties, new = write_files(folder, ids)
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
        for run in ("first", "second", "changed", "holder-grown", "party-grown", "predictions"):
            if run == "changed":
                table = pd.read_parquet(parties[0])
                write(table[1:], parties[0])
            if run == "holder-grown":  # by 500 whom the parties know, and 500 whom nobody does
                known = pd.read_csv(parties[1])["id"]
                there = pd.read_csv(labels)["id"]
                later = known[~known.isin(there) & ~known.isin(pd.read_csv(new)["id"])]
                grow(labels, [*later[:500], *range(10 * ids, 10 * ids + 500)])
            if run == "party-grown":
                grow(parties[0], range(10 * ids, 10 * ids + 1000))
            out = str(folder / f"{engine}-{run}")
            keys = {**KEYS, "dataset": f"files:{labels}", "out": out}
            if run == "predictions":
                model = str(folder / f"{engine}-party-grown")
                keys = {"dataset": f"files:{new}", "model": model, "out": f"{out}.csv"}
            if superlink:
                task = {"task": "predict"} if run == "predictions" else {}
                superlink.submit({**keys, **task}, len(parties), folder / "flower.log").wait()
            else:
                given = keys, node_configs
                child = multiprocessing.get_context("spawn").Process(
                    target=run_in_process, args=given
                )
                child.start()
                child.join()
            lines = [line.split() for line in times.read_text().splitlines()]
            figures[run] = {kind: float(seconds) for kind, seconds, *_ in lines}
            figures[run] |= {"processor": float(lines[-1][2]), "ids blinded": int(lines[-1][3])}
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
            results[name] = runs_of(name, Path(place), options.ids)
    report("realign", {"ids": options.ids, **results})
