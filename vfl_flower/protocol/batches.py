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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.transport.messages import Arrays, TrainOrder, checked


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


def first_step(config: RunConfig, rows: int, order: TrainOrder) -> int:
    """The number of an order's first step among all of the party's, from 0."""
    return order.epoch * steps_per_epoch(config, rows) + order.first


def divisors(config: RunConfig, rows: int, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """What each step's sum is divided by: its rows, or with Poisson sampling those expected."""
    if config.schedule.sampling == "poisson":
        return np.full(len(lengths), expected_rows(config, rows), np.int32)
    return np.maximum(lengths, 1)  # a step may have none of a party's rows


def expected_rows(config: RunConfig, rows: int) -> int:
    """Rows of a mini-batch of N rows, on average: B, unless there are fewer."""
    return min(config.training.batch_size, rows)


def most_rows(config: RunConfig, rows: int, steps: int) -> int:
    """Rows of a window of so many steps, at most; with Poisson sampling, by all reason."""
    expected = steps * expected_rows(config, rows)
    if config.schedule.sampling == "poisson":
        return int(expected + 10 * expected**0.5 + 100)  # ten deviations above the mean
    return min(expected, rows)


def check_order(config: RunConfig, rows: int, parties: int, order: TrainOrder) -> None:
    """Refuse an order for steps that no run with this configuration has, before they are drawn.

    Raises
    ------
    VflError
        As the end of a sentence, whose subject is the party.
    """
    per_epoch = steps_per_epoch(config, rows)
    # A party that is quick takes over what others have not done.
    epochs = config.training.epochs * parties
    if order.epoch >= epochs or order.first + order.steps > per_epoch:
        raise VflError(
            f"was asked for steps {order.first + 1} to {order.first + order.steps} of epoch "
            f"{order.epoch + 1}, where {epochs} epochs of {per_epoch} steps are the most there are."
        )


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
    if config.schedule.sampling == "poisson":
        return _draw_poisson(config, rows, party, epoch, first, steps, secret)
    order = _order(config.training.seed, rows, party, epoch, config.training.batch_size >= rows)
    ids = order[first * config.training.batch_size : (first + steps) * config.training.batch_size]
    lengths = np.full(steps, config.training.batch_size, np.int32)
    lengths[-1] = len(ids) - config.training.batch_size * (steps - 1)
    lengths.flags.writeable = False  # windows are shared
    return Window(ids, lengths, config.training.batch_size >= rows, distinct=True)


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
    rate = min(1.0, config.training.batch_size / rows)
    key = f"batch|{config.training.seed}|{party}|{epoch}|{first}|".encode() + secret
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


def uploaded(
    config: RunConfig,
    rows: int,
    party: int,
    order: TrainOrder,
    arrays: Arrays,
    present: NDArray[np.bool_] | None = None,
) -> tuple[Window, Window]:
    """The mini-batches that an order is of, and those of their rows that were uploaded.

    These are the rows that the party has, by a mask [N], if it lacks some. Both ends know
    mini-batches that are coordinated, and those of a party's own shuffled order, of which the ids
    are compared; Poisson mini-batches are read, as the party has drawn them in secret.

    Raises
    ------
    VflError
        If the ids cannot be those of the order.
    """
    owner = None if order.coordinated else party
    if not order.coordinated and config.schedule.sampling == "poisson":
        window = _read_window(rows, order.steps, arrays, present)
        return window, window
    batches = draw_window(config, rows, owner, order.epoch, order.first, order.steps)
    window = kept(batches, present)
    if order.coordinated:
        return batches, window
    ids = _sent(arrays, "ids", window.ids.shape)
    if not np.array_equal(ids, window.ids):
        raise VflError(
            "sent sample ids that are not those of its mini-batches: another party's, or another "
            "run's."
        )
    return window, window


def _read_window(
    rows: int, steps: int, arrays: Arrays, present: NDArray[np.bool_] | None
) -> Window:
    lengths = _sent(arrays, "lengths", (steps,))
    if lengths.min() < 0 or lengths.max() > rows:
        raise VflError(f"sent mini-batches of {lengths.min()} to {lengths.max()} rows.")
    ids = _sent(arrays, "ids", (int(lengths.sum(dtype=np.int64)),))
    if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
        raise VflError("sent sample ids out of range.")
    if present is not None and not present[ids].all():
        raise VflError("sent sample ids of rows that it does not have.")
    places = np.repeat(np.arange(steps), lengths) * rows + ids  # one number for (step, row)
    if len(np.unique(places)) < len(places):
        raise VflError("sent a mini-batch in which a row occurs more than once.")
    return Window(ids, lengths)


def _sent(arrays: Arrays, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
    try:
        array: NDArray[np.int32] = checked(arrays, name, "int32", shape)
    except VflError as error:
        raise VflError(f"sent an upload that cannot be used: {error}") from None
    return array


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


def join(config: RunConfig, rows: int, windows: Sequence[Window]) -> Joint:
    """Windows of one quorum: step j takes the j-th mini-batch of each, one after the other."""
    if len(windows) == 1:
        return Joint(windows[0], divisors(config, rows, windows[0].lengths), [])
    step_of = np.concatenate([np.repeat(np.arange(len(w.lengths)), w.lengths) for w in windows])
    by_step = np.argsort(step_of, kind="stable")
    steps = max(len(window.lengths) for window in windows)
    divided = np.zeros(steps, np.int64)
    for window in windows:
        divided[: len(window.lengths)] += divisors(config, rows, window.lengths)
    ids = np.concatenate([window.ids for window in windows])[by_step]
    starts = np.cumsum([len(window.ids) for window in windows])[:-1]
    lengths = np.bincount(step_of, minlength=steps).astype(np.int32)
    return Joint(Window(ids, lengths), divided, np.split(np.argsort(by_step), starts))


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
