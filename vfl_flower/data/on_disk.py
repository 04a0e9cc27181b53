"""Sources that read their data once, in pieces, and keep the rows on disk.

So the memory of a party or of the label holder is bounded for any data. A mini-batch costs one
small read for each row. Errors in any row are found before training begins. `LargeTable` is a table
of numbers and texts; `images`, `text` and `sequences` have other kinds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.provenance import free_memory
from vfl_flower.data.own_files import OwnFile, as_frame
from vfl_flower.data.row_file import RowFile, unnamed
from vfl_flower.data.samples import Arrays
from vfl_flower.data.source import Preparation, Source

Array = NDArray[Any]

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
        for found, piece in self._pieces(wanted, preparation):
            encoded = self._encode(piece, preparation)
            if not self._files:
                self._files.append(RowFile(encoded.dtype, encoded.shape[1:]))
            self._numbers[found] = self._files[0].append(encoded)

    def rows(self, places: Array, preparation: Preparation) -> Arrays:
        """Return these rows."""
        if (self._numbers[places] < 0).any():
            self.load(places, preparation)
        return self._decode(self._files[0].read(self._numbers[places]), preparation)

    @cached_property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.id_column)

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
        """Return the file, once there is one."""
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

    def raw_columns(
        self, places: Array, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Yield nothing: an image, a text or a sequence is no column of values."""
        return iter(())

    def _pieces(self, wanted: Array, preparation: Preparation) -> Iterator[tuple[Array, Any]]:
        start = 0
        for frame in self._frames(self._needed(preparation)):
            frame.index += start
            found = np.flatnonzero(wanted[start : start + len(frame)])
            if len(found):
                yield start + found, frame.iloc[found]
            start += len(frame)

    def _needed(self, preparation: Preparation) -> list[str]:
        """Return the columns that samples need."""
        return self.feature_names

    def _frames(self, names: list[str]) -> Iterator[Any]:
        """Yield frames of these columns, piece by piece."""
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self._parquet, buffer_size=2**16, pre_buffer=False) as file:
                for batch in file.iter_batches(self.piece, columns=names, use_threads=False):
                    yield as_frame(batch)[names]
        except (ValueError, OSError, NotImplementedError) as error:
            raise self._unreadable(error) from None

    def _read(self, names: list[str]) -> Any:
        if names == [self.id]:
            return super()._read(names)
        import pyarrow.parquet as pq

        try:
            self._check_memory(self._parquet, names)
            return as_frame(pq.read_table(self._parquet, columns=names, use_threads=False))
        except (ValueError, OSError, NotImplementedError) as error:
            raise self._unreadable(error) from None

    @property
    def _parquet(self) -> Any:
        """Return a parquet file with these columns: the file itself, or a converted csv."""
        if not self._is_csv:
            return Path(self.path).expanduser()
        self._converted.seek(0)
        return self._converted

    @cached_property
    def _converted(self) -> BinaryIO:
        """Convert a csv file's columns to parquet. Non-numeric columns become text."""
        import pandas as pd
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(self.path).expanduser()
        names = [name for name in self._names if name != self.id]

        def pieces(dtypes: Mapping[str, Any]) -> Iterator[Any]:
            with pd.read_csv(path, usecols=names, dtype=dtypes, chunksize=self.piece) as reader:
                for frame in reader:
                    yield frame[names]

        file, kinds = unnamed(), dict.fromkeys(names, "")
        try:
            for frame in pieces({}):
                kinds = {name: kinds[name] + frame[name].dtype.kind for name in names}
            types = {name: _type_of(set(found)) for name, found in kinds.items()}
            schema = pa.schema(list(types.items()))
            texts = {name: str for name, each in types.items() if each == pa.string()}
            with pq.ParquetWriter(file, schema) as writer:
                for frame in pieces(texts):
                    writer.write_table(pa.Table.from_pandas(frame, schema, preserve_index=False))
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from None
        return file


def _type_of(kinds: set[str]) -> Any:
    """Return the Arrow type of a column whose pieces have these NumPy kinds."""
    import pyarrow as pa

    if len(kinds) == 1:
        return {"b": pa.bool_(), "i": pa.int64(), "f": pa.float64()}.get(min(kinds), pa.string())
    return pa.float64() if kinds == {"i", "f"} else pa.string()


@dataclass(frozen=True)
class LargeTable(KeptFile):
    """A table too large for memory. A model reads the same rows as from `OwnFile`."""

    raw_columns = OwnFile.raw_columns

    def _some(self, names: list[str]) -> Any:
        return self._read(names)[names]

    def _needed(self, preparation: Preparation) -> list[str]:
        return self._check_columns(preparation)

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        return self._prepare(piece, preparation)


def of_size(own: OwnFile) -> OwnFile:
    """Return a table that stays on disk if it is too large to hold in double precision."""
    return as_kind(LargeTable, own) if own.feature_names and _is_large(own) else own


def as_kind(kind: type[OwnFile], own: OwnFile, **more: Any) -> OwnFile:
    """Return the same file as another kind of source."""
    return kind(**{spec.name: getattr(own, spec.name) for spec in fields(OwnFile)}, **more)


def _is_large(own: OwnFile) -> bool:
    import pyarrow.parquet as pq

    path = Path(own.path).expanduser()
    most = min(_LARGE, free_memory() / 8)
    if path.suffix.lower() == ".csv":
        return path.stat().st_size > most  # text takes about as many bytes
    rows: int = pq.read_metadata(path).num_rows
    return 8 * rows * len(own.feature_names) > most
