"""Sources that read their data once, in pieces, and keep the rows on disk.

So the memory of a party or of the label holder is bounded for any data, and errors in any row are
found before training begins. A mini-batch costs one small read for each row.

The file with the rows has no name: nobody else can open it, and it vanishes with the process. It
lies in FLWR_HOME/vfl-flower, like a party's state. It is read and not mapped, since the kernel
would keep mapped pages in the process, and memory would grow with the file.
"""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import VflError
from vfl_flower.config.files import make_folder
from vfl_flower.config.provenance import free_memory
from vfl_flower.data.later import pa, pq
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.samples import Arrays
from vfl_flower.data.source import Moments, Preparation, Source, scaled
from vfl_flower.data.table_file import TableFile, is_csv
from vfl_flower.transport.flower_internals import flower_home

_LARGE = 2**30  # bytes of a table in double precision; a larger table stays on disk


class KeptSource(Source):
    """A lazy source that encodes its rows once, and keeps them as arrays of one shape."""

    lazy = True

    def load(self, places: Array, preparation: Preparation) -> None:
        """Read, check and keep these rows, unless they are kept already."""
        wanted = np.zeros(len(self._numbers), bool)
        wanted[places] = True
        wanted &= self._numbers < 0
        if not wanted.any():
            return
        for at, piece in self._pieces(wanted, preparation):
            encoded = self._encode(piece, preparation)
            if not self._files:
                self._files.append(RowFile(encoded.dtype, encoded.shape[1:]))
            self._numbers[at] = self._files[0].append(encoded)

    def rows(self, places: Array, preparation: Preparation) -> Arrays:
        """Return these rows."""
        if (self._numbers[places] < 0).any():
            self.load(places, preparation)
        return self._decode(self._files[0].read(self._numbers[places]), preparation)

    @cached_property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def forget_ids(self) -> None:
        """Drop the ids as any source does, but keep their number."""
        _ = self.count
        super().forget_ids()

    @cached_property
    def _numbers(self) -> Array:
        """Return the number in the file of the row at each place; -1 if it is missing."""
        return np.full(self.count, -1, np.int32)

    @cached_property
    def _files(self) -> list[RowFile]:
        return []

    @abstractmethod
    def _pieces(self, wanted: Array, preparation: Preparation) -> Iterator[tuple[Array, Any]]:
        """Yield the wanted rows in pieces: their places, and their content."""

    @abstractmethod
    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        """Encode a piece to keep it: [n, ...], with one type and shape for all pieces."""

    def _decode(self, rows: Array, preparation: Preparation) -> Arrays:
        """Return samples from kept rows."""
        return rows


@dataclass(frozen=True)
class KeptFile(KeptSource, OwnFile):  # type: ignore[misc]  # rows need not be one array
    """A csv or parquet file, read in pieces."""

    piece: ClassVar[int] = 4096  # rows to read at once

    raw_columns = Source.raw_columns  # an image, a text or a sequence is no column of values

    def _pieces(self, wanted: Array, preparation: Preparation) -> Iterator[tuple[Array, Any]]:
        start = 0
        with self._reading():
            names, texts = self._needed(preparation), self._texts(preparation)
            for frame in self._columns.frames(names, texts, self.piece):
                frame.index += start
                inside = np.flatnonzero(wanted[start : start + len(frame)])
                if len(inside):
                    yield start + inside, frame.iloc[inside]
                start += len(frame)

    def _needed(self, preparation: Preparation) -> list[str]:
        """Return the columns that samples need."""
        return self.feature_names

    def _texts(self, preparation: Preparation) -> Collection[str]:
        """Return the columns that stay texts, whatever they hold."""
        return preparation.texts

    @cached_property
    def _columns(self) -> TableFile:
        """Return a parquet file with the columns: the file itself, or a converted csv file."""
        if not self._is_csv or self.repeats != "refuse":
            return super()._columns
        names = self.names_besides_ids
        file, schema = unnamed(), pa.schema([(name, pa.string()) for name in names])
        with self._reading(), pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
            for piece in self._file.pieces(names):
                writer.write_batch(piece)
        return TableFile(file, False, self.words)


@dataclass(frozen=True)
class LargeTable(KeptFile):
    """A table too large for memory. A model reads the same rows as from `OwnFile`."""

    raw_columns = OwnFile.raw_columns

    def _some(self, names: list[str], texts: Collection[str] = ()) -> Any:
        return self._read(names, texts)

    def _needed(self, preparation: Preparation) -> list[str]:
        return self._check_columns(preparation)

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        return self._prepare(piece, preparation)


def of_size(own: OwnFile) -> OwnFile:
    """Return a table that stays on disk if it is too large to hold in double precision."""
    if not own.feature_names:
        return own
    if is_csv(own.place):  # text takes about as many bytes as numbers, and compressed a fourth
        with own._reading():
            size = own.place.stat().st_size * (4 if own.place.suffix.lower() == ".gz" else 1)
    else:
        size = 8 * own.count * len(own.feature_names)
    return as_kind(LargeTable, own) if size > min(_LARGE, free_memory() / 8) else own


def as_kind(kind: type[OwnFile], own: OwnFile, **more: Any) -> OwnFile:
    """Return the same file as another kind of source."""
    return kind(**{spec.name: getattr(own, spec.name) for spec in fields(OwnFile)}, **more)


class RowFile:
    """Rows of one type and shape, in order of arrival."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self._file, self._rows = unnamed(), 0
        self._size = self.dtype.itemsize * int(np.prod(shape))

    def append(self, rows: Array) -> Array:
        """Append rows [n, *shape], and return their numbers [n]."""
        content = np.ascontiguousarray(rows, self.dtype)
        with _told():
            self._file.write(content.data.cast("B"))
            self._file.flush()
        self._rows += len(rows)
        return np.arange(self._rows - len(rows), self._rows)

    def read(self, numbers: Array) -> Array:
        """Return the rows with these numbers, [n, *shape]."""
        rows = np.empty((len(numbers), *self.shape), self.dtype)
        content, opened, size = rows.data.cast("B"), self._file.fileno(), self._size
        for at, number in enumerate(numbers.tolist()):
            os.preadv(opened, [content[at * size : (at + 1) * size]], number * size)
        return rows


def unnamed() -> BinaryIO:
    """Return a file without a name."""
    folder = flower_home() / "vfl-flower"
    with _told():
        make_folder(folder)
        return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


@contextmanager
def _told() -> Iterator[None]:
    """Raise `VflError` if a write fails. The text is the end of a sentence."""
    try:
        yield
    except OSError as error:
        raise VflError(
            f"cannot keep its rows on its disk ({error.strerror}). Make room in the folder "
            "vfl-flower of FLWR_HOME."
        ) from None


@dataclass(frozen=True)
class SequenceColumn(KeptFile):
    """A parquet file whose only feature column holds lists, or a file of rows of people."""

    piece: ClassVar[int] = 1024

    length: int = 0  # T; 0: length of the longest sequence in the training rows

    def learn(self, train: Array) -> Preparation:
        """Return length, signals, and mean and deviation of each signal."""
        wanted, moments, longest = np.zeros(self.count, bool), Moments(), 1
        wanted[train] = True
        signals = 0
        for _, piece in self._pieces(wanted, Preparation({}, {}, [], [])):
            for values in self._values(piece, signals):
                signals = values.shape[1]
                longest = max(longest, len(values))
                moments.add(values)
        if not signals:
            what = "has no sequence in the training rows. Fill some in."
            raise self.wrong(what, "all are empty.")
        shape = [self.length or longest, signals]
        names = self.feature_names if self.repeats == "sequence" else ()  # to keep their order
        return Preparation(dict.fromkeys(names, 0.0), {}, *moments.result(), shape=shape)

    def _needed(self, preparation: Preparation) -> list[str]:
        return self._check_columns(preparation) if preparation.numbers else self.feature_names

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        length, signals = preparation.shape
        mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
        rows = np.zeros((len(piece), length, signals), np.float32)
        for row, values in zip(rows, self._values(piece, signals), strict=True):
            last = scaled(values, mean, deviation)[-length:]
            row[length - len(last) :] = last
        if not np.isfinite(rows).all():
            raise self.too_large()
        return rows

    def _values(self, piece: Any, signals: int) -> list[Array]:
        """Return the values [T, signals] of each row of a piece."""
        sequences = []
        for place, *cells in piece.itertuples(name=None):
            cell = cells[0] if len(cells) == 1 else np.stack(cells, 1)  # of numeric columns
            try:
                values = np.array([np.asarray(each, np.float64) for each in cell], np.float64)
            except (TypeError, ValueError):
                values = np.full((1, 1, 1), np.nan)
            if not values.size:
                values = np.zeros((0, signals or 1))
            values = values[:, None] if values.ndim == 1 else values
            signals = signals or values.shape[1]
            if values.ndim > 2 or values.shape[1] != signals or not np.isfinite(values).all():
                raise self.wrong(
                    "has a sequence with missing or infinite values, or of other signals than the "
                    "others. Correct it.",
                    f"row {place}.",
                )
            sequences.append(values)
        return sequences
