"""Read runs from results folders, and check the numbers and texts in them.

The files may contain anything. Only `number` reads numbers, and texts are only shown.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import VflError
from vfl_flower.config.names import from_json, in_words
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.protocol.system import System, load_system
from vfl_flower.results.figures import data_called
from vfl_flower.results.page import NOTHING, printable

MEASURES = {"test_accuracy": "test accuracy", "test_r2": "test R²"}
"""Measures of a run -> their names on the page."""

_RESULTS = ("test_", "validation_", "train_", "deviation")


@dataclass(frozen=True)
class Shown:
    """A run on the page. ``summary`` is empty if the run has not finished."""

    title: str
    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)

    def beside(self, command: str) -> dict[str, Any]:
        """Return what another command has written beside the run, such as "audit"."""
        return json_of(self.folder / f"{command}.json")

    def among(self, runs: Sequence["Shown"], after: str = "") -> str:
        """Return the title and a text after it; nothing if there is no other run."""
        return f"{self.title}{after}" if len(runs) > 1 else ""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary) and self.summary.get("failure") is None

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation whose model the run keeps, so far by validation loss; perhaps empty."""
        if self.finished:
            kept = number(self.summary, "best_epoch")
            at = (each for each in self.history if kept and number(each, "epoch") == kept)
            return next(at, {})
        validated = [each for each in self.history if number(each, "validation_loss") is not None]
        return min(validated, key=lambda each: number(each, "validation_loss") or 0.0, default={})

    @property
    def figures(self) -> dict[str, Any]:
        """The summary, or the last evaluation with the results of the best evaluation."""
        last = self.summary or self.history[-1]
        if self.finished:
            return last
        results = {key: each for key, each in self.best.items() if key.startswith(_RESULTS)}
        return {**last, **results}

    @property
    def config(self) -> dict[str, Any]:
        """The run configuration: option -> value."""
        return mapping(self.summary.get("config"))

    @property
    def assessment(self) -> dict[str, Any]:
        """The figures of the model on test rows, with intervals, curves and segments."""
        return mapping(self.summary.get("assessment"))

    @property
    def system(self) -> System | None:
        """The system or baseline, if its name is known; otherwise nothing is loaded."""
        name = text(self.summary.get("strategy"))
        return load_system(name) if name in SYSTEMS.known else None

    @property
    def dataset(self) -> str:
        """The last part of the data set's name; of data in memory, whose they are."""
        parties = [self.called(each.get("party")) for each in self._by_party]
        rows = mapping(mapping(self.summary.get("data")).get("rows"))
        every = sum(number(rows, kind) or 0 for kind in rows)
        return data_called(text(self.summary.get("dataset", "")), parties, every)

    def called(self, party: Any) -> str:
        """Return what a party is called, by its name if it has one."""
        return self.in_words(f"party {text(party)}")

    def in_words(self, said: str) -> str:
        """Return a text with the names of this run's parties in place of numbers."""
        names = {str(each.get("party")): each.get("name") for each in self._by_party}
        return in_words(said, from_json(names))

    @property
    def measure(self) -> str:
        """The measure of the run: accuracy or R2."""
        every = [self.summary, *self.history]
        has = (key for key in MEASURES if any(number(each, key) is not None for each in every))
        return next(has, "test_accuracy")

    @property
    def parties(self) -> list[dict[str, Any]]:
        """The counts of each party; empty if no message was sent."""
        return self._by_party if number(self.figures, "exchanges") else []

    @property
    def _by_party(self) -> list[dict[str, Any]]:
        return mappings(self.summary.get("by_party"))


def read(folders: Sequence[Path]) -> list[Shown]:
    """Return the runs in results folders, in order; a folder may hold several runs."""
    runs = [run for folder in folders for run in _of(folder)]
    for more in (", {0.name}", " in {0.parent.name}"):  # titles of several runs get their folders
        times = Counter(run.title for run in runs)
        runs = [
            replace(run, title=run.title + more.format(run.folder)) if times[run.title] > 1 else run
            for run in runs
        ]
    return runs


def _of(folder: Path) -> list[Shown]:
    """Return the run in a folder, or the runs of a comparison, or of all subfolders."""
    if (folder / "compare.json").is_file():
        compared = json_of(folder / "compare.json")
        titles = {folder_of(title): title for title in compared}
        failed = (each.name for each in sorted(folder.iterdir()) if _is_run(each))
        titles |= {name: name for name in failed if name not in titles}
        named = titles.items()
        return [_run(folder / name, title, mapping(compared.get(title))) for name, title in named]
    if _is_run(folder):
        return [_run(folder)]
    if not folder.exists():
        raise VflError(f"{folder} does not exist: name a results folder, or a folder of them.")
    found = []
    for each in sorted(folder.iterdir()) if folder.is_dir() else ():
        has_figures = any((each / name).is_file() for name in ("compare.json", "summary.json"))
        if has_figures or (_is_run(each) and _content(each / "history.jsonl")):
            found += _of(each)
    if not found:
        raise VflError(
            f"{folder} is not a results folder, and contains none: name a folder that `vfl run`, "
            "`vfl compare` or `vfl audit` has written."
        )
    return found


def folder_of(title: str) -> str:
    """Return the name of the folder that a run of this title gets in a comparison."""
    return re.sub(r"[^\w.=-]+", "-", title).strip(".-")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "history.jsonl"))


def _run(folder: Path, title: str = "", more: Mapping[str, Any] | None = None) -> Shown:
    summary = {**json_of(folder / "summary.json"), **(more or {})}
    path = folder / "history.jsonl"
    history = [_with_megabytes(_parsed(path, line)) for line in _content(path).splitlines()]
    if not summary and not history:
        said = f"The run in {folder} has no summary.json and no evaluation yet: wait for it."
        raise VflError(said)
    title = title or text(summary.get("strategy", folder.name))
    return Shown(title, folder, summary, history)


def _with_megabytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a history with the megabytes up and down, as one cost."""
    up, down = number(entry, "bytes_up"), number(entry, "bytes_down")
    several = number(entry, "deviation", "bytes")
    if several is not None:
        entry["deviation"]["megabytes"] = several / 1e6
    return entry if up is None or down is None else {**entry, "megabytes": (up + down) / 1e6}


def json_of(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one if there is no file."""
    return _parsed(path, _content(path) or b"{}")


def _content(path: Path) -> bytes:
    """Return the bytes of a file; none if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        said = f"{path} cannot be read: {error.strerror}. Check its permissions."
        raise VflError(said) from error


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = _plain(json.loads(text))
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise VflError(f"{path} cannot be read: a run did not write it so. Move it away.")
    return parsed


def _plain(value: Any) -> Any:
    """Return a value without characters that a page cannot show."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a mapping; otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the items of a list as mappings; an empty list for other values."""
    return [mapping(each) for each in value] if isinstance(value, list) else []


def text(value: Any) -> str:
    """Return a value as text; `NOTHING` for None, mappings and lists."""
    return NOTHING if value is None or isinstance(value, dict | list) else str(value)


def number(of: Mapping[str, Any], *path: str) -> float | None:
    """Return the number at a path, if it is a number that can be drawn."""
    value: Any = of
    for key in path:
        value = mapping(value).get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and (value == 0 or 1e-100 < abs(value) < 1e100) else None


def numbers(of: Mapping[str, Any], *keys: str) -> list[tuple[float, ...]]:
    """Return the i-th numbers of the lists under these keys, for each i at which all have one."""
    lists = [each if isinstance(each := of.get(key), list) else [] for key in keys]
    rows = ([number({"": value}, "") for value in values] for values in zip(*lists, strict=False))
    return [tuple(each for each in row if each is not None) for row in rows if None not in row]


def shown(figure: float | None, form: str = ".4g") -> str:
    """Return a number as text."""
    return NOTHING if figure is None else format(figure, form)


def measured(of: Mapping[str, object], *path: str, form: str = ".4g", unit: float = 1) -> str:
    """Return the number at a path, times ``unit``, with its deviation over seeds."""
    *above, key = path
    found = number(of, *path), number(of, *above, "deviation", key)
    mean, deviation = (None if each is None else each * unit for each in found)
    return shown(mean, form) if deviation is None else f"{shown(mean, form)} ± {deviation:{form}}"


def megabytes(of: Mapping[str, object], key: str, unit: float = 1e-6) -> str:
    """Return a number of bytes as text, in megabytes to three digits."""
    figure = number(of, key)
    large = figure is not None and figure * unit >= 100
    return measured(of, key, form=".0f" if large else ".3g", unit=unit)


def counted(figure: float | None, one: str, several: str) -> str:
    """Return a number of things as text."""
    return f"{shown(figure)} {one if figure == 1 else several}"
