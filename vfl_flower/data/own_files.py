"""A file of one's own: how a party reads its features, and the label holder labels and features.

A party names its file in its ``--node-config``, the label holder in the run configuration, by the
same words: ``file`` (the label holder: ``dataset = "files:PATH"``), ``id``, ``columns``,
``missing`` and ``text``. What a party's own columns are called, and what is in them, is told to
nobody else: sentences that leave it say what is wrong, and its own log says where.

Rows are those that all have (`vfl_flower.data.alignment`), in the order of the label holder's ids.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.source import Preparation, Source, scaled, scaling
from vfl_flower.errors import ConfigError
from vfl_flower.sections import DataConfig

log = logging.getLogger("flwr")

Array = NDArray[Any]
_MOST_VALUES = 100  # of a text column, each of which becomes a column


@dataclass(frozen=True)
class OwnFile(Source):
    """A csv or parquet file, and what its owner says of it.

    Raises
    ------
    ConfigError
        From each method: what is wrong with the file. Of a party's columns it names none.
    """

    path: str
    id: str = "id"
    columns: str = ""  # with commas; empty: all others
    missing: str = "refuse"
    text: str = "refuse"
    label: str = ""  # the label holder's
    party: int | None = None  # None: the label holder

    @classmethod
    def of_party(cls, node_config: Mapping[str, Any], party: int) -> OwnFile:
        """The file that a party's node configuration names."""
        given = {name: node_config.get(name, "") for name in ("file", *_WORDS)}
        if not all(isinstance(value, str) for value in given.values()):
            raise ConfigError(
                f"Party {party}'s node configuration must give file, id, columns, missing and "
                "text as texts in quotes."
            )
        path = given.pop("file")
        if not path:
            raise ConfigError(
                f"Party {party} has named no file: start its SuperNode with --node-config "
                "\"partition-id=... num-partitions=... file='/path/features.parquet' id='id'\"."
            )
        own = cls(path, **{name: value for name, value in given.items() if value}, party=party)
        for name, known in (("missing", ("refuse", "median")), ("text", ("refuse", "one-hot"))):
            if getattr(own, name) not in known:
                raise ConfigError(
                    f"Party {party}'s node configuration has another {name} than those known: "
                    f"choose one of {', '.join(known)}."
                )
        return own

    @classmethod
    def of_label_holder(cls, data: DataConfig) -> OwnFile:
        """The file that ``dataset = "files:PATH"`` names."""
        path = data.dataset.partition(":")[2]
        words = {name: getattr(data, name) for name in _WORDS}
        return cls(path, **words, label=data.label)

    @property
    def whose(self) -> str:
        """The file as the subject of a sentence."""
        return self.path if self.party is None else f"Party {self.party}'s file"

    # --- rows -----------------------------------------------------------------------------------

    @cached_property
    def id_column(self) -> Any:
        """The id column."""
        if self.id not in self._names:
            raise self._wrong(
                "does not have the id column that `id` names.",
                f"id = {self.id!r}, and its columns are {', '.join(self._names[:8])}"
                f"{', ...' * (len(self._names) > 8)}.",
            )
        return self._read([self.id])[self.id]

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
        absent = [name for name in named if name not in self._names or name in kept]
        if absent or len(set(named)) < len(named):
            raise self._wrong(
                "does not have the columns that `columns` names, or has one of them twice.",
                f"columns = {self.columns!r}, the file has {', '.join(self._names)}.",
            )
        return named

    def labels(self, rows: Array) -> Array:
        """The label column of these rows."""
        self.check_labels()
        values = self.labels_with_gaps(rows)
        if is_missing(values).any():
            raise ConfigError(f"Column {self.label!r} of {self.path} has missing labels.")
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
                f"{self.path} has no label column {self.label!r}: set `label` to one of "
                f"{', '.join(self._names[:8])}{', ...' * (len(self._names) > 8)}."
            )

    @property
    def has_labels(self) -> bool:
        """Whether there is a label column."""
        return self.label in self._names

    def learn(self, train: Array) -> Preparation:
        """Medians, values of texts, means and deviations of the training rows."""
        frame = self._frame
        if not len(frame.columns):
            raise self._wrong("has no feature columns.", "besides ids and labels, there are none.")
        numbers = [name for name in frame if frame[name].dtype.kind in "biuf"]
        texts = [name for name in frame if name not in numbers]
        if texts and self.text == "refuse":
            raise self._wrong(
                "has a column that is not numeric: encode it, leave it out by `columns`, or "
                "set text='one-hot'.",
                f"column {texts[0]!r} is not numeric.",
            )
        learnt = frame.iloc[train]
        self._check_missing(learnt, numbers)
        values = {name: sorted(set(_texts(learnt[name]))) for name in texts}
        many = [name for name in texts if len(values[name]) > _MOST_VALUES]
        if many:
            raise self._wrong(
                f"has a text column with more than {_MOST_VALUES} values: leave it out by "
                "`columns`, or group them.",
                f"column {many[0]!r} has {len(values[many[0]])} values.",
            )
        empty = [name for name in numbers if learnt[name].isna().all()]
        if empty:
            raise self._wrong(
                "has a column without any value in the training rows: leave it out by `columns`.",
                f"column {empty[0]!r} is empty.",
            )
        medians = {name: float(learnt[name].median()) for name in numbers}
        rows = _matrix(Preparation(medians, values, [], []), learnt)
        mean, deviation = scaling(rows, per_column=True)
        return Preparation(medians, values, mean.tolist(), deviation.tolist())

    def rows(self, places: Array, preparation: Preparation) -> Array:
        """These rows as float32 [rows, F], by what the training rows have taught."""
        names = [*preparation.numbers, *preparation.texts]
        absent = [name for name in names if name not in self._names]
        if absent:
            raise self._changed(f"column {absent[0]!r} is not there any more.")
        if not self.columns and set(self.feature_names) != set(names):
            new = next(name for name in self.feature_names if name not in names)
            raise self._changed(f"column {new!r} is new: name the columns of then by `columns`.")
        known = set(names) == set(self.feature_names)
        frame = (self._frame if known else self._read(names))[names].iloc[places]
        for name in names:
            numeric = frame[name].dtype.kind in "biuf"
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
        infinite = [name for name in numbers if np.isinf(_floats(frame[name])).any()]
        if infinite:
            raise self._wrong(
                "has infinite values: replace them.", f"column {infinite[0]!r} has some."
            )
        if self.missing == "refuse":
            gaps = [name for name in frame if frame[name].isna().any()]
            if gaps:
                raise self._wrong(
                    "has missing values in its features: fill them in, drop those rows, or set "
                    "missing='median'.",
                    f"column {gaps[0]!r} has {int(frame[gaps[0]].isna().sum())}.",
                )

    # --- the file -------------------------------------------------------------------------------

    @cached_property
    def _names(self) -> list[str]:
        """The columns, without those in which pandas may have put row numbers."""
        import pandas as pd
        import pyarrow.parquet as pq

        if not Path(self.path).expanduser().is_file():
            raise self._wrong("is not there.", "there is no such file.")
        try:
            if self._is_csv:
                return [str(name) for name in pd.read_csv(Path(self.path).expanduser(), nrows=0)]
            names = [str(name) for name in pq.read_schema(Path(self.path).expanduser()).names]
            return [name for name in names if not re.fullmatch(r"__index_level_\d+__", name)]
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from None

    @cached_property
    def _frame(self) -> Any:
        """All feature columns."""
        names = self.feature_names
        return self._read(names)[names]

    def _read(self, names: list[str]) -> Any:
        import pandas as pd
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self._is_csv:
                return pd.read_csv(Path(self.path).expanduser(), usecols=names)
            table = pq.read_table(Path(self.path).expanduser(), columns=names)
            truths = {pa.bool_(): pd.BooleanDtype()}  # else a missing one makes them objects
            return table.to_pandas(ignore_metadata=True, types_mapper=truths.get)
        except (ValueError, OSError, NotImplementedError) as error:
            raise self._unreadable(error) from None

    @property
    def _is_csv(self) -> bool:
        suffix = Path(self.path).suffix.lower()
        if suffix not in (".csv", ".parquet"):
            raise self._wrong("is neither .csv nor .parquet.", "its name must end in one of them.")
        return suffix == ".csv"

    def _unreadable(self, error: Exception) -> ConfigError:
        return self._wrong(
            "cannot be read as a table with a header.", f"{type(error).__name__}: {error}"
        )

    def _changed(self, detail: str) -> ConfigError:
        return self._wrong("has other columns than its model was trained with.", detail)

    def _wrong(self, what: str, detail: str) -> ConfigError:
        """What is wrong; the detail stays here, if this is a party."""
        if self.party is None:
            return ConfigError(f"{self.path} {what.rstrip('.')}: {detail}")
        log.warning("The file %s of this party %s %s", self.path, what, detail)
        return ConfigError(f"Party {self.party}'s file {what} Its own log says more.")


_WORDS = ("id", "columns", "missing", "text")


def is_missing(values: Array) -> Array:
    """Which values are none, or not a number."""
    return np.array([value is None or value != value for value in values.tolist()], bool)


def _floats(columns: Any) -> Array:
    """Numbers as pandas holds them, also where it marks missing ones in a way of its own."""
    numbers: Array = columns.to_numpy(np.float64, na_value=np.nan)
    return numbers


def _texts(column: Any) -> list[str]:
    """Values of a text column; a missing one is a value of its own."""
    texts: list[str] = column.astype(object).where(column.notna(), "").map(str).tolist()
    return texts


def _matrix(preparation: Preparation, frame: Any) -> Array:
    """Numbers, with medians where one is missing, and a 0/1 column for each value of a text."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    parts: list[Array] = []
    if preparation.numbers:
        # Fitted on a row of what the training rows taught, transformers know just that again.
        medians = np.array([list(preparation.numbers.values())])
        imputer = SimpleImputer(strategy="median").fit(medians)
        parts.append(imputer.transform(_floats(frame[list(preparation.numbers)])))
    if preparation.texts:
        values = [np.array(each, object) for each in preparation.texts.values()]
        encoder = OneHotEncoder(categories=values, handle_unknown="ignore", sparse_output=False)
        encoder.fit(np.array([[each[0] for each in values]], object))
        columns = [_texts(frame[name]) for name in preparation.texts]
        parts.append(encoder.transform(np.array(columns, object).T.reshape(-1, len(values))))
    return np.concatenate(parts, axis=1)
