"""Folders whose columns are divided among parties already: VertiBench's and MARS-VFL's.

    vfl run --parties 4 -c "dataset='examples/divided_folders.py:vertibench:FOLDER'"
    vfl run --parties 2 -c "dataset='examples/divided_folders.py:mars_vfl:FOLDER'"

Each party gets the columns that the folder gives it, not an even part. Nothing is unpickled.
docs/how-to/own-data.md describes the folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.partitioned import Columns, PartitionedData

Array = NDArray[Any]

_UNREADABLE = (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile)


@dataclass(frozen=True)
class _Divided:
    """A data set with a given division of its columns.

    parties : number of parties.
    parts : "train" and "test", or "train" alone.
    rows : function from a party and a part to features [R, ...].
    labels : function from a part to labels [R].
    kept : function from a part to the rows to use, truth values [R]; None uses all.
    """

    parties: int
    parts: Sequence[str]
    rows: Callable[[int, str], Array]
    labels: Callable[[str], Array]
    kept: Callable[[str], Array] | None = None


def _partitioned(data: DataConfig, of: _Divided) -> PartitionedData:
    """Return a divided data set, after a check that all parts have the same rows."""
    known_labels = cache(of.labels)  # of small size; all parties of a process check by it

    def used(part: str, rows: Array) -> Array:
        return rows if of.kept is None else rows[of.kept(part)]

    def features(columns: Columns) -> list[Array]:
        if columns.parties != of.parties:
            raise ConfigError(
                f"{data.dataset} is divided among {of.parties} parties, and the run has "
                f"{columns.parties}. Use {of.parties} parties."
            )
        found = []
        for part in of.parts:
            rows, labels = of.rows(columns.party, part), known_labels(part)
            if len(rows) != len(labels):
                raise ConfigError(
                    f"Party {columns.party} of {data.dataset} has {len(rows)} {part} rows, and "
                    f"there are {len(labels)} labels. Give all parties the same rows."
                )
            found.append(used(part, rows))
        if len({rows.shape[1:] for rows in found}) > 1:
            raise ConfigError(
                f"Party {columns.party} of {data.dataset} has other columns in its test part "
                "than in its training part. Make them equal."
            )
        return found

    def labels() -> list[Array]:
        return [used(part, _as_labels(data, known_labels(part))) for part in of.parts]

    return PartitionedData(features, labels)


def _as_labels(data: DataConfig, labels: Array) -> Array:
    """Return labels, whole numbers as integers, since VertiBench stores classes as floats."""
    if labels.dtype.kind != "f":
        return labels
    if not np.isfinite(labels).all():
        raise ConfigError(f"{data.dataset} has missing labels. Drop those rows.")
    whole = data.target == "classification" and (labels == np.rint(labels)).all()
    return labels.astype(np.int64) if whole else labels


def _there(data: DataConfig, place: str) -> Path:
    """Return the path of a folder or a file, which must be there."""
    if not place or not Path(place).exists():
        raise ConfigError(f"dataset = {data.dataset!r}: there is no such folder. Correct its path.")
    return Path(place)


def _file(data: DataConfig, path: Path) -> Path:
    """Return the path of a file that must be there."""
    if not path.is_file():
        raise ConfigError(f"{data.dataset} lacks the file {path.name}. Add it.")
    return path


def _cannot_read(data: DataConfig, file: str, wanted: str) -> ConfigError:
    return ConfigError(f"{file} of {data.dataset} cannot be read. Give it {wanted}.")


def _numbers(data: DataConfig, path: Path, separator: str, **how: Any) -> Array:
    """Return the numbers of a text file, float32 [R, columns] by default."""
    import pandas as pd

    how = {"header": None, "dtype": np.float32, **how}
    try:
        found: Array = pd.read_csv(path, sep=separator, **how).to_numpy()
    except _UNREADABLE as error:
        raise _cannot_read(data, path.name, "the same number of numbers in each line") from error
    return found


# --- VertiBench -----------------------------------------------------------------------------------

_PARTY_FILE = re.compile(
    r"(?P<start>.+_party(?:(?P<parties>\d+)-)?)(?P<party>\d+)"
    r"(?P<how>(?:_.+)?)_(?P<part>train|test)\.(?P<kind>csv|npz|pkl)"
)
"""``covtype_party4-0_imp_weight0.1_seed0_train.csv``, or ``satellite_party0_train.csv``."""


class _Split(NamedTuple):
    """The common parts of a split's file names; ``parties`` is 0 if the names do not say it."""

    start: str
    how: str
    kind: str
    parties: int

    def file(self, party: int, part: str) -> str:
        """Return the name of a party's file."""
        return f"{self.start}{party}{self.how}_{part}.{self.kind}"


def vertibench(data: DataConfig, place: str) -> PartitionedData:
    """Open a folder of VertiBench: a csv or npz file for each party and part.

    Parameters
    ----------
    place : the folder, or any file of the split to use if the folder has several splits.
    """
    path = _there(data, place)
    folder = path if path.is_dir() else path.parent
    splits: dict[_Split, set[tuple[int, str]]] = {}
    for file in sorted(folder.iterdir()):
        if match := _PARTY_FILE.fullmatch(file.name):
            split = _Split(match["start"], match["how"], match["kind"], int(match["parties"] or 0))
            splits.setdefault(split, set()).add((int(match["party"]), match["part"]))
    if path.is_file():
        splits = {s: there for s, there in splits.items() if path.name in _names(s, there)}
    split = _only(data, splits)
    there = splits[split]
    parties = split.parties or 1 + max(party for party, _ in there)
    parts = ["train", "test"] if "test" in {part for _, part in there} else ["train"]
    read = _PartyCsv if split.kind == "csv" else _PartyNpz
    files = {
        (party, part): read(data, _file(data, folder / split.file(party, part)))
        for party, part in product(range(parties), parts)
    }
    return _partitioned(data, _of_files(data, parties, parts, files))


def _names(split: _Split, there: set[tuple[int, str]]) -> set[str]:
    return {split.file(*each) for each in there}


def _only(data: DataConfig, splits: Mapping[_Split, set[tuple[int, str]]]) -> _Split:
    """Return the only split whose files can be read."""
    safe = [split for split in splits if split.kind != "pkl"]
    if len(safe) == 1:
        return safe[0]
    if safe:
        raise ConfigError(
            f"{data.dataset} has {len(safe)} splits. Name a file of one of them, such as "
            f"{min(_names(safe[0], splits[safe[0]]))}."
        )
    if splits:
        raise ConfigError(
            f"{data.dataset} has pickled files, which can run code, so they are not read. "
            "Where you trust them, load each and save its X and y by numpy.savez, as FILE.npz."
        )
    raise ConfigError(
        f"{data.dataset} has no party files. Name them NAME_partyN-K_train.csv for party K of N, "
        "as VertiBench does."
    )


class _PartyCsv:
    """A party's csv file: with names (``id``, ``y``, features), or without (label last)."""

    def __init__(self, data: DataConfig, path: Path) -> None:
        self._data, self._path = data, path

    @cached_property
    def _columns(self) -> list[Any]:
        """Return names of the columns, or their numbers if the first line has numbers."""
        first = self._read(header=None, nrows=1, dtype=str)[0]
        try:
            first.astype(float)
        except ValueError:
            return [str(name) for name in first]
        return list(range(len(first)))

    @property
    def _named(self) -> bool:
        return isinstance(self._columns[0], str)

    @property
    def has_labels(self) -> bool:
        return not self._named or "y" in self._columns

    def features(self) -> Array:
        places = [at for at, name in enumerate(self._columns) if name not in ("id", "y")]
        # VertiBench stores single precision, and its satellite images have 324,532 columns.
        return self._at(places if self._named else places[:-1], np.float32)

    def labels(self) -> Array:
        at = self._columns.index("y") if self._named else len(self._columns) - 1
        return self._at([at], np.float64)[:, 0]

    def ids(self) -> Array | None:
        known = "id" in self._columns
        return self._at([self._columns.index("id")], np.float64)[:, 0] if known else None

    def _at(self, places: list[int], kind: type) -> Array:
        """Read columns by their places, since names may repeat."""
        header = 0 if self._named else None
        return self._read(header=header, usecols=places, dtype=kind)

    def _read(self, **how: Any) -> Array:
        return _numbers(self._data, self._path, ",", **how)


class _PartyNpz:
    """A party's npz file: X, and y at a party that has the labels."""

    def __init__(self, data: DataConfig, path: Path) -> None:
        self._data, self._path = data, path

    @property
    def has_labels(self) -> bool:
        return self._array("y") is not None

    def features(self) -> Array:
        rows = self._array("X")
        if rows is None or rows.dtype.kind not in "biuf" or rows.ndim < 2:
            raise _cannot_read(self._data, self._path.name, "a numeric array X of rows")
        return rows

    def labels(self) -> Array:
        labels = self._array("y")
        if labels is None:
            raise _cannot_read(self._data, self._path.name, "an array y of labels")
        return labels

    def ids(self) -> Array | None:
        return None

    def _array(self, name: str) -> Array | None:
        try:
            with np.load(self._path, allow_pickle=False) as file:
                return file[name] if name in file.files else None
        except _UNREADABLE as error:
            raise _cannot_read(self._data, self._path.name, "numeric arrays X and y") from error


def _of_files(
    data: DataConfig,
    parties: int,
    parts: Sequence[str],
    files: Mapping[tuple[int, str], _PartyCsv | _PartyNpz],
) -> _Divided:
    """Return the data set of party files, whose labels are the first party's that has them."""

    @cache
    def holder() -> int:
        for party in range(parties):
            if files[party, "train"].has_labels:
                return party
        raise ConfigError(f"{data.dataset} has no labels. Add a column y to the file of party 0.")

    @cache
    def ids(part: str) -> Array | None:
        return files[holder(), part].ids()

    def rows(party: int, part: str) -> Array:
        mine, due = files[party, part].ids(), ids(part)
        if mine is not None and due is not None and len(mine) == len(due) and (mine != due).any():
            raise ConfigError(
                f"Party {party} of {data.dataset} has {part} rows in another order than the "
                "labels. Sort all files by id."
            )
        return files[party, part].features()

    return _Divided(parties, parts, rows, lambda part: files[holder(), part].labels())


# --- MARS-VFL -------------------------------------------------------------------------------------


def mars_vfl(data: DataConfig, place: str) -> PartitionedData:
    """Open UCI HAR, KU-HAR or NUS-WIDE, divided between two parties as MARS-VFL divides them.

    Parameters
    ----------
    place : the data set's folder, as its authors publish it.
    """
    folder = _there(data, place)
    har = next((f for f in (folder, folder / _UCI_HAR) if (f / "features.txt").is_file()), None)
    if har:
        return _partitioned(data, _uci_har(data, har))
    if (folder / _KU_HAR).is_file():
        return _partitioned(data, _ku_har(data, folder / _KU_HAR))
    if (folder / _IMAGES).is_dir():
        return _partitioned(data, _nus_wide(data, folder))
    raise ConfigError(
        f"{data.dataset} has no {_UCI_HAR}, {_KU_HAR} or {_IMAGES}. Save MARS-VFL's pickled and "
        "HDF5 data as NAME_partyN-K_train.npz with X and y, for divided_folders.py:vertibench:DIR."
    )


_UCI_HAR, _KU_HAR, _IMAGES = "UCI HAR Dataset", "KU-HAR_20750x300.csv", "Low_Level_Features"
_OF_KU_HAR = 1800
_TOPICS = ("buildings", "grass", "animal", "water", "person")
"""Topics of NUS-WIDE that MARS-VFL tells apart."""


def _uci_har(data: DataConfig, folder: Path) -> _Divided:
    """Return UCI HAR: party 0 has the accelerometer's columns, party 1 the gyroscope's."""
    names = (folder / "features.txt").read_text().splitlines()
    gyroscope = np.array(["Gyro" in name for name in names])

    def numbers(letter: str, part: str) -> Array:
        return _numbers(data, _file(data, folder / part / f"{letter}_{part}.txt"), r"\s+")

    def rows(party: int, part: str) -> Array:
        found = numbers("X", part)
        if found.shape[1] != len(gyroscope):
            raise _cannot_read(data, f"X_{part}.txt", f"{len(gyroscope)} columns as features.txt")
        return found[:, gyroscope == bool(party)]

    return _Divided(2, ("train", "test"), rows, lambda part: numbers("y", part)[:, 0])


def _ku_har(data: DataConfig, path: Path) -> _Divided:
    """Return KU-HAR: party 0 has the accelerometer's columns, party 1 the gyroscope's."""
    half = _OF_KU_HAR // 2

    def rows(party: int, part: str) -> Array:
        return _numbers(data, path, ",", usecols=range(party * half, (party + 1) * half))

    return _Divided(
        2, ("train",), rows, lambda part: _numbers(data, path, ",", usecols=[_OF_KU_HAR])[:, 0]
    )


def _nus_wide(data: DataConfig, folder: Path) -> _Divided:
    """Return NUS-WIDE: party 0 has the images' features, party 1 the tags.

    As in MARS-VFL, a row counts if it has exactly one of five topics, which is its label.
    """

    @cache
    def topics(part: str) -> Array:
        """Return whether a row has a topic, [R, 5]."""
        names = [f"Labels_{topic}_{part.capitalize()}.txt" for topic in _TOPICS]
        labels = folder / "Groundtruth" / "TrainTestLabels"
        return _joined(data, [_file(data, labels / name) for name in names])

    def rows(party: int, part: str) -> Array:
        start = part.capitalize()
        if party:
            return _joined(data, [_file(data, folder / "NUS_WID_Tags" / f"{start}_Tags1k.dat")])
        files = sorted((folder / _IMAGES).glob(f"{start}_Normalized_*.dat"))
        return _joined(data, files or [_file(data, folder / _IMAGES / f"{start}_Normalized_*.dat")])

    return _Divided(
        2,
        ("train", "test"),
        rows,
        lambda part: np.array(_TOPICS)[topics(part).argmax(1)],
        lambda part: topics(part).sum(1) == 1,
    )


def _joined(data: DataConfig, files: Sequence[Path]) -> Array:
    """Return the columns of several text files side by side."""
    found = [_numbers(data, file, r"\s+") for file in files]
    for file, each in zip(files, found, strict=True):
        if len(each) != len(found[0]):
            raise _cannot_read(data, file.name, f"{len(found[0])} lines, as {files[0].name} has")
    return np.hstack(found)
