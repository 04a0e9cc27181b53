"""A party's features: its own data, or its columns of a partitioned data set.

`data.at_label_holder` is the label holder's half. Both derive the same split into training and test
rows from the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.config.provenance import return_memory
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.drift import Watch, columns_of, sampled
from vfl_flower.data.own_columns import OwnColumns, signs_of
from vfl_flower.data.partitioned import Columns, decisive, opened, version_of
from vfl_flower.data.samples import Augment
from vfl_flower.data.source import (
    Compact,
    Moments,
    Named,
    Preparation,
    Rows,
    Source,
    scaled,
    scaling,
)
from vfl_flower.data.split import (
    Alignment,
    RowMask,
    background_rows,
    digest_of_rows,
    divide,
    row_masks_of,
    split,
)
from vfl_flower.data.tables import Table

_MANY_PIXELS = 2**27  # bytes of images in single precision; above, keep their pixels as bytes


@dataclass(frozen=True)
class FeatureBlock:
    """One party's features.

    train, test : samples of the training and the test rows, or readers of them.
    ids_digest : digest of the rows' ids. With own data, only the party knows it.
    alignment : the party's statement about its rows (`transport.messages.Description`).
    train_rows, test_rows : numbers that identify the rows in any order. With own data they are
        empty unless the party counts uploads.
    row_masks : which of the run's training and test rows these are, if the party lacks rows.
    validation : number of validation rows, which come first in ``test`` and choose the model.
    background : numbers of the people in `background_rows` of own data, 0 where the party lacks
        them. It comes with ``shares``.
    """

    train: Array | Rows | Compact
    test: Array | Rows | Compact
    ids_digest: str
    preparation: Preparation | None = None
    alignment: str = ""
    train_rows: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    test_rows: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    augment: Augment = samples.none
    row_masks: tuple[RowMask, RowMask] | None = None
    validation: int = 0
    shares: Watch | None = None  # of the raw columns at the training rows, if asked for
    count: int = 0  # rows of the party's own data, with those that the run leaves out
    background: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def tested(self) -> NDArray[np.int32]:
        """Return the places of the test samples that did not choose the model."""
        return np.arange(self.validation, len(self.test), dtype=np.int32)


@dataclass(frozen=True)
class ArrayBlock(FeatureBlock):
    """Features in memory."""

    train: Array
    test: Array


# --- own data ------------------------------------------------------------------------------------


def load_own_features(
    data: DataConfig,
    own: Source,
    common: Alignment,
    counted: bool = False,
    preparation: Preparation | None = None,
    watched: bool = False,
) -> FeatureBlock:
    """Return a participant's own features of the common rows.

    Uploads of rows that are ``counted`` need numbers, and columns that are ``watched`` shares.
    """
    *places, validation = divide(data, len(common.rows), common.held_out)
    parts = [common.rows[each] for each in places]
    train, test = training_rows(own, parts[0]), parts[1][parts[1] >= 0]
    validation = int((parts[1][:validation] >= 0).sum())
    known = None
    if data.align != "any":
        _check_has_all(own, common)
    elif own.party is not None:
        known = RowMask.of(parts[0] >= 0), RowMask.of(parts[1] >= 0)
    digest, count = own.digest(common.rows[common.rows >= 0]), len(own.ids)
    named = {"train_rows": train, "test_rows": test} if counted else {}
    numbers: dict[str, Any] = {name: own.names(rows) for name, rows in named.items()}
    few = parts[1][background_rows(len(parts[1]))]
    background = np.zeros(len(few), np.uint64)
    background[few >= 0] = own.names(few[few >= 0])
    own.forget_ids()  # before anything else takes much memory
    return_memory(count)
    if preparation is None:
        _check_no_labels(own, data.label)
        preparation = own.learn(train)
    _check_monotonic(own, preparation)
    block = FeatureBlock(
        prepared(own, train, preparation),
        prepared(own, test, preparation),
        digest,
        preparation,
        common.name,
        row_masks=known,
        validation=validation,
        count=count,
        **numbers,
    )
    return_memory(count)
    if not watched:
        return block
    few = train[sampled(len(train), len(preparation.mean))]
    shares = Watch.learn(own.raw_columns(few, dates=preparation.dates))
    return replace(block, shares=shares, background=background)


def training_rows(own: Source, rows: Array) -> Array:
    """Return the places of the training rows that are there, at least one."""
    if not len(rows := rows[rows >= 0]):
        raise ConfigError(f"{own.whose} has none of the training rows. Provide more rows.")
    return rows


def _check_no_labels(own: Source, label: str) -> None:
    """Refuse a column with the label's name in a table, unless `columns` names it."""
    if not isinstance(own, Table) or own.party is None:
        return
    is_named = own.columns and not own.leaves_out
    if not is_named and label in own.feature_names:
        raise ConfigError(
            f"{own.whose} has a column of the label's name, so the label would predict itself. "
            "Leave that column out, or name the feature columns by `columns`."
        )


def _check_monotonic(own: Source, preparation: Preparation) -> None:
    """Refuse another `monotonic` than the one that the model was trained with."""
    if isinstance(own, OwnColumns) and (
        wrong := dict(signs_of(own.monotonic).items() ^ preparation.monotone.items())
    ):
        raise own.wrong(
            "has other monotonic columns than its model, or `monotonic` names no column of "
            "numbers. Write 'a:+,b:-'.",
            f"monotonic = {own.monotonic!r}. Look at {', '.join(map(repr, wrong))}.",
        )


def _check_has_all(own: Source, common: Alignment) -> None:
    """Refuse a missing row, which would shift the other rows."""
    if (common.rows < 0).any():
        raise ConfigError(f"{own.whose} lacks rows that all parties need. Set align = 'any'.")


def prepared(own: Source, rows: Array, preparation: Preparation) -> Array | Rows | Compact:
    """Return samples of own rows. Read them now, or on use if the source is lazy."""
    if own.lazy:
        return Rows(own, rows, preparation)
    samples = own.rows(rows, preparation)
    if isinstance(samples, np.ndarray):
        return samples
    every, parts = np.arange(len(rows)), dict(samples)
    return Compact(every, lambda at: {name: each[at] for name, each in parts.items()})


# --- a partitioned data set -----------------------------------------------------------------------


def load_features(config: RunConfig, party: int, parties: int) -> ArrayBlock:
    """Return the features of `load_partition` in memory: float32 [rows, ...]."""
    block = load_partition(config, party, parties)
    if isinstance(block, ArrayBlock):
        return block
    parts = {name: np.asarray(getattr(block, name)[:]) for name in ("train", "test")}
    return ArrayBlock(**{**vars(block), **parts})


def load_partition(config: RunConfig, party: int, parties: int) -> FeatureBlock:
    """Return a party's columns of a partitioned data set, scaled by its training rows.

    It may lack rows (`row_masks_of`).
    """
    data, sequences = config.data, config.models.bottom == "lstm"
    block = _load_part(decisive(data), version_of(data), sequences, party, parties)
    if data.presence >= 1:
        return block
    numbers = block.train_rows, block.test_rows
    has = row_masks_of(config, numbers, parties)
    known = RowMask.of(has[0][:, party]), RowMask.of(has[1][:, party])
    if not len(known[0].ids):
        raise ConfigError(
            f"presence = {data.presence} leaves party {party} no training row. Raise it."
        )
    train, test = (
        rows[has.ids] if isinstance(rows, np.ndarray) else Compact(has.ids, rows.__getitem__)
        for rows, has in zip((block.train, block.test), known, strict=True)
    )
    return replace(
        block,
        train=train,
        test=test,
        validation=int((known[1].ids < block.validation).sum()),
        train_rows=numbers[0][known[0].ids],
        test_rows=numbers[1][known[1].ids],
        row_masks=known,
    )


@lru_cache(maxsize=128)
def _load_part(
    data: DataConfig, version: Any, sequences: bool, party: int, parties: int
) -> FeatureBlock:
    dataset = opened(data, version)
    parts = dataset.features(Columns(data, sequences, party, parties))
    train, test, (train_rows, test_rows, validation) = split(data, parts)
    digest = digest_of_rows(train_rows, test_rows)
    about: dict[str, Any] = {"ids_digest": digest, "alignment": digest, "validation": validation}
    about |= {"train_rows": train_rows, "test_rows": test_rows}
    if dataset.made:  # texts
        return FeatureBlock(Compact(train, dataset.made), Compact(test, dataset.made), **about)
    per_column = train.ndim == 2 or sequences
    if train.dtype == np.uint8 and not per_column and 4 * train.size > _MANY_PIXELS:
        moments = Moments()
        for at in range(0, len(train), 1024):
            moments.add(train[at : at + 1024].reshape(-1, 1))
        mean, deviation = map(np.array, moments.result())
        made = partial(scaled, mean=mean, deviation=deviation)
        return FeatureBlock(Compact(train, made), Compact(test, made), **about)
    mean, deviation = scaling(train, per_column)
    train, test = scaled(train, mean, deviation), scaled(test, mean, deviation)
    if not (np.isfinite(train).all() and np.isfinite(test).all()):
        raise ConfigError(
            f"The columns of party {party} in {data.called} have missing or infinite values. "
            "Fill them in, or drop those rows at every party."
        )
    return ArrayBlock(train, test, **about)


@dataclass(frozen=True)
class RawColumns:
    """A participant's columns in its n training rows."""

    alignment: str  # statement about the rows, as in `transport.messages.Description`
    rows: int
    read: Callable[[], Named]  # yields the name and the values [n] of each column
    people: Callable[[], NDArray[np.uint64]]  # returns a number for each row's person, [n]


def own_columns(data: DataConfig, own: Source, common: Alignment) -> RawColumns:
    """Return a participant's own columns."""
    places, *_ = divide(data, len(common.rows), common.held_out)
    train = training_rows(own, common.rows[places])
    read, people = partial(_checked, own, train), partial(own.people, train)
    return RawColumns(common.name, len(train), read, people)


def _checked(own: Source, places: Array) -> Named:
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
    """Return a party's columns of a partitioned data set. Their names are their numbers."""
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
    people = partial(numbers.astype, np.uint64)

    def read() -> Named:  # one column at a time, since all would double the memory
        return ((name, column.astype(np.float64)) for name, column in columns_of(train))

    return RawColumns(alignment, len(train), read, people)
