"""Baseline `frozen`: the same models, but the parties are never trained.

Each party uploads every embedding once, and the label holder trains its top model on them. The
result is that of `split-nn` with ``party-lr = 0``, for one exchange a party. What a system gains
over it is what training the parties is worth.
"""

from __future__ import annotations

import numpy as np
from tqdm import trange

from strategies.vertical import Vertical
from vfl_flower.axes.batches import draw_window
from vfl_flower.config import RunConfig
from vfl_flower.holder.label_holder import Arrival
from vfl_flower.records import EmbedOrder, EvaluateOrder


class Frozen(Vertical):
    """Baseline: parties upload their first embeddings once and are never trained."""

    name = "frozen"
    axes = "one upload · parties untrained · first-order server · identity · no privacy"

    @classmethod
    def serves_black_boxes(cls, config: RunConfig) -> bool:
        """Yes: parties need not learn."""
        return True

    def train(self) -> None:
        """Two messages a party, for training and test embeddings; then epochs without messages."""
        rows = np.arange(len(self.labels.train), dtype=np.int32)
        for order in (
            EmbedOrder(exchange=1, arrays={"ids": rows}),
            EvaluateOrder(exchange=2),
        ):
            self._send(self._message(seat, order) for seat in self.seats)
            self._wait_for(self.seats)
        for epoch in trange(self.config.epochs, unit="epoch", disable=None, leave=False):
            window = draw_window(self.config, len(rows), None, epoch, 0, self.steps_per_epoch)
            self.holder.learn([Arrival(0, window, coordinated=True)])
            self.party_steps += self.steps_of_epoch
            if self.is_due(epoch + 1):
                self._record(self.holder.evaluate())
