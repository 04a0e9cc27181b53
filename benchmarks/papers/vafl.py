"""VAFL: a Method of Vertical Asynchronous Federated Learning (Chen et al., 2020), Figure 2."""

from __future__ import annotations

from benchmarks.papers.rows import ACCURACY, Column, Data, Job, Keys, Picture, Row, last, until

LOGISTIC: Keys = {
    "bottom-model": "linear",
    "top-model": "sum",
    "regulariser-weight": 0.001,
    "delay": "poisson",
    "window": 1,
}
SCHEDULES: dict[str, Keys] = {
    "sync": {"strategy": "split-nn"},
    "t-sync": {"strategy": "vafl-t"},
    "async": {"strategy": "vafl"},
}
# Noise of variance 0.01 on outputs, as in appendix G.2; a bound that outputs do not reach.
PRIVATE: Keys = {
    "privacy": "perturbed-embedding",
    "embedding-noise": 0.1,
    "embedding-bound": 100.0,
}
PICTURES = (Picture("virtual_seconds", "test_accuracy", "virtual seconds", "test accuracy"),)


def jobs(dataset: str, parties: int, keys: Keys) -> dict[str, Job]:
    """All schedules with and without noise, and the centralised model."""
    common = {**LOGISTIC, **keys, "dataset": dataset}
    named = {
        **SCHEDULES,
        **{f"{name}, private": {**each, **PRIVATE} for name, each in SCHEDULES.items()},
        "centralised": {"strategy": "centralised", "delay": "none"},
    }
    return {name: Job(parties, {**common, **each}) for name, each in named.items()}


def mnist(data: Data) -> dict[str, Job]:
    """Seven parties, a hundredth of the rows; the rate is ours, theirs 1e-4 of an unstated loss."""
    keys = {"batch-size": 600, "party-lr": 0.02, "server-lr": 0.02}
    return jobs(data.mnist, 7, {**keys, "epochs": 10, "eval-every": 0.25})


def cifar(data: Data) -> dict[str, Job]:
    """Eight parties, a hundredth of the rows."""
    keys = {"batch-size": 500, "party-lr": 0.002, "server-lr": 0.002}
    return jobs(data.cifar, 8, {**keys, "epochs": 10, "eval-every": 0.5})


def table(data: Data) -> dict[str, Job]:
    """Three parties, as Parkinson disease has."""
    keys = {"batch-size": 5, "party-lr": 0.05, "server-lr": 0.05}
    return jobs(data.table, 3, {**keys, "epochs": 10, "eval-every": 0.25})


def timed(column: Column) -> Column:
    """Return a column of virtual seconds; the centralised model, in one place, has no clock."""
    return lambda history: column(history) if history[-1]["virtual_seconds"] else None


def figures(target: float) -> dict[str, Column]:
    """Return columns beside the accuracy: virtual seconds in all, and to a target."""
    return {
        **ACCURACY,
        "virtual seconds": timed(last("virtual_seconds")),
        f"to {target:.0%}": timed(until("test_accuracy", target, "virtual_seconds")),
    }


ABOUT = (
    "accuracy against time of sync, t-sync and async, with private variants: logistic regression"
)
ROWS = {
    "vafl-fig2": Row(f"{ABOUT}, MNIST (or Fashion)", mnist, figures(0.9), PICTURES, missing="-"),
    "vafl-fig2-cifar": Row(f"{ABOUT}, CIFAR-10", cifar, figures(0.35), PICTURES, missing="-"),
    "vafl-fig2-table": Row(f"{ABOUT}, any table", table, figures(0.9), PICTURES, missing="-"),
}
