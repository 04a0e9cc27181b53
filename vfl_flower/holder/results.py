"""The results folder of a run: history.jsonl, summary.json, curves.png and top.npz."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError
from vfl_flower.holder.observers import METRICS, Observer, main_metric, reached
from vfl_flower.messages import Arrays

log = logging.getLogger("flwr")

_CURVES = (
    ("exchanges", "exchanges", 1.0),
    ("bytes", "megabytes, up and down", 1e-6),
    ("seconds", "seconds", 1.0),
    ("virtual_seconds", "virtual seconds", 1.0),
)


TRANSPORTS = {"none": "", "stream": " over streams", "messages": " over Flower's messages"}


class Results(Observer):
    """One folder a run; an existing run's is never written over, unless it is gone on with.

    Parameters
    ----------
    history : of a run that is resumed, up to its last checkpoint; what came later comes again.
    """

    def __init__(self, config: RunConfig, history: Sequence[dict[str, Any]] | None = None) -> None:
        self.folder = results_folder(config)
        self.history: list[dict[str, Any]] = list(history or ())
        self._outdated = history is not None  # the file is to be written anew
        if history is None and any(
            (self.folder / name).exists() for name in ("summary.json", "history.jsonl")
        ):
            raise ConfigError(
                f"out = {config.running.out!r} already holds a run: name another folder, or move it away."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "history.jsonl").touch()
        except OSError as error:
            raise ConfigError(f"The results folder {self.folder} cannot be written.") from error

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Append a history entry, at once, so that a run that ends early has left it."""
        self.history.append(entry)
        new = self.history if self._outdated else [entry]
        with (self.folder / "history.jsonl").open("w" if self._outdated else "a") as file:
            file.writelines(json.dumps(each) + "\n" for each in new)
        self._outdated = False

    def finish(self, summary: dict[str, Any], top: Arrays) -> None:
        """Write the summary, the curves, and the top model's parameters."""
        if top:
            parameters: dict[str, Any] = top
            np.savez(self.folder / "top.npz", **parameters)
        if self.history:
            draw_curves({summary["strategy"]: self.history}, self.folder / "curves.png")
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if summary["failure"] is None:
            log.info("%s", headline(summary))
        log.info("Results are in %s", self.folder)


def results_folder(config: RunConfig) -> Path:
    """The configured folder, or a new one under ``runs``, as an absolute path."""
    if config.running.resume:
        return Path(config.running.resume).expanduser().absolute()
    if config.running.out:
        return Path(config.running.out).expanduser().absolute()
    dataset = config.data.dataset.rsplit("/", 1)[-1].replace(":", "-")
    name = f"{config.strategy}-{dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder for each in names if not (folder := Path("runs", each).absolute()).exists())


def draw_curves(
    histories: Mapping[str, list[dict[str, Any]]],
    path: Path,
    levels: Mapping[str, float] | None = None,
) -> None:
    """The main metric against exchanges, bytes and time: a line for each run, a level for others.

    All runs have the same main metric.
    """
    from matplotlib.figure import Figure  # no pyplot: works without a display, in any thread
    from matplotlib.ticker import LogLocator, NullFormatter

    def value(entry: dict[str, Any], key: str) -> float:
        return float(entry["bytes_up"] + entry["bytes_down"] if key == "bytes" else entry[key])

    used = [
        curve
        for curve in _CURVES
        if all(any(value(entry, curve[0]) for entry in each) for each in histories.values())
    ]
    metric = main_metric(next((history[-1] for history in histories.values() if history), {}))
    figure = Figure(figsize=(4.2 * max(1, len(used)), 3.4), layout="constrained")
    for number, (key, label, unit) in enumerate(used):
        axes = figure.add_subplot(1, len(used), number + 1)
        for name, history in histories.items():
            x = [unit * value(entry, key) for entry in history]
            y = [entry[metric] for entry in history]
            axes.plot(x, y, marker=".", markersize=4, linewidth=1.2, label=name)
        for number_of_level, (name, level) in enumerate((levels or {}).items()):
            style = ("--", "-.", ":")[number_of_level % 3]
            axes.axhline(level, color="grey", linestyle=style, linewidth=1, label=name)
        if key in ("bytes", "exchanges") and len(histories) > 1:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a decade may be too long
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.set_ylabel(METRICS[metric] if number == 0 else "")
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_frontier(histories: Mapping[str, list[dict[str, Any]]], path: Path, target: float) -> None:
    """The best main metric so far against all bytes so far; runs that send nothing as levels.

    The broad line is the frontier: the most that any of the runs had reached by so many bytes.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
    metric = main_metric(next((history[-1] for history in histories.values() if history), {}))
    points: list[tuple[float, float]] = []
    for name, history in histories.items():
        x = [1e-6 * (entry["bytes_up"] + entry["bytes_down"]) for entry in history]
        y = np.maximum.accumulate([entry[metric] for entry in history])
        if not history:
            continue
        if x[-1] == 0:
            axes.axhline(y[-1], color="grey", linestyle=":", linewidth=1, label=name)
            continue
        points += zip(x, y, strict=True)
        axes.plot(x, y, marker=".", markersize=4, linewidth=1.2, label=name)
    if points:
        points.sort()
        x, y = [each for each, _ in points], np.maximum.accumulate([each for _, each in points])
        axes.step(x, y, where="post", color="black", linewidth=5, alpha=0.15, label="frontier")
        axes.set_xscale("log")
    axes.axhline(target, color="black", linestyle="--", linewidth=0.6)
    axes.set_xlabel("megabytes, up and down")
    axes.set_ylabel(f"best {METRICS[metric]} so far")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=120)


def headline(summary: dict[str, Any]) -> str:
    """What a run reached and took, in one line."""
    parts = []
    if summary[main_metric(summary)] is not None:
        parts.append(reached(summary))
    if summary["test_auc"] is not None:
        parts.append(f"AUC {summary['test_auc']:.4f}")
    if summary["epsilon"] is not None:
        known = summary.get("epsilon_known_batches")
        aside = "" if known is None else f" ({known:.3g} to who knows the mini-batches)"
        parts.append(f"epsilon {summary['epsilon']:.3g}{aside} at delta {summary['delta']:g}")
    up, down = summary["bytes_up"] / 1e6, summary["bytes_down"] / 1e6
    parts += [
        f"{summary['exchanges']} exchanges",
        f"{up:.2f} MB up, {down:.2f} MB down",
        f"{summary['seconds']:.1f} s{TRANSPORTS[summary['transport']]}",
    ]
    return f"{summary['strategy']}: {', '.join(parts)}"


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
