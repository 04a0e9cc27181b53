"""A party that joins a trained model: credit defaults, a bank and two parties, and later a third.

The files are made as in `partial_bank`: the bank has the labels of all people and a quarter of the
columns, and each party knows three fifths of the people. The third party is worth the most (one of
the other two is worth little, whenever it comes). The bank and two parties train `two`. Three runs
begin from it, for a few more epochs. `longer` has the same two parties. `frozen` has all three, and
only the third and the top model learn. In `free` all three learn. `three` trains all three from the
beginning, for as long as `two`. All hold out the same fifth of the people. AUC is of all of these,
with the parties that know them. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import check_there, report
from benchmarks.partial_bank import KEYS, PARTIES, cut
from vfl_flower.launch.engines import run_local

WAYS: dict[str, dict[str, Any]] = {
    "longer": {},
    "frozen": {"freeze": True},
    "free": {},
}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=25)
    made.add_argument("--more", type=int, default=5, help="epochs after the third has joined")
    options = made.parse_args()
    check_there("--npz", options.npz)
    figures: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["VFL_HOME"] = name  # so that no alignment of an earlier run is used again
        dataset, (zero, last, two) = cut(options.npz, Path(name))
        nodes = [zero, two, last]

        def run(way: str, parties: int, keys: dict[str, Any]) -> str:
            out = str(Path(name) / f"{way}-{keys['seed']}")
            given = {**keys, "out": out}
            found = run_local(parties, given, node_configs=nodes[:parties]).summary
            by_party = {m: each["auc"] for m, each in found["test_by_party"].items()}
            about = {"auc": found["test_auc"], "by_party": by_party}
            about["bytes"] = found["bytes_up"] + found["bytes_down"]
            figures.setdefault(way, []).append(about)
            print(way, about, flush=True)
            return out

        for seed in range(options.seeds):
            anew = {**KEYS, "dataset": dataset, "strategy": "split-nn", "seed": seed}
            anew["epochs"] = options.epochs
            earlier = run("two", PARTIES - 1, anew)
            for way, more in WAYS.items():
                parties = PARTIES - (way == "longer")
                run(way, parties, {**more, "grow": earlier, "epochs": options.more, "seed": seed})
            run("three", PARTIES, anew)
    report("new_party", figures)


if __name__ == "__main__":
    main()
