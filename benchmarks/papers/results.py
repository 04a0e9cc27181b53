"""Runs of the papers' rows that are kept on disk, so that `all` goes on after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.papers.rows import History, Row

_FIELDS = (
    *("epoch", "steps", "seconds", "virtual_seconds", "bytes_up", "bytes_down", "parties"),
    *("cpu_seconds", "epsilon", "delta", "epsilon_shown", "trials"),
    *("train_loss", "train_accuracy", "gradient_norm", "test_loss", "test_accuracy"),
    *("validation_loss", "validation_accuracy"),
)


class Results:
    """The kept runs of a row: a line of JSON for each, in ``FOLDER/ROW.jsonl``.

    A run is found again by its name, seed and keys, whose data set has its name (`data.names_of`).
    A line that was cut off is passed over.

    Parameters
    ----------
    folder : where runs are kept.
    trials : another folder, from which trials of learning rates are read too.
    """

    def __init__(self, folder: Path, row: str, trials: Path) -> None:
        self._path = folder / f"{row}.jsonl"
        self._runs: dict[tuple[str, str, int], History] = {}
        for path in (trials / f"{row}.jsonl", self._path):
            for each in _lines(path):
                if path == self._path or " @ " in each["run"]:
                    columns = each["history"]
                    entries = zip(*columns.values(), strict=True)
                    history = [dict(zip(columns, entry, strict=True)) for entry in entries]
                    self._runs[each["of"], each["run"], each["seed"]] = history

    def get(self, name: str, seed: int, row: Row, keys: Mapping[str, Any]) -> History | None:
        """Return the history of a run; empty if it diverged, None if it is not there."""
        return self._runs.get((digest(row, keys), name, seed))

    def put(
        self, name: str, seed: int, row: Row, keys: Mapping[str, Any], history: History
    ) -> None:
        """Keep a run."""
        fields = [key for key in _FIELDS if history and history[-1].get(key) is not None]
        columns = {key: [_short(entry.get(key)) for entry in history] for key in fields}
        of = digest(row, keys)
        self._runs[of, name, seed] = history
        run = {"run": name, "seed": seed, "of": of, "history": columns}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * cut + json.dumps(run, separators=(",", ":")) + "\n")


def digest(row: Row, keys: Mapping[str, Any]) -> str:
    """Return a short digest of a run's keys.

    It has the names of files of code without their folders. It has 10 digits of each number, since
    the last bits of a computed one differ from machine to machine.
    """
    text = json.dumps([{key: _lasting(keys[key]) for key in keys}, row.training], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _lasting(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.10g}") if abs(value) > 1e-30 else 0.0
    return Path(value).stem if isinstance(value, str) and ".py:" in value else value


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
