"""A sparse file in svmlight's format: rows of `index:value`, kept sparse until they are used.

Its values are as they are in the file, since scaling by mean and deviation would fill the zeros.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.data.partitioned import Columns, Divided

Array = NDArray[Any]


class SparseRows:
    """Rows in memory as their entries other than zero."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries  # a scipy CSR matrix
        self.size = int(np.prod(entries.shape))

    def __len__(self) -> int:
        return int(self._entries.shape[0])

    def __getitem__(self, rows: Any) -> SparseRows:
        return SparseRows(self._entries[rows])

    def dense(self) -> Array:
        """All entries, float32 [rows, columns]."""
        found: Array = self._entries.toarray()
        return found


def svmlight(data: DataConfig, place: str) -> Divided:
    """A file PATH, with PATH.t beside it as the test part, if that is there (as LIBSVM's are)."""
    from sklearn.datasets import load_svmlight_files

    paths = [place, f"{place}.t"] if Path(f"{place}.t").is_file() else [place]

    @cache
    def parts() -> tuple[list[Any], list[Array]]:
        try:
            found = load_svmlight_files(paths, dtype=np.float32)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{data.dataset} cannot be read: its lines must be a label and index:value pairs, "
                "in order of their indices, as svmlight has them."
            ) from error
        rows, labels = found[::2], found[1::2]
        if not all(np.isfinite(each.data).all() for each in rows):
            raise ConfigError(f"{data.dataset} has infinite values: replace them.")
        whole = all((each == np.rint(each)).all() for each in labels)
        if whole and data.target == "classification":
            labels = [each.astype(np.int64) for each in labels]
        return rows, labels

    def features(columns: Columns) -> list[Any]:
        rows, _ = parts()
        mine = columns(rows[0].shape[1:])[-1]
        return [SparseRows(each[:, mine]) for each in rows]

    return Divided(features, lambda: parts()[1], SparseRows.dense)
