"""Partitioned data sets: files, scikit-learn's sets, and sets of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError, label_asked
from vfl_flower.config.logs import log
from vfl_flower.config.options import DataConfig
from vfl_flower.config.provenance import free_memory
from vfl_flower.data.frames import floats, of_texts
from vfl_flower.data.images import decoded
from vfl_flower.data.own_files import of_separator
from vfl_flower.data.partitioned import Columns, PartitionedData
from vfl_flower.data.table_file import TableError, TableFile, check_place
from vfl_flower.data.text import Tokenizer, as_samples


def shipped(data: DataConfig, place: str) -> PartitionedData:
    """Open a data set that comes with scikit-learn."""
    from sklearn import datasets as sklearn_datasets

    if data.dataset == "digits":
        digits = sklearn_datasets.load_digits()
        rows, labels = digits.images, digits.target
    else:
        rows, labels = sklearn_datasets.load_breast_cancer(return_X_y=True)
    shape = rows.shape[1:]
    return PartitionedData(
        lambda columns: [rows[columns(shape)]], lambda: [labels], shape=lambda: shape
    )


def npz(data: DataConfig, place: str) -> PartitionedData:
    """Open arrays X_train, y_train, X_test, y_test; or X, y. Nothing is unpickled."""

    def arrays(letter: str) -> list[Array]:
        try:
            with ZipFile(place) as file:
                needed, free = sum(each.file_size for each in file.infolist()), free_memory()
            if needed > free:  # a file of some kilobytes may hold gigabytes of zeros
                raise ConfigError(
                    f"{data.dataset} needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} "
                    "GB are free. Check the file, or give fewer rows."
                )
            with np.load(place, allow_pickle=False) as file:
                names = [f"{letter}_train", f"{letter}_test"]
                names = names if set(names) <= set(file.files) else [letter]
                return [file[name] for name in names]
        except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"{data.dataset} cannot be read. Give it numeric arrays X_train, y_train, X_test "
                "and y_test, or X and y."
            ) from error

    def features(columns: Columns) -> list[Array]:
        parts = arrays("X")
        shapes = {rows.shape[1:] for rows in parts}
        if any(rows.dtype.kind not in "biuf" or rows.ndim < 2 for rows in parts) or len(shapes) > 1:
            raise ConfigError(
                f"X of {data.dataset} is not numeric, or its rows differ in shape. Give numeric "
                "arrays of equal rows."
            )
        return [rows[columns(rows.shape[1:])] for rows in parts]

    def shape() -> tuple[int, ...]:
        """Return the shape of a sample, from the header of its file."""
        with suppress(KeyError, ValueError, OSError, EOFError, BadZipFile), ZipFile(place) as file:
            both = {"X_train.npy", "X_test.npy"} <= set(file.namelist())
            with file.open("X_train.npy" if both else "X.npy") as array:
                header = np.lib.format.read_array_header_2_0
                if np.lib.format.read_magic(array) == (1, 0):
                    header = np.lib.format.read_array_header_1_0
                return tuple(header(array)[0][1:])
        return ()  # the parties say what is wrong

    return PartitionedData(features, lambda: arrays("y"), shape=shape)


def table(data: DataConfig, place: str) -> PartitionedData:
    """Open a csv or parquet file with a header, a label column and numeric features."""
    file = TableFile(Path(place), data.dataset.startswith("csv:"))

    @contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except TableError as error:
            raise ConfigError(f"{data.dataset} {error.what}") from None
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{data.dataset} cannot be read as a table. Give it a line of column names, then "
                "rows."
            ) from error

    def read(columns: list[str]) -> Any:
        with reading():
            return file.read(columns)

    with reading():
        check_place(Path(place))
        names = file.names
    if file.is_csv and data.label not in names and (wrong := of_separator(names)):
        raise ConfigError(f"{data.dataset} {wrong}")

    others = [name for name in names if name != data.label]

    def features(columns: Columns) -> list[Array]:
        mine = others[columns((len(others),))[-1]]
        frame = read(mine)
        all_numeric(data, {name: frame[name].dtype.kind for name in mine}, frame)
        return [floats(frame)]

    def labels() -> list[Array]:
        has_label(data, names)
        column = read([data.label])[data.label]
        if column.isna().any():
            raise missing_labels(data)
        return [column.to_numpy()]

    return PartitionedData(features, labels, shape=lambda: (len(others),))


class SparseRows:
    """Rows in memory, stored as their non-zero entries."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries  # a scipy CSR matrix
        self.size = int(np.prod(entries.shape))

    def __len__(self) -> int:
        return int(self._entries.shape[0])

    def __getitem__(self, rows: Any) -> SparseRows:
        return SparseRows(self._entries[rows])

    def dense(self) -> Array:
        """Return all entries, float32 [rows, columns]."""
        return self._entries.toarray()


def svmlight(data: DataConfig, place: str) -> PartitionedData:
    """Open a file PATH, and PATH.t beside it as the test part, if any (as in LIBSVM)."""
    from sklearn.datasets import load_svmlight_files

    paths = [place, f"{place}.t"] if Path(f"{place}.t").is_file() else [place]

    @cache
    def parts() -> tuple[list[Any], list[Array]]:
        try:
            loaded = load_svmlight_files(paths, dtype=np.float32)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{data.dataset} cannot be read. Write each line as svmlight does: a label, then "
                "index:value pairs in order of their indices."
            ) from error
        rows, labels = loaded[::2], loaded[1::2]
        if not all(np.isfinite(each.data).all() for each in rows):
            raise ConfigError(f"{data.dataset} has infinite values. Replace them.")
        whole = all((each == np.rint(each)).all() for each in labels)
        if whole and data.target == "classification":
            labels = [each.astype(np.int64) for each in labels]
        return rows, labels

    def features(columns: Columns) -> list[Any]:
        rows, _ = parts()
        mine = columns(rows[0].shape[1:])[-1]
        return [SparseRows(each[:, mine]) for each in rows]

    return PartitionedData(
        features, lambda: parts()[1], SparseRows.dense, lambda: tuple(parts()[0][0].shape[1:])
    )


def has_label(data: DataConfig, names: list[str]) -> None:
    """Refuse a table without the label column."""
    if data.label not in names:
        raise ConfigError(
            f"{data.dataset} has no label column {data.label!r}:{label_asked(data.label, names)}"
        )


def missing_labels(data: DataConfig) -> ConfigError:
    """Return the error about missing labels."""
    return ConfigError(
        f"Column {data.label!r} of {data.dataset} has missing labels. Drop those rows."
    )


def all_numeric(data: DataConfig, kinds: dict[str, str], frame: Any = None) -> None:
    """Refuse columns that are not numeric, by NumPy's letters of their kinds."""
    for name, kind in kinds.items():
        if kind not in "biuf":
            advice = ". Encode it as numbers first."
            advice = advice if frame is None else of_texts(frame[name], advice)
            raise of_column(data, name, f"is not numeric{advice}")


def of_column(data: DataConfig, name: str, what: str) -> ConfigError:
    """Return an error about a column without its name, since others may read it."""
    log.warning("Column %r of %s %s", name, data.dataset, what)
    return ConfigError(f"A column of {data.dataset}, named in the party's own log, {what}")


def hugging_face(data: DataConfig, place: str) -> PartitionedData:
    """Open a data set of the `datasets` library: a hub id, a folder, or a saved set."""
    parts = _Parts(data, _loaded(data, place))
    return PartitionedData(parts.features, parts.labels, as_samples if parts.is_text else None)


def _loaded(data: DataConfig, place: str) -> list[Any]:
    """Return the training part, and the test part if there is one."""
    import datasets as hugging_face

    try:
        if (Path(place) / "dataset_dict.json").is_file() or (Path(place) / "state.json").is_file():
            loaded = hugging_face.load_from_disk(place)
        else:
            loaded = hugging_face.load_dataset(place)
    except Exception as error:  # the library raises many kinds of errors, with long texts
        raise ConfigError(
            f"{data.dataset} cannot be loaded by the datasets library "
            f"({type(error).__name__}). Check the name, or the folder."
        ) from error
    if isinstance(loaded, hugging_face.Dataset):
        return [loaded]
    if "train" not in loaded:
        raise ConfigError(f"{data.dataset} has no part named 'train'. Rename its training part.")
    return [loaded[name] for name in ("train", "test") if name in loaded]


class _Parts:
    """Columns of one or two parts of a data set."""

    def __init__(self, data: DataConfig, parts: list[Any]) -> None:
        self._data, self._parts, self._kinds = data, parts, parts[0].features
        self._others = [name for name in parts[0].column_names if name != data.label]
        kind = self._kinds[self._others[0]] if len(self._others) == 1 else None
        self.is_text = getattr(kind, "dtype", "") in ("string", "large_string")

    def features(self, columns: Columns) -> list[Array]:
        """Return a party's features of each part: one column of arrays or texts, or a table."""
        if self.is_text:
            return [_tokens(self._data, part[self._others[0]], columns) for part in self._parts]
        if len(self._others) == 1:
            rows = self._only_column
            all_numeric(self._data, {self._others[0]: rows[0].dtype.kind})
            if rows[0].ndim > 1:  # images or sequences
                if len({each.shape[1:] for each in rows}) > 1:
                    raise ConfigError(
                        f"The parts of {self._data.dataset} have rows of unequal shape. Make them "
                        "equal."
                    )
                return [each[columns(each.shape[1:])] for each in rows]
        mine = self._others[columns((len(self._others),))[-1]]
        table = [{name: self._column(part, name) for name in mine} for part in self._parts]
        all_numeric(self._data, {name: c.dtype.kind for name, c in table[0].items()})
        if wide := [name for name in mine if table[0][name].ndim > 1]:
            what = "holds arrays beside other columns. Keep either one column of arrays, or columns"
            raise of_column(self._data, wide[0], f"{what} of numbers.")
        return [np.stack(list(each.values()), axis=1) for each in table]

    def labels(self) -> list[Array]:
        """Return labels of each part, with class names for numbers. -1 is a missing label."""
        from datasets import ClassLabel

        label, parts = self._data.label, []
        has_label(self._data, self._parts[0].column_names)
        plain = self._data.target == "regression"  # stars of a review, for example
        for part in self._parts:
            kind, values = part.features[label], self._column(part, label)
            if isinstance(kind, ClassLabel) and values.dtype.kind == "i" and not plain:
                if values.min(initial=0) < 0:
                    raise missing_labels(self._data)
                values = np.array(kind.names)[values]
            parts.append(values)
        return parts

    @cached_property
    def _only_column(self) -> list[Array]:
        """Return the single feature column of each part."""
        from datasets import Image

        (name,) = self._others
        kind, parts = self._kinds[name], self._parts
        if isinstance(kind, Image):
            parts = [part.cast_column(name, Image(decode=False)) for part in parts]
        elif not (isinstance(kind, Mapping) and kind.keys() == {"bytes", "path"}):  # plain images
            return [self._column(part, name) for part in parts]
        return [_pixels(self._data, part[name]) for part in parts]

    def _column(self, part: Any, name: str) -> Array:
        try:
            return np.asarray(part.select_columns([name]).with_format("numpy")[:][name])
        except (ValueError, TypeError, IndexError) as error:
            what = "has rows of unequal shape. Make them equal."
            raise of_column(self._data, name, what) from error


def _pixels(data: DataConfig, cells: Iterable[Mapping[str, Any]]) -> Array:
    """Return images, uint8 [n, H, W] or [n, H, W, 3]."""
    pixels = []
    for number, cell in enumerate(cells):
        try:
            pixels.append(decoded(cell["bytes"] or Path(cell["path"]), grey=True))
        except ValueError as error:
            log.warning("Image %d of %s cannot be read: %s", number, data.dataset, error)
            raise ConfigError(
                f"{data.dataset} has an image that cannot be read. Its reader's log says which. "
                "Replace that image."
            ) from None
    if len({each.shape for each in pixels}) > 1:
        raise ConfigError(f"{data.dataset} has images of unequal shape. Make them equal.")
    return np.stack(pixels)


def _tokens(data: DataConfig, texts: Sequence[str], columns: Columns) -> Array:
    """Return tokens of a party's part of each text: contiguous words, evenly divided."""
    tokenizer = Tokenizer(data.tokenizer, data.text_length, data.dataset)
    many = 2**20  # a nominal number of words: a real text may have fewer words than parties
    mine = columns((many,))[-1]
    parts = []
    for text in texts:
        words = (text or "").split()
        cut = slice(mine.start * len(words) // many, mine.stop * len(words) // many)
        parts.append(" ".join(words[cut]))
    return tokenizer.encode(parts)
