"""The share of a federation's gain that a distilled model keeps, and the time to score a person.

The bank has a third of the columns (MNIST: the middle quarter of the pixels), and few labels. Two
parties have the other columns of everybody. The student also learns from people without a label.
In `credit, all labels` nobody lacks a label. The share is of mean gains over seeds, with a
bootstrap's interval of 95 %. A subset:

    python -m benchmarks.distil --only table --seeds 1
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import make_classification

from benchmarks.common import check_there, report
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import distil_local, run_local
from vfl_flower.tasks.inference.model import Predictor

ROWS = {"credit": (4000, 1000, 12_000), "credit, all labels": (4000, 17_000, 0)}
FEW = (4000, 500, 8000)  # test rows, people with a label, and without


def tried(seed: int, x: Any, y: Any, own: Any, rows: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of one run and its student."""
    tested, labelled, _ = rows
    with tempfile.TemporaryDirectory() as name:
        os.environ["VFL_HOME"] = name
        order = np.random.default_rng(seed).permutation(len(x))[: sum(rows)]
        table, bank = pd.DataFrame(x[order]).add_prefix("c"), Path(name, "bank.csv")
        table = table.assign(id=1000 + np.arange(len(order)), label=y[order])
        everybody = table[[*(f"c{each}" for each in own), "id", "label"]]
        everybody.to_csv(Path(name, "everybody.csv"), index=False)
        everybody[: tested + labelled].to_csv(bank, index=False)
        nodes = [{"file": f"{name}/{party}.parquet", "id": "id"} for party in range(2)]
        rest = np.array_split(np.setdiff1d(np.arange(x.shape[1]), own), 2)
        for node, block in zip(nodes, rest, strict=True):
            table[[*(f"c{each}" for each in block), "id"]].to_parquet(node["file"], index=False)
        keys: dict[str, Any] = {"dataset": f"files:{bank}", "id": "id", "out": f"{name}/run"}
        keys |= {"seed": seed, "test-fraction": tested / (tested + labelled)}
        given = {"model": f"{name}/run", "dataset": f"files:{name}/everybody.csv"}
        run_local(2, keys, node_configs=nodes)
        finished = distil_local(given, nodes)
        predictor, times = Predictor(checkpoint.load(finished.folder), len(own)), []
        torch.set_num_threads(1)
        for person in everybody.iloc[:200, : len(own)].to_numpy(np.float32):
            began = time.perf_counter()
            predictor.outputs(torch.zeros(1, 0), person[None], np.zeros((1, 0), bool))
            times.append(time.perf_counter() - began)
        return {**finished.summary["distilled"], "milliseconds": 1000 * float(np.median(times))}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    for name, file in (("credit", "uci_credit_default"), ("mnist", "mnist")):
        made.add_argument(f"--{name}", default=f"../shared/data/{file}.npz", metavar="FILE")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--scale", type=float, default=1.0, help="share of all rows to use")
    made.add_argument("--only", default="", metavar="NAME")
    options = made.parse_args()
    sets: dict[str, Any] = {}
    for name in ("credit", "mnist"):
        check_there(f"--{name}", vars(options)[name])
        with np.load(vars(options)[name], allow_pickle=False) as found:
            parts = [part for part in ("", "_train", "_test") if f"X{part}" in found.files]
            sets[name] = [np.concatenate([found[each + part] for part in parts]) for each in "Xy"]
    digits, parity = sets.pop("mnist")
    pixels = digits.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    middle = np.arange(196).reshape(14, 14)[4:11, 4:11].ravel()
    sets["credit"] = sets["credit, all labels"] = [*sets["credit"], np.arange(8)]
    sets["mnist, odd digits"] = [pixels, parity % 2, middle]
    made_up: dict[str, Any] = {
        "n_informative": 12,
        "n_redundant": 24,
        "flip_y": 0.05,
        "random_state": 0,
    }
    sets["table"] = [*make_classification(20_000, 36, **made_up), np.arange(12)]
    figures: dict[str, list[Any]] = {}
    for name in [options.only] if options.only else sets:
        rows = tuple(int(options.scale * each) for each in ROWS.get(name, FEW))
        for seed in range(options.seeds):
            x, y, own = sets[name]
            figures.setdefault(name, []).append(tried(seed, x, y, own, rows))
            print(name, seed, figures[name][-1], flush=True)
        keys = ("local_only", "distilled", "federation")
        each = np.array([[run[key] for key in keys] for run in figures[name]])
        # Seeds have other test rows, so drawing seeds anew covers the noise of both.
        drawn = np.random.default_rng(0).integers(0, len(each), (2000, len(each)))
        local, *gains = np.moveaxis(np.concatenate([each[None], each[drawn]]).mean(1), 1, 0)
        kept, *spread = (gains[0] - local) / (gains[1] - local)
        shown = " | ".join(f"{mean:.4f}" for mean in each.mean(0))
        low, high = np.quantile(spread, (0.025, 0.975))
        print(f"| {name} | {shown} | {kept:.0%} ({low:.0%} to {high:.0%}) |")
    report("distil", figures)


if __name__ == "__main__":
    main()
