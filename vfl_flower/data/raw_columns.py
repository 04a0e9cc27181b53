"""Columns as their owner wrote them, of the training rows: what bins are learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import training_rows
from vfl_flower.data.partitioned import Columns, decisive, opened, version_of
from vfl_flower.data.row_mask import Alignment, row_masks_of
from vfl_flower.data.source import Source
from vfl_flower.data.split import digest_of_rows, divide, split
from vfl_flower.data.tables import Table


@dataclass(frozen=True)
class RawColumns:
    """A participant's columns in its training rows.

    alignment : statement about the rows, as in `transport.messages.Description`.
    rows : number n of its training rows.
    read : function that yields the name and the values [n] of each column (`Source.raw_columns`).
    people : function that returns a number for the person of each row, [n]: by its id if it has
        one, or else the row's number.
    """

    alignment: str
    rows: int
    read: Callable[[], Iterator[tuple[str, Array]]]
    people: Callable[[], NDArray[np.uint64]]


def own_columns(data: DataConfig, own: Source, common: Alignment) -> RawColumns:
    """Return a participant's own columns.

    Raise `ConfigError` if it has none of the training rows.
    """
    places, *_ = divide(data, len(common.rows), common.held_out)
    train = training_rows(own, common.rows[places])
    read, people = partial(_checked, own, train), partial(own.people, train)
    return RawColumns(common.name, len(train), read, people)


def _checked(own: Source, places: Array) -> Iterator[tuple[str, Array]]:
    """Yield the columns, which must be there and have no dates."""
    if isinstance(own, Table):
        own.check_features()
    has_columns = False
    for name, values in own.raw_columns(places):
        if values.dtype == object and any(isinstance(each, date) for each in values):
            assert isinstance(own, Table)
            raise own.wrong(
                "has a column of dates. Set dates='days', or leave it out by `columns`.",
                f"column {name!r} has dates.",
            )
        has_columns = True
        yield name, values
    if not has_columns:
        raise ConfigError(f"{own.whose} has no columns of numbers or texts. Give it a table.")


def partition_columns(config: RunConfig, party: int, parties: int) -> RawColumns:
    """Return a party's columns of a partitioned data set. Their names are their numbers.

    Raise `ConfigError` if the data set is no table of numbers.
    """
    data = decisive(config.data)
    dataset = opened(data, version_of(data))
    parts = dataset.features(Columns(data, False, party, parties))
    train, _, (numbers, test_numbers, _) = split(data, parts)
    if dataset.made or train.ndim != 2 or train.dtype.kind not in "biuf":
        raise ConfigError(
            f"{config.data.called} has no columns of numbers, and task = 'information' bins "
            "columns. Name a table by dataset."
        )
    alignment = digest_of_rows(numbers, test_numbers)
    if config.data.presence < 1:
        mask = row_masks_of(config, (numbers, test_numbers), parties)[0][:, party]
        train, numbers = train[mask], numbers[mask]

    def read() -> Iterator[tuple[str, Array]]:
        for number, column in enumerate(train.T):
            yield str(number), column.astype(np.float64)

    return RawColumns(alignment, len(train), read, lambda: numbers.astype(np.uint64))
