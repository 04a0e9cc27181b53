"""Own data that Python code hands over: frames, arrays, tensors and torch data sets.

They are held in this process under a name, by which the run configuration (``dataset =
"memory:NAME"``) and the parties' node configurations (``source = "memory"``, ``held = "NAME"``)
speak of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.source import Preparation, Source, scaled, scaling
from vfl_flower.data.tables import Table
from vfl_flower.errors import ConfigError
from vfl_flower.sections import DataConfig

Array = NDArray[Any]


@dataclass(frozen=True)
class Frame(Table):
    """A pandas frame; its ids are in its column ``id``."""

    kind = "frame"

    frame: Any = None

    @cached_property
    def _names(self) -> list[str]:
        return list(map(str, self.frame.columns))

    def _read(self, names: list[str]) -> Any:
        return self.frame.set_axis(self._names, axis=1)[names]


class ArraySource(Source):
    """An array [N, ...], whose ids are the numbers of its rows; scaled by its training rows."""

    def __init__(self, array: Array, party: int) -> None:
        super().__init__({}, party)
        if array.dtype.kind not in "biuf" or array.ndim < 2:
            raise ConfigError(
                f"The features of party {party} are {array.dtype} of shape {array.shape}: give "
                "numbers, and at least two dimensions, rows first."
            )
        self._array = array

    @property
    def id_column(self) -> Array:
        """The numbers of the rows."""
        return np.arange(len(self._array))

    def learn(self, train: Array) -> Preparation:
        """Mean and deviation of each column of a table, or of all pixels at once."""
        mean, deviation = scaling(self._array[train], per_column=self._array.ndim == 2)
        return Preparation({}, {}, mean.reshape(-1).tolist(), deviation.reshape(-1).tolist())

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """These rows, scaled."""
        if self._array.ndim == 2 and self._array.shape[1] != len(preparation.mean):
            raise ConfigError(
                f"Party {self.party}'s array has {self._array.shape[1]} columns, and its model was "
                f"trained with {len(preparation.mean)}."
            )
        mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
        rows = scaled(self._array[places], mean, deviation)
        if not np.isfinite(rows).all():
            raise ConfigError(
                f"The features of party {self.party} have missing or infinite values: fill them "
                "in, or drop those rows, at every party."
            )
        return rows


class DataSetSource(Source):
    """A torch data set: item i is the sample of row i, or a tuple that begins with it."""

    lazy = True

    def __init__(self, dataset: Any, party: int) -> None:
        super().__init__({}, party)
        self._dataset = dataset

    @property
    def id_column(self) -> Array:
        """The numbers of the rows."""
        return np.arange(len(self._dataset))

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """These samples, as the data set gives them."""
        items = [self._dataset[int(place)] for place in places]
        samples = [item[0] if isinstance(item, tuple | list) else item for item in items]
        return np.stack([np.asarray(sample, np.float32) for sample in samples])


# --- what is held -------------------------------------------------------------------------------

_held: dict[str, tuple[Table, Sequence[Source]]] = {}


@contextmanager
def held(labels: Table, features: Sequence[Source]) -> Iterator[str]:
    """Hold the label holder's table and the parties' features; the name, while this lasts."""
    name = secrets.token_hex(8)
    _held[name] = labels, features
    try:
        yield name
    finally:
        del _held[name]


def of_party(node_config: Mapping[str, Any], party: int) -> Source:
    """What is held for a party."""
    return _get(str(node_config.get("held")))[1][party]


def of_label_holder(data: DataConfig) -> Table:
    """What is held for the label holder."""
    return _get(data.dataset.partition(":")[2])[0]


def _get(name: str) -> tuple[Table, Sequence[Source]]:
    if name not in _held:
        raise ConfigError(
            "The data of that run were handed over by Python code, and are gone: hand them over "
            "again, by vfl_flower.train or a model's predict."
        )
    return _held[name]
