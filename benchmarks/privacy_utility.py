"""Accuracy against epsilon of labels: all mechanisms under one relation and adversary, on MNIST.

Four quadrant parties 196-16 with sigmoid, a linear top model on the mean. Epsilon protects labels,
where one person's label is changed. The adversary is all parties, the network, and anyone who gets
the model. Noise on labels is drawn in the same way for each system. `dpzv` has noise on scalars and
on its top model, at delta 1e-5, with one direction of all parties. (DPZV's Figure 3 has one each.)
`frozen` and `split-nn` without noise are the lines. A figure of another kind stands beside them:
`vafl` with noise on embeddings, whose epsilon protects features from the label holder. Runs "by
default" name only the strategy, the data, the mechanism and epsilon: validation rows choose their
epoch. Then comes the credit table at two parties, without noise and with twelve draws of noise on
labels. Prints one JSON object as its last line.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from dp_accounting import get_sigma_gaussian
from tqdm.auto import tqdm

from benchmarks.common import (
    PARTIES,
    SIGMOID_MODEL,
    check_there,
    mnist_of,
    parser,
    quiet_run,
    report,
)

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0)
ADAM = {"optimizer": "adam", "batch-size": 512, "party-lr": 0.003, "server-lr": 0.003, "window": 8}
NOISY_LABELS: dict[str, dict[str, Any]] = {  # and epochs
    "split-nn": {**ADAM, "epochs": 15},
    "vafl": {**ADAM, "epochs": 15},
    "ef-vfl": {**ADAM, "epochs": 15},
    "cascaded": {
        **{**ADAM, "epochs": 80, "window": 58},
        **{"batch-size": 1024, "party-lr": 0.001, "server-lr": 0.002},
    },
}
BY_DEFAULT = ("split-nn", "vafl", "ef-vfl")
DPZV: dict[str, Any] = {
    **{"batch-size": 4096, "party-lr": 0.03, "server-lr": 0.2, "clip": 1.0, "top-clip": 0.5},
    **{"epochs": 546, "quorum": PARTIES, "delta": DELTA, "window": 15},
}
CREDIT: dict[str, Any] = {  # two parties
    **{"optimizer": "adam", "batch-size": 1024, "epochs": 15, "window": 8},
    **{"party-lr": 0.0005, "server-lr": 0.001},
    **{"bottom-hidden": 256, "embedding-size": 64, "top-hidden": 256},
}
AT_ONE: dict[str, dict[str, Any]] = {  # other ways to spend an epsilon of 1
    "dpzv, top model by its scalar": {"perturbs": "all", "server-update": "zeroth-order"},
    "dpzv, a scalar for each party": {"perturbs": "each"},
}


def jobs(epsilons: Sequence[float], epochs: int | None) -> dict[str, dict[str, Any]]:
    """The keys of each run, by a name that ends in its epsilon if it has one."""
    made: dict[str, dict[str, Any]] = {
        "frozen": {"strategy": "frozen", "epochs": 20},
        "without noise": {"strategy": "split-nn", **NOISY_LABELS["split-nn"]},
    }
    for epsilon in epsilons:
        for system, keys in NOISY_LABELS.items():
            privacy = {"privacy": "labels", "epsilon": epsilon}
            made[f"{system}, labels {epsilon:g}"] = {"strategy": system, **keys, **privacy}
        if epsilon <= 1:  # where the choice of an epoch by noisy labels is the hardest
            for system in BY_DEFAULT:
                given = {"strategy": system, "privacy": "labels", "epsilon": epsilon}
                made[f"{system} by default {epsilon:g}"] = {**given, "validation-fraction": "auto"}
        own = {"strategy": "dpzv", **DPZV, "epsilon": epsilon}
        made[f"dpzv {epsilon:g}"] = {**own, "perturbs": "all"}
        if epsilon == 1:
            made.update({f"{name} 1": {**own, **more} for name, more in AT_ONE.items()})
            uploads = NOISY_LABELS["vafl"]["epochs"]
            noise = 2 * math.sqrt(uploads) * float(get_sigma_gaussian(epsilon, DELTA))
            perturbed = {"privacy": "perturbed-embedding", "embedding-noise": noise}
            of_vafl = {"strategy": "vafl", **NOISY_LABELS["vafl"], **perturbed, "delta": DELTA}
            made["vafl, embeddings 1"] = of_vafl
    return {name: {**keys, **({"epochs": epochs} if epochs else {})} for name, keys in made.items()}


def run(parties: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with a fresh count of label draws."""
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"VFL_HOME": home, "XDG_STATE_HOME": home}
        return quiet_run(parties, keys)[0]


def draw(figures: dict[str, Any], epsilons: Sequence[float], path: Path) -> None:
    """Accuracy against epsilon, between the lines of `frozen` and no noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in (*(f"{system}, labels" for system in NOISY_LABELS), "dpzv"):
        reached = [figures[f"{name} {epsilon:g}"]["test_accuracy"] for epsilon in epsilons]
        style = "-" if name == "dpzv" else "--"
        axes.plot(epsilons, reached, style, marker="o", markersize=4, label=name)
    for name, style in (("without noise", ":"), ("frozen", "-.")):
        reached = figures[name]["test_accuracy"]
        axes.axhline(reached, color="grey", linestyle=style, label=name)
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{each:g}" for each in epsilons])
    axes.minorticks_off()
    axes.set_xlabel("epsilon: one person's label is changed, all parties collude")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--epochs", type=int, help="of each run, to try it out")
    made.add_argument("--credit", default="../shared/data/uci_credit_default.npz", metavar="PATH")
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    made.add_argument("--picture", type=Path, default=Path("benchmarks/privacy_utility.png"))
    options = made.parse_args()
    check_there("--credit", options.credit)
    figures: dict[str, Any] = {"delta": DELTA, "seeds": options.seeds}
    todo = jobs(options.epsilons, options.epochs)
    with mnist_of(options) as mnist:
        for name, keys in tqdm(todo.items(), disable=None, leave=False):
            common: dict[str, Any] = {"dataset": f"npz:{mnist}"}
            if "by default" not in name:
                common = {**SIGMOID_MODEL, **common, "eval-every": keys["epochs"]}
            each = [run(PARTIES, {**common, **keys, "seed": seed}) for seed in range(options.seeds)]
            accuracies = [summary["test_accuracy"] for summary in each]
            last = each[-1]
            figures[name] = {
                "test_accuracy": round(mean(accuracies), 4),
                "by_seed": [round(value, 4) for value in accuracies],
                "epsilon": last["epsilon"] and round(max(one["epsilon"] for one in each), 4),
                "delta": last["delta"],
                "megabytes": round((last["bytes_up"] + last["bytes_down"]) / 1e6, 1),
            }
            print(f"{name:32s}", figures[name], flush=True)
    credit = {**CREDIT, "dataset": f"npz:{options.credit}"}
    credit |= {"epochs": options.epochs or CREDIT["epochs"]}
    for name, privacy in (("", {}), (", labels 1", {"privacy": "labels", "epsilon": 1.0})):
        areas = [run(2, {**credit, **privacy})["test_auc"] for _ in range(12 if privacy else 1)]
        figures[f"credit{name}"] = {
            "test_auc": round(mean(areas), 4),
            "by_draw": [round(area, 4) for area in areas],
        }
        print(f"{'credit' + name:32s}", figures[f"credit{name}"], flush=True)
    draw(figures, options.epsilons, options.picture)
    report("privacy_utility", figures)


if __name__ == "__main__":
    main()
