"""What results folders hold: runs, with the numbers and texts that can be relied on in them.

The files may say anything: numbers are read by `number` alone, and the texts are only shown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unicodedata import category

from vfl_flower.config import renamed
from vfl_flower.config.errors import VflError
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.protocol.systems import System, load_system

MEASURES = {"test_accuracy": "test accuracy", "test_r2": "test R²"}
"""What a run is measured by, one of them -> what the page calls it."""

_RESULTS = ("test_", "validation_", "train_", "deviation")

NOTHING = "–"
"""What the page says where there is no number or text."""


@dataclass(frozen=True)
class Shown:
    """A run on the page.

    ``summary`` is empty if the run has not finished, ``audit`` if it was not attacked, and
    ``contribution`` if `vfl contribution` has not seen it.
    """

    title: str
    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    audit: dict[str, Any]
    contribution: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary) and self.summary.get("failure") is None

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation whose model the run keeps, by validation rows; empty if there is none.

        Of a run that has not finished, the evaluation with the least validation loss so far.
        """
        if self.finished:
            kept = number(self.summary, "best_epoch")
            at = (each for each in self.history if kept and number(each, "epoch") == kept)
            return next(at, {})
        validated = [each for each in self.history if number(each, "validation_loss") is not None]
        return min(validated, key=lambda each: number(each, "validation_loss") or 0.0, default={})

    @property
    def figures(self) -> dict[str, Any]:
        """The summary, or the last evaluation; the results are those of the best evaluation."""
        last = self.summary or self.history[-1]
        if self.finished:
            return last
        results = {key: each for key, each in self.best.items() if key.startswith(_RESULTS)}
        return {**last, **results}

    @property
    def config(self) -> dict[str, Any]:
        """The run configuration, by key."""
        return mapping(self.summary.get("config"))

    @property
    def versions(self) -> dict[str, Any]:
        """Of Python and the libraries, by name."""
        return mapping(self.summary.get("versions"))

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """What each attack of an audit found."""
        return mappings(self.audit.get("attacks"))

    @property
    def system(self) -> System | None:
        """The system or baseline, if it is one of ours; a folder's text loads nothing else."""
        name = text(renamed.accepted("strategy", self.summary.get("strategy")))
        return load_system(name) if name in SYSTEMS.known else None

    @property
    def dataset(self) -> str:
        """The data set's name, without what precedes it."""
        return text(self.summary.get("dataset", "")).rsplit("/", 1)[-1]

    @property
    def measure(self) -> str:
        """Which of accuracy and R2 it was measured by."""
        every = [self.summary, *self.history]
        has = (key for key in MEASURES if any(number(each, key) is not None for each in every))
        return next(has, "test_accuracy")

    @property
    def parties(self) -> list[dict[str, Any]]:
        """What was counted by party; nothing where no message was sent."""
        return mappings(self.summary.get("by_party")) if number(self.figures, "exchanges") else []


def read(folders: Sequence[Path]) -> list[Shown]:
    """The runs of results folders, in order; that of a comparison, or of runs, has several.

    Raises
    ------
    VflError
        If a folder holds no run, or one that has not finished and was never evaluated, or a file
        that cannot be read.
    """
    runs = [run for folder in folders for run in _of(folder)]
    for called in (_by_folder, _by_place):
        times = Counter(run.title for run in runs)
        runs = [run if times[run.title] == 1 else called(run) for run in runs]
    return runs


def _of(folder: Path) -> list[Shown]:
    """The run in a folder, those of a comparison, or those of a folder of both."""
    if (folder / "compare.json").is_file():
        compared = json_of(folder / "compare.json")
        titles = {folder_of(title): title for title in compared}
        failed = (each.name for each in sorted(folder.iterdir()) if _is_run(each))
        titles |= {name: name for name in failed if name not in titles}
        return [
            _run(folder / name, title, mapping(compared.get(title)))
            for name, title in titles.items()
        ]
    if _is_run(folder):
        return [_run(folder)]
    if not folder.exists():
        raise VflError(f"{folder} is not there: name a results folder, or a folder of some.")
    found = []
    for each in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (each / "compare.json").is_file() or _has_figures(each):
            found += _of(each)
    if not found:
        raise VflError(
            f"{folder} is no results folder, nor a folder of some: name one that `vfl run`, `vfl "
            "compare` or `vfl audit` has left."
        )
    return found


def folder_of(title: str) -> str:
    """Return the name of the folder that a run of this title gets in a comparison."""
    return re.sub(r"[^\w.=-]+", "-", title).strip(".-")


def _has_figures(folder: Path) -> bool:
    """Whether there is a run in a folder that has finished, or was evaluated."""
    history = folder / "history.jsonl"
    return (folder / "summary.json").is_file() or (history.is_file() and bool(_content(history)))


def _by_folder(run: Shown) -> Shown:
    return replace(run, title=f"{run.title}, {run.folder.name}")


def _by_place(run: Shown) -> Shown:
    return replace(run, title=f"{run.title} in {run.folder.parent.name}")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "history.jsonl"))


def _run(folder: Path, title: str = "", more: Mapping[str, Any] | None = None) -> Shown:
    summary = {**json_of(folder / "summary.json"), **(more or {})}
    path = folder / "history.jsonl"
    history = [_parsed(path, line) for line in _content(path).splitlines()]
    if not summary and not history:
        raise VflError(
            f"The run in {folder} has not finished, as it has no summary.json, and was not "
            "evaluated yet: wait for it."
        )
    title = title or text(renamed.accepted("strategy", summary.get("strategy", folder.name)))
    besides = (json_of(folder / name) for name in ("audit.json", "contribution.json"))
    return Shown(title, folder, summary, history, *besides)


def json_of(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, or an empty one if there is no file.

    Raises
    ------
    VflError
        If it cannot be read.
    """
    return _parsed(path, _content(path) or b"{}")


def _content(path: Path) -> bytes:
    """The bytes of a file; none if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise VflError(
            f"{path} cannot be read: {error.strerror}; see to its permissions."
        ) from error


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = _plain(json.loads(text))
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise VflError(f"{path} cannot be read: it is not as a run leaves it, so move it away.")
    return parsed


def _plain(value: Any) -> Any:
    """The same without characters that are no text, and could not stand on a page."""
    if isinstance(value, str):
        return "".join("\ufffd" if category(c) in ("Cc", "Cs", "Cn") else c for c in value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return value


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The value if it is a list, each of it as a mapping; else an empty one."""
    return [mapping(each) for each in value] if isinstance(value, list) else []


def text(value: Any) -> str:
    """The value as a text, if it is a text, a number or the like."""
    return NOTHING if value is None or isinstance(value, dict | list) else str(value)


def number(of: Mapping[str, Any], *path: str) -> float | None:
    """The number that is found so, if it is one, and of a size that can be drawn."""
    value: Any = of
    for key in path:
        value = mapping(value).get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and (value == 0 or 1e-100 < abs(value) < 1e100) else None


def spent(entry: Mapping[str, Any], what: str) -> float | None:
    """How much had been spent of something; megabytes are those up and down."""
    if what != "megabytes":
        return number(entry, what)
    up, down = number(entry, "bytes_up"), number(entry, "bytes_down")
    return None if up is None or down is None else (up + down) / 1e6
