"""The results folder of a run: history.jsonl, summary.json, curves.png and top.npz."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.charts import draw_curves
from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError
from vfl_flower.figures import headline
from vfl_flower.holder.observers import Observer
from vfl_flower.messages import Arrays

log = logging.getLogger("flwr")


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
                f"out = {config.running.out!r} already holds a run: name another folder, or move "
                "it away."
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
        if len(self.history) > 1:
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
    what = (config.strategy, config.data.dataset)  # which may be places
    strategy, dataset = (each.rsplit("/", 1)[-1].replace(":", "-") for each in what)
    name = f"{strategy}-{dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder for each in names if not (folder := Path("runs", each).absolute()).exists())
