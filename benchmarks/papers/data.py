"""The data sets of the rows: their places, and their names in the keys of kept runs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.images import cifar_of
from benchmarks.papers.rows import Data
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.systems import resolve

FEW = 240  # rows of each data set
PART = 10_000  # training rows of MNIST in `Data.part`
NAMES = Data("mnist", "credit", "credit-one-hot", "cifar10", "breast-cancer", f"mnist-{PART}")
"""The names of the data sets of the kept runs."""
_LABELS = Data(
    mnist="c47d7c127452",
    credit="3d724982e1a5",
    credit_one_hot="3d724982e1a5",
    cifar="a22e3725afe1",
    table="bad6d9428eff",
    part="1b54bb3ca004",
)
"""How the digests of their labels begin."""


def names_of(data: Data, used: Collection[str]) -> dict[str, str]:
    """Return the name of each data set that is used, whatever its files are called.

    The labels tell whether it is the one of the kept runs. If not, its name has their digest.
    """
    names = asdict(NAMES)
    for option, place in asdict(data).items():
        if place in used and place != names[option]:
            labels = load_labels(resolve({"dataset": place})).whole[:12]
            if labels != getattr(_LABELS, option):
                names[option] += f" {labels}"
    return {place: names[option] for option, place in asdict(data).items()}


@contextmanager
def data_of(options: argparse.Namespace) -> Iterator[Data]:
    """The data sets, or their first rows."""
    few = FEW if options.quick else options.rows
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        mnist, credit, cifar = options.mnist, options.credit, options.cifar
        if few and "cifar" in options.row:
            cifar = stack.enter_context(cifar_of(cifar, few))
        elif few:
            mnist, credit = (
                part_of(Path(each), few, Path(folder, f"{number}.npz"))
                for number, each in enumerate((mnist, credit))
            )
        part = part_of(Path(mnist), few or PART, Path(folder, f"mnist-{PART}.npz"))
        encoded = one_hot(Path(credit), Path(folder, "credit-one-hot.npz"))
        yield Data(
            mnist=f"npz:{mnist}",
            credit=f"npz:{credit}",
            credit_one_hot=f"npz:{encoded}",
            cifar=f"hf:{cifar}",
            table=options.table,
            part=f"npz:{part}",
        )


def part_of(place: Path, rows: int, to: Path) -> Path:
    """A file of the first rows of each array in an npz file, which may be missing."""
    if place.is_file():
        with np.load(place, allow_pickle=False) as file:
            names = [name for name in file.files if name[0] in "Xy"]
            np.savez(to, **{name: file[name][:rows] for name in names})
    return to


def one_hot(place: Path, to: Path) -> Path:
    """A table whose columns of at most 12 values have a column for each value, if there is one.

    AsyREVEL's credit table has 90 columns, and 23 before such an encoding. This makes 91.
    """
    if place.is_file():
        with np.load(place, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name[0] in "Xy"}
        parts = [name for name in arrays if name[0] == "X"]
        encoded: dict[str, list[NDArray[Any]]] = {name: [] for name in parts}
        for at, column in enumerate(np.concatenate([arrays[name] for name in parts]).T):
            values = np.unique(column)
            for name in parts:
                mine = arrays[name][:, at, None]
                encoded[name].append(mine == values if len(values) <= 12 else mine)
        for name, columns in encoded.items():
            arrays[name] = np.concatenate(columns, 1, dtype=np.float64)
        np.savez(to, allow_pickle=False, **arrays)
    return to
