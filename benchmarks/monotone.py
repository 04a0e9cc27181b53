"""The price of monotonic columns on credit data, and violations of the promise.

A bank has labels, limit and age, one party the months of delay, another bills and payments. A limit
and a payment may only lower the score, a delay may only raise it. Each seed trains with these
columns and without. A pair of rows differs in one of them, and half of the pairs lie beyond all
training rows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

import vfl_flower
from benchmarks.common import check_there, report
from vfl_flower.label_holder import checkpoint
from vfl_flower.party import about, state, state_file

BANK = ["limit", "sex", "education", "marriage", "age"]
DELAYS = [f"delay {month}" for month in range(6)]
BILLS = [f"bill {month}" for month in range(6)] + [f"paid {month}" for month in range(6)]
SIGNS = {"limit": -1, **dict.fromkeys(DELAYS, 1), **dict.fromkeys(BILLS[6:], -1)}
SYSTEMS: dict[
    str, dict[str, Any]
] = {  # the default top model, the others, masked sums, and every kind of answer
    "split-nn": {},
    "split-nn, linear top": {"top-model": "linear"},
    "split-nn, sum": {"top-model": "sum"},
    "split-nn, mean": {"combine": "mean"},
    "split-nn, masked sums": {"combine": "mean", "aggregation": "secure"},
    "split-nn, subsets": {"subsets": "sampled"},
    "split-nn, mlp": {"bottom-model": "mlp"},
    "vafl": {"strategy": "vafl"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "cascaded": {"strategy": "cascaded"},
    "asyrevel": {"strategy": "asyrevel"},
    "dpzv": {"strategy": "dpzv", "privacy": "none"},
    "centralised": {"strategy": "centralised"},
}

Frames = list[pd.DataFrame]


def frames_of(x: Any) -> Frames:
    """Return the frames of the bank and the two parties."""
    whole = pd.DataFrame(x, columns=[*BANK, *DELAYS, *BILLS]).astype(float)
    return [whole[BANK], whole[DELAYS], whole[BILLS]]


def pairs_of(
    frames: Frames, medians: Any, number: int, seed: int, reach: float
) -> tuple[Frames, Frames, Any]:
    """Return rows, the same rows with one column changed, and the sign of each change.

    Half of the values come from other people. The others lie up to 10^reach times beyond all.
    One second value in fifty is missing, which counts as the training median.
    """
    random = np.random.default_rng(seed)
    names = list(SIGNS)
    rows, which = (
        random.integers(len(frames[0]), size=number),
        random.integers(len(names), size=number),
    )
    low = [frame.iloc[rows].reset_index(drop=True) for frame in frames]
    high = [frame.copy() for frame in low]
    signs = np.zeros(number)
    for at, name in enumerate(names):
        mine = np.flatnonzero(which == at)
        place = next(n for n, frame in enumerate(frames) if name in frame)
        column = frames[place][name].to_numpy()
        values = random.choice(column, (2, len(mine)))
        far = random.random((2, len(mine))) < 0.5
        beyond = np.abs(column).max() * 10.0 ** random.uniform(0, reach, values.shape)
        values = np.where(far, beyond * random.choice([-1, 1], values.shape), values)
        missing = random.random(len(mine)) < 0.02
        known = np.where(missing, medians[name], values[1])
        signs[mine] = SIGNS[name] * np.sign(known - values[0])
        values[1, missing] = np.nan
        for frames_, each in zip((low, high), values, strict=True):
            frames_[place].loc[mine, name] = each
    return low, high, signs


def medians_of(model: Any) -> dict[str, float]:
    """Return the median of each column in the training rows, which stands for missing values."""
    found = checkpoint.load(model.folder)
    states = sorted(model.folder.glob("run-*-checkpoint-*.state"))
    abouts = [about.read(state.load_about(state_file.read(each))) for each in states]
    parts = [each.preparation.numbers for each in abouts if each.preparation]
    return {
        **found.about_labels["preparation"]["numbers"],
        **{k: v for p in parts for k, v in p.items()},
    }


def scores(model: Any, frames: Frames) -> Any:
    """Return the probability of the second class of each row, or its number."""
    said = model.predict_proba if model.classes else model.predict
    return np.asarray(said(frames[1:], own=frames[0])).reshape(len(frames[0]), -1)[:, -1]


def violations(model: Any, pairs: tuple[Frames, Frames, Any], atol: float = 1e-6) -> int:
    """Return in how many pairs the score moves against the sign, by more than rounding."""
    low, high, signs = pairs
    return int(((scores(model, high) - scores(model, low)) * signs < -atol).sum())


def main() -> None:
    """Print a line for each system: AUC with and without, and violations of both models."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--npz", default="../shared/data/uci_credit_default.npz", metavar="FILE")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--rows", type=int, default=24_000)
    made.add_argument("--pairs", type=int, default=10_000)
    made.add_argument("--epochs", type=int)
    made.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    options = made.parse_args()
    check_there("--npz", options.npz)
    with np.load(options.npz) as of:
        parts = [[""], ["_train", "_test"]]["X_train" in of]
        x, y = (np.concatenate([of[f"{name}{part}"] for part in parts]) for name in "Xy")
    first = len(x) * 4 // 5
    train, labels = frames_of(x[:first][: options.rows]), y[:first][: options.rows]
    test, truth = frames_of(x[first:]), y[first:]
    own = train[0].assign(label=labels)
    monotonic = ",".join(f"{name}:{'-+'[sign > 0]}" for name, sign in SIGNS.items())
    figures: dict[str, Any] = {}
    for system in options.systems:
        reach = 0.0 if "masked" in system else 3.0  # masked sums have no room for more
        found: dict[str, list[list[float]]] = {"free": [], "monotone": []}
        for seed in range(options.seeds):
            for kind, each in found.items():
                signs = monotonic if kind == "monotone" else ""
                keys: dict[str, Any] = {"missing": "median", "seed": seed, **SYSTEMS[system]}
                keys |= {"epochs": options.epochs} if options.epochs else {}
                model = vfl_flower.train(
                    keys, train[1:], own, expert={"monotonic": signs}, progress=False
                )
                auc = roc_auc_score(truth, scores(model, test))
                pairs = pairs_of(test, medians_of(model), options.pairs, seed, reach)
                each.append([auc, violations(model, pairs)])
        of_both = {kind: np.array(each) for kind, each in found.items()}
        price = of_both["free"][:, 0] - of_both["monotone"][:, 0]
        figures[system] = {
            **{f"{kind}_auc": float(each[:, 0].mean()) for kind, each in of_both.items()},
            "price": float(price.mean()),
            "price_deviation": float(price.std(ddof=min(1, len(price) - 1))),
            **{
                f"{kind}_violations": each[:, 1].astype(int).tolist()
                for kind, each in of_both.items()
            },
        }
        print(system, json.dumps(figures[system]), flush=True)
    report("monotone", figures)


if __name__ == "__main__":
    main()
