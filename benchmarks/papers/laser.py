"""Vertical Federated Learning with Missing Features During Training and Inference (LASER-VFL;
Valdeira, Wang and Chi, 2025): rows that some of four parties lack, in training and in prediction.

Of its data sets, only the credit table, by test accuracy. The paper's code takes the F1 score
there, and draws both classes equally often.
"""

from __future__ import annotations

from benchmarks.common import PARTIES
from benchmarks.papers.rows import ACCURACY, MEGABYTES, Data, Job, Keys, Row

MODEL: Keys = {  # ten times the rate of the paper's code, and a tenth of its epochs
    "bottom-model": "mlp",
    "bottom-hidden": 64,
    "embedding-size": 32,
    "combine": "mean",
    "batch-size": 128,
    "optimizer": "adam",
    "weight-decay": 0.0001,
    "party-lr": 0.001,
    "server-lr": 0.001,
    "epochs": 10,
    "eval-every": 10,
}
SYSTEMS: dict[str, Keys] = {
    "local-only": {"strategy": "local-only"},
    "standard VFL, common rows": {"strategy": "intersection-only"},
    "split-nn, no subsets": {"strategy": "split-nn", "subsets": "off"},
    "LASER": {"strategy": "split-nn", "subsets": "laser"},
}


def credit(data: Data) -> dict[str, Job]:
    """Each party has a row by a chance of 0.5 or 1.0, of training and of test rows."""
    return {
        f"presence {presence} | {name}": Job(
            PARTIES, {**MODEL, **keys, "dataset": data.credit, "presence": presence}
        )
        for presence in (0.5, 1.0)
        for name, keys in SYSTEMS.items()
    }


ROWS = {
    "laser": Row(
        "credit: rows that some parties lack", credit, {**ACCURACY, **MEGABYTES}, missing="none"
    ),
}
