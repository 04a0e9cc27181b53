"""Labels for training: class indices or standardised numbers, and class weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.options import DataConfig
from vfl_flower.data.drift import Watch
from vfl_flower.data.source import Preparation, Rows, alike, scaling

FEW = 50  # training or test rows
_MOST_NUMBERS = 20  # values with a decimal point that may still be classes


@dataclass(frozen=True)
class LabelNoise:
    """Parameters of the noise on labels, to correct figures for it."""

    kept: float = 1.0  # probability that a class label is the true one; any other is as likely
    variance: float = 0.0  # of the noise on a number, in squared units of standardised labels


@dataclass(frozen=True)
class Labels:
    """The label holder's training rows, and held-out rows, here called test rows.

    train, test : class indices, int64 [rows], into ``classes``. Under regression, float32 [rows]:
        the labels minus the training labels' ``mean``, divided by their ``deviation``.
    classes : label values of the classes; empty under regression.
    features : the label holder's own columns, if any: float32 [rows, F] of training and of test
        rows, made by ``preparation`` from its file. Training rows of a large table are on disk.
    places, test_places : numbers of the rows among all rows of the label holder.
    people : numbers of the ids of training and test rows (`Source.people`), if rows have ids.
    coverage : the people of the file that the run covers, and why others are left out.
    segments : name of a column -> its values in the test rows, for columns that ``segments`` names.
    """

    train: Array
    test: Array
    classes: tuple[bool | int | float | str, ...]
    ids_digest: str
    mean: float = 0.0
    deviation: float = 1.0
    features: tuple[Array | Rows, Array] | None = None
    preparation: Preparation | None = None
    alignment: str = ""  # the statement about rows that parties must make (`messages.Description`)
    places: Array | None = None
    test_places: Array | None = None
    people: tuple[Array, Array] | None = None
    whole: str = ""  # digest of all labels in their order, if rows have no ids
    bounds: tuple[float, float] | None = None  # of regression labels, if configured
    present: tuple[Array, Array] | None = None  # row masks [rows, M] of training and test rows
    validation: int = 0  # number of test rows, from the first, that choose the model
    coverage: Mapping[str, Any] | None = None
    segments: Mapping[str, Array] = field(default_factory=dict)
    shares: Watch | None = None  # of own columns at the training rows

    @property
    def repeats(self) -> bool:
        """Return whether the test rows are the training rows, since none are held out."""
        if self.places is None or self.test_places is None:
            return False
        return bool(np.isin(self.test_places[self.validation :][:1], self.places).any())

    @property
    def compared(self) -> int:
        """Return how many test rows, from the first, set the limits of embeddings.

        They are the validation rows, or without these some test rows: nobody reads their labels.
        """
        return self.validation or (0 if self.repeats else min(len(self.test), 20_000))

    @property
    def tested(self) -> Labels:
        """Return these labels without validation rows, which chose the model."""
        first = self.validation
        pairs = {"features": self.features, "present": self.present, "people": self.people}
        tested: dict[str, Any] = {k: v and (v[0], v[1][first:]) for k, v in pairs.items()}
        return replace(
            self,
            test=self.test[first:],
            test_places=None if self.test_places is None else self.test_places[first:],
            segments={name: values[first:] for name, values in self.segments.items()},
            validation=0,
            **tested,
        )

    @property
    def share_tested(self) -> float:
        """Return the ``test-fraction`` that holds out exactly these test rows."""
        tested, rows = len(self.test) - self.validation, len(self.train) + len(self.test)
        exact = math.ceil(tested / rows * rows) == tested
        return tested / rows if exact else math.nextafter(tested / rows, 0)

    def warn_of_few(self) -> None:
        """Warn if figures on so few rows would depend on chance."""
        test = len(self.test) - self.validation
        if min(len(self.train), test) < FEW:
            notice.warning(
                "There are %d training rows and %d test rows. Figures on fewer than %d depend on "
                "chance: use more rows, or another test-fraction.",
                *(len(self.train), test, FEW),
            )

    def about(self, private: bool = False) -> dict[str, Any]:
        """Return the rows' identity, and what prediction needs: for a checkpoint, in JSON.

        ``private`` omits a digest of the labels: it would reveal a label to a reader of all others.
        """
        labels = hashlib.sha256(self.train.tobytes() + self.test.tobytes())
        return {
            "ids": self.ids_digest,
            "alignment": self.alignment,
            "labels": "" if private else labels.hexdigest(),
            "classes": list(self.classes),
            "mean": self.mean,
            "deviation": self.deviation,
            "preparation": self.preparation.as_json() if self.preparation else None,
        }

    def differ_from(self, about: Mapping[str, Any]) -> bool:
        """Return whether rows, classes or values differ from a checkpoint's (`about`)."""
        about = {name: value for name, value in about.items() if name != "coverage"}
        return not alike(self.about(private=not about["labels"]), about)

    def prior(self, kept: float) -> list[float]:
        """Return outputs for a row that no party has: from class shares, or the mean."""
        if not self.classes:
            return [float(self.train.mean())]
        counts = _counts(self.train, len(self.classes), kept)
        chances = np.maximum(counts, 1) / np.maximum(counts, 1).sum()
        if len(chances) == 2:
            return [float(np.log(chances[1] / chances[0]))]
        return np.log(chances).tolist()

    @property
    def outputs(self) -> int:
        """Return the model's outputs: 1 for numbers or two classes, else one a class."""
        return 1 if len(self.classes) in (0, 2) else len(self.classes)


def check(data: DataConfig) -> None:
    """Raise `ConfigError` if options of the labels contradict each other."""
    if data.target == "regression" and data.class_weights:
        raise ConfigError(
            "class-weights is for classes, and target = 'regression' has no classes. Leave one of "
            "them out."
        )
    bounds(data)


def bounds(data: DataConfig) -> tuple[float, float] | None:
    """Return the bounds of ``label-range``, if given."""
    if not data.label_range:
        return None
    if data.target != "regression":
        raise ConfigError(
            "label-range is for target = 'regression'. Set that target, or leave label-range out."
        )
    try:
        low, high = (float(each) for each in data.label_range.split(","))
    except ValueError:
        low = high = math.nan
    if not -1e38 < low < high < 1e38:
        raise ConfigError(
            f"label-range = {data.label_range!r} is not a range. Give two numbers, the lower one "
            "first, with a comma between them, such as '0,120'."
        )
    return low, high


def digest_of_labels(rows: str, regression: bool, *parts: Array) -> str:
    """Return a digest of all labels in their order, for a data set without ids."""
    texts = any(part.dtype.kind == "O" for part in parts)
    values = np.concatenate([part.astype(str) if texts else part for part in parts])
    if not regression or values.dtype.kind not in "biuf":
        values = np.unique(values, return_inverse=True)[1]
    return hashlib.sha256(rows.encode() + values.astype("<f8").tobytes()).hexdigest()


def _counts(labels: Array, classes: int, kept: float) -> Array:
    """Return the rows of each class, [classes]; estimated if ``kept`` is below 1."""
    counts = np.bincount(labels, minlength=classes)
    other = (1 - kept) / max(1, classes - 1)
    return np.maximum((counts - other * len(labels)) / (kept - other), 1)


def encode_labels(data: DataConfig, train: Array, test: Array, ids_digest: str) -> Labels:
    """Encode labels [rows] of training and test rows, by the option ``target``."""
    everything = np.concatenate([train, test])
    absent = everything.dtype.kind == "f" and not np.isfinite(everything).all()
    if absent or (everything.dtype.kind == "O" and any(label is None for label in everything)):
        raise ConfigError(f"The labels of {data.called} have missing values. Drop those rows.")
    if data.target == "regression":
        return _standardised(data, train, test, ids_digest)
    classes, indices = np.unique(everything, return_inverse=True)
    rows = len(everything) if data.test_fraction else len(train)  # else test repeats train
    if not 2 <= len(classes) <= max(2, rows // 2):
        raise ConfigError(
            f"The labels of {data.called} take {len(classes)} values in {rows} rows. "
            "Classification needs at least two classes with several rows each. "
            + "The column looks like ids: name another by `label`. " * (len(classes) == rows)
            + "For numbers, set target = 'regression'."
        )
    if everything.dtype.kind == "f" and len(classes) > _MOST_NUMBERS:
        raise ConfigError(
            f"The labels of {data.called} are numbers with {len(classes)} values, and each value "
            "would be a class. Set target='regression', or give classes as whole numbers or texts."
        )
    indices, known = indices.astype(np.int64), classes.tolist()
    names = tuple(each if isinstance(each, bool | int | float) else str(each) for each in known)
    return Labels(indices[: len(train)], indices[len(train) :], names, ids_digest)


def as_known(data: DataConfig, labels: Labels, about: Mapping[str, Any]) -> Labels:
    """Encode labels with the classes or units of an earlier model (`Labels.about`)."""
    if not labels.classes:
        mean, deviation = float(about["mean"]), float(about["deviation"])
        by, shift = labels.deviation / deviation, (labels.mean - mean) / deviation
        both = (labels.train, labels.test)
        train, test = ((part * by + shift).astype(np.float32) for part in both)
        return replace(labels, train=train, test=test, mean=mean, deviation=deviation)
    known = {name: number for number, name in enumerate(about["classes"])}
    if unknown := [name for name in labels.classes if name not in known]:
        raise ConfigError(
            f"The labels of {data.called} have {len(unknown)} values, such as {unknown[0]!r}, that "
            "the earlier run's model has never seen. Correct them, or leave grow out."
        )
    numbers = np.array([known[name] for name in labels.classes], np.int64)
    of_train, of_test = numbers[labels.train], numbers[labels.test]
    return replace(labels, train=of_train, test=of_test, classes=tuple(known))


def _standardised(data: DataConfig, train: Array, test: Array, ids_digest: str) -> Labels:
    if not {train.dtype.kind, test.dtype.kind} <= set("biuf"):
        raise ConfigError(
            f"The labels of {data.called} are not numbers, which target = 'regression' needs. "
            "Name another label column, or leave target out."
        )
    train, test = train.astype(np.float64), test.astype(np.float64)
    if named := bounds(data):
        train = np.clip(train, *named)
        mean, deviation = (named[0] + named[1]) / 2, (named[1] - named[0]) / math.sqrt(12)
    else:
        mean, deviation = map(float, scaling(train, per_column=False))
    if named or train.min() < train.max():
        train, test = (((part - mean) / deviation).astype(np.float32) for part in (train, test))
    # An epsilon may cover labels with a range. Then none may decide whether the run begins.
    if not named and (train.min() == train.max() or test.min() == test.max()):
        raise ConfigError(
            f"The labels of {data.called} are all the same in the training rows or in the test "
            "rows. Give labels that differ in both."
        )
    return Labels(train, test, (), ids_digest, mean, deviation, bounds=named)


def class_weights(data: DataConfig, labels: Array, classes: int, kept: float = 1.0) -> Array | None:
    """Return class weights for the loss, float32 [classes]; None if all are equal.

    ``balanced`` gives every class the same total weight over the training rows: N / (classes *
    rows of the class). Parties with shared labels compute the same weights.
    """
    if not data.class_weights:
        return None
    if data.class_weights == "balanced":
        balanced: Array = len(labels) / (classes * _counts(labels, classes, kept))
        return balanced.astype(np.float32)
    try:
        weights = np.array([float(each) for each in data.class_weights.split(",")], np.float32)
    except ValueError:
        weights = np.zeros(1, np.float32)
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ConfigError(
            f"class-weights = {data.class_weights!r} is not valid. Give 'balanced', or positive "
            "numbers with commas between them, such as '1,5'."
        )
    if len(weights) != classes:
        raise ConfigError(
            f"class-weights = {data.class_weights!r} gives {len(weights)} weights for {classes} "
            "classes. Give one for each class, in the order of their names."
        )
    return weights
