"""Communication-efficient Vertical Federated Learning via Compressed Error Feedback (Valdeira et
al., 2025). Its Table 2 is `benchmarks.table2`, whose model and rates these rows have too.
"""

from __future__ import annotations

from benchmarks.common import PARTIES, SIGMOID_MODEL
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
    last,
    until,
    within,
)
from benchmarks.table2 import COLUMNS, keys_of

SHALLOW: Keys = {**SIGMOID_MODEL, "bottom-bias": False}
METHODS: dict[str, tuple[str, str]] = {  # system, and who knows the labels
    "SVFL": ("split-nn", "private"),
    "CVFL": ("cvfl", "shared"),
    "EF-VFL": ("ef-vfl", "shared"),
    "CVFL (PL)": ("cvfl", "private"),
    "EF-VFL (PL)": ("ef-vfl", "private"),
}


def compressors(data: Data) -> dict[str, Job]:
    """Full batch, 100 rounds, six compressors; SVFL once."""
    common = {**SHALLOW, "dataset": data.mnist, "batch-size": 10**9, "epochs": 100}
    common["eval-every"] = 4
    made = {}
    for column in COLUMNS:
        for name in ("SVFL", "CVFL", "EF-VFL"):
            system, labels = METHODS[name]
            keys = keys_of(system, column if name != "SVFL" else "uncompressed")
            if name != "SVFL" or column == "keep 10 %":
                made[f"{column} | {name}"] = Job(PARTIES, {**common, **keys, "labels": labels})
    return made


def private_labels(data: Data) -> dict[str, Job]:
    """Batches of 1024, top-k 5 %: labels shared, and private (PL)."""
    common = {**SHALLOW, "dataset": data.mnist, "batch-size": 1024, "epochs": 20}
    common |= {"optimizer": "sgd", "party-lr": 6.0, "server-lr": 6.0}
    compressed: Keys = {"codec": "top-k", "keep": 0.05}
    return {
        name: Job(
            PARTIES,
            {
                **common,
                **(compressed if name != "SVFL" else {}),
                "strategy": system,
                "labels": labels,
            },
        )
        for name, (system, labels) in METHODS.items()
    }


def rivals(data: Data) -> dict[str, Job]:
    """The shallow network with private labels: what each system reaches by the bytes it takes."""
    common = {**SHALLOW, "dataset": data.mnist, "batch-size": 1024, "epochs": 10}
    common |= {"optimizer": "sgd", "party-lr": 6.0, "server-lr": 6.0, "eval-every": 0.5}
    bcd: Keys = {"estimator": f"{HERE}/fedbcd.py:FedBcd", "local-steps": 5}
    compressed: Keys = {"codec": "top-k", "keep": 0.05}
    of: dict[str, Keys] = {
        "split learning": {"strategy": "split-nn"},
        "FedBCD, Q = 5": {"strategy": "split-nn", **bcd},
        "CVFL": {"strategy": "cvfl", **compressed},
        "EF-VFL": {"strategy": "ef-vfl", **compressed},
        "EF-VFL, initial surrogates": {
            **{"strategy": "ef-vfl", "initial-surrogates": "embeddings"},
            **compressed,
        },
    }
    return {name: Job(PARTIES, {**common, **keys}) for name, keys in of.items()}


def local_steps(data: Data) -> dict[str, Job]:
    """CIFAR-10's quadrants, a small CNN at each party, qsgd of 4 bits; Q steps on a mini-batch."""
    common: Keys = {
        "dataset": data.cifar,
        "bottom-model": "cnn",
        "bottom-hidden": 16,
        "embedding-size": 32,
        "top-model": "linear",
        "batch-size": 128,
        "optimizer": "momentum",
        "weight-decay": 0.001,
        "party-lr": 0.01,
        "server-lr": 0.01,
        "epochs": 3,
        "labels": "shared",
    }
    of: dict[str, Keys] = {
        "SVFL": {"strategy": "split-nn"},
        "CVFL": {"strategy": "cvfl", "codec": "qsgd", "bits": 4},
        "EF-VFL": {"strategy": "ef-vfl", "codec": "qsgd", "bits": 4},
    }
    return {
        f"Q = {steps} | {name}": Job(PARTIES, {**common, **keys, "local-steps": steps})
        for steps in (2, 4)
        for name, keys in of.items()
    }


BY_BYTES = Picture("megabytes", "test_accuracy", "megabytes, up and down", "test accuracy")
ROWS = {
    "ef-vfl-fig2": Row(
        "MNIST: gradient's squared norm against epochs, accuracy against bytes",
        compressors,
        {
            **ACCURACY,
            **MEGABYTES,
            "MB to 85 %": until("test_accuracy", 0.85, "megabytes"),
            "gradient norm² at first": lambda history: history[0]["gradient_norm"],
            "at last": last("gradient_norm"),
        },
        (Picture("epoch", "gradient_norm", "epochs", "squared norm of the gradient"), BY_BYTES),
        training="gradient",
    ),
    "ef-vfl-fig5": Row(
        "MNIST: private and shared labels",
        private_labels,
        {**ACCURACY, "training loss": last("train_loss"), **MEGABYTES},
        (Picture("epoch", "train_loss", "epochs", "training loss"), BY_BYTES),
        tuned=True,
    ),
    "rivals": Row(
        "MNIST: split learning, FedBCD, CVFL and EF-VFL with private labels, accuracy by bytes",
        rivals,
        {
            **ACCURACY,
            "within 50 MB": within("test_accuracy", "megabytes", 50, PERCENT),
            "MB to 85 %": until("test_accuracy", 0.85, "megabytes"),
            **MEGABYTES,
        },
        (BY_BYTES,),
        tuned=True,
    ),
    "ef-vfl-fig6-cifar": Row(
        "CIFAR-10: several local steps",
        local_steps,
        {
            "test accuracy, %": last("test_accuracy", PERCENT),
            "training loss": last("train_loss"),
            **MEGABYTES,
        },
        (Picture("epoch", "train_loss", "epochs", "training loss"), BY_BYTES),
        seeds=3,
    ),
}
