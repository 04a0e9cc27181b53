"""The label holder's checkpoint: its state for resuming a run or using the model.

The checkpoint is one file in the results folder, ``checkpoint.npz``. It holds arrays, a JSON text
and a checksum; nothing is pickled. Each save replaces the whole file. Only the owner can read it,
since it may hold embeddings of all rows. Each party saves its own half
(`vfl_flower.party.state_file`), named by this file's run and number.
"""

import json
import secrets
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import check_own, unsealed, whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.transport.messages import Arrays

FILE = "checkpoint.npz"
JOURNAL = "releases.journal"

_TEXT = "text"
_USED = "learnt", "chose"
_LEARNT = "train", "earlier"  # people of the run, and of runs that it began with


@dataclass(frozen=True)
class Checkpoint:
    """Content of the checkpoint file.

    run, number : name under which the parties save their states (`Keeper.name`), and the number
        of this checkpoint.
    finished : whether the run has finished.
    rows : with own files, the common rows in the label holder's file, in common order.
    present : row mask [N, M] of these rows, if parties may lack rows.
    used : after a warm start, rows of that file that trained models of earlier runs, and rows
        that chose these models.
    about_labels : how to turn the model's outputs into labels (`Labels.about`).
    strategy, arrays : scalars and arrays of the strategy and the label holder (``state_dict``).
        "tags.train" and "tags.test" name the people of the rows by keyed hashes
        (`data.withdrawn`). "tags.earlier" names people of runs that the run began with. 0 stands
        for a person who withdrew.
    """

    config: RunConfig
    run: str
    number: int
    finished: bool
    rows: NDArray[np.int64]
    present: NDArray[np.bool_] | None
    about_labels: dict[str, Any]
    strategy: dict[str, Any]
    arrays: Arrays
    used: tuple[NDArray[np.int64], NDArray[np.int64]]

    @property
    def parties(self) -> int:
        """Return the number of parties of the run."""
        return len(self.strategy["seats"])

    @property
    def names(self) -> dict[int, str]:
        """Return the names of the parties that have one."""
        return {each["party"]: each["name"] for each in self.strategy["seats"] if each.get("name")}

    @property
    def origin(self) -> str:
        """Return the name of the run when it began, before it was interrupted."""
        return str(self.strategy.get("origin", self.run))

    @property
    def epoch(self) -> float:
        """Return the epochs done at the last evaluation."""
        entries = self.strategy["history"]["entries"]
        return float(entries[-1]["epoch"]) if entries else 0.0

    @property
    def withdrawn(self) -> tuple[int, int]:
        """Return how many people of the training rows have withdrawn since, and of how many."""
        tags = [self.arrays[f"tags.{name}"] for name in _LEARNT if f"tags.{name}" in self.arrays]
        return sum(int((each == 0).sum()) for each in tags), sum(map(len, tags))

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Return the calibration of the probabilities; None without one."""
        found: dict[str, Any] | None = self.strategy["holder"].get("calibration")
        return found

    @property
    def threshold(self) -> float:
        """Return the probability above which the second of two classes is predicted."""
        known: float | None = self.strategy["holder"].get("threshold")
        if known is not None:
            return known
        rule = self.config.assessment.rule  # an interrupted run has not chosen a number by it
        return rule.number if rule.kind == "number" else 0.5

    def save(self, folder: Path) -> None:
        """Write the checkpoint into a results folder, and replace the last one."""
        text = {
            "config": self.config.values(),
            "run": self.run,
            "number": self.number,
            "finished": self.finished,
            "about_labels": self.about_labels,
            "strategy": self.strategy,
        }
        encoded = np.frombuffer(json.dumps(text).encode(), np.uint8)
        arrays: dict[str, Any] = {f"array.{name}": array for name, array in self.arrays.items()}
        arrays |= {_TEXT: encoded, "rows": self.rows}
        arrays |= dict(zip(_USED, self.used, strict=True))
        arrays |= {} if self.present is None else {"present": self.present}
        with whole(folder / FILE, sealed=True) as file:
            np.savez(file, **arrays)


class Keeper:
    """Where a run saves checkpoints, and the one to resume, ``found``, or to grow, ``earlier``."""

    def __init__(
        self,
        folder: Path,
        run: str,
        found: Checkpoint | None = None,
        earlier: Checkpoint | None = None,
        again: Checkpoint | None = None,
    ) -> None:
        self.folder, self.run = folder, run
        self.nonce = secrets.token_hex(8)  # part of the name, since Flower may reuse a run number
        self.found, self.earlier = found, earlier
        self.again = again  # the run to repeat
        self.rows: NDArray[np.int64] = found.rows if found else np.zeros(0, np.int64)
        self.present = found.present if found else None
        none = np.zeros(0, np.int64)
        self.used = found.used if found else (none, none)
        self.number = found.number if found else 0
        self.journal = folder / JOURNAL
        self.origin = found.origin if found else self.name

    @property
    def name(self) -> str:
        """Return the name of the run, under which parties save their states."""
        return f"{self.run}-{self.nonce}"


def load(folder: str | Path) -> Checkpoint:
    """Read the checkpoint of a results folder, unless another user can change it."""
    path = Path(folder).expanduser() / FILE
    if not path.parent.is_dir():
        raise ConfigError(f"{folder} is not a folder. Name the results folder of a run.")
    check_own(path.parent)
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {FILE}. Name the results folder of a run that saved a checkpoint."
        )
    try:
        with np.load(BytesIO(unsealed(path)), allow_pickle=False) as file:
            text = json.loads(file[_TEXT].tobytes())
            arrays = {name[6:]: file[name] for name in file.files if name.startswith("array.")}
            config = RunConfig.of(text.pop("config"))
            present = file["present"] if "present" in file.files else None
            none = np.zeros(0, np.int64)  # files of older versions have no such arrays
            learnt, chose = (file[name] if name in file.files else none for name in _USED)
            found = Checkpoint(
                config=config,
                rows=file["rows"],
                present=present,
                arrays=arrays,
                used=(learnt, chose),
                **text,
            )
            names.note(found.names)
            return found
    except (KeyError, TypeError, ValueError, OSError, VflError) as error:
        raise ConfigError(
            f"{path} is damaged, or another version wrote it. Name another results folder."
        ) from error


def has_finished(folder: Path) -> bool:
    """Return whether a folder has the summary of a run that has finished."""
    try:
        failure = json.loads((folder / "summary.json").read_text())["failure"]
        return failure is None
    except (OSError, ValueError, KeyError, TypeError):  # no summary, or half of one
        return False
