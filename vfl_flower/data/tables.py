"""A table of one's own: columns of numbers and texts, and how they become what a model reads.

What a party's own columns are called, and what is in them, is told to nobody else: sentences that
leave it say what is wrong, and its own log says where. `own_files` has tables in files, `memory`
those that Python code hands over.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, asked
from vfl_flower.data.source import Preparation, Source, scaled, scaling

log = logging.getLogger("flwr")

Array = NDArray[Any]
_MOST_VALUES = 100  # of a text column, each of which becomes a column


@dataclass(frozen=True)
class Table(Source):
    """Columns by name, and what their owner says of them.

    path : where it is; the label holder's sentences name it.

    Raises
    ------
    ConfigError
        From each method: what is wrong with the table. Of a party's columns it names none.
    """

    kind: ClassVar[str] = "table"

    path: str
    id: str = "id"
    columns: str = ""  # with commas; empty: all others
    missing: str = "refuse"
    text: str = "refuse"
    label: str = ""  # the label holder's
    party: int | None = None  # None: the label holder

    @property
    def whose(self) -> str:
        """The table as the subject of a sentence."""
        return self.path if self.party is None else f"Party {self.party}'s {self.kind}"

    # --- rows -----------------------------------------------------------------------------------

    @cached_property
    def id_column(self) -> Any:
        """The id column."""
        if self.id not in self._names:
            raise self._wrong(
                "does not have the id column that `id` names: correct `id`.",
                f"id = {self.id!r}, and its columns are {', '.join(self._names[:8])}"
                f"{', ...' * (len(self._names) > 8)}.",
            )
        return self._read([self.id])[self.id]

    @property
    def has_ids(self) -> bool:
        """Whether the ids are in a column."""
        return True

    # --- columns --------------------------------------------------------------------------------

    @property
    def feature_names(self) -> list[str]:
        """The feature columns: those named, or all but ids and labels; "none" names none."""
        kept = {self.id, self.label}
        if self.columns == "none":
            return []
        if not self.columns:
            return [name for name in self._names if name not in kept]
        named = [name.strip() for name in self.columns.split(",")]
        known = set(self._names) - kept
        absent = [name for name in named if name not in known]
        if absent or len(set(named)) < len(named):
            raise self._wrong(
                "does not have the columns that `columns` names, or has one of them twice.",
                f"columns = {self.columns!r}, the {self.kind} has {', '.join(self._names)}.",
            )
        return named

    def labels(self, rows: Array) -> Array:
        """The label column of these rows."""
        self.check_labels()
        values = self.labels_with_gaps(rows)
        if is_missing(values).any():
            raise ConfigError(
                f"Column {self.label!r} of {self.path} has missing labels: drop those rows."
            )
        return values

    def labels_with_gaps(self, rows: Array) -> Array:
        """The label column of these rows, as it is."""
        values: Array = self._read([self.label])[self.label].iloc[rows].to_numpy()
        return values

    def check(self) -> None:
        """Whether there are ids and labels, before anything takes long."""
        _ = self.ids
        self.check_labels()

    def check_labels(self) -> None:
        """Whether there is a label column."""
        if not self.has_labels:
            raise ConfigError(
                f"{self.path} has no label column {self.label!r}:"
                f"{asked(self.label, self._names, 'set')} `label` to one of "
                f"{', '.join(self._names[:8])}{', ...' * (len(self._names) > 8)}."
            )

    @property
    def has_labels(self) -> bool:
        """Whether there is a label column."""
        return self.label in self._names

    def learn(self, train: Array) -> Preparation:
        """Medians, values of texts, means and deviations of the training rows."""
        self.check_features()
        return self._learn(self._frame.iloc[train])

    def check_features(self) -> None:
        """Whether there is a feature column."""
        if not self.feature_names:
            raise self._wrong("has no feature columns.", "besides ids and labels, there are none.")

    def _learn(self, learnt: Any) -> Preparation:
        """What these training rows of some columns, or all, teach of them."""
        numeric = _numeric(learnt)
        numbers = [name for name in learnt if numeric[name]]
        texts = [name for name in learnt if not numeric[name]]
        if texts and self.text == "refuse":
            raise self._wrong(
                f"has a column that is not numeric{of_texts(learnt[texts[0]])}",
                f"column {texts[0]!r} is not numeric.",
            )
        self._check_missing(learnt, numbers)
        values = {name: sorted(set(_texts(learnt[name]))) for name in texts}
        many = [name for name in texts if len(values[name]) > _MOST_VALUES]
        if many:
            raise self._wrong(
                f"has a text column with more than {_MOST_VALUES} values"
                f"{of_texts(learnt[many[0]], ': leave it out by `columns`, or group them.')}",
                f"column {many[0]!r} has {len(values[many[0]])} values.",
            )
        known = _floats(learnt[numbers])
        empty = [numbers[at] for at in np.flatnonzero(np.isnan(known).all(0))]
        if empty:
            raise self._wrong(
                "has a column without any value in the training rows: leave it out by `columns`.",
                f"column {empty[0]!r} is empty.",
            )
        medians = dict(zip(numbers, _medians(known), strict=True))
        rows = _matrix(Preparation(medians, values, [], []), learnt)
        mean, deviation = scaling(rows, per_column=True)
        return Preparation(medians, values, mean.tolist(), deviation.tolist())

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """These rows as float32 [rows, F], by what the training rows have taught."""
        names = self._check_columns(preparation)
        known = set(names) == set(self.feature_names)
        frame = self._frame if known else self._read(names)
        return self._prepare(frame[names].iloc[places], preparation)

    def _check_columns(self, preparation: Preparation) -> list[str]:
        """The columns that the training rows had, which must be there."""
        names = [*preparation.numbers, *preparation.texts]
        there = set(self._names)
        absent = [name for name in names if name not in there]
        if absent:
            raise self._changed(f"column {absent[0]!r} is not there any more.")
        if not self.columns and set(self.feature_names) != set(names):
            new = min(set(self.feature_names) - set(names), key=self._names.index)
            raise self._changed(f"column {new!r} is new: name the columns of then by `columns`.")
        return names

    def _prepare(self, frame: Any, preparation: Preparation) -> Array:
        """These rows of the columns that `preparation` knows, as float32 [rows, F]."""
        for name, numeric in _numeric(frame).items():
            if numeric != (name in preparation.numbers) and not frame[name].isna().all():
                raise self._changed(f"column {name!r} does not hold numbers, or texts, as then.")
        self._check_missing(frame, list(preparation.numbers))
        rows = scaled(
            _matrix(preparation, frame),
            np.array(preparation.mean),
            np.array(preparation.deviation),
        )
        if not (np.isfinite(rows).all() and np.isfinite(preparation.deviation).all()):
            raise self._wrong("has numbers that are too large.", "some are infinite in 32 bits.")
        return rows

    def _check_missing(self, frame: Any, numbers: Sequence[str]) -> None:
        infinite = np.flatnonzero(np.isinf(_floats(frame[list(numbers)])).any(0))
        if len(infinite):
            raise self._wrong(
                "has infinite values: replace them.", f"column {numbers[infinite[0]]!r} has some."
            )
        if self.missing == "refuse":
            gaps = frame.isna().sum()
            gaps = gaps[gaps > 0]
            if len(gaps):
                raise self._wrong(
                    "has missing values in its features: fill them in, drop those rows, or set "
                    "missing='median'.",
                    f"column {gaps.index[0]!r} has {self._missing_of(gaps.index[0])}"
                    + (f", and {len(gaps) - 1} more columns have some." if len(gaps) > 1 else "."),
                )

    def _missing_of(self, name: str) -> str:
        """How many values of a column are missing, in all its rows."""
        column = self._read([name])[name]
        return f"{int(column.isna().sum())} in {len(column)} rows"

    # --- where its columns are ------------------------------------------------------------------

    @property
    @abstractmethod
    def _names(self) -> list[str]:
        """The columns."""

    @abstractmethod
    def _read(self, names: list[str]) -> Any:
        """A pandas frame of these columns, and perhaps others."""

    @cached_property
    def _frame(self) -> Any:
        """All feature columns."""
        names = self.feature_names
        return self._read(names)[names]

    def _changed(self, detail: str) -> ConfigError:
        return self._wrong("has other columns than its model was trained with.", detail)

    def _wrong(self, what: str, detail: str) -> ConfigError:
        """What is wrong; the detail stays here, if this is a party."""
        what_and_where = f"{what.rstrip('.')}: {detail}"
        if ":" in what:
            what_and_where = f"{what.rstrip('.')} ({detail.removesuffix('.')})."
        if self.party is None:
            return ConfigError(f"{self.path} {what_and_where}")
        log.warning("The %s %s of this party %s", self.kind, self.path, what_and_where)
        return ConfigError(f"{self.whose} {what} Its own log says more.")


def is_missing(values: Array) -> Array:
    """Which values are none, not a number, or what pandas marks as missing."""
    import pandas as pd

    missing: Array = pd.isna(values)
    return missing


_DECIMAL_COMMA = r"\s*[-+]?(?:\d+|\d{1,3}(?:[. ]\d{3})+),\d+\s*"
_DATE = r"\s*(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})(?:[ T].*)?\s*"
_ADVICE = ": encode it, leave it out by `columns`, or set text='one-hot'."


def of_texts(column: Any, otherwise: str = _ADVICE) -> str:
    """What the values of a text column seem to be, and what to do; quotes none of them.

    It is the end of a sentence about the column: ``otherwise`` where they are texts indeed.
    """
    import pandas as pd

    known = column.dropna()
    texts = known[:10_000].astype(str)
    if not len(texts):
        return otherwise
    if known.dtype.kind == "M" or texts.str.fullmatch(_DATE).all():
        return (
            ", since it holds dates: make numbers of them, such as days since a fixed day, or "
            "leave it out by `columns`."
        )
    numbers = pd.to_numeric(texts, errors="coerce").notna()
    commas = texts.str.fullmatch(_DECIMAL_COMMA)
    if commas.any() and (commas | numbers).all():
        return (
            ", since its numbers have decimal commas: write points instead, as "
            "pandas.read_csv(..., decimal=',') and to_csv do."
        )
    if numbers.mean() > 0.5:
        return (
            ", since it has texts among its numbers: correct those, or leave them empty and set "
            "missing='median'."
        )
    return otherwise


def _floats(columns: Any) -> Array:
    """Numbers as pandas holds them, also where it marks missing ones in a way of its own."""
    numbers: Array = columns.to_numpy(np.float64, na_value=np.nan)
    return numbers


def _numeric(frame: Any) -> dict[str, bool]:
    """Column -> whether it holds numbers, by its type."""
    return {name: dtype.kind in "biuf" for name, dtype in frame.dtypes.items()}


def _medians(numbers: Array) -> list[float]:
    """The median of each column [rows, columns], without the values that are missing."""
    medians = np.median(numbers, axis=0)  # NaN where one is missing
    for at in np.flatnonzero(np.isnan(medians)):
        medians[at] = np.nanmedian(numbers[:, at])
    found: list[float] = medians.tolist()
    return found


def _texts(column: Any) -> list[str]:
    """Values of a text column; a missing one is a value of its own."""
    texts: list[str] = column.astype(object).where(column.notna(), "").map(str).tolist()
    return texts


def _matrix(preparation: Preparation, frame: Any) -> Array:
    """Numbers, with medians where one is missing, and a 0/1 column for each value of a text."""
    parts: list[Array] = []
    if preparation.numbers:
        numbers = _floats(frame[list(preparation.numbers)]).copy(order="K")
        for column, median in zip(numbers.T, preparation.numbers.values(), strict=True):
            column[np.isnan(column)] = median
        parts.append(numbers)
    for name, values in preparation.texts.items():
        places = {value: place for place, value in enumerate(values)}
        found = np.array([places.get(each, -1) for each in _texts(frame[name])], np.int64)
        parts.append((found[:, None] == np.arange(len(values))).astype(np.float64))
    return np.concatenate(parts, axis=1)
