"""Data sets: what a party reads (its own columns), and what the label holder reads (the labels).

Both sides derive the same train/test split from the number of rows alone, and compare digests of
the sample ids before training. Either each participant has a file of its own (`own_files`), or
every party reads one named data set and keeps its own block of columns; labels never reach a party
and features never reach the label holder.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.config import RunConfig
from vfl_flower.data.alignment import common_rows
from vfl_flower.data.own_files import OwnFile, Preparation, scaled, scaling
from vfl_flower.errors import ConfigError, VflError

log = logging.getLogger("flwr")

Array = NDArray[Any]


@dataclass(frozen=True)
class FeatureBlock:
    """One party's columns, scaled. ``train`` and ``test`` are float32, [rows, ...sample shape].

    ``preparation`` is what made them of the party's own file, if it has one.
    """

    train: Array
    test: Array
    ids_digest: str
    preparation: Preparation | None = None


@dataclass(frozen=True)
class Labels:
    """What the label holder has of the training and the test rows.

    ``train`` and ``test`` are class indices, int64 [rows], of the label values ``classes``; or
    under regression float32 [rows], the labels less the training labels' ``mean`` over their
    ``deviation``, and there are no classes. ``features`` are columns of its own, if it has any:
    training rows float32 [rows, F] and test rows, as ``preparation`` has made them of its file.
    """

    train: Array
    test: Array
    classes: tuple[str, ...]
    ids_digest: str
    mean: float = 0.0
    deviation: float = 1.0
    features: tuple[Array, Array] | None = None
    preparation: Preparation | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Which rows these are, and what is needed to predict: for a checkpoint, in JSON."""
        labels = hashlib.sha256(self.train.tobytes() + self.test.tobytes())
        return {
            "ids": self.ids_digest,
            "labels": labels.hexdigest(),
            "classes": list(self.classes),
            "mean": self.mean,
            "deviation": self.deviation,
            "preparation": self.preparation.as_json() if self.preparation else None,
        }

    @property
    def outputs(self) -> int:
        """Outputs of the model: one number, one logit for two classes, else one a class."""
        return 1 if len(self.classes) in (0, 2) else len(self.classes)


def load_features(config: RunConfig, party: int, parties: int) -> FeatureBlock:
    """Party ``party``'s block of columns, scaled by what its own training rows say.

    Raises
    ------
    ConfigError
        If the data cannot be read, is empty or not numeric, or has fewer columns than parties.
    """
    return _load_features(_about_data(config), party, parties)


@lru_cache(maxsize=128)
def _load_features(config: RunConfig, party: int, parties: int) -> FeatureBlock:
    source = _open(config)
    parts = source.features(lambda shape: _block(config, shape, party, parties))
    train, test, digest = _split(config, parts)
    mean, deviation = scaling(train, per_column=_is_table(config, train))
    train, test = scaled(train, mean, deviation), scaled(test, mean, deviation)
    if not (np.isfinite(train).all() and np.isfinite(test).all()):
        raise ConfigError(
            f"The columns of party {party} in {config.dataset} have missing or infinite values: "
            "fill them in, or drop those rows, at every party."
        )
    return FeatureBlock(train, test, digest)


def seat(context: Context) -> tuple[int, int]:
    """The index of a node's party, and the number of parties."""
    node = context.node_config
    index, parties = node.get("partition-id"), node.get("num-partitions")
    if not (isinstance(index, int) and isinstance(parties, int) and 0 <= index < parties):
        raise ConfigError(
            "A SuperNode does not know which party it is: start it with "
            "--node-config 'partition-id=0 num-partitions=4', partition-id counting from 0."
        )
    return index, parties


def load_block(context: Context, config: RunConfig) -> FeatureBlock:
    """The columns of a node's party: of its own file, or of the data set that is divided."""
    index, parties = seat(context)
    if not config.own_files:
        if "file" in context.node_config:
            raise ConfigError(
                f"Party {index} has a file of its own, and takes part in nothing else than runs "
                "with dataset = 'files:PATH'."
            )
        return load_features(config, index, parties)
    own, rows = OwnFile.of_party(context.node_config, index), common_rows(context)
    if rows.max() >= len(own.ids):
        raise VflError("has lost rows of its file since they were aligned.")
    return load_own_features(config, own, rows)


def load_own_features(config: RunConfig, own: OwnFile, rows: Array) -> FeatureBlock:
    """A participant's columns of its own file; ``rows`` are the common ones, in common order.

    Raises
    ------
    ConfigError
        If they cannot be read, or are not what ``own`` says of them.
    """
    train_ids, test_ids = _divide(config, len(rows))
    train, test, preparation = own.prepared(rows[train_ids], rows[test_ids])
    return FeatureBlock(train, test, own.digest(rows), preparation)


def load_labels(config: RunConfig) -> Labels:
    """The labels of the training and the test rows.

    Raises
    ------
    ConfigError
        If there is no label column, or its labels are not such as `encode_labels` can use, or
        class weights do not fit them.
    """
    labels = _load_labels(_about_data(config))
    class_weights(config, labels.train, len(labels.classes))  # to find what is wrong
    return labels


@lru_cache(maxsize=4)
def _load_labels(config: RunConfig) -> Labels:
    parts = _open(config).labels()
    if any(part.ndim != 1 for part in parts):
        raise ConfigError(
            f"The labels of {config.dataset} have shape {parts[0].shape}: one a row is needed."
        )
    return encode_labels(config, *_split(config, parts))


def load_own_labels(config: RunConfig, own: OwnFile, rows: Array) -> Labels:
    """The labels, and the label holder's own columns, of the common rows in common order.

    Raises
    ------
    ConfigError
        As `encode_labels` and `load_own_features`.
    """
    train_ids, test_ids = _divide(config, len(rows))
    values = own.labels(rows)
    labels = encode_labels(config, values[train_ids], values[test_ids], own.digest(rows))
    class_weights(config, labels.train, len(labels.classes))  # to find what is wrong
    if not own.feature_names:
        return labels
    block = load_own_features(config, own, rows)
    return replace(labels, features=(block.train, block.test), preparation=block.preparation)


def encode_labels(config: RunConfig, train: Array, test: Array, ids_digest: str) -> Labels:
    """The labels of the training and the test rows, as read [rows], by what ``target`` makes them.

    Raises
    ------
    ConfigError
        If a label is missing; if there are fewer than two classes, or too many; or under regression
        if labels are not numbers, or all the same.
    """
    everything = np.concatenate([train, test])
    absent = everything.dtype.kind == "f" and not np.isfinite(everything).all()
    if absent or (everything.dtype.kind == "O" and any(label is None for label in everything)):
        raise ConfigError(f"The labels of {config.dataset} have missing values: drop those rows.")
    if config.target == "regression":
        return _standardised(config, train, test, ids_digest)
    classes, indices = np.unique(everything, return_inverse=True)
    if not 2 <= len(classes) <= max(2, len(everything) // 2):
        raise ConfigError(
            f"The labels of {config.dataset} take {len(classes)} values in {len(everything)} rows: "
            "classification needs at least two classes with several rows each; for numbers, set "
            "target = 'regression'."
        )
    indices = indices.astype(np.int64)
    return Labels(
        indices[: len(train)], indices[len(train) :], tuple(map(str, classes.tolist())), ids_digest
    )


def _standardised(config: RunConfig, train: Array, test: Array, ids_digest: str) -> Labels:
    if not {train.dtype.kind, test.dtype.kind} <= set("biuf"):
        raise ConfigError(
            f"The labels of {config.dataset} are not numbers, which target = 'regression' needs: "
            "name another label column, or leave target out."
        )
    train, test = train.astype(np.float64), test.astype(np.float64)
    mean, deviation = float(train.mean()), float(train.std())
    if deviation > 1e-9 * abs(mean):  # else they are constant up to rounding
        train, test = (((part - mean) / deviation).astype(np.float32) for part in (train, test))
    if train.min() == train.max() or test.min() == test.max():
        raise ConfigError(
            f"The labels of {config.dataset} are all the same in the training rows or in the test "
            "rows: regression needs labels that differ in both."
        )
    return Labels(train, test, (), ids_digest, mean, deviation)


def class_weights(config: RunConfig, labels: Array, classes: int) -> Array | None:
    """Weights of the classes in the loss, float32 [classes]; none where all weigh the same.

    ``balanced`` makes every class weigh as much as any other over the training rows: N / (classes *
    rows of the class). Parties with shared labels find the same weights.

    Parameters
    ----------
    labels : class indices of the training rows, [N].

    Raises
    ------
    ConfigError
        If the configured weights are not one positive number for each class.
    """
    if not config.class_weights:
        return None
    if config.class_weights == "balanced":
        counts = np.bincount(labels, minlength=classes)
        balanced: Array = len(labels) / (classes * np.maximum(counts, 1))
        return balanced.astype(np.float32)
    try:
        weights = np.array([float(each) for each in config.class_weights.split(",")], np.float32)
    except ValueError:
        weights = np.zeros(1, np.float32)
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ConfigError(
            f"class-weights = {config.class_weights!r} must be 'balanced', or positive numbers "
            "with commas between them, such as '1,5'."
        )
    if len(weights) != classes:
        raise ConfigError(
            f"class-weights = {config.class_weights!r} gives {len(weights)} weights for {classes} "
            "classes: give one for each class, in the order of their names."
        )
    return weights


def _about_data(config: RunConfig) -> RunConfig:
    """What of a run configuration decides the data: runs that differ in the rest share it."""
    return RunConfig(
        dataset=config.dataset,
        label=config.label,
        target=config.target,
        test_fraction=config.test_fraction,
        image_split=config.image_split,
        bottom_model="lstm" if config.bottom_model == "lstm" else "linear",
    )


# --- which columns are a party's ----------------------------------------------------------------


def _block(config: RunConfig, shape: tuple[int, ...], party: int, parties: int) -> Any:
    """Index of a party's columns in an array [rows, *shape]; evenly, by contiguous blocks."""
    if len(shape) == 1 or config.bottom_model == "lstm":
        # A table's columns; or a sequence's signals, each party seeing every time step.
        columns = _cut(shape[-1], party, parties, "columns", config.dataset)
        return (..., columns)
    if config.image_split == "rows":
        return (slice(None), _cut(shape[0], party, parties, "rows of pixels", config.dataset))
    down = max(d for d in range(1, math.isqrt(parties) + 1) if parties % d == 0)
    across = parties // down
    return (
        slice(None),
        _cut(shape[0], party // across, down, "rows of pixels", config.dataset),
        _cut(shape[1], party % across, across, "columns of pixels", config.dataset),
    )


def _cut(size: int, part: int, parts: int, what: str, dataset: str) -> slice:
    if parts > size:
        raise ConfigError(
            f"{dataset} has {size} {what}, too few to divide among {parts}: use fewer parties."
        )
    return slice(part * size // parts, (part + 1) * size // parts)


# --- rows: split, digest, scale -----------------------------------------------------------------


def _split(config: RunConfig, parts: list[Array]) -> tuple[Array, Array, str]:
    """Training and test rows, and a digest of their sample ids, which are row numbers.

    One part is divided at random; two parts are the data set's own division.
    """
    if min(part.size for part in parts) == 0:
        raise ConfigError(f"{config.dataset} has no rows.")
    if len(parts) == 2:
        train_ids = np.arange(len(parts[0]))
        test_ids = np.arange(len(parts[0]), len(parts[0]) + len(parts[1]))
        train, test = parts
    else:
        (rows,) = parts
        train_ids, test_ids = _divide(config, len(rows))
        train, test = rows[train_ids], rows[test_ids]
    digest = hashlib.sha256(train_ids.astype("<i8").tobytes() + b"|")
    digest.update(test_ids.astype("<i8").tobytes())
    return train, test, digest.hexdigest()


def _divide(config: RunConfig, rows: int) -> tuple[Array, Array]:
    """Numbers of the training and test rows, by a permutation that depends on ``rows`` alone."""
    order = np.random.default_rng(0).permutation(rows)
    held_out = math.ceil(config.test_fraction * rows)
    if held_out == rows:
        raise ConfigError(
            f"{config.dataset} has {rows} rows and test-fraction = {config.test_fraction} "
            "leaves none to train on: use more rows or a smaller fraction."
        )
    return order[held_out:], order[:held_out]


def _is_table(config: RunConfig, rows: Array) -> bool:
    return rows.ndim == 2 or config.bottom_model == "lstm"


# --- sources ------------------------------------------------------------------------------------

Columns = Callable[[tuple[int, ...]], Any]
"""From the shape of one sample to the index of a party's columns."""


@dataclass(frozen=True)
class _Source:
    """A data set before its split: one part (all rows) or two (training rows, test rows)."""

    features: Callable[[Columns], list[Array]]
    labels: Callable[[], list[Array]]


def _open(config: RunConfig) -> _Source:
    kind, _, place = config.dataset.partition(":")
    if config.dataset in ("digits", "breast-cancer"):
        return _embedded(config.dataset)
    openers: dict[str, Callable[[RunConfig, str], _Source]] = {
        "npz": _npz,
        "csv": _table,
        "parquet": _table,
        "hf": _hugging_face,
    }
    if kind not in openers or not place:
        raise ConfigError(
            f"dataset = {config.dataset!r} is not known: use digits, breast-cancer, npz:PATH, "
            "csv:PATH, parquet:PATH or hf:NAME_OR_DIR."
        )
    if kind != "hf" and not Path(place).is_file():
        raise ConfigError(f"dataset = {config.dataset!r}: there is no such file.")
    return openers[kind](config, place)


def _embedded(name: str) -> _Source:
    from sklearn import datasets as sklearn_datasets

    if name == "digits":
        digits = sklearn_datasets.load_digits()
        rows, labels = digits.images, digits.target
    else:
        rows, labels = sklearn_datasets.load_breast_cancer(return_X_y=True)
    return _Source(lambda columns: [rows[columns(rows.shape[1:])]], lambda: [labels])


def _npz(config: RunConfig, place: str) -> _Source:
    """Arrays X_train, y_train, X_test, y_test; or X, y. Nothing is unpickled."""

    def arrays(letter: str) -> list[Array]:
        try:
            with np.load(place, allow_pickle=False) as file:
                names = [f"{letter}_train", f"{letter}_test"]
                names = names if set(names) <= set(file.files) else [letter]
                return [file[name] for name in names]
        except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"{config.dataset} cannot be read: it needs numeric arrays X_train, y_train, "
                "X_test and y_test, or X and y."
            ) from error

    def features(columns: Columns) -> list[Array]:
        parts = arrays("X")
        shapes = {rows.shape[1:] for rows in parts}
        if any(rows.dtype.kind not in "biuf" or rows.ndim < 2 for rows in parts) or len(shapes) > 1:
            raise ConfigError(
                f"X of {config.dataset} must be numeric arrays, whose rows all have one shape."
            )
        return [rows[columns(rows.shape[1:])] for rows in parts]

    return _Source(features, lambda: arrays("y"))


def _table(config: RunConfig, place: str) -> _Source:
    """A csv or parquet file with a header: one label column, all others numeric features."""
    import pandas as pd
    import pyarrow.parquet as pq

    csv = config.dataset.startswith("csv:")
    try:
        names = list(pd.read_csv(place, nrows=0)) if csv else pq.read_schema(place).names
    except (ValueError, OSError) as error:
        raise ConfigError(f"{config.dataset} cannot be read as a table with a header.") from error

    def read(columns: list[str]) -> Any:
        return (
            pd.read_csv(place, usecols=columns) if csv else pd.read_parquet(place, columns=columns)
        )

    def features(columns: Columns) -> list[Array]:
        mine = _own_columns(config, names, columns)
        frame = read(mine)[mine]
        _all_numeric(config, {name: frame[name].dtype.kind for name in mine})
        return [frame.to_numpy(dtype=np.float64)]

    def labels() -> list[Array]:
        _has_label(config, names)
        column = read([config.label])[config.label]
        if column.isna().any():
            raise ConfigError(f"Column {config.label!r} of {config.dataset} has missing labels.")
        return [column.to_numpy()]

    return _Source(features, labels)


def _hugging_face(config: RunConfig, place: str) -> _Source:
    """A data set of the `datasets` library: a hub id, a folder of files, or a saved data set."""
    import datasets as hugging_face

    try:
        if (Path(place) / "dataset_dict.json").is_file() or (Path(place) / "state.json").is_file():
            loaded = hugging_face.load_from_disk(place)
        else:
            loaded = hugging_face.load_dataset(place)
    except Exception as error:  # the library raises many kinds, and its own texts are long
        raise ConfigError(
            f"{config.dataset} cannot be loaded by the datasets library "
            f"({type(error).__name__}): check the name, or the folder."
        ) from error
    if isinstance(loaded, hugging_face.Dataset):
        parts = [loaded]
    elif "train" not in loaded:
        raise ConfigError(f"{config.dataset} has no part named 'train': rename its training part.")
    else:
        parts = [loaded[name] for name in ("train", "test") if name in loaded]
    names = parts[0].column_names

    def column(part: Any, name: str) -> Array:
        try:
            return np.asarray(part.select_columns([name]).with_format("numpy")[:][name])
        except (ValueError, TypeError, IndexError) as error:
            raise _of_column(config, name, "has rows of unequal shape: make them equal.") from error

    def features(columns: Columns) -> list[Array]:
        others = [name for name in names if name != config.label]
        if len(others) == 1:
            rows = [column(part, others[0]) for part in parts]
            _all_numeric(config, {others[0]: rows[0].dtype.kind})
            if rows[0].ndim > 1:  # images or sequences
                if len({each.shape[1:] for each in rows}) > 1:
                    raise ConfigError(f"The parts of {config.dataset} have rows of unequal shape.")
                return [each[columns(each.shape[1:])] for each in rows]
        mine = _own_columns(config, names, columns)
        table = [{name: column(part, name) for name in mine} for part in parts]
        _all_numeric(config, {name: c.dtype.kind for name, c in table[0].items()})
        wide = [name for name in mine if table[0][name].ndim > 1]
        if wide:
            raise _of_column(
                config,
                wide[0],
                "holds arrays beside other columns: keep either one column of arrays, or columns "
                "of numbers.",
            )
        return [np.stack(list(each.values()), axis=1) for each in table]

    def labels() -> list[Array]:
        _has_label(config, names)
        return [column(part, config.label) for part in parts]

    return _Source(features, labels)


def _own_columns(config: RunConfig, names: list[str], columns: Columns) -> list[str]:
    others = [name for name in names if name != config.label]
    own: list[str] = others[columns((len(others),))[-1]]
    return own


def _has_label(config: RunConfig, names: list[str]) -> None:
    if config.label not in names:
        raise ConfigError(
            f"{config.dataset} has no label column {config.label!r}: set `label` to one of "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )


def _all_numeric(config: RunConfig, kinds: dict[str, str]) -> None:
    text = [name for name, kind in kinds.items() if kind not in "biuf"]
    if text:
        raise _of_column(config, text[0], "is not numeric: encode it as numbers first.")


def _of_column(config: RunConfig, name: str, what: str) -> ConfigError:
    """What is wrong with a column, without its name: the sentence may leave the party."""
    log.warning("Column %r of %s %s", name, config.dataset, what)
    return ConfigError(f"A column of {config.dataset}, named in the party's own log, {what}")
