"""Base of sampling schemes, and ``shuffle``: a random order of rows in each epoch.

K = ceil(N / B) mini-batches divide the order of the N training rows. A window has up to S
consecutive mini-batches of one epoch, so they are disjoint. Synchronous parties share one order
(``party`` is ``None``). Both ends derive it from the seed, so no ids are sent. Each asynchronous
party draws a separate order and sends the ids.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import (
    Joint,
    Window,
    expected_rows,
    kept,
    secret_generator,
    steps_per_epoch,
)
from vfl_flower.transport.messages import Arrays, TrainOrder, checked


class Sampling:
    """Draw mini-batches. A scheme overrides `draw`, and the methods that depend on it.

    secret : whether an uncoordinated party draws from a private secret. It then sends its row ids,
        and the label holder reads them. Otherwise both ends draw the rows.
    varies : whether mini-batches of an epoch differ in size, except for the last one.
    """

    secret: ClassVar[bool] = False
    varies: ClassVar[bool] = False

    def __init__(self, config: RunConfig, rows: int) -> None:
        self.config = config
        self.rows = rows  # N
        self.batch = config.training.batch_size  # B
        self.per_epoch = steps_per_epoch(config, rows)  # K
        # Both ends ask for a window, and more than once.
        self.window: Callable[[int | None, int, int, int, bytes], Window] = lru_cache(16)(self.draw)
        self._orders: dict[int | None, dict[int, NDArray[np.int32]]] = {}

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw mini-batches ``first`` to ``first + steps - 1`` of an epoch.

        Parameters
        ----------
        party : number of the party; ``None`` for the order that all parties share.
        secret : the party's secret, if the scheme is `secret` and parties do not share rows.
        """
        whole = self.batch >= self.rows  # one batch of all rows needs no order
        # Feedback may still need the order of the previous epoch.
        kept, key = self._orders.setdefault(party, {}), 0 if whole else epoch
        if key not in kept:
            order = np.arange(self.rows, dtype=np.int32)
            if not whole:
                stream = 0 if party is None else party + 1
                np.random.default_rng([self.config.training.seed, 1, stream, epoch]).shuffle(order)
            order.flags.writeable = False
            kept[key] = order
            while len(kept) > 2:
                del kept[next(iter(kept))]
        ids = kept[key][first * self.batch : (first + steps) * self.batch]
        lengths = np.full(steps, self.batch, np.int32)
        lengths[-1] = len(ids) - self.batch * (steps - 1)
        lengths.flags.writeable = False  # windows are shared
        return Window(ids, lengths, whole, distinct=True)

    def divisors(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the divisor of the sum over each step's rows, [S]: here their number."""
        return np.maximum(lengths, 1)  # a step may have none of a party's rows

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window of so many steps."""
        return min(steps * expected_rows(self.config, self.rows), self.rows)

    def check(self, order: TrainOrder, parties: int) -> None:
        """Refuse an order for steps that no run with this configuration has.

        Raises
        ------
        VflError
            If there is no such step. The text lacks its subject, the party.
        """
        # A fast party takes over steps of the others.
        epochs = self.config.training.epochs * parties
        if order.epoch >= epochs or order.first + order.steps > self.per_epoch:
            raise VflError(
                f"was asked for steps {order.first + 1} to {order.first + order.steps} of epoch "
                f"{order.epoch + 1}, but the run has at most {epochs} epochs of {self.per_epoch} "
                "steps."
            )

    # --- the label holder -----------------------------------------------------------------------

    def uploaded(
        self,
        party: int,
        order: TrainOrder,
        arrays: Arrays,
        present: NDArray[np.bool_] | None = None,
    ) -> tuple[Window, Window]:
        """Return the mini-batches of an order, and the uploaded rows of them.

        A party uploads the rows in its row mask ``present`` [N]. Both ends know the mini-batches,
        and the label holder compares the ids that a party sends. If the party draws in secret, the
        label holder reads the ids instead.

        Raises
        ------
        VflError
            If the ids cannot answer the order.
        """
        if self.secret and not order.coordinated:
            window = self._read(order.steps, arrays, present)
            return window, window
        owner = None if order.coordinated else party
        batches = self.window(owner, order.epoch, order.first, order.steps, b"")
        window = batches if present is None else kept(batches, present)
        if order.coordinated:
            return batches, window
        ids = _sent(arrays, "ids", window.ids.shape)
        if not np.array_equal(ids, window.ids):
            raise VflError(
                "sent sample ids that differ from its mini-batches: they belong to another party "
                "or another run."
            )
        return window, window

    def _read(self, steps: int, arrays: Arrays, present: NDArray[np.bool_] | None) -> Window:
        """Read a window that a party has drawn in secret."""
        lengths = _sent(arrays, "lengths", (steps,))
        if lengths.min() < 0 or lengths.max() > self.rows:
            raise VflError(f"sent mini-batches of {lengths.min()} to {lengths.max()} rows.")
        ids = _sent(arrays, "ids", (int(lengths.sum(dtype=np.int64)),))
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.rows):
            raise VflError("sent sample ids out of range.")
        if present is not None and not present[ids].all():
            raise VflError("sent sample ids of rows that it does not have.")
        places = np.repeat(np.arange(steps), lengths) * self.rows + ids  # one for (step, row)
        if len(np.unique(places)) < len(places):
            raise VflError("sent a mini-batch in which a row occurs more than once.")
        return Window(ids, lengths)

    def join(self, windows: Sequence[Window]) -> Joint:
        """Join windows of one quorum: step j has the j-th mini-batch of each window."""
        if len(windows) == 1:
            return Joint(windows[0], self.divisors(windows[0].lengths), [])
        step_of = np.concatenate([np.repeat(np.arange(len(w.lengths)), w.lengths) for w in windows])
        by_step = np.argsort(step_of, kind="stable")
        steps = max(len(window.lengths) for window in windows)
        divided = np.zeros(steps, np.int64)
        for window in windows:
            divided[: len(window.lengths)] += self.divisors(window.lengths)
        ids = np.concatenate([window.ids for window in windows])[by_step]
        starts = np.cumsum([len(window.ids) for window in windows])[:-1]
        lengths = np.bincount(step_of, minlength=steps).astype(np.int32)
        return Joint(Window(ids, lengths), divided, np.split(np.argsort(by_step), starts))


def _sent(arrays: Arrays, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
    try:
        array: NDArray[np.int32] = checked(arrays, name, "int32", shape)
    except VflError as error:
        raise VflError(f"sent an upload that cannot be used: {error}") from None
    return array


class Poisson(Sampling):
    """Draw each row independently in each step."""

    secret: ClassVar[bool] = True
    varies: ClassVar[bool] = True

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw the gaps between rows that are taken."""
        rows, seed = self.rows, self.config.training.seed
        rate = min(1.0, self.batch / rows)
        generator = secret_generator(f"batch|{seed}|{party}|{epoch}|{first}|".encode() + secret)
        trials, taken = steps * rows, np.zeros(0, np.int64)
        last = -1
        while last < trials:
            gaps = generator.geometric(rate, size=int(trials * rate) + 100)
            taken = np.concatenate([taken, last + np.cumsum(gaps)])
            last = int(taken[-1])
        step, found = np.divmod(taken[taken < trials], rows)
        lengths = np.bincount(step, minlength=steps).astype(np.int32)
        ids = found.astype(np.int32)
        ids.flags.writeable = lengths.flags.writeable = False
        return Window(ids, lengths)

    def divisors(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the average number of rows in each step, [S]."""
        return np.full(len(lengths), expected_rows(self.config, self.rows), np.int32)

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window, by ten deviations above the mean."""
        expected = steps * expected_rows(self.config, self.rows)
        return int(expected + 10 * expected**0.5 + 100)


class Replacement(Sampling):
    """Draw each mini-batch from all rows. Both ends derive it from the seed."""

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw the rows of each step by a generator of that step."""
        if self.batch >= self.rows:
            return super().draw(party, epoch, first, steps, secret)
        stream = 0 if party is None else party + 1
        ids = np.empty(steps * self.batch, np.int32)
        for step in range(steps):
            seed = [self.config.training.seed, 2, stream, epoch, first + step]
            rows = np.random.default_rng(seed).choice(self.rows, self.batch, replace=False)
            ids[step * self.batch : (step + 1) * self.batch] = rows
        lengths = np.full(steps, self.batch, np.int32)
        ids.flags.writeable = lengths.flags.writeable = False  # windows are shared
        return Window(ids, lengths)

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window of so many steps."""
        return steps * expected_rows(self.config, self.rows)
