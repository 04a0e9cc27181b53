"""Secure and Fast Asynchronous VFL via Cascaded Hybrid Optimization (Wang et al., 2023)."""

from __future__ import annotations

from benchmarks.papers.rows import (
    ACCURACY,
    EPOCHS,
    PERCENT,
    TRAINED,
    Data,
    Job,
    Keys,
    Picture,
    Row,
    last,
    scaled,
)

MODEL: Keys = {  # 128 outputs with ReLU at each party; 128 hidden units and 10 classes on top
    "image-split": "flat",
    "bottom-model": "linear",
    "embedding-size": 128,
    "top-hidden": 128,
    "optimizer": "sgd",
    "batch-size": 64,
    "delay": "none",
}
FIRST_ORDER: Keys = {"window": 8, "epochs": 5}
ZEROTH_ORDER: Keys = {"window": 64, "epochs": 12, "eval-every": 2, "top-model": "mlp"}
LONGER = 24  # epochs
SYSTEMS: dict[str, Keys] = {
    "Split learning": {"strategy": "split-nn", "party-lr": 0.1, "server-lr": 0.1, **FIRST_ORDER},
    "VAFL": {"strategy": "vafl", "party-lr": 0.05, "server-lr": 0.05, **FIRST_ORDER},
    "Syn-ZOO-VFL": {"strategy": "syn-zoo", "party-lr": 8e-4, "server-lr": 6e-4, **ZEROTH_ORDER},
    "ZOO-VFL": {"strategy": "asyrevel", "party-lr": 8e-4, "server-lr": 4e-4, **ZEROTH_ORDER},
    "VFL-Cascaded": {
        **{"strategy": "cascaded", "party-lr": 1e-3, "server-lr": 0.1},
        **{"window": 64, "epochs": 5},
    },
}
RATES = (0.020, 0.015, 0.010, 0.005, 0.001)
PICTURES = (Picture("epoch", "train_accuracy", "epochs", "training accuracy"),)
VARIANTS = {  # parties, and hidden units of the top model
    "4 parties": (4, 128),
    "6 parties": (6, 128),
    "8 parties": (8, 128),
    "width 256": (4, 256),
    "width 512": (4, 512),
}
TABLE_2 = {  # in SYSTEMS' order
    "4 parties": ("97.7 ± 0.1", "97.7 ± 0.2", "87.4 ± 0.3", "89.0 ± 0.3", "96.4 ± 0.3"),
    "6 parties": ("97.7 ± 0.1", "97.8 ± 0.1", "87.4 ± 0.2", "89.4 ± 0.4", "96.5 ± 0.4"),
    "8 parties": ("97.5 ± 0.2", "97.7 ± 0.2", "87.7 ± 0.3", "89.2 ± 0.4", "96.4 ± 0.3"),
    "width 256": ("98.1 ± 0.2", "97.8 ± 0.2", "88.7 ± 0.2", "85.3 ± 0.8", "96.5 ± 0.4"),
    "width 512": ("98.1 ± 0.1", "97.8 ± 0.1", "88.2 ± 0.3", "86.0 ± 0.7", "96.2 ± 0.3"),
}


def systems(data: Data) -> dict[str, Job]:
    """Four, six and eight parties, and wider top models: all with the rates of the first variant.

    At the width of 512, zeroth order has half of those rates, since Syn-ZOO-VFL diverges with them.
    Syn-ZOO-VFL, which steps least often, also has runs of twice as many epochs. Their rates are the
    largest of 1, 3/4 and 1/2 of the tuned ones with which no run of a variant diverged.
    """
    made = {}
    for variant, (parties, width) in VARIANTS.items():
        for name, system in SYSTEMS.items():
            keys: Keys = {**MODEL, **system, "dataset": data.mnist, "top-hidden": width}
            if width == 512 and "ZOO" in name:
                keys |= scaled(keys, 0.5)
            seeds = 3 if width > 128 else None
            made[f"{variant} | {name}"] = Job(parties, keys, f"4 parties | {name}", seeds)
            if name == "Syn-ZOO-VFL":
                share = 0.75 if parties == 4 and width < 512 else 1.0
                more = {**keys, **scaled(keys, share), "epochs": LONGER, "eval-every": 4}
                made[f"{variant} | {name}, {LONGER} epochs"] = Job(
                    parties, more, f"4 parties | {name}", 3
                )
    return made


def robustness(data: Data) -> dict[str, Job]:
    """The label holder's rate varied, and of ZOO-VFL the parties' with it."""
    common = {**MODEL, "dataset": data.mnist, "epochs": 5, "eval-every": 5}
    zoo, cascaded = SYSTEMS["ZOO-VFL"], SYSTEMS["VFL-Cascaded"]
    made = {}
    for rate in RATES:
        made[f"{rate:g} | ZOO-VFL"] = Job(
            4, {**zoo, **common, "party-lr": rate / 10, "server-lr": rate / 10}
        )
        made[f"{rate:g} | VFL-Cascaded"] = Job(4, {**cascaded, **common, "server-lr": rate})
    return made


def theirs() -> dict[str, str]:
    """Return Table II's figures by job."""
    made = {
        f"{variant} | {name}": figure
        for variant, figures in TABLE_2.items()
        for name, figure in zip(SYSTEMS, figures, strict=True)
    }
    longer = f"Syn-ZOO-VFL, {LONGER} epochs"
    return made | {f"{each} | {longer}": made[f"{each} | Syn-ZOO-VFL"] for each in VARIANTS}


ROWS = {
    "cascaded-table2": Row(
        "test accuracy (Table II), and training curves (Figures 3 and 5a), by parties and width",
        systems,
        {**ACCURACY, **TRAINED, **EPOCHS},
        PICTURES,
        theirs(),
        "accuracy",
        tuned=True,
    ),
    "cascaded-fig4": Row(
        "robustness to the rate: ZOO-VFL and VFL-Cascaded",
        robustness,
        {"test accuracy, %": last("test_accuracy", PERCENT)},
    ),
}
