"""Which rows a step uses: the sampling half of the schedule axis.

``shuffle``: an epoch is one random order of the N training rows, cut into K = ceil(N / B)
mini-batches; a window is up to S consecutive ones, and never crosses an epoch, so its batches are
disjoint. Synchronous parties share one order (``party`` is ``None``), which both sides derive from
the seed, so no ids are sent; asynchronous parties draw an order of their own and send the ids.

``poisson``: a step takes each row by chance B / N, as privacy amplification assumes, so the sizes
of mini-batches vary around B. An asynchronous party draws them from a secret of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config import RunConfig


@dataclass(frozen=True)
class Window:
    """Consecutive mini-batches: row ids int32 [R], and rows in each of the S steps, int32 [S].

    ``whole`` : whether they are one full batch, all N rows in their own order.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    whole: bool = False


def take(table: Tensor, window: Window) -> Tensor:
    """The window's rows of a table [N, ...]; for a full batch, the table itself."""
    if window.whole:
        return table
    return table.index_select(0, torch.from_numpy(window.ids).to(table.device))


def put(config: RunConfig, table: Tensor, window: Window, rows: Tensor) -> None:
    """Write the window's rows into a table; of a row that is there twice, the last counts."""
    if window.whole:
        table.copy_(rows)
        return
    ids = window.ids
    if config.sampling == "poisson" or len(ids) > len(table):
        ids, from_end = np.unique(ids[::-1], return_index=True)
        rows = rows[torch.from_numpy(len(rows) - 1 - from_end)]
    table.index_copy_(0, torch.from_numpy(ids).to(table.device).long(), rows)


def steps_per_epoch(config: RunConfig, rows: int) -> int:
    """K, the mini-batches of one pass over the training rows; the last may be smaller."""
    return -(-rows // config.batch_size)


def divisors(config: RunConfig, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """What each step's sum over rows is divided by: its rows, or with Poisson sampling B."""
    if config.sampling == "poisson":
        return np.full(len(lengths), config.batch_size, np.int32)
    return lengths


@lru_cache(maxsize=16)  # both sides ask for one more than once
def draw_window(
    config: RunConfig,
    rows: int,
    party: int | None,
    epoch: int,
    first: int,
    steps: int,
    secret: bytes = b"",
) -> Window:
    """Mini-batches ``first`` to ``first + steps - 1`` of an epoch.

    Parameters
    ----------
    secret : what only this party knows; decides Poisson mini-batches that parties do not share.
    """
    if config.sampling == "poisson":
        return _draw_poisson(config, rows, party, epoch, first, steps, secret)
    order = _order(config.seed, rows, party, epoch, config.batch_size >= rows)
    ids = order[first * config.batch_size : (first + steps) * config.batch_size]
    lengths = np.full(steps, config.batch_size, np.int32)
    lengths[-1] = len(ids) - config.batch_size * (steps - 1)
    lengths.flags.writeable = False  # windows are shared
    return Window(ids, lengths, config.batch_size >= rows)


def _draw_poisson(
    config: RunConfig,
    rows: int,
    party: int | None,
    epoch: int,
    first: int,
    steps: int,
    secret: bytes,
) -> Window:
    """Rows taken by independent chances, drawn as the gaps between those that are taken."""
    rate = min(1.0, config.batch_size / rows)
    key = f"batch|{config.seed}|{party}|{epoch}|{first}|".encode() + secret
    generator = secret_generator(key)
    trials, taken = steps * rows, np.zeros(0, np.int64)
    last = -1
    while last < trials:
        gaps = generator.geometric(rate, size=int(trials * rate) + 100)
        taken = np.concatenate([taken, last + np.cumsum(gaps)])
        last = int(taken[-1])
    step, ids = np.divmod(taken[taken < trials], rows)
    lengths = np.bincount(step, minlength=steps).astype(np.int32)
    ids = ids.astype(np.int32)
    ids.flags.writeable = lengths.flags.writeable = False
    return Window(ids, lengths)


def secret_generator(key: bytes) -> np.random.Generator:
    """A generator that follows from all of a key; torch's would use 32 bits of it."""
    seed = int.from_bytes(hashlib.sha256(key).digest(), "little")
    return np.random.Generator(np.random.SFC64(seed))


def _order(seed: int, rows: int, party: int | None, epoch: int, full: bool) -> NDArray[np.int32]:
    """The order of an epoch; a party's last two are kept, since feedback trails its window."""
    kept = _orders.setdefault(party, {})
    key = (seed, rows, 0 if full else epoch, full)
    if key not in kept:
        kept[key] = _draw_order(seed, rows, party, epoch, full)
        while len(kept) > 2:
            del kept[next(iter(kept))]
    return kept[key]


_orders: dict[int | None, dict[tuple[int, int, int, bool], NDArray[np.int32]]] = {}


def _draw_order(
    seed: int, rows: int, party: int | None, epoch: int, full: bool
) -> NDArray[np.int32]:
    stream = 0 if party is None else party + 1
    generator = np.random.default_rng([seed, 1, stream, epoch])
    order = np.arange(rows, dtype=np.int32)
    if not full:  # one batch of all rows needs no order
        generator.shuffle(order)
    order.flags.writeable = False
    return order
