"""Learning rates of a row's runs: the same trials for each system, judged on validation rows.

A trial multiplies both learning rates of a job, and lets them fall by a cosine. The trial with the
best validation accuracy at its end is taken.
"""

from __future__ import annotations

from itertools import product

from benchmarks.papers.rows import History, Job, Keys

FACTORS = tuple(product((1.0, 3.0, 1 / 3), repeat=2))
"""Of the parties' rate and of the label holder's, in each trial; the first changes neither."""


def trial(job: Job, number: int) -> Keys:
    """Return the keys of a trial: a whole run, since a shorter one prefers rates that diverge."""
    keys = rates(job, number)
    return {**keys, "validation-fraction": 0.1, "eval-every": keys["epochs"]}


def rates(job: Job, number: int) -> Keys:
    """Return a job's keys with the learning rates of a trial."""
    of_parties, of_top = FACTORS[number]
    return {
        **job.keys,
        "party-lr": float(f"{of_parties * job.keys['party-lr']:.3g}"),
        "server-lr": float(f"{of_top * job.keys['server-lr']:.3g}"),
        "lr-schedule": "cosine",
    }


def best(trials: list[History]) -> int:
    """Return the number of the best trial; of equals, the one with less loss, or else the first."""

    def reached(number: int) -> tuple[float, float]:
        history = trials[number]
        if not history:  # it has diverged
            return -1.0, 0.0
        return history[-1]["validation_accuracy"], -history[-1]["validation_loss"]

    return max(range(len(trials)), key=reached)
