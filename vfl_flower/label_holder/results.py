"""Results folder of a run: history.jsonl, summary.json, model card and top.npz."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import (
    append,
    locked,
    make_own_folder,
    told,
    whole,
    write_json,
    write_whole,
)
from vfl_flower.config.logs import log
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.data.tables import Table
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.privacy.journal import has_events
from vfl_flower.results.figures import headline
from vfl_flower.results.model_card import write_card
from vfl_flower.results.summary import Summary
from vfl_flower.transport.messages import Arrays


class Results(Callback):
    """Write the results of one run into a folder that `in_use` has locked.

    Never overwrite another run's results. A run that failed before its first step leaves its folder
    to the next, unless it released something.
    """

    def __init__(self, folder: Path, history: Sequence[dict[str, Any]] | None = None) -> None:
        self.folder = folder
        self.history: list[dict[str, Any]] = list(history or ())
        self._outdated = history is not None  # the file may hold entries after the checkpoint
        if history is None and _has_begun(folder):
            resume = f" Or set resume='{folder}' to continue it." if _resumable(folder) else ""
            raise ConfigError(
                f"{folder} already holds a run. Name another folder, or move this one away.{resume}"
            )
        with told(self._file):
            if history is None and (folder / "summary.json").exists():  # of a run without a step
                for name in _OF_A_RUN:
                    (folder / name).unlink(missing_ok=True)
            self._file.touch(0o600)

    @property
    def _file(self) -> Path:
        return self.folder / "history.jsonl"

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Append a history entry at once, so that an interrupted run keeps it."""
        self.history.append(entry)
        if self._outdated:
            self._write_anew()
        else:
            append(self._file, _lines([entry]))

    def finish(self, summary: Summary, top: Arrays) -> None:
        """Write the summary, the top model's parameters, and a kept model's card."""
        if self._outdated:
            self._write_anew()
        if top:
            parameters: dict[str, Any] = top
            with whole(self.folder / "top.npz") as file:
                np.savez(file, **parameters)
        finished = summary["failure"] is None
        has_data = "data" in summary  # it lacks this if a checkpoint of 0.2.0 was resumed
        if finished and has_data and (self.folder / checkpoint.FILE).is_file():
            write_card(self.folder, summary)
        write_json(self.folder / "summary.json", summary)
        if finished:
            log.info("%s", headline(summary))
        log.info("Results are in %s", self.folder)

    def write_tested(self, labels: Labels, columns: Mapping[str, Any], own: Table | None) -> None:
        """Write labels and scores of test rows by id: all their figures follow from them."""
        import pandas as pd

        places = labels.tested.test_places
        ids = places if own is None or places is None else own.id_values(places)
        if columns:
            with whole(self.folder / TESTED, synced=False) as file:
                write_csv(file, pd.DataFrame({"id": ids, **columns}))

    def _write_anew(self) -> None:
        write_whole(self._file, _lines(self.history))
        self._outdated = False


TESTED = "test_rows.csv"
"""File of a run's test rows."""
_OF_A_RUN = ("summary.json", "history.jsonl", checkpoint.FILE, checkpoint.JOURNAL, "top.npz")


def check_free(folder: Path) -> None:
    """Raise `ConfigError` if a folder has more than runs that failed before their first step."""
    if folder.exists() and not all(map(_is_free, folder.iterdir())):
        raise ConfigError(f"out = {str(folder)!r} already exists: name another folder.")


def _is_free(place: Path) -> bool:
    """Return whether this is a run that failed before its first step, or a folder of such runs."""
    if (place / "summary.json").exists():
        return not _has_begun(place)
    return place.suffix == ".lock" or (place.is_dir() and all(map(_is_free, place.iterdir())))


def _has_begun(folder: Path) -> bool:
    """Return whether a folder has a run that trained, was evaluated, or released something."""
    summary, history = folder / "summary.json", folder / "history.jsonl"
    if history.exists() and history.stat().st_size:
        return True
    if any(map(has_events, folder.glob("*.journal"))):
        return True
    try:
        found = json.loads(summary.read_text())
        return found["failure"] is None or bool(found.get("steps"))
    except FileNotFoundError:  # no run, or one that was killed
        return any((folder / name).exists() for name in _OF_A_RUN[2:])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # half of a summary
        return True


def _resumable(folder: Path) -> bool:
    """Return whether a folder has the checkpoint of a run that has not finished."""
    return not checkpoint.has_finished(folder) and (folder / checkpoint.FILE).exists()


def _lines(entries: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in entries).encode()


@contextmanager
def in_use(folder: Path, lock: str = "run.lock") -> Iterator[None]:
    """Make a results folder and lock it, by default as the run's ServerApp does."""
    with told(folder):
        make_own_folder(folder)
    sentence = f"Another run uses {folder}. Wait until it ends, or name another folder."
    with locked(folder / lock, sentence):
        yield


SUMMARY, INFORMATION = "summary.json", "information.json"


def result_of(task: str) -> str:
    """Return the file that a ServerApp writes when its task is done."""
    return INFORMATION if task == "information" else SUMMARY


def distilled_folder(config: RunConfig) -> Path:
    """Return the folder of a distilled model: ``out``, or a folder in that of its run."""
    out = config.running.out or Path(config.model, "distilled")
    return Path(out).expanduser().absolute()


def results_folder(config: RunConfig) -> Path:
    """Return the configured folder, or make a new one under ``runs``; its absolute path."""
    if named := config.running.resume or config.running.out:
        return Path(named).expanduser().absolute()
    done = config.task if config.task == "information" else config.strategy
    what = (done, config.data.dataset)  # each may be an import path
    strategy, dataset = (each.rsplit("/", 1)[-1].replace(":", "-") for each in what)
    name = f"{strategy}-{dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    while True:
        folder = Path("runs", next(names)).absolute()
        with told(folder):
            make_own_folder(folder.parent)
            with suppress(FileExistsError):  # of a run that began in the same second
                folder.mkdir(0o700)
                return folder
