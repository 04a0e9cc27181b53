"""Windows of mini-batches: row ids by step, and their rows in a table."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.losses import Loss
from vfl_flower.protocol.subsets import Copies


@dataclass(frozen=True)
class Window:
    """Consecutive mini-batches of S steps.

    ids : row ids of all steps in order, int32 [R].
    lengths : number of rows in each step, int32 [S].
    whole : whether the window is one full batch of all N rows in table order.
    distinct : whether no row is certain to occur twice.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    whole: bool = False
    distinct: bool = False

    @cached_property
    def index(self) -> Tensor:
        """Return the ids as an int64 tensor, which can index tensors."""
        return torch.from_numpy(self.ids).long()


def kept(window: Window, present: NDArray[np.bool_] | None) -> Window:
    """Return the rows of a window in a party's row mask [N]; all without a mask."""
    if present is None:
        return window
    held = present[window.ids]
    if held.all():
        return window
    step = np.repeat(np.arange(len(window.lengths)), window.lengths)
    lengths = np.bincount(step[held], minlength=len(window.lengths)).astype(np.int32)
    return Window(window.ids[held], lengths, distinct=window.distinct)


def take(table: Tensor, window: Window) -> Tensor:
    """Return the window's rows of a table [N, ...]; a full batch is the table itself."""
    if window.whole:
        return table
    return table.index_select(0, window.index.to(table.device, non_blocking=True))


def put(table: Tensor, window: Window, rows: Tensor) -> None:
    """Write the window's rows into a table; the last value of a repeated row counts."""
    if window.whole:
        table.copy_(rows)
        return
    index = window.index
    if not window.distinct:
        ids, from_end = np.unique(window.ids[::-1], return_index=True)
        last = torch.from_numpy(len(rows) - 1 - from_end)
        rows = rows[last.to(rows.device, non_blocking=True)]
        index = torch.from_numpy(ids).long()
    table.index_copy_(0, index.to(table.device, non_blocking=True), rows)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return consecutive parts as one tensor, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def padded_steps(rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return rows [R, ...] by step, [S, longest, ...], and places step * longest + position, [R].

    The places are None if all steps have the same number of rows.
    """
    steps, longest = len(lengths), max(1, *lengths)
    if steps * longest == len(rows):
        return rows.view(steps, longest, *rows.shape[1:]), None
    held = np.arange(longest) < np.asarray(lengths)[:, None]
    places = torch.from_numpy(np.flatnonzero(held)).to(rows.device, non_blocking=True)
    padded = rows.new_zeros(steps * longest, *rows.shape[1:]).index_copy(0, places, rows)
    return padded.view(steps, longest, *rows.shape[1:]), places


def step_means(values: Tensor, lengths: Sequence[int], divisors: Sequence[int]) -> Tensor:
    """Divide the sum over the rows of each step by its divisor: [R] to [S]."""
    steps = len(lengths)
    whole = steps * max(1, *lengths) == len(values)
    sums = (values.view(steps, -1) if whole else padded_steps(values, lengths)[0]).sum(1)
    return sums / torch.tensor(divisors, dtype=sums.dtype).to(sums.device, non_blocking=True)


def row_losses(loss: Loss, outputs: Tensor, labels: Tensor, copies: Copies | None) -> Tensor:
    """Return row losses [R] from outputs of the rows, [R, C], or of their copies, [R', C]."""
    if copies is None:
        return loss.per_row(outputs, labels)
    return copies.mean(loss.per_row(outputs, labels[copies.rows]))


def steps_per_epoch(config: RunConfig, rows: int) -> int:
    """Return K, the mini-batches in one epoch; the last one may be smaller."""
    return -(-rows // config.training.batch_size)


def expected_rows(config: RunConfig, rows: int) -> int:
    """Return the average size of a mini-batch from N rows: B, or N if N is smaller."""
    return min(config.training.batch_size, rows)


@dataclass(frozen=True)
class Joint:
    """The rows that S steps of the top model use, in order of steps.

    ``divisors`` [S] divide each step's sum over rows. ``places`` has an array for each window, the
    positions of the window's rows here, in the order of the window. It is empty for a single
    window.
    """

    window: Window
    divisors: NDArray[Any]
    places: list[NDArray[np.int64]]


def among(window: Window, batches: Window) -> NDArray[np.int64]:
    """Return the positions of a window's rows in mini-batches that contain them, in equal order."""
    step = np.arange(len(batches.lengths))
    all_of, some = (np.repeat(step, each.lengths) << 32 | each.ids for each in (batches, window))
    return np.flatnonzero(np.isin(all_of, some))


def secret_generator(key: bytes) -> np.random.Generator:
    """Return a generator seeded by a whole key; torch's uses 32 bits only."""
    seed = int.from_bytes(hashlib.sha256(key).digest(), "little")
    return np.random.Generator(np.random.SFC64(seed))
