"""What a sampling scheme is; as it is, ``shuffle``: a random order of the rows in each epoch.

The order of the N training rows is cut into K = ceil(N / B) mini-batches. A window is up to S
consecutive ones, and never crosses an epoch, so its mini-batches are disjoint. Synchronous parties
share one order (``party`` is ``None``), which both sides derive from the seed, so no ids are sent.
Asynchronous parties draw an order of their own and send the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Joint, Window, expected_rows, kept, steps_per_epoch
from vfl_flower.transport.messages import Arrays, TrainOrder, checked


class Sampling:
    """How mini-batches are drawn. A scheme overrides `draw`, and what follows from it.

    secret : whether a party that does not step with others draws from a secret of its own. It then
        sends its rows, which the label holder reads. Else both ends draw them.
    varies : whether mini-batches of an epoch differ in size, but for the last.
    """

    secret: ClassVar[bool] = False
    varies: ClassVar[bool] = False

    def __init__(self, config: RunConfig, rows: int) -> None:
        self.config = config
        self.rows = rows  # N
        self.batch = config.training.batch_size  # B
        self.per_epoch = steps_per_epoch(config, rows)  # K
        # As `draw`, once for all that ask: both ends do, and more than once.
        self.window: Callable[[int | None, int, int, int, bytes], Window] = lru_cache(16)(self.draw)
        self._orders: dict[int | None, dict[int, NDArray[np.int32]]] = {}

    def draw(self, party: int | None, epoch: int, first: int, steps: int, secret: bytes) -> Window:
        """Draw mini-batches ``first`` to ``first + steps - 1`` of an epoch.

        Parameters
        ----------
        party : whose order of the rows counts; ``None`` for the order that all parties share.
        secret : what only the party knows, if the scheme is `secret` and parties do not share rows.
        """
        order = self._order(party, epoch)
        ids = order[first * self.batch : (first + steps) * self.batch]
        lengths = np.full(steps, self.batch, np.int32)
        lengths[-1] = len(ids) - self.batch * (steps - 1)
        lengths.flags.writeable = False  # windows are shared
        return Window(ids, lengths, self.batch >= self.rows, distinct=True)

    def _order(self, party: int | None, epoch: int) -> NDArray[np.int32]:
        """Return the order of an epoch. A party's last two are kept: feedback trails its window."""
        whole = self.batch >= self.rows  # one batch of all rows needs no order
        kept, key = self._orders.setdefault(party, {}), 0 if whole else epoch
        if key not in kept:
            order = np.arange(self.rows, dtype=np.int32)
            if not whole:
                stream = 0 if party is None else party + 1
                seed = self.config.training.seed
                np.random.default_rng([seed, 1, stream, epoch]).shuffle(order)
            order.flags.writeable = False
            kept[key] = order
            while len(kept) > 2:
                del kept[next(iter(kept))]
        return kept[key]

    def divisors(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return what the sum over each step's rows is divided by, [S]: here their number."""
        return np.maximum(lengths, 1)  # a step may have none of a party's rows

    def most_rows(self, steps: int) -> int:
        """Bound the rows of a window of so many steps."""
        return min(steps * expected_rows(self.config, self.rows), self.rows)

    def check(self, order: TrainOrder, parties: int) -> None:
        """Refuse an order for steps that no run with this configuration has.

        Raises
        ------
        VflError
            As the end of a sentence, whose subject is the party.
        """
        # A party that is quick takes over what others have not done.
        epochs = self.config.training.epochs * parties
        if order.epoch >= epochs or order.first + order.steps > self.per_epoch:
            raise VflError(
                f"was asked for steps {order.first + 1} to {order.first + order.steps} of epoch "
                f"{order.epoch + 1}, where {epochs} epochs of {self.per_epoch} steps are the most "
                "there are."
            )

    # --- the label holder -----------------------------------------------------------------------

    def uploaded(
        self,
        party: int,
        order: TrainOrder,
        arrays: Arrays,
        present: NDArray[np.bool_] | None = None,
    ) -> tuple[Window, Window]:
        """Return the mini-batches that an order asks for, and the rows of them that were uploaded.

        A party uploads the rows that it has, by its mask ``present`` [N]. Both ends know the
        mini-batches, and compare the ids that a party sends. The label holder reads rows that the
        party has drawn in secret.

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
        window = kept(batches, present)
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
        """Join windows of one quorum: step j takes the j-th mini-batch of each, in their order."""
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
