"""Communication-Efficient and Differentially Private VFL with Zeroth-Order Optimization (Zhang et
al., 2026).

Noise of all methods is calibrated by the paper's own Theorem VI.5, delta 1e-3: of DPZV on scalars,
of the others on embeddings. docs/explanation/what-leaks.md says what holds of it.
"""

from __future__ import annotations

from math import sqrt

from dp_accounting import get_sigma_gaussian

from benchmarks.papers.rows import (
    ACCURACY,
    HERE,
    MEGABYTES,
    PERCENT,
    Data,
    Job,
    Keys,
    Picture,
    Row,
    best,
    last,
    scaled,
    until,
    within,
)

PARTIES, ROWS_OF_MNIST, BATCH, EPOCHS, DELTA = 7, 60_000, 256, 5, 1e-3
MODEL: Keys = {  # a small CNN on four rows of pixels; two linear layers on top
    "image-split": "rows",
    "bottom-model": "cnn",
    "bottom-hidden": 8,
    "embedding-size": 16,
    "top-hidden": 64,
    "optimizer": "sgd",
    "batch-size": BATCH,
    "delta": DELTA,
    "epochs": EPOCHS,
    "delay": "none",
}
BOUND = 4.0  # of an embedding's norm
METHODS: dict[str, Keys] = {
    "DPZV": {"strategy": "dpzv", "party-lr": 0.1, "server-lr": 0.3, "clip": 1.0, "window": 16},
    "VAFL": {"strategy": "vafl", "party-lr": 0.1, "server-lr": 0.1, "window": 8},
    "VFL-CZOFO": {
        **{"strategy": "vafl", "estimator": f"{HERE}/czofo.py:Czofo", "window": 8},
        **{"party-lr": 0.02, "server-lr": 0.1},
    },
    "ZOO-VFL": {
        **{"strategy": "asyrevel", "party-lr": 0.001, "server-lr": 0.01, "window": 16},
        "top-model": "mlp",
    },
}
EPSILONS = (float("inf"), 1.0, 0.5)


def private(name: str, epsilon: float) -> Keys:
    """The noise of a method."""
    if name == "DPZV":
        noise = {"noise-multiplier": 0.0} if epsilon == float("inf") else {"epsilon": epsilon}
        return {**noise, "calibration": "paper", "sampling": "poisson"}
    if epsilon == float("inf"):
        return {}
    steps = EPOCHS * ROWS_OF_MNIST / BATCH
    multiplier = 2 * BATCH * sqrt(steps) / ROWS_OF_MNIST * get_sigma_gaussian(epsilon, DELTA)
    noise = {"embedding-noise": BOUND * multiplier, "embedding-bound": BOUND}
    return {"privacy": "perturbed-embedding", **noise}


def budgets(data: Data) -> dict[str, Job]:
    """All methods without noise, and at epsilon 1 and 0.5."""
    common = {**MODEL, "dataset": data.mnist}
    return {
        f"epsilon {epsilon:g} | {name}": Job(PARTIES, {**common, **keys, **private(name, epsilon)})
        for epsilon in EPSILONS
        for name, keys in METHODS.items()
    }


def clipping(data: Data) -> dict[str, Job]:
    """DPZV without noise, with and without clipping, at the rates above and at a tenth of them."""
    without = private("DPZV", float("inf"))
    common = {**MODEL, **METHODS["DPZV"], **without, "dataset": data.mnist}
    return {
        f"{panel} | {name}": Job(PARTIES, {**common, **scaled(common, factor), "clip": clip})
        for panel, factor in (("our rates", 1.0), ("a tenth", 0.1))
        for name, clip in (("clipped to 1", 1.0), ("not clipped", 1e6))
    }


def thresholds(data: Data) -> dict[str, Job]:
    """DPZV at epsilon 1, by clipping thresholds: with the same rates, and with rates over C.

    The noise has a standard deviation in proportion to C, so rates over C make it equal.
    """
    common = {**MODEL, **METHODS["DPZV"], **private("DPZV", 1.0), "dataset": data.mnist}
    return {
        f"{panel} | C = {clip:g}": Job(
            PARTIES, {**common, **scaled(common, clip**-power), "clip": clip}
        )
        for panel, power in (("our rates", 0), ("rates / C", 1))
        for clip in (1.0, 10.0, 100.0, 500.0)
        if clip > 1 or power == 0
    }


CURVES = (Picture("epoch", "test_accuracy", "epochs", "test accuracy"),)
ROWS = {
    "dpzv-fig2": Row(
        "MNIST: accuracy by epsilon (Figures 2 and 3), by bytes (Figure 5), bytes to a target "
        "(Table I)",
        budgets,
        {
            "best test accuracy, %": best("test_accuracy", PERCENT),
            "within 100 MB": within("test_accuracy", "megabytes", 100.0, PERCENT),
            "MB to 80 %": until("test_accuracy", 0.8, "megabytes"),
            "MB to 90 %": until("test_accuracy", 0.9, "megabytes"),
            **MEGABYTES,
        },
        CURVES,
        seeds=3,
    ),
    "dpzv-fig6": Row(
        "MNIST: DPZV without noise, with and without clipping",
        clipping,
        {**ACCURACY, "test loss": last("test_loss")},
        (Picture("epoch", "test_loss", "epochs", "test loss"),),
    ),
    "dpzv-fig7": Row("MNIST: DPZV at epsilon 1, by clipping", thresholds, ACCURACY, CURVES),
}
