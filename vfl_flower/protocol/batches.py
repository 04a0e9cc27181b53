"""Windows of mini-batches: row ids by step, and the rows of a table that they name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.run_config import RunConfig


@dataclass(frozen=True)
class Window:
    """Consecutive mini-batches: row ids int32 [R], and rows in each of the S steps, int32 [S].

    ``whole`` : whether they are one full batch, all N rows in their own order; ``distinct`` :
    whether it is known that no row is in it twice.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    whole: bool = False
    distinct: bool = False

    @cached_property
    def index(self) -> Tensor:
        """The ids, to index tensors by."""
        return torch.from_numpy(self.ids).long()


def kept(window: Window, present: NDArray[np.bool_] | None) -> Window:
    """Those rows of a window that a party has, by a mask [N]; all, if there is none."""
    if present is None:
        return window
    held = present[window.ids]
    if held.all():
        return window
    step = np.repeat(np.arange(len(window.lengths)), window.lengths)
    lengths = np.bincount(step[held], minlength=len(window.lengths)).astype(np.int32)
    return Window(window.ids[held], lengths, distinct=window.distinct)


def take(table: Tensor, window: Window) -> Tensor:
    """The window's rows of a table [N, ...]; for a full batch, the table itself."""
    if window.whole:
        return table
    return table.index_select(0, window.index.to(table.device))


def put(table: Tensor, window: Window, rows: Tensor) -> None:
    """Write the window's rows into a table; of a row that is there twice, the last counts."""
    if window.whole:
        table.copy_(rows)
        return
    index = window.index
    if not window.distinct:
        ids, from_end = np.unique(window.ids[::-1], return_index=True)
        rows = rows[torch.from_numpy(len(rows) - 1 - from_end)]
        index = torch.from_numpy(ids).long()
    table.index_copy_(0, index.to(table.device), rows)


def steps_per_epoch(config: RunConfig, rows: int) -> int:
    """K, the mini-batches of one pass over the training rows; the last may be smaller."""
    return -(-rows // config.training.batch_size)


def expected_rows(config: RunConfig, rows: int) -> int:
    """Rows of a mini-batch of N rows, on average: B, unless there are fewer."""
    return min(config.training.batch_size, rows)


@dataclass(frozen=True)
class Joint:
    """The rows that S steps of the top model use, those of step 0 first.

    ``divisors`` is what each step's sum over rows is divided by, [S]. ``places`` says of each
    window where its rows are, in its own order; empty if there is only one.
    """

    window: Window
    divisors: NDArray[Any]
    places: list[NDArray[np.int64]]


def among(window: Window, batches: Window) -> NDArray[np.int64]:
    """Where in mini-batches the rows of a window are, of which it has some, in the same order."""
    step = np.arange(len(batches.lengths))
    all_of, some = (np.repeat(step, each.lengths) << 32 | each.ids for each in (batches, window))
    return np.flatnonzero(np.isin(all_of, some))


def secret_generator(key: bytes) -> np.random.Generator:
    """A generator that follows from all of a key; torch's would use 32 bits of it."""
    seed = int.from_bytes(hashlib.sha256(key).digest(), "little")
    return np.random.Generator(np.random.SFC64(seed))
