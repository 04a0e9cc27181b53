"""Data sets of the Hugging Face `datasets` library, which are partitioned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.formats import all_numeric, has_label, of_column, own_columns
from vfl_flower.data.images import decoded
from vfl_flower.data.partitioned import Columns, PartitionedData
from vfl_flower.data.text import Tokenizer, as_samples

log = logging.getLogger("flwr")


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
        self._names = parts[0].column_names
        self._others = [name for name in self._names if name != data.label]
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
        mine = own_columns(self._data, self._names, columns)
        table = [{name: self._column(part, name) for name in mine} for part in self._parts]
        all_numeric(self._data, {name: c.dtype.kind for name, c in table[0].items()})
        if wide := [name for name in mine if table[0][name].ndim > 1]:
            raise of_column(
                self._data,
                wide[0],
                "holds arrays beside other columns. Keep either one column of arrays, or columns "
                "of numbers.",
            )
        return [np.stack(list(each.values()), axis=1) for each in table]

    def labels(self) -> list[Array]:
        """Return the labels of each part."""
        has_label(self._data, self._names)
        return [self._named(part, self._column(part, self._data.label)) for part in self._parts]

    def _named(self, part: Any, values: Array) -> Array:
        """Replace class numbers by class names. -1 means a missing label."""
        from datasets import ClassLabel

        feature = part.features[self._data.label]
        if not isinstance(feature, ClassLabel) or values.dtype.kind != "i":
            return values
        if self._data.target == "regression":  # stars of a review, for example
            return values
        if values.min(initial=0) < 0:
            raise ConfigError(
                f"Column {self._data.label!r} of {self._data.dataset} has missing labels. Drop "
                "those rows."
            )
        return np.array(feature.names)[values]

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
