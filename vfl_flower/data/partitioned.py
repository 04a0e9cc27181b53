"""Partitioned data sets: parties read their columns, the label holder the labels.

`config.plugins.DATASETS` names the functions of `data.formats` that open them, by the prefix in
``dataset='npz:PATH'``. A data set of your own is ``dataset='waves.py:open_waves'``, or
``'waves.py:open_waves:PATH'`` if it reads a path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from os.path import expanduser, isdir, isfile
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError, asked
from vfl_flower.config.options import DataConfig
from vfl_flower.config.plugins import DATASETS
from vfl_flower.data.samples import Arrays

_SHIPPED = ("digits", "breast-cancer")  # in scikit-learn
OF_A_FILE = ("npz", "csv", "parquet", "svmlight")


@dataclass(frozen=True)
class Columns:
    """A party's columns: call it with the shape of a sample to get the index of an even part."""

    data: DataConfig
    sequences: bool
    party: int  # from 0
    parties: int

    def __call__(self, shape: tuple[int, ...]) -> Any:
        """Return the index of the party's columns in [rows, *shape]: even contiguous blocks."""
        _check_cuts(self.data, self.sequences, shape, self.parties)
        party, parties = self.party, self.parties
        if len(shape) == 1 or self.sequences:
            # Columns of a table, or signals of a sequence: each party sees every time step.
            return (..., _cut(shape[-1], party, parties))
        if self.data.image_split == "flat":
            pixels = _cut(shape[0] * shape[1], party, parties)
            return (slice(None), *np.unravel_index(np.r_[pixels][:, None], shape[:2]))
        bands = {"rows": (parties, 1), "columns": (1, parties)}
        down, across = bands.get(self.data.image_split, _grid(parties))
        rows = _cut(shape[0], party // across, down)
        return (slice(None), rows, _cut(shape[1], party % across, across))


@dataclass(frozen=True)
class PartitionedData:
    """A data set before its split: one part (all rows) or two (training, test).

    made : function that makes samples of features as read; without it, features are scaled.
    shape : function that returns the shape of a sample, without reading all features.
    """

    features: Callable[[Columns], list[Array]]
    labels: Callable[[], list[Array]]
    made: Callable[[Any], Arrays] | None = None
    shape: Callable[[], tuple[int, ...]] | None = None


@lru_cache(maxsize=1)  # decodes the images of all parties once
def opened(data: DataConfig, version: Any) -> PartitionedData:
    """Return the data set that ``dataset`` names, cached until its files change (`version_of`)."""
    if own := code_of(data.dataset):
        return DATASETS.load(own[0])(data, own[1])
    kind, _, place = data.dataset.partition(":")
    ours = kind in DATASETS.known
    if (ours and bool(place) != (kind in _SHIPPED)) or (not ours and kind in DATASETS.names):
        if place and kind in OF_A_FILE and not isfile(place):
            raise ConfigError(
                f"dataset = {data.dataset!r}: there is no such file. Correct its path."
            )
        return DATASETS.load(kind)(data, place)
    packages = (f", {name}" for name in DATASETS.names if name not in DATASETS.known)
    suffix = Path(data.dataset).suffix.removeprefix(".")
    kinds = ("files", "hf", *OF_A_FILE) if place else _SHIPPED
    close = get_close_matches(kind.lower(), kinds, 1)
    likely = [f"{each}:{place}" if place else each for each in close]
    likely += [f"{suffix}:{data.dataset}"] * (suffix in OF_A_FILE and not place)
    raise ConfigError(
        f"dataset = {data.dataset!r} is not known:{asked(data.dataset, likely, 'use')} digits, "
        "breast-cancer, npz:PATH, csv:PATH, parquet:PATH, svmlight:PATH or hf:NAME_OR_DIR"
        f"{''.join(packages)}. Files of several owners are files:PATH, where PATH has the labels."
    )


def code_of(dataset: str) -> tuple[str, str] | None:
    """Return the import path that ``dataset`` begins with, and the path after it, if any."""
    module, _, rest = dataset.partition(":")
    name, colon, path = rest.partition(":")
    is_file = module.endswith(".py") and module != ".py"
    is_module = "." in module and all(map(str.isidentifier, module.split(".")))
    if not (is_file or is_module) or not name.isidentifier() or (colon and not path):
        return None
    return f"{module}:{name}", path


def decisive(data: DataConfig) -> DataConfig:
    """Return the options that decide the data, so that other runs can share it."""
    others = "id", "columns", "missing", "text", "presence", "dates", "class_weights", "augment"
    return replace(data, **{name: getattr(DataConfig, name) for name in others})


def version_of(data: DataConfig) -> Any:
    """Return a value that changes with the files of a data set, for the cache."""
    kind, _, place = data.dataset.partition(":")
    if not place:
        return ()
    paths = [Path(expanduser(place))]
    if own := code_of(data.dataset):
        paths = [Path(expanduser(each)) for each in (kind, own[1] or kind)]
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if isdir(path) else [path, Path(f"{path}.t")])
    ]
    found = []
    for file in files:
        with suppress(OSError, ValueError):
            about = file.stat()
            found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(found)


def check_parties(data: DataConfig, sequences: bool, parties: int) -> None:
    """Refuse a data set with too few columns, if its shape is known. Else the parties check."""
    dataset = opened(decisive(data), version_of(data))
    if dataset.shape is not None and (shape := dataset.shape()):
        _check_cuts(data, sequences, shape, parties)


def _cut(size: int, part: int, parts: int) -> slice:
    return slice(part * size // parts, (part + 1) * size // parts)


def _grid(parties: int) -> tuple[int, int]:
    """Return how many parties an image has down and across: as square as possible."""
    down = max(d for d in range(1, math.isqrt(parties) + 1) if parties % d == 0)
    return down, parties // down


def _check_cuts(data: DataConfig, sequences: bool, shape: tuple[int, ...], parties: int) -> None:
    """Refuse to divide samples of this shape if a party's part would be empty."""
    grid = False
    if len(shape) == 1 or sequences:
        most, what = shape[-1], f"{shape[-1]} columns"
    elif data.image_split in ("rows", "columns"):
        most = shape[data.image_split == "columns"]
        what = f"{most} {data.image_split} of pixels"
    else:
        most, what = shape[0] * shape[1], f"{shape[0]} x {shape[1]} pixels"
        grid = data.image_split != "flat"

    def fits(number: int) -> bool:
        down, across = _grid(number) if grid else (1, 1)
        return number <= most and (not grid or (down <= shape[0] and across <= shape[1]))

    if fits(parties):
        return
    best = next(filter(fits, range(min(parties, most), 0, -1)), 0)
    how = " as a grid of {} x {}".format(*_grid(parties)) if grid else ""
    use = f"Use {best}, the largest number below {parties} that works" if best else "Add columns"
    raise ConfigError(
        f"{data.dataset} has {what}, too few to divide among {parties} parties{how}. {use}."
    )
