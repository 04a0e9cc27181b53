"""Rows that are kept on the disk, where they would be too many for memory.

The file has no name, so that nobody else can open it and it is gone with the process; it is made
in FLWR_HOME/vfl-flower, where a party keeps its state. It is read and not mapped: pages of a map
would stay in the process until the kernel wants them back, so that its memory grew with the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import make_folder
from vfl_flower.transport.flower_internals import flower_home

Array = NDArray[Any]


class RowFile:
    """Rows of one type and shape, by the order in which they came."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._file = unnamed()
        self._rows = 0
        self._size = self.dtype.itemsize * int(np.prod(shape))

    def append(self, rows: Array) -> Array:
        """Add rows [n, *shape], and tell their numbers, [n]; `VflError` if the disk refuses."""
        content = np.ascontiguousarray(rows, self.dtype)
        with _told():
            self._file.write(content.data.cast("B"))
            self._file.flush()
        self._rows += len(rows)
        return np.arange(self._rows - len(rows), self._rows)

    def read(self, numbers: Array) -> Array:
        """The rows of these numbers, [n, *shape]."""
        rows = np.empty((len(numbers), *self.shape), self.dtype)
        content, opened, size = rows.data.cast("B"), self._file.fileno(), self._size
        for at, number in enumerate(numbers.tolist()):
            os.preadv(opened, [content[at * size : (at + 1) * size]], number * size)
        return rows


def unnamed() -> BinaryIO:
    """A file without a name; `VflError` if the disk refuses."""
    folder = flower_home() / "vfl-flower"
    with _told():
        make_folder(folder)
        return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


@contextmanager
def _told() -> Iterator[None]:
    """Say as the end of a sentence, by `VflError`, that the disk refuses."""
    try:
        yield
    except OSError as error:
        raise VflError(
            f"cannot keep its rows on its disk ({error.strerror}): make room in the folder "
            "vfl-flower of FLWR_HOME."
        ) from None
