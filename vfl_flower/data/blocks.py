"""What each end of a run reads: a party its features, the label holder labels and its own features.

Either each participant has data of its own (`source`, `own_files`), or every party reads one named
data set and keeps its own block of columns (`divided`); labels never reach a party and features
never reach the label holder. Both sides derive the same train/test split from the number of rows
alone, and before training see that they speak of the same rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import augmentation, memory
from vfl_flower.data.augmentation import Augment
from vfl_flower.data.common_rows import Alignment
from vfl_flower.data.labels import Labels, as_known, class_weights, digest_of_labels, encode_labels
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.partitioned import Divided, open_dataset
from vfl_flower.data.row_mask import Known, drawn
from vfl_flower.data.source import Compact, Moments, Preparation, Rows, Source, scaled, scaling
from vfl_flower.data.split import digest_of_rows, divide, split
from vfl_flower.data.tables import Table

Array = NDArray[Any]
Places = NDArray[np.int64]

_MANY_PIXELS = 2**27  # bytes of images in single precision, beyond which their pixels are held


@dataclass(frozen=True)
class FeatureBlock:
    """One party's features: ``train`` and ``test`` are samples of so many rows, or read them.

    Of those held out as ``test`` the first ``validation`` choose the model.

    ``ids_digest`` is of its rows' ids, and of own data known to the party alone; ``alignment`` is
    what it says of its rows to the label holder (`transport.messages.Description`).
    ``preparation`` is what made the features of the party's own data, if it has some.
    ``train_rows`` and ``test_rows`` are numbers by which the party knows the rows again, whatever
    their order; of own data none, where it counts no uploads. ``augment`` is what it does to
    samples in training passes. ``known`` says which of the run's training and test rows these are,
    where the party lacks some.
    """

    train: Array | Rows | Compact
    test: Array | Rows | Compact
    ids_digest: str
    preparation: Preparation | None = None
    alignment: str = ""
    train_rows: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    test_rows: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    augment: Augment = augmentation.none
    known: tuple[Known, Known] | None = None
    validation: int = 0

    @property
    def tested(self) -> NDArray[np.int32]:
        """Where among the test samples those are that nothing was chosen by."""
        return np.arange(self.validation, len(self.test), dtype=np.int32)


@dataclass(frozen=True)
class ArrayBlock(FeatureBlock):
    """Features that are in memory."""

    train: Array
    test: Array


# --- a party ------------------------------------------------------------------------------------


def own_table(data: DataConfig) -> Table:
    """The label holder's own table: ids, labels, and perhaps features."""
    if data.dataset.startswith("memory:"):
        return memory.of_label_holder(data)
    return OwnFile.of_label_holder(data)


def load_own_features(
    data: DataConfig,
    own: Source,
    common: Alignment,
    counted: bool = False,
    preparation: Preparation | None = None,
) -> FeatureBlock:
    """A participant's own features of the common rows; with their numbers, if they are counted.

    Parameters
    ----------
    preparation : that of an earlier run; else the training rows teach it.

    Raises
    ------
    ConfigError
        If they cannot be read, or are not what ``own`` says of them.
    """
    *places, validation = divide(data, len(common.rows))
    parts = [common.rows[each] for each in places]
    train, test = (part[part >= 0] for part in parts)
    validation = int((parts[1][:validation] >= 0).sum())
    if not len(train):
        raise ConfigError(f"{own.whose} has none of the training rows: more of them are needed.")
    known = None
    if data.align != "any":
        _check_has_all(own, common)
    elif own.party is not None:
        known = Known.of(parts[0] >= 0), Known.of(parts[1] >= 0)
    digest = own.digest(common.rows[common.rows >= 0])
    none = train[:0]
    names = (own.names(train), own.names(test)) if counted else (none, none)
    own.forget_ids()  # before there is anything else that takes much memory
    if preparation is None:
        _check_no_labels(own, data.label)
        preparation = own.learn(train)
    samples = [prepared(own, part, preparation) for part in (train, test)]
    block = FeatureBlock(samples[0], samples[1], digest, preparation, common.name, *names)
    return replace(block, known=known, validation=validation)


def _check_no_labels(own: Source, label: str) -> None:
    """Refuse a party's file with a column that is called as the labels, unless that is named."""
    if not isinstance(own, OwnFile) or own.party is None or own.columns:
        return
    if label in own.feature_names:
        raise ConfigError(
            f"{own.whose} has a column of the label's name, by which it would learn the label from "
            "itself: leave that column out, or name the feature columns by `columns`."
        )


def _check_has_all(own: Source, common: Alignment) -> None:
    """Refuse, by `ConfigError`, that one lacks a row, by which its others would be shifted."""
    if (common.rows < 0).any():
        raise ConfigError(f"{own.whose} lacks rows that all are to have: only align = 'any' can.")


def prepared(own: Source, rows: Array, preparation: Preparation) -> Array | Rows | Compact:
    """Samples of own rows: read now, or if the source is lazy when they are used."""
    if own.lazy:
        return Rows(own, rows, preparation)
    found = own.rows(rows, preparation)
    if isinstance(found, np.ndarray):
        return found
    parts = dict(found)
    return Compact(
        np.arange(len(rows)), lambda at: {name: each[at] for name, each in parts.items()}
    )


def load_features(config: RunConfig, party: int, parties: int) -> ArrayBlock:
    """`load_part`, in memory: float32 [rows, ...]."""
    block = load_part(config, party, parties)
    if isinstance(block, ArrayBlock):
        return block
    parts = {name: np.asarray(getattr(block, name)[:]) for name in ("train", "test")}
    return ArrayBlock(**{**vars(block), **parts})


def load_part(config: RunConfig, party: int, parties: int) -> FeatureBlock:
    """Party ``party``'s block of columns of a divided data set, scaled by its own training rows.

    Raises
    ------
    ConfigError
        If the data cannot be read, is empty or not numeric, or has fewer columns than parties.
    """
    data, sequences = config.data, config.models.bottom == "lstm"
    block = _load_part(_decisive(data), _version(data), sequences, party, parties)
    return block if data.presence >= 1 else _with_presence(block, config, party, parties)


def _with_presence(
    block: FeatureBlock, config: RunConfig, party: int, parties: int
) -> FeatureBlock:
    """Those rows of a divided data set that are a party's (`presence.drawn`)."""
    numbers = block.train_rows, block.test_rows
    has = drawn(config, 1 + max(int(part.max()) for part in numbers), parties)[:, party]
    known = Known.of(has[numbers[0]]), Known.of(has[numbers[1]])
    if not len(known[0].ids):
        raise ConfigError(
            f"presence = {config.data.presence} leaves party {party} no training row: raise it."
        )
    rows = [numbers[part][known[part].ids] for part in (0, 1)]
    of = block.train, block.test
    train, test = (_some(part, each.ids) for part, each in zip(of, known, strict=True))
    validation = int((known[1].ids < block.validation).sum())
    rest: dict[str, Any] = {"train_rows": rows[0], "test_rows": rows[1], "known": known}
    return replace(block, train=train, test=test, validation=validation, **rest)


def _some(rows: Array | Rows | Compact, ids: Array) -> Array | Compact:
    return rows[ids] if isinstance(rows, np.ndarray) else Compact(ids, rows.__getitem__)


@lru_cache(maxsize=128)
def _load_part(
    data: DataConfig, version: Any, sequences: bool, party: int, parties: int
) -> FeatureBlock:
    opened = _opened(data, version)
    found = opened.features(lambda shape: _block(data, sequences, shape, party, parties))
    train, test, (train_rows, test_rows, validation) = split(data, found)
    digest = digest_of_rows(train_rows, test_rows)
    about: dict[str, Any] = {"ids_digest": digest, "alignment": digest, "validation": validation}
    about |= {"train_rows": train_rows, "test_rows": test_rows}
    if opened.made:  # of texts
        return FeatureBlock(Compact(train, opened.made), Compact(test, opened.made), **about)
    per_column = train.ndim == 2 or sequences
    if train.dtype == np.uint8 and not per_column and 4 * train.size > _MANY_PIXELS:
        moments = Moments()
        for at in range(0, len(train), 1024):
            moments.add(train[at : at + 1024].reshape(-1, 1))
        mean, deviation = map(np.array, moments.found())
        made = partial(scaled, mean=mean, deviation=deviation)
        return FeatureBlock(Compact(train, made), Compact(test, made), **about)
    mean, deviation = scaling(train, per_column)
    train, test = scaled(train, mean, deviation), scaled(test, mean, deviation)
    if not (np.isfinite(train).all() and np.isfinite(test).all()):
        raise ConfigError(
            f"The columns of party {party} in {data.called} have missing or infinite values: "
            "fill them in, or drop those rows, at every party."
        )
    return ArrayBlock(train, test, **about)


# --- the label holder ---------------------------------------------------------------------------


def load_labels(config: RunConfig) -> Labels:
    """The labels of the training and the test rows of a divided data set.

    Raises
    ------
    ConfigError
        If there is no label column, or its labels are not such as `encode_labels` can use, or
        class weights do not fit them.
    """
    labels = _load_labels(_decisive(config.data), _version(config.data))
    class_weights(config.data, labels.train, len(labels.classes))  # to find what is wrong
    return labels


def with_presence(labels: Labels, config: RunConfig, parties: int) -> Labels:
    """Labels that know which party has which row of a divided data set, if any lacks some."""
    if config.data.own_data or config.data.presence >= 1:
        return labels
    assert labels.places is not None and labels.test_places is not None
    numbers = labels.places, labels.test_places
    has = drawn(config, 1 + max(int(part.max()) for part in numbers), parties)
    return replace(labels, present=(has[numbers[0]], has[numbers[1]]))


@lru_cache(maxsize=4)
def _load_labels(data: DataConfig, version: Any) -> Labels:
    parts = _opened(data, version).labels()
    if any(part.ndim != 1 for part in parts):
        raise ConfigError(
            f"The labels of {data.called} have shape {parts[0].shape}: one a row is needed."
        )
    train, test, (*rows, validation) = split(data, parts)
    digest = digest_of_rows(*rows)
    whole = digest_of_labels("", data.target == "regression", *parts)
    labels = encode_labels(data, train, test, digest)
    labels = replace(labels, alignment=digest, whole=whole)
    return replace(labels, places=rows[0], test_places=rows[1], validation=validation)


def load_own_labels(
    data: DataConfig, own: Table, common: Alignment, about: Mapping[str, Any] | None = None
) -> Labels:
    """The labels, and the label holder's own columns, of the common rows.

    Parameters
    ----------
    about : `Labels.about` of the run by whose model this one begins, if it does.

    Raises
    ------
    ConfigError
        As `encode_labels` and `load_own_features`.
    """
    train, test, validation = divide(data, len(common.rows))
    values, digest = own.labels(common.rows), own.digest(common.rows)
    labels = encode_labels(data, values[train], values[test], digest)
    labels = labels if about is None else as_known(data, labels, about)
    if own.has_ids:
        people = own.people(common.rows)
        labels = replace(labels, people=(people[train], people[test]))
    else:
        every = np.arange(len(own.ids))
        known = own.labels_with_gaps(every)
        whole = digest_of_labels(own.digest(every), data.target == "regression", known)
        labels = replace(labels, whole=whole)
    labels = replace(labels, places=common.rows[train], test_places=common.rows[test])
    labels = replace(labels, alignment=common.name, validation=validation)
    if common.present is not None:
        labels = replace(labels, present=(common.present[train], common.present[test]))
    class_weights(data, labels.train, len(labels.classes))  # to find what is wrong
    then = about["preparation"] if about else None
    if about and bool(then) != bool(own.feature_names):
        raise ConfigError(
            f"{own.path} has feature columns, or has none, other than when the model by which this "
            "run begins was trained: give it those of then, or leave grow out."
        )
    if not own.feature_names:
        return labels
    preparation = Preparation(**then) if then else None
    block = load_own_features(data, own, common, preparation=preparation)
    features = np.asarray(block.train[:]), np.asarray(block.test[:])
    return replace(labels, features=features, preparation=block.preparation)


# --- what is read again -------------------------------------------------------------------------


@lru_cache(maxsize=1)  # of images, all parties' are decoded at once
def _opened(data: DataConfig, version: Any) -> Divided:
    return open_dataset(data)


def _decisive(data: DataConfig) -> DataConfig:
    """What decides the data: runs that differ in the rest share it."""
    as_always = replace(data, id="id", columns="", missing="refuse", text="refuse", presence=1.0)
    return replace(as_always, class_weights="", augment="none")


def _version(data: DataConfig) -> Any:
    """What changes when the files of a data set do, so that no old content is used again."""
    kind, _, place = data.dataset.partition(":")
    if not place:
        return ()
    path = Path(kind if kind.endswith(".py") else place).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path, Path(f"{path}.t")]
    return tuple((str(f), s.st_size, s.st_mtime_ns) for f in files if (s := _stat(f)))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


# --- which columns are a party's ----------------------------------------------------------------


def _block(
    data: DataConfig, sequences: bool, shape: tuple[int, ...], party: int, parties: int
) -> Any:
    """Index of a party's columns in an array [rows, *shape]; evenly, by contiguous blocks."""
    if len(shape) == 1 or sequences:
        # A table's columns; or a sequence's signals, each party seeing every time step.
        columns = _cut(shape[-1], party, parties, "columns", data.dataset)
        return (..., columns)
    if data.image_split == "flat":
        pixels = _cut(shape[0] * shape[1], party, parties, "pixels", data.dataset)
        return (slice(None), *np.unravel_index(np.r_[pixels][:, None], shape[:2]))
    if data.image_split == "rows":
        return (slice(None), _cut(shape[0], party, parties, "rows of pixels", data.dataset))
    if data.image_split == "columns":
        mine = _cut(shape[1], party, parties, "columns of pixels", data.dataset)
        return (slice(None), slice(None), mine)
    down = max(d for d in range(1, math.isqrt(parties) + 1) if parties % d == 0)
    across = parties // down
    return (
        slice(None),
        _cut(shape[0], party // across, down, "rows of pixels", data.dataset),
        _cut(shape[1], party % across, across, "columns of pixels", data.dataset),
    )


def _cut(size: int, part: int, parts: int, what: str, dataset: str) -> slice:
    if parts > size:
        raise ConfigError(
            f"{dataset} has {size} {what}, too few to divide among {parts}: use fewer parties."
        )
    return slice(part * size // parts, (part + 1) * size // parts)
