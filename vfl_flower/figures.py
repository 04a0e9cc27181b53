"""The figures of runs in words: what they are judged by, and how that is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

METRICS = {"test_accuracy": "test accuracy", "test_r2": "test R2"}
"""Main metric -> what tables and pictures call it."""

GUARANTEE = {
    "protects": "epsilon_protects",
    "relation": "epsilon_relation",
    "adversary": "epsilon_adversary",
}
"""What is said of an epsilon wherever it is shown -> its key in a summary."""

TRANSPORTS = {"none": "", "stream": " over streams", "messages": " over Flower's messages"}
"""Transport -> what is said of it behind a time."""


def main_metric(figures: Mapping[str, Any]) -> str:
    """The key of what a history entry or a summary is judged by: accuracy, or for regression R2."""
    return "test_accuracy" if figures.get("test_r2") is None else "test_r2"


def reached(figures: Mapping[str, Any]) -> str:
    """How a history entry or a summary does on the test rows, in words."""
    if main_metric(figures) == "test_r2":
        return f"test RMSE {figures['test_rmse']:.4g}, R2 {figures['test_r2']:.4f}"
    return f"test accuracy {figures['test_accuracy']:.4f}"


def headline(summary: dict[str, Any]) -> str:
    """What a run reached and took, in one line, and in another what its epsilon is of."""
    parts = []
    if summary[main_metric(summary)] is not None:
        parts.append(reached(summary))
    if summary["test_auc"] is not None:
        parts.append(f"AUC {summary['test_auc']:.4f}")
    if summary["epsilon"] is not None:
        parts.append(f"epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}")
    up, down = summary["bytes_up"] / 1e6, summary["bytes_down"] / 1e6
    parts += [
        f"{summary['exchanges']} exchanges",
        f"{up:.2f} MB up, {down:.2f} MB down",
        f"{summary['seconds']:.1f} s{TRANSPORTS[summary['transport']]}",
    ]
    lines = [f"{summary['strategy']}: {', '.join(parts)}", guarantee(summary)]
    return "\n".join(filter(None, lines))


def guarantee(summary: Mapping[str, Any]) -> str:
    """What a summary's epsilon is of, in one line; empty where there is no epsilon."""
    if summary["epsilon"] is None:
        return ""
    said = [
        f"{name}: {summary[key]}"
        for name, key in GUARANTEE.items()
        if key in summary  # which those of older runs have not
    ]
    return f"epsilon {'. '.join(said)}." if said else ""


def aligned(rows: Sequence[Sequence[str]], texts: int) -> str:
    """A table: so many columns of texts to the left, then figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
