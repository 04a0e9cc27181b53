"""Run a row of a page of results: its table, its pictures, and its figures in JSON.

The pages are docs/reference/papers.md and docs/papers, for the papers, and docs/results for ours.

Without a row, all are listed. A row's learning rates are tuned first, on validation rows, with as
many trials for each of its systems. With --resume, runs are kept in a folder, and those that are
there already are not run again. `all` runs what is missing of all rows, and writes the pages and
their pictures. `page` writes them from what is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import check_there, parser, report
from benchmarks.papers import (
    asyrevel,
    cascaded,
    dpzv,
    ef_vfl,
    label_privacy,
    laser,
    page,
    tuning,
    vafl,
)
from benchmarks.papers.data import FEW, NAMES, data_of, names_of
from benchmarks.papers.draw import draw
from benchmarks.papers.results import Results
from benchmarks.papers.rows import Data, Histories, History, Job, Row
from benchmarks.papers.training import history_of

ROWS: dict[str, Row] = {
    name: row
    for paper in (vafl, asyrevel, cascaded, ef_vfl, dpzv, laser, label_privacy)
    for name, row in paper.ROWS.items()
}
QUICK: dict[str, Any] = {"epochs": 1, "eval-every": 0.5, "checkpoint-every": 0}
Wanted = Mapping[tuple[str, int], tuple[Job, Mapping[str, Any]]]
"""Runs by name and seed: each with its job and its keys."""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.prog = "python -m benchmarks.papers"
    made.add_argument(
        "row",
        nargs="?",
        choices=[*ROWS, "all", "page"],
        metavar="ROW",
        help="such as vafl-fig2, or all",
    )
    made.add_argument(
        "--resume", type=Path, metavar="FOLDER", help=f"where runs are kept (all: {page.KEPT.name})"
    )
    places = {
        "credit": "../shared/data/uci_credit_default.npz",
        "cifar": "../shared/data/cifar10",
        "table": "breast-cancer",
    }
    made.add_argument(
        "--credit",
        default=places["credit"],
        metavar="PATH",
        help="the credit-default table: an npz of X, y (default: %(default)s)",
    )
    made.add_argument(
        "--cifar",
        default=places["cifar"],
        metavar="FOLDER",
        help="CIFAR-10: train.parquet and test.parquet (default: %(default)s)",
    )
    made.add_argument(
        "--table",
        default=places["table"],
        metavar="DATASET",
        help="of two classes, as key `dataset` names it (default: %(default)s)",
    )
    made.add_argument("--seeds", type=int, help="instead of the row's own number")
    made.add_argument("--epochs", type=int, help="instead of each run's own")
    made.add_argument("--processes", type=int, help="runs at a time (default: one for each core)")
    made.add_argument("--only", default="", metavar="TEXT", help="runs whose name has this in it")
    made.add_argument(
        "--picture", type=Path, nargs="+", metavar="PNG", help="where its curves are drawn"
    )
    made.add_argument(
        "--quick", action="store_true", help=f"{FEW} rows, one epoch and seed, to try it out"
    )
    return made


def check_data(options: argparse.Namespace) -> None:
    """End the command with one sentence if a file that its runs need is missing."""
    if options.row == "page":  # runs nothing
        return
    named = Data("--mnist", "--credit", "--credit", "--cifar", "--table", "--mnist")
    needed = {
        job.keys.get("dataset", "")
        for row in (ROWS.values() if options.row == "all" else [ROWS[options.row]])
        for name, job in row.jobs(named).items()
        if options.only in name
    }
    for option in sorted(needed & {"--mnist", "--credit", "--cifar"}):
        check_there(option, getattr(options, option.removeprefix("--")))


class Runs:
    """The runs of a row: those that are kept, and those that are missing.

    Parameters
    ----------
    only : runs whose name has this in it.
    more : keys that replace a run's own.
    processes : number of runs at a time; None is one for each core.

    Attributes
    ----------
    absent : the seeds of each run that was not found, and not run either.
    """

    def __init__(
        self,
        name: str,
        data: Data,
        only: str,
        more: Mapping[str, Any],
        kept: Results,
        processes: int | None = None,
    ) -> None:
        self._processes = processes or os.cpu_count() or 1
        self.name, self.row, self.more, self.kept = name, ROWS[name], more, kept
        self._jobs = self.row.jobs(data)
        self.names = [each for each in self._jobs if only in each]
        used = {self._jobs[name].keys.get("dataset", "") for name in self.names}
        self._names = names_of(data, used)
        self._trial: dict[str, int] = {}  # by job: number of the best
        self.absent: dict[str, list[int]] = {}

    def tune(self, missing: bool = True) -> None:
        """Choose the learning rates of each job, on validation rows.

        Parameters
        ----------
        missing : whether to run trials that are not kept; else their jobs keep their own rates,
            and the trials are `absent`.
        """
        numbers = range(len(tuning.FACTORS)) if self.row.tuned else ()
        tuned = dict.fromkeys(self._jobs[name].like or name for name in self.names)
        wanted = {
            (f"{name} @ {number}", 0): (
                self._jobs[name],
                {**tuning.trial(self._jobs[name], number), **self.more, **_seeded(0)},
            )
            for name, number in product(tuned, numbers)
        }
        found = self._found(wanted, missing)
        for name in tuned:
            trials = [found.get((f"{name} @ {number}", 0)) for number in numbers]
            if trials and None not in trials:
                self._trial[name] = tuning.best([each or [] for each in trials])

    def histories(self, seeds: int, missing: bool = True) -> Histories:
        """Return the histories of all jobs, by seed.

        Parameters
        ----------
        missing : whether to run those that are not kept; else they are `absent`.
        """
        wanted = {}
        for seed, name in product(range(seeds), self.names):
            job = self._jobs[name]
            if job.seeds is not None and seed >= job.seeds:
                continue
            trial = self._trial.get(job.like or name)
            keys = job.keys if trial is None else tuning.rates(job, trial)
            wanted[name, seed] = job, {**keys, **self.more, **_seeded(seed)}
        found = self._found(wanted, missing)
        return {
            name: [found[name, seed] for seed in range(seeds) if (name, seed) in found]
            for name in self.names
        }

    def _found(self, wanted: Wanted, missing: bool) -> dict[tuple[str, int], History]:
        """Return (name, seed) -> history of the runs that are kept, and of those that it runs."""
        named = {key: self._named(keys) for key, (_, keys) in wanted.items()}
        kept = {key: self.kept.get(*key, self.row, keys) for key, keys in named.items()}
        found = {key: history for key, history in kept.items() if history is not None}
        absent = [key for key in wanted if key not in found]
        if not missing:
            for name, seed in absent:
                self.absent.setdefault(name, []).append(seed)
        elif absent:
            with ProcessPoolExecutor(self._processes, get_context("spawn")) as pool:
                running = {}
                for key in absent:
                    job, keys = wanted[key]
                    given = job.parties, keys, self.row.training, self.row.run
                    running[pool.submit(history_of, *given)] = key
                ended = tqdm(as_completed(running), self.name, len(running), leave=False)
                for future in ended:
                    key = running[future]
                    found[key] = future.result()
                    self.kept.put(*key, self.row, named[key], found[key])
        return found

    def _named(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys with the name of the data set, not its place."""
        place = keys.get("dataset")
        return {**keys, "dataset": self._names[place]} if place else keys


def _seeded(seed: int) -> dict[str, int]:
    return {"seed": seed, "noise-seed": seed}


def main() -> None:
    options = arguments().parse_args()
    if options.row is None:
        for name, each in ROWS.items():
            print(f"{name:24s} {each.about}")
        return
    check_data(options)
    more: dict[str, Any] = dict(QUICK) if options.quick else {}
    more |= {"epochs": options.epochs} if options.epochs else {}
    whole = options.row in ("all", "page")
    if whole and options.only:
        raise SystemExit(f"--only is for one row: {options.row}. Leave it out, or name a row.")
    figures: dict[str, Any] = {}
    kept: dict[str, Histories] = {}
    absent: dict[str, dict[str, list[int]]] = {}
    missing = options.row != "page"
    given: AbstractContextManager[Data] = data_of(options) if missing else nullcontext(NAMES)
    with given as data, tempfile.TemporaryDirectory() as thrown_away:
        folder = options.resume or (page.KEPT if whole else Path(thrown_away))
        for name in ROWS if whole else [options.row]:
            row = ROWS[name]
            seeds = 1 if options.quick else options.seeds or row.seeds
            # Rates for the page are those that were tuned for it.
            results = Results(folder, name, page.KEPT)
            runs = Runs(name, data, options.only, more, results, options.processes)
            if not options.quick:
                runs.tune(missing)
            histories = runs.histories(seeds, missing)
            print("\n".join(page.table(row, histories)), flush=True)
            figures[name] = {
                run: {title: page.figure(of, each)[1] for title, of in row.columns.items()}
                for run, each in histories.items()
            }
            paths = page.picture(name) if whole else options.picture or ()
            drawn = {run: each for run, each in histories.items() if each and all(each)}
            for row_picture, path in zip(row.pictures, paths, strict=False):
                if drawn:
                    draw(drawn, row_picture, path)
            kept[name] = histories
            if runs.absent:
                absent[name] = runs.absent
    if whole:
        page.write(ROWS, kept, absent)
    for name, of_row in absent.items():
        print(f"{folder} lacks runs of {name}, so the page has none of them:", file=sys.stderr)
        for run, of_run in of_row.items():
            print(f"  {run}: seeds {', '.join(map(str, of_run))}", file=sys.stderr)
    report(f"papers {options.row}", figures if whole else {"seeds": seeds, **figures[options.row]})


if __name__ == "__main__":
    main()
