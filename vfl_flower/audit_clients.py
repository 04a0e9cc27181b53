"""ClientApps of the privacy audit's attackers: one that reads messages, and one that makes queries.

Both stand in front of the parties' own ClientApp, and use the messages alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from vfl_flower import client_app, zeroth_order
from vfl_flower.batches import Window, divisors, draw_window
from vfl_flower.config import RunConfig
from vfl_flower.errors import VflError
from vfl_flower.records import (
    Arrays,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    TrainOrder,
    Upload,
    read_order,
    read_reply,
    to_reply,
)

Rows = NDArray[np.float32]
Ids = NDArray[np.integer[Any]]

_ORDERS: dict[str, type[Order]] = {k.kind: k for k in (TrainOrder, EvaluateOrder, EmbedOrder)}


class Wiretap(ClientApp):
    """Reads the messages of party 0, and keeps what they say of each of the N training rows.

    Parameters
    ----------
    client : the ClientApp whose messages are read.
    guess : draws the directions of zeroth-order pairs, for who does not see the uploads.

    Attributes
    ----------
    embeddings : as last uploaded, [N, E]; of a zeroth-order pair, the one that is trained on.
    gradients : by the first answer, when the top model has learned least, [N, E]: the gradient of
        the row's loss with respect to its embedding; under zeroth order the step's difference times
        the row's direction, which is one embedding of its pair less the other (Cascaded, VI-B).
    uploaded, answered : which rows have one, [N].
    """

    embeddings: Rows
    gradients: Rows
    uploaded: NDArray[np.bool_]
    answered: NDArray[np.bool_]

    def __init__(
        self,
        config: RunConfig,
        client: ClientApp = client_app.app,
        guess: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.client = client
        self.guess = guess
        self.pending: tuple[Window, Arrays] | None = None  # an upload that awaits its feedback

    def __call__(self, message: Message, context: Context) -> Message:
        """The party's own answer, which is read on its way."""
        reply: Message = self.client(message, context)
        with suppress(VflError):  # a failure, which the label holder will report
            self._read(message, reply)
        return reply

    def _read(self, message: Message, reply: Message) -> None:
        if message.metadata.message_type == DescribeOrder.kind:
            described = read_reply(reply, Description)
            if described.party == 0:
                shape = described.train_rows, described.embedding_size
                self.embeddings, self.gradients = np.zeros((2, *shape), np.float32)
                self.uploaded, self.answered = np.zeros((2, described.train_rows), bool)
            return
        upload = read_reply(reply, Upload)
        if upload.party != 0:
            return
        order = read_order(message, _ORDERS[message.metadata.message_type])
        if self.pending and order.arrays.keys() - {"ids"}:
            self._read_feedback(*self.pending, order.arrays)
            self.pending = None
        if isinstance(order, TrainOrder):
            window = self._window(order, upload.arrays)
            self.pending = window, upload.arrays
            self._read_embeddings(window.ids, upload.arrays)
        elif isinstance(order, EmbedOrder):
            self._read_embeddings(order.arrays["ids"], upload.arrays)

    def _window(self, order: TrainOrder, arrays: Arrays) -> Window:
        """The rows of an upload; those that it does not name follow from the configuration."""
        if "lengths" in arrays:
            return Window(arrays["ids"], arrays["lengths"])
        owner, rows = None if order.coordinated else 0, len(self.embeddings)
        return draw_window(self.config, rows, owner, order.epoch, order.first, order.steps)

    def _read_embeddings(self, ids: Ids, arrays: Arrays) -> None:
        if "embedding" in arrays:
            self.embeddings[ids] = arrays["embedding"]
        else:
            self.embeddings[ids] = (arrays["plus"] + arrays["minus"]) / 2
        self.uploaded[ids] = True

    def _read_feedback(self, window: Window, sent: Arrays, feedback: Arrays) -> None:
        lengths = window.lengths
        if "gradient" in feedback:
            scale = np.repeat(divisors(self.config, lengths), lengths)
            rows = feedback["gradient"] * scale[:, None]
        else:
            first, second = (sent[name] for name in zeroth_order.block_names(self.config))
            directions = first - second
            if self.guess:
                directions = self.guess.standard_normal(first.shape, np.float32)
            rows = np.repeat(feedback["difference"], lengths)[:, None] * directions
        new = ~self.answered[window.ids]
        self.gradients[window.ids[new]] = rows[new]
        self.answered[window.ids] = True


class Curious(ClientApp):
    """Party 0 as a curious client, which uploads queries in place of embeddings (Cascaded, VI-B).

    A row's query is c ~ N(0, 1), or under zeroth order the pair c + mu u and c (two-sided: c - mu
    u) with u ~ N(0, 1).
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.generator = np.random.default_rng([config.seed, 3])

    def __call__(self, message: Message, context: Context) -> Message:
        """What the party would answer, but for its embeddings."""
        reply: Message = client_app.app(message, context)
        try:
            upload = read_reply(reply, Upload)
        except VflError:  # a description, or a failure
            return reply
        if upload.party != 0:
            return reply
        names = [name for name in upload.arrays if name not in ("ids", "lengths")]
        c, u = self.generator.standard_normal((2, *upload.arrays[names[0]].shape), np.float32)
        shift = {"perturbed": self.config.mu, "plus": self.config.mu, "minus": -self.config.mu}
        queries = {name: c + np.float32(shift.get(name, 0)) * u for name in names}
        return to_reply(replace(upload, arrays={**upload.arrays, **queries}), message)
