"""Data sets that are divided among parties: each reads its own columns, the label holder labels.

`config.plugins.DATASETS` names those below, by what stands before the colon in
``dataset='npz:PATH'``. To add one, write a function like them: a data set of your own is
``dataset='waves.py:open_waves'``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, asked
from vfl_flower.config.options import DataConfig
from vfl_flower.config.plugins import DATASETS
from vfl_flower.data.images import decoded
from vfl_flower.data.own_files import of_separator
from vfl_flower.data.samples import Arrays
from vfl_flower.data.tables import of_texts
from vfl_flower.data.text import Tokenizer, as_samples

log = logging.getLogger("flwr")

Array = NDArray[Any]
Columns = Callable[[tuple[int, ...]], Any]
"""From the shape of one sample to the index of a party's columns."""


@dataclass(frozen=True)
class Divided:
    """A data set before its split: one part (all rows) or two (training rows, test rows).

    ``made`` : what makes samples of features as they are read; if it is none, they are scaled.
    """

    features: Callable[[Columns], list[Array]]
    labels: Callable[[], list[Array]]
    made: Callable[[Any], Arrays] | None = None


def open_dataset(data: DataConfig) -> Divided:
    """The data set that ``dataset`` names.

    Raises
    ------
    ConfigError
        If there is no such kind of data set, or no such file.
    """
    kind, _, place = data.dataset.partition(":")
    if is_code(data.dataset):
        return _opener(data.dataset)(data, "")
    ours = kind in DATASETS.known
    if (ours and bool(place) != (kind in _SHIPPED)) or (not ours and kind in DATASETS.names):
        if place and kind in _OF_A_FILE and not Path(place).is_file():
            raise ConfigError(f"dataset = {data.dataset!r}: there is no such file.")
        return _opener(kind)(data, place)
    packages = (f", {name}" for name in DATASETS.names if name not in DATASETS.known)
    suffix = Path(data.dataset).suffix.removeprefix(".")
    close = get_close_matches(kind.lower(), ("files", "hf", *_OF_A_FILE) if place else _SHIPPED, 1)
    likely = [f"{each}:{place}" if place else each for each in close]
    likely += [f"{suffix}:{data.dataset}"] * (suffix in _OF_A_FILE and not place)
    raise ConfigError(
        f"dataset = {data.dataset!r} is not known:{asked(data.dataset, likely, 'use')} digits, "
        "breast-cancer, npz:PATH, csv:PATH, parquet:PATH, svmlight:PATH or "
        f"hf:NAME_OR_DIR{''.join(packages)}."
    )


def _opener(name: str) -> Callable[[DataConfig, str], Divided]:
    found: Callable[[DataConfig, str], Divided] = DATASETS.load(name)
    return found


def is_code(dataset: str) -> bool:
    """Whether a data set is the place of code: no path after a colon, but a name after a dot."""
    return DATASETS.is_place(dataset) and "." in dataset.rpartition(":")[0]


_SHIPPED = ("digits", "breast-cancer")  # with scikit-learn
_OF_A_FILE = ("npz", "csv", "parquet", "svmlight")


def shipped(data: DataConfig, place: str) -> Divided:
    """A data set that comes with scikit-learn."""
    from sklearn import datasets as sklearn_datasets

    if data.dataset == "digits":
        digits = sklearn_datasets.load_digits()
        rows, labels = digits.images, digits.target
    else:
        rows, labels = sklearn_datasets.load_breast_cancer(return_X_y=True)
    return Divided(lambda columns: [rows[columns(rows.shape[1:])]], lambda: [labels])


def npz(data: DataConfig, place: str) -> Divided:
    """Arrays X_train, y_train, X_test, y_test; or X, y. Nothing is unpickled."""

    def arrays(letter: str) -> list[Array]:
        try:
            with np.load(place, allow_pickle=False) as file:
                names = [f"{letter}_train", f"{letter}_test"]
                names = names if set(names) <= set(file.files) else [letter]
                return [file[name] for name in names]
        except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"{data.dataset} cannot be read: it needs numeric arrays X_train, y_train, "
                "X_test and y_test, or X and y."
            ) from error

    def features(columns: Columns) -> list[Array]:
        parts = arrays("X")
        shapes = {rows.shape[1:] for rows in parts}
        if any(rows.dtype.kind not in "biuf" or rows.ndim < 2 for rows in parts) or len(shapes) > 1:
            raise ConfigError(
                f"X of {data.dataset} must be numeric arrays, whose rows all have one shape."
            )
        return [rows[columns(rows.shape[1:])] for rows in parts]

    return Divided(features, lambda: arrays("y"))


def table(data: DataConfig, place: str) -> Divided:
    """A csv or parquet file with a header: one label column, all others numeric features."""
    import pandas as pd
    import pyarrow.parquet as pq

    csv = data.dataset.startswith("csv:")
    try:
        names = list(pd.read_csv(place, nrows=0)) if csv else pq.read_schema(place).names
    except (ValueError, OSError) as error:
        raise ConfigError(f"{data.dataset} cannot be read as a table with a header.") from error
    if csv and data.label not in names and (wrong := of_separator(list(map(str, names)))):
        raise ConfigError(f"{data.dataset} {wrong}")

    def read(columns: list[str]) -> Any:
        return (
            pd.read_csv(place, usecols=columns) if csv else pd.read_parquet(place, columns=columns)
        )

    def features(columns: Columns) -> list[Array]:
        mine = _own_columns(data, names, columns)
        frame = read(mine)[mine]
        _all_numeric(data, {name: frame[name].dtype.kind for name in mine}, frame)
        return [frame.to_numpy(dtype=np.float64)]

    def labels() -> list[Array]:
        _has_label(data, names)
        column = read([data.label])[data.label]
        if column.isna().any():
            raise ConfigError(
                f"Column {data.label!r} of {data.dataset} has missing labels: drop those rows."
            )
        return [column.to_numpy()]

    return Divided(features, labels)


def hugging_face(data: DataConfig, place: str) -> Divided:
    """A data set of the `datasets` library: a hub id, a folder of files, or a saved data set."""
    import datasets as hugging_face

    try:
        if (Path(place) / "dataset_dict.json").is_file() or (Path(place) / "state.json").is_file():
            loaded = hugging_face.load_from_disk(place)
        else:
            loaded = hugging_face.load_dataset(place)
    except Exception as error:  # the library raises many kinds, and its own texts are long
        raise ConfigError(
            f"{data.dataset} cannot be loaded by the datasets library "
            f"({type(error).__name__}): check the name, or the folder."
        ) from error
    if isinstance(loaded, hugging_face.Dataset):
        parts = [loaded]
    elif "train" not in loaded:
        raise ConfigError(f"{data.dataset} has no part named 'train': rename its training part.")
    else:
        parts = [loaded[name] for name in ("train", "test") if name in loaded]
    names = parts[0].column_names

    def column(part: Any, name: str) -> Array:
        try:
            return np.asarray(part.select_columns([name]).with_format("numpy")[:][name])
        except (ValueError, TypeError, IndexError) as error:
            raise _of_column(data, name, "has rows of unequal shape: make them equal.") from error

    others = [name for name in names if name != data.label]
    text = len(others) == 1 and _is_text(parts[0].features[others[0]])

    @cache
    def only_column() -> list[Array]:
        """The one feature column of each part."""
        feature, raw = parts[0].features[others[0]], hugging_face.Image(decode=False)
        if isinstance(feature, hugging_face.Image):
            return [_pixels(data, part.cast_column(others[0], raw)[others[0]]) for part in parts]
        if isinstance(feature, Mapping) and feature.keys() == {"bytes", "path"}:  # unnamed images
            return [_pixels(data, part[others[0]]) for part in parts]
        return [column(part, others[0]) for part in parts]

    def features(columns: Columns) -> list[Array]:
        if text:
            return [_tokens(data, part[others[0]], columns) for part in parts]
        if len(others) == 1:
            rows = only_column()
            _all_numeric(data, {others[0]: rows[0].dtype.kind})
            if rows[0].ndim > 1:  # images or sequences
                if len({each.shape[1:] for each in rows}) > 1:
                    raise ConfigError(f"The parts of {data.dataset} have rows of unequal shape.")
                return [each[columns(each.shape[1:])] for each in rows]
        mine = _own_columns(data, names, columns)
        table = [{name: column(part, name) for name in mine} for part in parts]
        _all_numeric(data, {name: c.dtype.kind for name, c in table[0].items()})
        wide = [name for name in mine if table[0][name].ndim > 1]
        if wide:
            raise _of_column(
                data,
                wide[0],
                "holds arrays beside other columns: keep either one column of arrays, or columns "
                "of numbers.",
            )
        return [np.stack(list(each.values()), axis=1) for each in table]

    def labels() -> list[Array]:
        _has_label(data, names)
        return [named(part, column(part, data.label)) for part in parts]

    def named(part: Any, values: Array) -> Array:
        """Class names in the place of their numbers, of which -1 stands for none."""
        feature = part.features[data.label]
        if not isinstance(feature, hugging_face.ClassLabel) or values.dtype.kind != "i":
            return values
        if data.target == "regression":  # stars of a review, for example
            return values
        if values.min(initial=0) < 0:
            raise ConfigError(
                f"Column {data.label!r} of {data.dataset} has missing labels: drop those rows."
            )
        return np.array(feature.names)[values]

    return Divided(features, labels, as_samples if text else None)


def _is_text(feature: Any) -> bool:
    """Whether a column of a Hugging Face data set holds texts."""
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _pixels(data: DataConfig, cells: Iterable[Mapping[str, Any]]) -> Array:
    """Images, uint8 [n, H, W] or [n, H, W, 3]."""
    pixels = []
    for number, cell in enumerate(cells):
        try:
            pixels.append(decoded(cell["bytes"] or Path(cell["path"]), grey=True))
        except ValueError as error:
            log.warning("Image %d of %s cannot be read: %s", number, data.dataset, error)
            raise ConfigError(
                f"{data.dataset} has an image that cannot be read; its reader's log says which."
            ) from None
    if len({each.shape for each in pixels}) > 1:
        raise ConfigError(f"{data.dataset} has images of unequal shape: make them equal.")
    return np.stack(pixels)


def _tokens(data: DataConfig, texts: Sequence[str], columns: Columns) -> Array:
    """A party's part of the words of each text, as tokens: contiguous parts, as even as can be."""
    tokenizer = Tokenizer(data.tokenizer, data.text_length, data.dataset)
    many = 2**20  # as if a text had so many words, since one may have fewer than there are parties
    mine = columns((many,))[-1]
    parts = []
    for text in texts:
        words = (text or "").split()
        cut = slice(mine.start * len(words) // many, mine.stop * len(words) // many)
        parts.append(" ".join(words[cut]))
    return tokenizer.encode(parts)


def _own_columns(data: DataConfig, names: list[str], columns: Columns) -> list[str]:
    others = [name for name in names if name != data.label]
    own: list[str] = others[columns((len(others),))[-1]]
    return own


def _has_label(data: DataConfig, names: list[str]) -> None:
    if data.label not in names:
        raise ConfigError(
            f"{data.dataset} has no label column {data.label!r}:"
            f"{asked(data.label, names, 'set')} `label` to one of "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )


def _all_numeric(data: DataConfig, kinds: dict[str, str], frame: Any = None) -> None:
    text = [name for name, kind in kinds.items() if kind not in "biuf"]
    if text:
        advice = ": encode it as numbers first."
        advice = advice if frame is None else of_texts(frame[text[0]], advice)
        raise _of_column(data, text[0], f"is not numeric{advice}")


def _of_column(data: DataConfig, name: str, what: str) -> ConfigError:
    """What is wrong with a column, without its name: the sentence may leave the party."""
    log.warning("Column %r of %s %s", name, data.dataset, what)
    return ConfigError(f"A column of {data.dataset}, named in the party's own log, {what}")
