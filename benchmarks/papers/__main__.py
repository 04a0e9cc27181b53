"""Run a row of docs/reference/papers.md: its table, its picture, and its figures in JSON.

Without a row, all are listed. The runs of a row take turns, each with one seed after another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.common import parser, quiet_run, report, trained
from benchmarks.images import cifar_of
from benchmarks.papers import asyrevel, cascaded, dpzv, ef_vfl, vafl
from benchmarks.papers.draw import draw
from benchmarks.papers.rows import Column, Data, History, Job, Row
from benchmarks.papers.training import Training
from vfl_flower.config.errors import DivergedError, PartyError

ROWS: dict[str, Row] = {
    name: row
    for paper in (vafl, asyrevel, cascaded, ef_vfl, dpzv)
    for name, row in paper.ROWS.items()
}
QUICK: dict[str, Any] = {"epochs": 1, "eval-every": 0.5, "checkpoint-every": 0}
FEW = 240  # rows of each data set


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("row", nargs="?", choices=ROWS, metavar="ROW", help="such as vafl-fig2")
    places = {
        "credit": "../shared/data/uci_credit_default.npz",
        "cifar": "../shared/data/cifar10",
        "table": "breast-cancer",
    }
    made.add_argument("--credit", default=places["credit"], metavar="PATH", help="an npz of X, y")
    made.add_argument("--cifar", default=places["cifar"], metavar="FOLDER", help="parquet files")
    made.add_argument(
        "--table",
        default=places["table"],
        metavar="DATASET",
        help="of two classes, as key `dataset` names it (default: %(default)s)",
    )
    made.add_argument("--seeds", type=int, help="instead of the row's own number")
    made.add_argument("--epochs", type=int, help="instead of each run's own")
    made.add_argument("--only", default="", metavar="TEXT", help="runs whose name has this in it")
    made.add_argument(
        "--picture", type=Path, nargs="+", metavar="PNG", help="where its curves are drawn"
    )
    made.add_argument(
        "--quick", action="store_true", help=f"{FEW} rows, one epoch and seed, to try it out"
    )
    return made


@contextmanager
def data_of(options: argparse.Namespace) -> Iterator[Data]:
    """The data sets, or their first rows."""
    few = FEW if options.quick else options.rows
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        mnist, credit, cifar = options.mnist, options.credit, options.cifar
        if few and "cifar" in options.row:
            cifar = stack.enter_context(cifar_of(cifar, few))
        elif few:
            mnist, credit = (
                part_of(Path(each), few, Path(folder, f"{number}.npz"))
                for number, each in enumerate((mnist, credit))
            )
        yield Data(f"npz:{mnist}", f"npz:{credit}", f"hf:{cifar}", options.table)


def part_of(place: Path, rows: int, to: Path) -> Path:
    """A file of the first rows of each array in an npz file, if there is that."""
    if place.is_file():
        with np.load(place, allow_pickle=False) as file:
            names = [name for name in file.files if name[0] in "Xy"]
            np.savez(to, **{name: file[name][:rows] for name in names})
    return to


def history_of(job: Job, row: Row, more: Mapping[str, Any]) -> History:
    """The entries of a run, with the number of its parties; none if it diverges."""
    keys, gradient = {**job.keys, **more}, row.training == "gradient"
    try:
        if row.training:
            strategy, _, _ = trained(job.parties, keys, lambda run: Training(run, gradient))
            entries = strategy.history.entries
        else:
            _, entries = quiet_run(job.parties, keys)
    except (PartyError, DivergedError) as error:
        print(f"{row.about}: {error}", file=sys.stderr)
        return []
    return [{**entry, "parties": job.parties} for entry in entries]


def figure(column: Column, histories: Sequence[History]) -> tuple[str, dict[str, Any]]:
    """A cell, "mean ± deviation", and its figures; how many seeds, where not all have one."""
    if not all(histories):
        return "diverges", {}
    found = [column(history) for history in histories]
    have = [each for each in found if each is not None]
    if not have:
        return "not reached", {"by_seed": found}
    text = f"{mean(have):.4g}" + (f" ± {stdev(have):.2g}" if len(have) > 1 else "")
    if len(have) < len(found):
        text += f" ({len(have)} of {len(found)})"
    by_seed = [None if each is None else float(f"{each:.6g}") for each in found]
    return text, {"mean": float(f"{mean(have):.6g}"), "by_seed": by_seed}


def main() -> None:
    options = arguments().parse_args()
    if options.row is None:
        for name, each in ROWS.items():
            print(f"{name:24s} {each.about}")
        return
    row = ROWS[options.row]
    seeds = 1 if options.quick else options.seeds or row.seeds
    more: dict[str, Any] = dict(QUICK) if options.quick else {}
    more |= {"epochs": options.epochs} if options.epochs else {}
    histories: dict[str, list[History]] = {}
    figures: dict[str, Any] = {"seeds": seeds}
    header = ["run", *(["the paper"] if row.theirs else []), *row.columns]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    with data_of(options) as data:
        for name, job in row.jobs(data).items():
            if options.only not in name:
                continue
            histories[name] = [
                history_of(job, row, {**more, "seed": seed, "noise-seed": seed})
                for seed in range(seeds)
            ]
            cells = {title: figure(of, histories[name]) for title, of in row.columns.items()}
            theirs = [row.theirs.get(name, "")] if row.theirs else []
            texts = [name.replace(" | ", ", "), *theirs, *(text for text, _ in cells.values())]
            print(f"| {' | '.join(texts)} |", flush=True)
            figures[name] = {title: found for title, (_, found) in cells.items()}
    for row_picture, path in zip(row.pictures, options.picture or (), strict=False):
        draw({name: each for name, each in histories.items() if all(each)}, row_picture, path)
    report(f"papers {options.row}", figures)


if __name__ == "__main__":
    main()
