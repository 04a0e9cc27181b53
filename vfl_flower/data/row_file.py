"""Rows on disk, for data that exceed memory.

The file has no name: nobody else can open it, and it vanishes with the process. It lies in
FLWR_HOME/vfl-flower, like a party's state. It is read and not mapped, since the kernel would keep
mapped pages in the process, and memory would grow with the file.
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
    """Rows of one type and shape, in order of arrival."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._file = unnamed()
        self._rows = 0
        self._size = self.dtype.itemsize * int(np.prod(shape))

    def append(self, rows: Array) -> Array:
        """Append rows [n, *shape], and return their numbers [n].

        Raises
        ------
        VflError
            If the rows cannot be written.
        """
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
    """Return a file without a name. Raise `VflError` if it cannot be made."""
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
