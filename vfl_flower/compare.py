"""Several systems and the three baselines on one data set: one table, and one picture.

A result says little alone: `frozen` is what parties are worth that never learn, `alone` what the
best of them is worth without the others, `joined` what their columns are worth in one place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

import strategies
from vfl_flower.engines import Run, run_local
from vfl_flower.errors import ConfigError
from vfl_flower.results import draw_curves, results_folder

_COLUMNS = ("test accuracy", "MB up", "MB down", "exchanges", "epsilon", "seconds")


def compare(
    parties: int,
    common: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    target: float,
) -> Path:
    """Run each configuration in this process, and each baseline that is not among them.

    Parameters
    ----------
    common : keys of all runs; ``out`` is the folder that gets a folder for each of them,
        ``compare.json`` and ``curves.png``.
    runs : what each run adds to them, ``strategy`` at least.
    target : the test accuracy to which bytes are counted.

    Returns
    -------
    The folder.

    Raises
    ------
    ConfigError
        If a configuration cannot work, before any of them runs.
    """
    named = {run["strategy"] for run in runs}
    runs = [*runs, *({"strategy": name} for name in strategies.BASELINES if name not in named)]
    labels = [label(run, runs) for run in runs]
    for run, its_label in zip(runs, labels, strict=True):
        if labels.count(its_label) > 1:
            raise ConfigError(f"{its_label} is there twice: leave one of them out.")
        strategies.resolve({**common, **run})
    first = strategies.resolve({**common, **runs[0]})
    folder = results_folder(replace(first, strategy="compare"))
    if folder.exists():
        raise ConfigError(f"out = {str(folder)!r} already exists: name another folder.")
    finished: dict[str, Run] = {}
    bar = tqdm(labels, unit="run", disable=None, leave=False)
    for its_label, run in zip(bar, runs, strict=False):
        bar.set_postfix_str(its_label)
        out = str(folder / its_label.replace(" ", "-").replace("'", "").replace("/", "-"))
        finished[its_label] = run_local(parties, {**common, **run, "out": out})
    figures = {name: {**run.summary, **_reached(run, target)} for name, run in finished.items()}
    (folder / "compare.json").write_text(json.dumps(figures, indent=2) + "\n")
    baselines = {
        name: run.summary["test_accuracy"]
        for name, run in finished.items()
        if run.summary["strategy"] in strategies.BASELINES
    }
    histories = {name: run.history for name, run in finished.items() if name not in baselines}
    draw_curves(histories, folder / "curves.png", baselines)
    return folder


def label(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """A run's system; with its other keys, if another run is of the same system."""
    name = str(run["strategy"])
    if sum(other["strategy"] == name for other in runs) == 1:
        return name
    return " ".join([name, *(f"{key}={value}" for key, value in run.items() if key != "strategy")])


def table(folder: Path, target: float) -> str:
    """The figures of a comparison, as aligned columns."""
    figures: dict[str, dict[str, Any]] = json.loads((folder / "compare.json").read_text())
    rows = [("", *_COLUMNS[:4], f"MB to {target:g}", *_COLUMNS[4:])]
    for name, each in figures.items():
        reached = each["megabytes_to_target"]
        epsilon = each["epsilon"]
        rows.append(
            (
                name,
                f"{each['test_accuracy']:.4f}",
                f"{each['bytes_up'] / 1e6:.1f}",
                f"{each['bytes_down'] / 1e6:.1f}",
                str(each["exchanges"]),
                "not reached" if reached is None else f"{reached:.1f}",
                "-" if epsilon is None else f"{epsilon:.3g}",
                f"{each['seconds']:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _reached(run: Run, target: float) -> dict[str, float | None]:
    """Megabytes up and down at the first evaluation that reaches the target."""
    for entry in run.history:
        if entry["test_accuracy"] >= target:
            return {"megabytes_to_target": (entry["bytes_up"] + entry["bytes_down"]) / 1e6}
    return {"megabytes_to_target": None}
