"""A bank and three parties, which know three fifths of its people each: credit defaults.

The bank has the labels of all, and a quarter of the columns; parties are aligned by private set
intersection, align = 'any' with min-parties = 0, so that everyone is used. AUC is of the people
held out, a fifth, all of them: with whoever knows them, and by each party alone with the bank, on
those whom it knows. `common` learns from the people alone whom all know, `alone` is each party with
the bank and without the others, `joined` has zeros where a party lacks someone. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common import ALL_ROWS, check_there, report
from vfl_flower.launch.engines import run_local

PARTIES, KNOWN = 3, 0.6
KEYS: dict[str, Any] = {
    **ALL_ROWS,
    **{"align": "any", "min-parties": 0, "id": "person", "combine": "mean", "noise-seed": 0},
    **{"batch-size": 256, "epochs": 25, "optimizer": "adam", "party-lr": 1e-3, "server-lr": 1e-3},
    **{"bottom-hidden": 32, "embedding-size": 16, "weight-decay": 1e-3},
}
WAYS: dict[str, dict[str, Any]] = {
    "split-nn": {"strategy": "split-nn"},
    "subsets off": {"strategy": "split-nn", "subsets": "off"},
    "vafl": {"strategy": "vafl"},
    "cascaded": {"strategy": "cascaded", "optimizer": "sgd", "party-lr": 0.01, "server-lr": 0.1},
    "common": {"strategy": "intersection-only"},
    "alone": {"strategy": "local-only"},
    "joined": {"strategy": "centralised"},
}


def cut(npz: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The files of the bank and of the parties; where they are."""
    with np.load(npz, allow_pickle=False) as file:
        parts = [name for name in ("", "_train", "_test") if f"X{name}" in file.files]
        x, y = (np.concatenate([file[f"{each}{part}"] for part in parts]) for each in "Xy")
    generator = np.random.default_rng(0)
    blocks = np.array_split(generator.permutation(x.shape[1]), PARTIES + 1)
    table = pd.DataFrame(x).add_prefix("column-")
    people = pd.Series(generator.permutation(10 * len(x))[: len(x)], name="person")

    def of(block: Any) -> pd.DataFrame:
        return pd.concat([people, table.iloc[:, block]], axis=1)

    of(blocks[0]).assign(label=y).to_csv(folder / "bank.csv", index=False)
    nodes = []
    for party, block in enumerate(blocks[1:]):
        some = generator.permutation(len(x))[: round(KNOWN * len(x))]
        of(block).iloc[some].to_parquet(folder / f"party-{party}.parquet", index=False)
        nodes.append({"file": str(folder / f"party-{party}.parquet"), "id": "person"})
    return f"files:{folder / 'bank.csv'}", nodes


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    made.add_argument("--seeds", type=int, default=1)
    options = made.parse_args()
    check_there("--npz", options.npz)
    figures: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["VFL_HOME"] = name  # so that no alignment of an earlier run is used again
        dataset, nodes = cut(options.npz, Path(name))
        for seed in range(options.seeds):
            for way, more in WAYS.items():
                keys = {**KEYS, **more, "dataset": dataset, "seed": seed}
                out = str(Path(name) / f"{way}-{seed}")
                found = run_local(PARTIES, {**keys, "out": out}, node_configs=nodes).summary
                by_party = found.get("test_by_party", {})
                by_parties = found.get("test_by_parties", {}) if way != "alone" else {}
                about = {
                    "auc": found["test_auc"],
                    "by_parties": {
                        k: each["auc"] for k, each in by_parties.items() if "auc" in each
                    },
                    "by_party": {m: each["auc"] for m, each in by_party.items() if "auc" in each},
                }
                figures.setdefault(way, []).append(about)
                print(way, about, flush=True)
    report("partial_bank", figures)


if __name__ == "__main__":
    main()
