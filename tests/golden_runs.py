"""Configurations of the golden runs, by kind and name: `tests.golden` runs them."""

from typing import Any

from tests.conftest import ALL_ROWS

TOWERS = "tests.towers"
ALL_KEPT = {"validation-fraction": 0.2}
MANY_PARTIES = 16  # as many as are computed together, in one stack

CANCER: dict[str, Any] = {
    **ALL_ROWS,
    "dataset": "breast-cancer",
    "bottom-model": "mlp",
    "bottom-hidden": 8,
    "batch-size": 64,
    "embedding-size": 4,
    "top-model": "mlp",
    "top-hidden": 8,
    "noise-seed": 0,
    "epochs": 3,
}
BOTH_WAYS = {"downlink-codec": "top-k", "downlink-compression": "error-feedback"}
VAFL = {"strategy": "vafl", "party-lr": 0.2, "server-lr": 0.2}
RATED = ("asyrevel", "synrevel", "cascaded", "syn-zoo", "dpzv")
"""Systems with their own rates; others had 0.2 when the figures were recorded."""
DPZV = {"strategy": "dpzv", "noise-multiplier": 1.0, "party-lr": 0.01, "server-lr": 0.1}

SMALL: dict[str, dict[str, Any]] = {
    "split-nn": {},
    "split-nn, tabular": {"bottom-model": "tabular"},
    "split-nn, windows, momentum, l2": {
        **{"window": 4, "optimizer": "momentum", "party-lr": 0.05, "server-lr": 0.05},
        **{"regulariser-weight": 0.01},
    },
    "split-nn, adam, Poisson": {
        **{"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01, "sampling": "poisson"}
    },
    "split-nn, mean, regulariser": {
        **{"combine": "mean", "top-model": "linear", "embedding-activation": "sigmoid"},
        **{"regulariser": "nonconvex", "regulariser-weight": 0.01, "window": 2},
    },
    "split-nn, sum, class weights": {
        **{"top-model": "sum", "embedding-size": "auto", "bottom-model": "linear"},
        **{"class-weights": "balanced"},
    },
    "split-nn, zeroth-order server": {"server-update": "zeroth-order", "server-lr": 0.02},
    "split-nn, full batch": {"batch-size": 1000, "epochs": 8},
    "vafl": {**VAFL, "delay": "exponential"},
    "vafl, momentum, window": {
        **{"strategy": "vafl", "optimizer": "momentum", "window": 4, "party-lr": 0.05},
        **{"server-lr": 0.05, "delay": "poisson"},
    },
    "vafl, bounded delay": {**{**VAFL, "max-delay": 6, "window": 3, "delay": "exponential"}},
    "vafl-t, Poisson": {"strategy": "vafl-t", "quorum": 2, "sampling": "poisson", "window": 3},
    "vafl-t, adam, class weights": {
        **{"strategy": "vafl-t", "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
        **{"class-weights": "1,3", "delay": "poisson"},
    },
    "vafl, perturbed": {**VAFL, "privacy": "perturbed-embedding", "window": 2},
    "split-nn, perturbed, inner noise, momentum": {
        **{"privacy": "perturbed-embedding", "inner-noise": 0.1, "optimizer": "momentum"},
        **{"party-lr": 0.05, "server-lr": 0.05, "window": 2},
    },
    "asyrevel": {"strategy": "asyrevel", "window": 4},
    "asyrevel, sphere, sgd, Poisson": {
        **{"strategy": "asyrevel", "directions": "sphere", "optimizer": "sgd", "window": 4},
        **{"party-lr": 0.02, "server-lr": 0.02, "sampling": "poisson"},
    },
    "synrevel": {"strategy": "synrevel", "window": 4, "regulariser-weight": 0.1},
    "cascaded": {"strategy": "cascaded", "delay": "straggler", "window": 4},
    "cascaded, bounded delay, window 1": {
        **{"strategy": "cascaded", "max-delay": 6, "window": 1, "delay": "exponential"}
    },
    "cascaded, perturbed": {
        **{"strategy": "cascaded", "privacy": "perturbed-embedding", "mu": 0.1, "window": 4},
        **{"embedding-noise": 0.01, "embedding-bound": 10.0},
    },
    "cascaded, black box": {
        **{"strategy": "cascaded", "bottom-model": "scorecard", "mu": 1.0, "party-lr": 1.0}
    },
    "cascaded, compressed": {
        **{"strategy": "cascaded", "codec": "top-k", "compression": "error-feedback"},
        **{"window": 4},
    },
    "syn-zoo, two-sided, qsgd": {
        **{"strategy": "syn-zoo", "differences": "two-sided", "codec": "qsgd", "window": 4},
        **{"compression": "error-feedback"},
    },
    "syn-zoo, in place": {"strategy": "syn-zoo", "window": 1},
    "ef-vfl": {"strategy": "ef-vfl", "keep": 0.3},
    "ef-vfl, qsgd both ways": {
        **{"strategy": "ef-vfl", "codec": "qsgd", "downlink-codec": "qsgd", "window": 2},
        **{"downlink-compression": "error-feedback"},
    },
    "ef-vfl, shared labels": {
        **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2, **BOTH_WAYS},
        **{"class-weights": "balanced", "window": 2, "regulariser-weight": 0.01},
    },
    "ef-vfl, shared labels, sum": {
        **{"strategy": "ef-vfl", "labels": "shared", "top-model": "sum"},
        **{"embedding-size": "auto", "privacy": "perturbed-embedding"},
    },
    "cvfl": {"strategy": "cvfl", **BOTH_WAYS},
    "vafl, compressed both ways": {
        **{**VAFL, "codec": "qsgd", "compression": "error-feedback"},
        **{"downlink-codec": "qsgd", "downlink-compression": "error-feedback", "window": 3},
    },
    "dpzv": {**DPZV, "window": 4},
    "dpzv, qsgd": {**DPZV, "codec": "qsgd", "window": 4, "compression": "error-feedback"},
    "dpzv, zeroth-order server, budget": {
        **{**DPZV, "epsilon": 2.0, "delta": 1e-3, "server-update": "zeroth-order"},
        **{"server-lr": 0.02, "window": 4, "noise-multiplier": 8.0},
    },
    "dpzv, synchronous": {**DPZV, "quorum": 3, "window": 4, "top-clip": 0.1},
    "dpzv, joint": {
        **{**DPZV, "quorum": 3, "perturbs": "all", "server-update": "zeroth-order"},
        **{"server-lr": 0.02},
    },
    "dpzv, secret mini-batches": {
        **{**DPZV, "sampling": "poisson", "calibration": "secret", "window": 4}
    },
    "dpzv, budget calibrated": {
        **{"strategy": "dpzv", "party-lr": 0.01, "server-lr": 0.1},
        **{"epsilon": 1.0, "delta": 1e-3, "window": 4},
    },
    "dpzv, calibrated by the paper": {
        **{
            "party-lr": 0.01,
            "server-lr": 0.1,
            "strategy": "dpzv",
            "calibration": "paper",
            "epsilon": 1.0,
            "delta": 1e-3,
        },
        **{"sampling": "poisson"},
    },
    "frozen": {"strategy": "frozen"},
    "alone": {"strategy": "local-only"},
    "joined": {"strategy": "centralised", "optimizer": "momentum", "party-lr": 0.05},
}
LARGE: dict[str, dict[str, Any]] = {
    "digits, split-nn": {"dataset": "digits", "batch-size": 32},
    "digits, cnn": {"dataset": "digits", "bottom-model": "cnn", "party-lr": 0.05, "window": 8},
    "digits, lstm": {"dataset": "digits", "bottom-model": "lstm", **VAFL},
    "digits, lstm, cascaded": {
        **{"dataset": "digits", "bottom-model": "lstm", "strategy": "cascaded", "epochs": 1}
    },
    "digits, bands, ef-vfl": {
        **{"dataset": "digits", "image-split": "rows", "strategy": "ef-vfl", "batch-size": 32},
        **BOTH_WAYS,
    },
    "digits, dpzv": {**DPZV, "dataset": "digits", "batch-size": 32},
    "digits, vafl-t, top-k": {
        **{"dataset": "digits", "strategy": "vafl-t", "codec": "top-k", "quorum": 2},
        **{"delay": "poisson"},
    },
    "digits, binarised": {
        **{"dataset": "digits", "strategy": "cascaded", "bottom-model": "binarised"},
        **{"party-lr": 1.0, "mu": 1.0},
    },
}
CUT_SHORT: dict[str, dict[str, Any]] = {
    "split-nn": {"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
    "vafl-t, bounded delay": {
        **{"strategy": "vafl-t", "quorum": 2, "max-delay": 5, "window": 4},
        **{"delay": "exponential"},
    },
    "ef-vfl, shared labels": {
        **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2, **BOTH_WAYS}
    },
    "cascaded": {"strategy": "cascaded", "window": 4, "delay": "straggler"},
    "dpzv": {**DPZV, "window": 4},
    "perturbed": {**VAFL, "privacy": "perturbed-embedding"},
}
OF_FILES: dict[str, dict[str, Any]] = {
    "vafl": VAFL,
    "cascaded, regression": {"strategy": "cascaded", "target": "regression", "label": "f2"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "dpzv, zeroth-order server": {**DPZV, "server-update": "zeroth-order", "server-lr": 0.02},
    "alone": {"strategy": "local-only"},
    "joined": {"strategy": "centralised"},
}

NEW: dict[str, dict[str, Any]] = {
    "label noise": {"privacy": "labels", "epsilon": 2.0},
    "label noise, vafl, validation": {**VAFL, "privacy": "labels", "epsilon": 4.0, **ALL_KEPT},
    "secure": {"aggregation": "secure", "combine": "mean", "embedding-activation": "none"},
    "secure, label noise": {
        **{"aggregation": "secure", "combine": "sum", "embedding-activation": "none"},
        **{"privacy": "labels", "epsilon": 2.0},
    },
    "secure, zeroth order": {
        **{"strategy": "syn-zoo", "aggregation": "secure", "combine": "mean"},
        **{"embedding-activation": "none", "epochs": 1, "perturbs": "all"},
    },
    "presence": {"presence": 0.6, "subsets": "sampled"},
    "presence, laser": {"presence": 0.6, "subsets": "laser", "combine": "mean"},
    "presence, vafl, balanced": {
        **{**VAFL, "presence": 0.7, "class-weights": "balanced", "subsets": "sampled"}
    },
    "sampled subsets": {"subsets": "sampled"},
    "validation, patience": {**ALL_KEPT, "epochs": 6, "patience": 2.0, "party-lr": 1.0},
    "validation, cascaded": {"strategy": "cascaded", **ALL_KEPT, "window": 4},
    "one-cycle, warm-up, clipped": {
        **{"optimizer": "adamw", "weight-decay": 0.01, "lr-schedule": "one-cycle"},
        **{"clip-gradient": 0.5, "party-lr": 0.01, "server-lr": 0.01, "window": 2},
    },
    "cosine, nesterov": {
        **{"optimizer": "nesterov", "lr-schedule": "cosine", "warm-up": 1.0},
        **{"party-lr": 0.05, "server-lr": 0.05},
    },
    "step, sgd, window 4": {"lr-schedule": "step", "lr-step": 1, "lr-decay": 0.5, "window": 4},
    "bfloat16": {"precision": "bfloat16"},
    "float16 both ways": {"codec": "float16", "downlink-codec": "float16"},
    "own modules": {
        **{"bottom-model": f"{TOWERS}:Normal", "model-args": "drop=0.1"},
        **{"top-model": f"{TOWERS}:Top", "loss": f"{TOWERS}:loss"},
    },
}
"""Runs of three parties on breast-cancer whose messages are compared too."""
GROWN: dict[str, dict[str, Any]] = {"all learn": {}, "frozen": {"freeze": True}}
