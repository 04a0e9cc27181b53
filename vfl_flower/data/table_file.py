"""Tables in csv and parquet files, read with types that hold for all rows (`column_types`)."""

from __future__ import annotations

import csv
import gzip
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vfl_flower.config.csv_text import are_predictions, count_guarded, restored
from vfl_flower.config.logs import notice
from vfl_flower.config.provenance import free_memory
from vfl_flower.data import column_types
from vfl_flower.data.later import pa, pa_csv, pc, pd, pq

_OTHERS = {  # first bytes of a file that is no csv file -> what it is and what to do
    b"PK\x03\x04": "is a zip or Excel file. Save it as csv.",
    b"\xd0\xcf\x11\xe0": "is an Excel file. Save it as csv.",
    b"PAR1": "is a parquet file. Name it .parquet.",
    b"\x1f\x8b": "is compressed by gzip. Name it .csv.gz.",
}
_BLOCK = 2**24  # bytes of a csv file to read at once; one line must fit


class TableError(ValueError):
    """A file that cannot be read: what is wrong and what to do, and a detail for its owner."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(what)
        self.what, self.detail = what, detail


_DAMAGED = "is damaged, or was not copied whole. Copy it anew.", "gzip cannot read it."
_NUL = "has NUL bytes. Write it anew, as UTF-8.", "they are no text."


def is_csv(path: str | Path) -> bool:
    """Return whether this is the name of a csv file, perhaps compressed by gzip."""
    return str(path).lower().endswith((".csv", ".csv.gz"))


def check_place(path: Path) -> None:
    """Raise `TableError` unless this is the path of a file with content that can be read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                start = file.read(4)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no path has a NUL character
        detail = f"there is no such file as {path}."
        raise TableError("is not there. Correct its path.", detail) from None
    except OSError as error:
        what = "cannot be opened. Correct its path, or your permissions."
        raise TableError(what, f"{error.strerror}.") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise TableError(f"is {kind}. Name a csv or parquet file.", f"{path}.")
    if not start:
        raise TableError("is empty. Give it a line of column names, and rows.", "it has 0 bytes.")
    if is_csv(path):
        compressed = path.suffix.lower() == ".gz"
        if compressed and not start.startswith(b"\x1f\x8b"):
            raise TableError("is not compressed. Name it .csv.", "gzip did not write it.")
        for first, what in _OTHERS.items():
            if start.startswith(first) and not compressed:
                raise TableError(what, f"it begins with {first!r}.")


@dataclass(frozen=True)
class TableFile:
    """A csv file, perhaps compressed by gzip, or a parquet file.

    If it cannot be read, each method raises `TableError`, which is a sentence, or `ValueError`,
    `OSError` or `NotImplementedError`.
    """

    place: Path | BinaryIO  # its path, or a parquet file that is open
    is_csv: bool
    words: tuple[str, ...] = ()  # texts that are missing values, beside the empty one
    kept: Any = None  # a mask of the rows to read; None reads all

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the columns that have one."""
        if not self.is_csv:
            return column_types.with_names(map(str, self._schema.names))
        first = next(_lines(self.csv), [])
        if "\0" in "".join(first):
            raise TableError(*_NUL)
        if names := column_types.with_names(first):
            return names
        raise TableError("has no column names. Write them into its first line.", "it is blank.")

    @cached_property
    def _schema(self) -> Any:
        """Return a parquet file's schema, cached: its reading time grows with the columns."""
        return pq.read_schema(self.place)

    def type_of(self, name: str) -> Any:
        """Return the Arrow type of a column; text in each csv file."""
        return pa.string() if self.is_csv else column_types.plain(self._schema.field(name).type)

    def read(self, names: Collection[str], texts: Collection[str] = ()) -> Any:
        """Return a pandas frame of these columns. The columns ``texts`` stay texts."""
        return column_types.as_frame(_that_fit(self._typed(names, texts, None)), names)

    def frames(self, names: Collection[str], texts: Collection[str], rows: int) -> Iterator[Any]:
        """Yield pandas frames of these columns, with at most so many rows of a parquet file."""
        return (column_types.as_frame([each], names) for each in self._typed(names, texts, rows))

    def ids(self, name: str) -> Any:
        """Return the ids in a column: numbers, or texts as they were written."""
        whole = replace(self, words=())
        if not self.is_csv:
            return column_types.as_frame(whole.pieces([name]), [name])[name]
        ids = column_types.as_ids([each.column(0) for each in _that_fit(whole.pieces([name]))])
        if ids.dtype == object and are_predictions(self.names, name):
            return restored(pd.Series(ids)).to_numpy()
        if ids.dtype == object and (number := count_guarded(ids)):
            notice.warning(
                "%d ids in column %r begin with an apostrophe and a sign of formulas, and stay so. "
                "If a file of predictions was their source, delete this apostrophe: else nobody "
                "has such an id.",
                *(number, name),
            )
        return ids

    def pieces(self, names: Collection[str], rows: int | None = None) -> Iterator[Any]:
        """Yield Arrow batches, or a table, of these columns, with texts as they were written."""
        start = 0
        for piece in self._pieces(names, rows):
            kept = self.kept if self.kept is None else self.kept[start : start + len(piece)]
            yield piece if kept is None else piece.filter(pa.array(kept))
            start += len(piece)

    def _pieces(self, names: Collection[str], rows: int | None) -> Iterator[Any]:
        if self.is_csv:
            yield from _csv_pieces(self, names)
        elif rows is None:
            self._check_memory(names)
            yield column_types.without_words(
                pq.read_table(self.place, columns=list(names)), self.words
            )
        else:
            with pq.ParquetFile(self.place, buffer_size=2**16, pre_buffer=False) as file:
                for batch in file.iter_batches(rows, columns=list(names), use_threads=False):
                    yield column_types.without_words(batch, self.words)

    @property
    def csv(self) -> Path:
        """Return the path of a csv file."""
        assert isinstance(self.place, Path)
        return self.place

    @cached_property
    def has_whole_quotes(self) -> bool:
        """Return true, or raise `TableError` if a quote of a csv file does not end."""
        _check_quotes(self.csv)
        return True

    def _typed(
        self, names: Collection[str], texts: Collection[str], rows: int | None
    ) -> Iterator[Any]:
        new = [name for name in names if name not in self._kinds and name not in texts]
        if undecided := [name for name in new if column_types.is_text(self.type_of(name))]:
            self._kinds.update(column_types.kinds_of(self.pieces(undecided, rows)))
        kinds = {**self._kinds, **dict.fromkeys(texts, "text")}
        return (column_types.typed(each, kinds) for each in self.pieces(names, rows))

    def _check_memory(self, names: Collection[str]) -> None:
        """Refuse columns of a parquet file that need more memory than is free.

        A file of some kilobytes may hold gigabytes: one value a billion times, or one long text.
        The footer does not say how long the texts of a dictionary are. If they might need more than
        the free memory, they are read as a dictionary, and measured.
        """
        free, sizes = free_memory(), self._sizes
        needed = sum(sizes[name][0] for name in names)
        for name in (name for name in names if needed <= free < sizes[name][1]):
            table = pq.read_table(self.place, columns=[name], read_dictionary=[name])
            for part in table[name].chunks:
                lengths = pc.binary_length(part.dictionary).cast("int64").take(part.indices)
                needed += pc.sum(lengths).as_py() or 0
        if needed > free:
            raise _too_large(needed, free)

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of each column in memory, and of its texts in the worst case."""
        footer = pq.read_metadata(self.place)
        sizes = dict.fromkeys(footer.schema.to_arrow_schema().names, (0, 0))
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                path, stored = column.path_in_schema, column.total_uncompressed_size
                name = path if path in sizes else path.split(".")[0]
                size, worst = sizes[name]
                text = column.physical_type == "BYTE_ARRAY" and path in sizes
                sizes[name] = (
                    size + max(8 * column.num_values, stored),
                    worst + text * column.num_values * stored,
                )
        return sizes

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Return the kinds of columns of texts, as far as they are decided."""
        return {}


def _csv_pieces(file: TableFile, names: Collection[str]) -> Iterator[Any]:
    """Yield Arrow batches of these columns of a csv file, all as texts."""
    path, lines = file.csv, _lines(file.csv)
    next(lines, None)
    if next(lines, None) is None:
        return  # no rows
    _ = file.has_whole_quotes
    convert = pa_csv.ConvertOptions(
        null_values=["", *file.words],
        strings_can_be_null=True,
        include_columns=list(names),
        column_types=dict.fromkeys(names, pa.string()),
    )
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    try:
        with pa_csv.open_csv(path, pa_csv.ReadOptions(block_size=_BLOCK), parse, convert) as reader:
            for piece in reader:
                texts = [each.buffers()[2] for each in piece if len(each.buffers()) > 2]
                if any(b"\0" in each.to_pybytes() for each in texts if each):
                    raise TableError(*_NUL)
                yield piece
    except pa.ArrowInvalid:  # its text may quote a row
        raise _wrong_line(path) from None
    except OSError as error:
        raise (error if error.errno else TableError(*_DAMAGED)) from None


def _check_quotes(path: Path) -> None:
    """Refuse a quote that does not end, since all lines after it would be one value."""
    with _unpacking(), _opener(path)(path, "rb") as file:
        quotes = sum(block.count(b'"') for block in iter(partial(file.read, 2**20), b""))
    if quotes % 2:
        with _opener(path)(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
            pieces = iter(partial(file.readline, _BLOCK), "")
            reader, number = csv.reader(pieces, strict=True), 0
            try:
                for _ in reader:
                    number = reader.line_num
            except csv.Error:
                raise TableError(
                    "has a quote that does not end. Close it, or remove it.",
                    f"it begins in line {number + 1}.",
                ) from None


@contextmanager
def _unpacking() -> Iterator[None]:
    """Raise what gzip cannot read as `TableError`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(*_DAMAGED) from None


def _opener(path: Path) -> Any:
    return gzip.open if path.suffix.lower() == ".gz" else open


def _that_fit(pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield pieces of a table; raise `TableError` if they need more memory than is free."""
    free, size = free_memory(), 0
    for piece in pieces:
        size += piece.nbytes
        if size > free:  # a compressed csv file may be short
            raise _too_large(size, free)
        yield piece


def _too_large(needed: float, free: float) -> TableError:
    return TableError(
        "needs more memory than is free. Check the file, or give fewer rows or columns.",
        f"it needs {needed / 1e9:.1f} GB or more, and {free / 1e9:.1f} GB are free.",
    )


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield the values of each line that is not blank; a line must fit into a block."""
    opened, left = _opener(path), _BLOCK

    def pieces(file: TextIO) -> Iterator[str]:
        nonlocal left
        while text := file.readline(left + 1):
            left -= len(text)
            if left < 0:  # a compressed file of some kilobytes may be one line of gigabytes
                raise csv.Error
            yield text

    try:
        with _unpacking(), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            for values in csv.reader(pieces(file)):
                left = _BLOCK
                if values:
                    yield values
    except UnicodeDecodeError as error:
        raise _of_encoding(path, opened, error.object[error.start]) from None
    except csv.Error:
        detail = "a value or a line is too long."
        raise TableError("cannot be read as csv. Write it anew.", detail) from None


def _of_encoding(path: Path, opened: Any, byte: int) -> TableError:
    """Return what is wrong with a csv file that is not UTF-8, and its first line that is not."""
    with opened(path, "rb") as file:
        lines = enumerate(iter(partial(file.readline, _BLOCK), b""), 1)
        wrong = ((n, each) for n, each in lines if each.decode("utf-8", "ignore").encode() != each)
        number, line = next(wrong)
    encoding = "utf-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
    return TableError(
        f"is not UTF-8. Write it as UTF-8, as pandas.read_csv(FILE, encoding={encoding!r}, "
        "dtype=str, keep_default_na=False).to_csv(FILE, index=False) does.",
        f"line {number} has the byte {byte:#x}.",
    )


def _wrong_line(path: Path) -> TableError:
    """Return what is wrong with a csv file that Arrow cannot read, from its first wrong line."""
    first: list[str] = []
    for number, values in enumerate(_lines(path), 1):
        first = first or values
        if len(values) != len(first):
            advice = "Correct that line"
            if len(values) == len(first) + 1:
                advice = "If the first value is a row name, write the file without row names"
                advice = advice if values[-1] else "Remove the comma at the end of each line"
            return TableError(
                f"has a line with more or fewer values than its first line. {advice}.",
                f"line {number} has {len(values)} values, and the first line has {len(first)}.",
            )
    return TableError(
        "cannot be read as csv. Write it anew, with a line of column names.",
        f"it has a line of more than {_BLOCK >> 20} MB, or quotes that do not end.",
    )
