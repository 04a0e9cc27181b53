"""Data sets of the Hugging Face `datasets` library, which are partitioned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.formats import all_numeric, has_label, of_column, own_columns
from vfl_flower.data.images import decoded
from vfl_flower.data.partitioned import Columns, PartitionedData
from vfl_flower.data.text import Tokenizer, as_samples

log = logging.getLogger("flwr")

Array = NDArray[Any]


def hugging_face(data: DataConfig, place: str) -> PartitionedData:
    """Open a data set of the `datasets` library: a hub id, a folder, or a saved set."""
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
        parts = [loaded]
    elif "train" not in loaded:
        raise ConfigError(f"{data.dataset} has no part named 'train'. Rename its training part.")
    else:
        parts = [loaded[name] for name in ("train", "test") if name in loaded]
    names = parts[0].column_names

    def column(part: Any, name: str) -> Array:
        try:
            return np.asarray(part.select_columns([name]).with_format("numpy")[:][name])
        except (ValueError, TypeError, IndexError) as error:
            raise of_column(data, name, "has rows of unequal shape. Make them equal.") from error

    others = [name for name in names if name != data.label]
    text = len(others) == 1 and _is_text(parts[0].features[others[0]])

    @cache
    def only_column() -> list[Array]:
        """Return the single feature column of each part."""
        feature, raw = parts[0].features[others[0]], hugging_face.Image(decode=False)
        if isinstance(feature, hugging_face.Image):
            return [_pixels(data, part.cast_column(others[0], raw)[others[0]]) for part in parts]
        if isinstance(feature, Mapping) and feature.keys() == {"bytes", "path"}:  # plain images
            return [_pixels(data, part[others[0]]) for part in parts]
        return [column(part, others[0]) for part in parts]

    def features(columns: Columns) -> list[Array]:
        if text:
            return [_tokens(data, part[others[0]], columns) for part in parts]
        if len(others) == 1:
            rows = only_column()
            all_numeric(data, {others[0]: rows[0].dtype.kind})
            if rows[0].ndim > 1:  # images or sequences
                if len({each.shape[1:] for each in rows}) > 1:
                    raise ConfigError(
                        f"The parts of {data.dataset} have rows of unequal shape. Make them equal."
                    )
                return [each[columns(each.shape[1:])] for each in rows]
        mine = own_columns(data, names, columns)
        table = [{name: column(part, name) for name in mine} for part in parts]
        all_numeric(data, {name: c.dtype.kind for name, c in table[0].items()})
        wide = [name for name in mine if table[0][name].ndim > 1]
        if wide:
            raise of_column(
                data,
                wide[0],
                "holds arrays beside other columns. Keep either one column of arrays, or columns "
                "of numbers.",
            )
        return [np.stack(list(each.values()), axis=1) for each in table]

    def labels() -> list[Array]:
        has_label(data, names)
        return [named(part, column(part, data.label)) for part in parts]

    def named(part: Any, values: Array) -> Array:
        """Replace class numbers by class names. -1 means a missing label."""
        feature = part.features[data.label]
        if not isinstance(feature, hugging_face.ClassLabel) or values.dtype.kind != "i":
            return values
        if data.target == "regression":  # stars of a review, for example
            return values
        if values.min(initial=0) < 0:
            raise ConfigError(
                f"Column {data.label!r} of {data.dataset} has missing labels. Drop those rows."
            )
        return np.array(feature.names)[values]

    return PartitionedData(features, labels, as_samples if text else None)


def _is_text(feature: Any) -> bool:
    """Return whether a column of a Hugging Face data set holds texts."""
    return getattr(feature, "dtype", "") in ("string", "large_string")


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
