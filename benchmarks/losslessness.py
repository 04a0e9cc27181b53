"""AsyREVEL's losslessness (section 5.4): eight parties against the same optimiser on joined data.

Logistic regression with the regulariser of Eq. (22), lambda 1e-4, by AsyREVEL-Gau and -Uni. On
joined data the same run has one party with all columns, as in the paper's Table 4. Ten trials.
Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev
from typing import Any

from tqdm.auto import tqdm

from benchmarks.common import check_there, quiet_run, report

KEYS: dict[str, Any] = {
    "strategy": "asyrevel",
    "bottom-model": "linear",
    "top-model": "sum",
    "regulariser": "nonconvex",
    "regulariser-weight": 1e-4,
    "optimizer": "sgd",
    "delay": "none",
    "batch-size": 64,
    "eval-every": 1000,
}
RATES = {"breast-cancer": (0.02, 1000), "credit default": (0.003, 20)}  # learning rate, epochs


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--credit",
        default="../shared/data/uci_credit_default.npz",
        metavar="PATH",
        help="the credit-default table: an npz of X, y (default: %(default)s)",
    )
    made.add_argument("--trials", type=int, default=10, help="two at least")
    made.add_argument("--epochs", type=int, help="instead of 1000 and 20, to try it out")
    made.add_argument("--data", nargs="+", choices=RATES, default=list(RATES))
    options = made.parse_args()
    if "credit default" in options.data:
        check_there("--credit", options.credit)
    if options.trials < 2:
        made.error("--trials: a deviation needs two")
    places = {"breast-cancer": "breast-cancer", "credit default": f"npz:{options.credit}"}
    figures: dict[str, Any] = {"trials": options.trials}
    for data in options.data:
        lr, epochs = RATES[data]
        for directions in ("gaussian", "sphere"):
            accuracies: dict[int, list[float]] = {8: [], 1: []}
            jobs = [(seed, parties) for seed in range(options.trials) for parties in accuracies]
            for seed, parties in tqdm(jobs, disable=None, leave=False):
                keys = {**KEYS, "dataset": places[data], "party-lr": lr}
                keys |= {"directions": directions, "seed": seed, "noise-seed": seed}
                keys["epochs"] = options.epochs or epochs
                summary, _ = quiet_run(parties, {**keys, "window": 8})
                accuracies[parties].append(summary["test_accuracy"])
            federated, joined = accuracies[8], accuracies[1]
            name = f"{data}, {directions}"
            figures[name] = {
                "eight_parties": round(mean(federated), 4),
                "joined": round(mean(joined), 4),
                "difference": round(mean(federated) - mean(joined), 4),
                "deviation_of_trials": round(stdev(federated), 4),
            }
            print(f"{name:24s}", figures[name], flush=True)
    report("losslessness", figures)


if __name__ == "__main__":
    main()
