"""Data from Python code: frames, arrays, tensors and torch data sets.

This process holds them under a name. The run configuration (``dataset = "memory:NAME"``) and the
parties' node configurations (``source = "memory"``, ``held = "NAME"``) use the name.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.column_types import as_typed, holds_texts, with_names
from vfl_flower.data.source import Named, Names, Preparation, Source, scaled, scaling
from vfl_flower.data.tables import Table

NO_COLUMN = "\0"  # stands for no column where a name is needed; no column has this name


@dataclass(frozen=True)
class Frame(Table):
    """A pandas frame. Its ids are in its column ``id``, or the numbers of its rows."""

    kind = "frame"

    frame: Any = None

    @cached_property
    def id_column(self) -> Any:
        """Return the id column, or the numbers of the rows."""
        return super().id_column if self.has_ids else np.arange(len(self.frame))

    @property
    def has_ids(self) -> bool:
        """Return whether a column has the ids."""
        return self.id != NO_COLUMN

    @cached_property
    def _named(self) -> Any:
        return self.frame.set_axis(map(str, self.frame.columns), axis=1)

    @cached_property
    def _names(self) -> list[str]:
        return with_names(self._named.columns)

    def wrong(self, what: str, detail: str, whole: str = "") -> ConfigError:
        """Return an error with the detail, since whoever reads it has the frame.

        A party's error is part of the run's results, so it has no cells. `survey` adds them.
        """
        named = replace(self, path=self.whose, party=None)
        return super(Frame, named).wrong(what, detail, whole * (self.party is None))

    def _read(self, names: list[str], texts: Collection[str] = ()) -> Any:
        try:
            return as_typed(self._named[names], texts, self.words)
        except UnicodeEncodeError:
            raise self.wrong(
                "has a text that is no Unicode. Correct it.", "no file takes it."
            ) from None

    def _read_ids(self) -> Any:
        column = self._named[self.id]
        return column.replace("", None) if holds_texts(column) else column


class RowsInOrder(Source):
    """Rows without ids, whose numbers stand for them."""

    def __init__(self, items: Any, party: int) -> None:
        super().__init__({}, party)
        self._items = items

    @property
    def id_column(self) -> Array:
        """Return the numbers of the rows."""
        return np.arange(len(self._items))


class ArraySource(RowsInOrder):
    """An array [N, ...], scaled by its training rows."""

    def __init__(self, array: Array, party: int) -> None:
        super().__init__(array, party)
        if array.dtype.kind not in "biuf" or array.ndim < 2:
            raise ConfigError(
                f"The features of party {party} are {array.dtype} of shape {array.shape}. Give "
                "numbers, and at least two dimensions, rows first."
            )
        if 0 in array.shape[1:]:
            raise ConfigError(
                f"The features of party {party} have no columns (shape {array.shape}). Give the "
                "party columns, or leave it out."
            )

    def learn(self, train: Array) -> Preparation:
        """Return mean and deviation of each column of a table, or of all pixels at once."""
        mean, deviation = scaling(self._items[train], per_column=self._items.ndim == 2)
        return Preparation({}, {}, mean.reshape(-1).tolist(), deviation.reshape(-1).tolist())

    def raw_columns(self, places: Array, names: Names = None, dates: Names = None) -> Named:
        """Yield the columns of a table by their numbers, as `Source.raw_columns`."""
        if self._items.ndim == 2:
            wanted = range(self._items.shape[1]) if names is None else map(int, names)
            yield from ((str(at), self._items[places, at].astype(np.float64)) for at in wanted)

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """Return these rows, scaled."""
        if self._items.ndim == 2 and self._items.shape[1] != len(preparation.mean):
            raise ConfigError(
                f"Party {self.party}'s array has {self._items.shape[1]} columns, and its model was "
                f"trained with {len(preparation.mean)}. Give the same columns."
            )
        mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
        rows = scaled(self._items[places], mean, deviation)
        if not np.isfinite(rows).all():
            raise ConfigError(
                f"The features of party {self.party} have missing or infinite values. Fill them "
                "in, or drop those rows at every party."
            )
        return rows


class DataSetSource(RowsInOrder):
    """A torch data set. Item i is the sample of row i, or a tuple that begins with it."""

    lazy = True

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """Return these samples as the data set gives them."""
        items = [self._items[int(place)] for place in places]
        samples = [item[0] if isinstance(item, tuple | list) else item for item in items]
        rows = np.stack([np.asarray(sample, np.float32) for sample in samples])
        finite = np.isfinite(rows).reshape(len(rows), -1).all(1)
        if not finite.all():
            raise ConfigError(
                f"Item {places[finite.argmin()]} of party {self.party}'s data set has missing or "
                "infinite values. Fill them in, or drop that row at every party."
            )
        return rows


# --- registry of held data ----------------------------------------------------------------------

_held: dict[str, tuple[Table, Sequence[Source]]] = {}


@contextmanager
def held(labels: Table, features: Sequence[Source], name: str = "") -> Iterator[str]:
    """Hold the label holder's table and the parties' features. Yield their name."""
    name = name or secrets.token_hex(8)
    _held[name] = labels, features
    try:
        yield name
    finally:
        del _held[name]


def of_party(node_config: Mapping[str, Any], party: int) -> Source:
    """Return the data held for a party."""
    return _get(str(node_config.get("held")))[1][party]


def of_label_holder(data: DataConfig) -> Table:
    """Return the table held for the label holder."""
    return _get(data.dataset.partition(":")[2])[0]


def _get(name: str) -> tuple[Table, Sequence[Source]]:
    if name not in _held:
        raise ConfigError(
            "The data of that run came from Python code, and are gone. Pass them again to "
            "vfl_flower.train or to the model's predict."
        )
    return _held[name]


def node_configs_of(name: str, parties: int, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the node configurations of parties with data that are held under a name."""
    named = [{"name": names[party]} if party in names else {} for party in range(parties)]
    return [{"source": "memory", "held": name, **each} for each in named]
