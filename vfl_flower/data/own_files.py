"""Your own file: a party's features, or the label holder's labels and features.

A party names its file in its ``--node-config``, the label holder by ``dataset = "files:PATH"``.
Both have the options `OPTIONS`. In a party's file, a person may have several rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.options import DataConfig
from vfl_flower.data.frames import floats
from vfl_flower.data.later import pa, pd, pq
from vfl_flower.data.normalised import as_written, spelling
from vfl_flower.data.own_columns import match_columns_of
from vfl_flower.data.table_file import TableError, TableFile, check_place, is_csv
from vfl_flower.data.tables import Table
from vfl_flower.data.withdrawn import place, read

OPTIONS = (
    *("id", "columns", "missing", "missing_words", "text", "dates", "match_columns", "monotonic"),
    "segments",
)
"""Options of a table that a party and the label holder have."""


@dataclass(frozen=True)
class OwnFile(Table):
    """A csv or parquet file, and its owner's options for it."""

    kind = "file"

    repeats: str = "refuse"  # or how several rows of a person become one: last, mean, sequence

    @classmethod
    def of_label_holder(cls, data: DataConfig) -> OwnFile:
        """Return the file that ``dataset = "files:PATH"`` names."""
        path = data.dataset.partition(":")[2]
        words = {name: getattr(data, name) for name in (*OPTIONS, "label", "time")}
        words["match_columns"] = match_columns_of(data.match, data.match_columns)
        return cls(path, **words, withdrawn=place())

    @property
    def place(self) -> Path:
        """Return the absolute path of the file."""
        return Path(expanduser(self.path)).absolute()

    @cached_property
    def _whole(self) -> TableFile:
        return TableFile(self.place, is_csv(self.path), self.words)

    @cached_property
    def _file(self) -> TableFile:
        return TableFile(*self._about)

    @cached_property
    def _about(self) -> tuple[Path, bool, tuple[str, ...], Any]:
        """Return what makes the file: without the rows of people who have withdrawn."""
        with self._reading():
            listed, kept = read(self.withdrawn), None
            if len(listed.hashes) and (self.id in self._names or self.match_columns):
                everybody = replace(self, withdrawn=None, repeats="refuse")
                kept = ~listed.have_ids(everybody.people_in_file)
        return self.place, is_csv(self.path), self.words, kept

    @cached_property
    def _columns(self) -> TableFile:
        """Return the file to read columns from, except ids."""
        if self.repeats in ("mean", "sequence"):
            return Combined(*self._about, self._people, self.repeats)
        return self._last_rows

    @cached_property
    def _last_rows(self) -> TableFile:
        return self._file if self.repeats == "refuse" else LastRows(*self._about, self._people)

    @cached_property
    def _people(self) -> People:
        """Return the number of each row's person, by the id, or else by all `match-columns`."""
        if self.id not in self._names and self.match_columns:
            names = [*dict.fromkeys(self.matching.values())]
            columns = self._file.read(names, names).items()
            texts = [as_written(column, name, self.whose) for name, column in columns]
            return numbered([each.by(spelling).codes for each in texts])
        ids = pd.factorize(self._file.ids(self.id))[0]
        alone = len(ids) + np.arange(len(ids))  # for rows without an id
        return numbered([np.where(ids < 0, alone, ids)])

    @cached_property
    def _names(self) -> list[str]:
        """Return the names of the columns."""
        with self._reading():
            if not self.path:
                raise TableError("is not there. Correct its path.", "its path is empty.")
            check_place(self.place)
            _ = self._is_csv  # refuses other kinds of files
            names = self._whole.names
        if self._is_csv and self.id not in names and (wrong := of_separator(names)):
            raise self.wrong(wrong, "its first line has no commas that separate columns.")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self.wrong("has two columns of one name. Rename one.", f"both are {twice!r}.")
        return names

    def _read(self, names: list[str], texts: Collection[str] = ()) -> Any:
        with self._reading():
            return self._columns.read(names, texts)

    def _read_ids(self) -> Any:
        with self._reading():
            return self._last_rows.ids(self.id)

    @cached_property
    def count(self) -> int:
        """Return the number of rows; of people, if they may have several."""
        if self.repeats != "refuse":
            return len(self.ids)
        if self._is_csv:
            return len(self._frame)
        with self._reading():
            rows: int = pq.read_metadata(self.place).num_rows
        return rows if self._about[3] is None else int(self._about[3].sum())

    def _some(self, names: list[str], texts: Collection[str] = ()) -> Any:
        if self._is_csv or len(names) == len(self.feature_names):
            return super()._some(names, texts)
        return self._read(names, texts)  # all columns at once would take much memory

    @property
    def about_file(self) -> dict[str, str]:
        """Return when the file was written, in UTC, and its digest."""
        written = datetime.fromtimestamp(self.place.stat().st_mtime, UTC)
        with open(self.place, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"written": written.isoformat(timespec="seconds"), "sha256": digest}

    @property
    def kind_of_features(self) -> str:
        """Return the kind of the feature columns: images, sequences, or else a table."""
        names = set(self.feature_names)
        if self.repeats == "sequence":
            return "sequences"
        if self._is_csv:
            return "table"
        types = {self._whole.type_of(name) for name in names}
        if any(pa.types.is_struct(each) or pa.types.is_binary(each) for each in types):
            return "images"
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return "sequences" if any(holds(each) for each in types for holds in lists) else "table"

    @property
    def _is_csv(self) -> bool:
        if not is_csv(self.path) and self.place.suffix.lower() != ".parquet":
            raise self.wrong(
                "is neither .csv, .csv.gz nor .parquet. Write it as one of them.",
                f"it ends in {self.place.suffix!r}.",
            )
        return self._whole.is_csv

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise a failure to read the file as `ConfigError`, without its rows."""
        try:
            yield
        except TableError as error:
            raise self.wrong(error.what, error.detail) from None
        except (ValueError, OSError, NotImplementedError) as error:
            raise self.wrong(
                "cannot be read as a table with a header.", f"{type(error).__name__}: {error}"
            ) from None


def of_separator(names: Sequence[str]) -> str:
    """Return what is wrong with a csv file's separator, by its column names, if so."""
    called = {";": "semicolons", "\t": "tabs", "|": "bars"}
    if not (separator := next((each for each in called if names and each in names[0]), "")):
        return ""
    return (
        f"has {called[separator]} between its columns, instead of commas. Rewrite it, as "
        f"pandas.read_csv(FILE, sep={separator!r}, dtype=str, keep_default_na=False)"
        ".to_csv(FILE, index=False) does."
    )


# --- several rows of a person ---------------------------------------------------------------------

# The order of people is the order of their last rows. `LastRows` reads these rows only, in pieces,
# so a model sees what a file without the earlier rows has. `Combined` reads all rows, some columns
# at a time. Then memory holds one row of each person, or all numbers of the columns.

People = NDArray[np.int64]  # the number of each row's person, [rows]

_ROWS = 65536  # rows to read at a time
_AT_ONCE = 2**26  # bytes of numbers to read at a time


def numbered(codes: Sequence[NDArray[np.int64]]) -> People:
    """Return the number of each row's person, [rows]: rows with equal ``codes`` are one's."""
    frame = pd.DataFrame(dict(enumerate(codes)))
    of_row = pd.Series(np.arange(len(frame)))
    last = of_row.groupby(frame.groupby([*frame], sort=False).ngroup()).transform("last")
    return np.unique(last, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class LastRows(TableFile):
    """A file with the last row of each person."""

    people: Any = None

    def pieces(self, names: Collection[str], rows: int | None = None) -> Iterator[Any]:
        """Yield Arrow batches as `TableFile.pieces`."""
        last, start = np.zeros(len(self.people), bool), 0
        last[len(last) - 1 - np.unique(self.people[::-1], return_index=True)[1]] = True
        for piece in super().pieces(names, rows or _ROWS):
            yield piece.filter(pa.array(last[start : start + len(piece)]))
            start += len(piece)


@dataclass(frozen=True)
class Combined(TableFile):
    """A file in which each column combines the rows of a person.

    ``mean`` gives the mean of numbers, and the most frequent value of other columns: the first one,
    if there are several. Missing values do not count. ``sequence`` gives lists of numbers.
    """

    people: Any = None
    how: str = "mean"

    def read(self, names: Collection[str], texts: Collection[str] = ()) -> Any:
        """Return a pandas frame as `TableFile.read`."""
        left, few, columns = list(names), max(1, _AT_ONCE // (8 * len(self.people) + 1)), {}
        while left:
            some, left = left[:few], left[few:]
            for name, column in super().read(some, texts).items():
                columns[name] = self._one(column, name in texts)
        return pd.DataFrame(columns, columns=list(names))

    def frames(self, names: Collection[str], texts: Collection[str], rows: int) -> Iterator[Any]:
        """Yield pandas frames as `TableFile.frames`."""
        frame = self.read(names, texts)
        for at in range(0, len(frame), rows):
            yield frame.iloc[at : at + rows].reset_index(drop=True)

    def _one(self, column: Any, is_text: bool) -> Any:
        """Return a column [people] of a column [rows]."""
        is_number = column.dtype.kind in "biuf"
        if is_text or (self.how == "mean" and not is_number):
            return self._frequent(column)
        if self.how == "mean":
            return pd.Series(floats(column)).groupby(self.people).mean()
        if not is_number or column.isna().any():
            what = "has texts, dates or missing values, and rows='sequence' makes sequences of "
            advice = "numbers. Fill them in, or leave that column out by `columns`."
            raise TableError(what + advice, f"column {column.name!r}.")
        values = floats(column)[np.argsort(self.people, kind="stable")]
        return pd.Series(np.split(values, np.cumsum(np.bincount(self.people))[:-1]), dtype=object)

    def _frequent(self, column: Any) -> Any:
        """Return the most frequent value of each person, [people]."""
        try:
            codes, values = pd.factorize(column)
        except TypeError:
            raise TableError(
                "has a column of neither numbers, texts nor dates, and rows='mean' combines no "
                "others. Set rows='last'.",
                f"column {column.name!r}.",
            ) from None
        pairs = pd.DataFrame({"person": self.people, "value": codes})[codes >= 0]
        counts = pairs.groupby([*pairs], sort=False).size()
        counts = counts.sort_values(ascending=False, kind="stable").reset_index()
        most = counts.drop_duplicates("person").set_index("person")["value"]
        of_person = most.reindex(range(self.people.max(initial=-1) + 1), fill_value=-1)
        return pd.Series(values).reindex(of_person.to_numpy()).reset_index(drop=True)
