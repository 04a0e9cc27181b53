"""ClientApps of the privacy audit's attackers: one reads messages, the other makes queries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower import client_app
from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.bottoms import embedding_size
from vfl_flower.party import about
from vfl_flower.party.state import load_about, load_large
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation.masks import Ints, from_fixed
from vfl_flower.protocol.aggregation.secure import Secure
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.ends import Reading
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import sized
from vfl_flower.transport import messages
from vfl_flower.transport.wire import read_order, read_reply, to_reply

Rows = NDArray[np.float32]
Ids = NDArray[np.integer[Any]]

_NAMES_OF_ROWS = ("ids", "lengths")
_ORDERS: dict[str, type[messages.Order]] = {
    k.kind: k
    for k in (
        messages.TrainOrder,
        messages.EvaluateOrder,
        messages.EmbedOrder,
        messages.RejoinOrder,
        messages.CheckpointOrder,
        messages.RestoreOrder,
    )
}


class Wiretap(ClientApp):
    """Reads the messages of a party, and keeps what they reveal of each training row.

    Rows are as last uploaded. Gradients are of the first answer, when the top model has learned
    least. Under zeroth order, a gradient is the step's difference times the row's direction
    (Cascaded, VI-B). ``guess`` draws that direction, if the attacker does not see the uploads.
    """

    embeddings: Rows  # [N, E]; of a zeroth-order pair, the one that trains the top
    pairs: Rows  # [N, 2 E]: both embeddings of zeroth-order pairs
    gradients: Rows  # [N, E], of a row's loss by its embedding
    uploaded: NDArray[np.bool_]
    answered: NDArray[np.bool_]
    masked: Ints  # [N, E]; `embeddings` and all that follows from them then hold random bits

    def __init__(
        self,
        config: RunConfig,
        client: ClientApp = client_app.app,
        guess: np.random.Generator | None = None,
        party: int = 0,
    ) -> None:
        super().__init__()
        self.party = party
        self.config = config
        self.client = client
        self.guess = guess
        self.estimator = estimators.choose(config)(config)
        self.is_masked = isinstance(self.estimator.aggregation, Secure)
        # The window that awaits its feedback, and what its upload said.
        self.pending: tuple[Window, Reading] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the wrapped ClientApp, after reading it."""
        reply: Message = self.client(message, context)
        with suppress(VflError):  # the label holder will report the failure
            self._read(message, reply)
        return reply

    def _read(self, message: Message, reply: Message) -> None:
        if message.metadata.message_type == messages.DescribeOrder.kind:
            described = read_reply(reply, messages.Description)
            if described.party == self.party:
                shape = described.train_rows, described.embedding_size
                self.embeddings, self.gradients = np.zeros((2, *shape), np.float32)
                self.masked = np.zeros(shape, np.int32)
                self.pairs = np.zeros((shape[0], 2 * shape[1]), np.float32)
                self.uploaded, self.answered = np.zeros((2, described.train_rows), bool)
                self.uplinks = self.estimator.uplinks(torch.zeros(shape))
                self.downlinks = self.estimator.downlinks(*shape)
            return
        upload = read_reply(reply, messages.Upload)
        if upload.party != self.party:
            return
        order = read_order(message, _ORDERS[message.metadata.message_type])
        if isinstance(order, messages.RejoinOrder):
            self.pending = None
            for _, surrogate in self.downlinks.with_surrogates():
                surrogate.zero_()
            for _, surrogate in self.uplinks.with_surrogates():
                surrogate.copy_(torch.from_numpy(order.arrays["embedding"]))
        elif self.pending and order.arrays.keys() - {"ids"}:
            self._read_feedback(*self.pending, order.arrays)
            self.pending = None
        if isinstance(order, messages.TrainOrder):
            rows_of = len(self.embeddings)
            window = window_of(self.config, order, upload.arrays, rows_of, self.party)
            arrays = self._unmasked(upload.arrays, window) if self.is_masked else upload.arrays
            reading = self.estimator.read(self.uplinks.decode(arrays, window), window)
            self._write(window, reading.fresh)
            if len(reading.embeddings) == 2:
                self.pairs[window.ids] = torch.cat(reading.embeddings, dim=1).numpy()
            self.pending = window, reading
        elif isinstance(order, messages.EmbedOrder):
            ids = order.arrays.get("ids", np.arange(len(self.embeddings), dtype=np.int32))
            window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
            links = self.estimator.fresh_links(self.uplinks, torch.zeros(self.embeddings.shape))
            self._write(window, links.decode(upload.arrays, window)["embedding"])

    def _unmasked(self, arrays: messages.Arrays, window: Window) -> messages.Arrays:
        """Return masked blocks, read as numbers between -2 and 2."""
        shape = len(window.ids), self.masked.shape[1]
        rows = {name: each[: shape[0] * shape[1]].reshape(shape) for name, each in arrays.items()}
        self.masked[window.ids] = rows["embedding"]
        return {name: (each / 2**30).astype(np.float32) for name, each in rows.items()}

    def _write(self, window: Window, embeddings: Tensor) -> None:
        self.embeddings[window.ids] = embeddings.numpy()
        self.uploaded[window.ids] = True

    def _read_feedback(self, window: Window, reading: Reading, feedback: messages.Arrays) -> None:
        lengths, rows_of = window.lengths, len(self.embeddings)
        if len(reading.embeddings) == 2:
            directions = (reading.embeddings[0] - reading.embeddings[1]).numpy()
            if self.guess:
                directions = self.guess.standard_normal(directions.shape, np.float32)
            rows = np.repeat(feedback["difference"], lengths)[:, None] * directions
        else:
            sampling = sampling_of(sized(self.config, rows_of), rows_of)
            scale = np.repeat(sampling.divisors(lengths), lengths)
            sent = self.downlinks.decode(feedback, window)["gradient"]
            rows = sent.numpy() * scale[:, None]
        new = ~self.answered[window.ids]
        self.gradients[window.ids[new]] = rows[new]
        self.answered[window.ids] = True


def summed(taps: Sequence[Wiretap]) -> Rows:
    """Return the sum of the parties' embeddings, of each row as last uploaded."""
    if not taps[0].is_masked:
        return np.sum([each.embeddings for each in taps], 0)
    return from_fixed(np.sum([each.masked for each in taps], 0, dtype=np.int32), len(taps))


class Curious(ClientApp):
    """A curious party 0, which uploads queries as embeddings (Cascaded, VI-B).

    A row's query is c ~ N(0, 1). Under zeroth order, it is the pair c + mu u and c (two-sided:
    c - mu u) with u ~ N(0, 1). The codec encodes it like an embedding.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.generator = np.random.default_rng([config.training.seed, 3])
        self.rows = 0

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the party's reply with queries in place of its embeddings."""
        kind = message.metadata.message_type
        trains = kind == messages.TrainOrder.kind
        surrogate = load_large(context.state).get("uplink") if trains else None
        before = None if surrogate is None else surrogate.copy()
        reply: Message = client_app.app(message, context)
        try:
            if kind == messages.DescribeOrder.kind:
                self.rows = read_reply(reply, messages.Description).train_rows
            if not trains:
                return reply
            upload = read_reply(reply, messages.Upload)
        except VflError:  # the party has failed
            return reply
        if upload.party != 0:
            return reply
        if surrogate is not None:  # the queries replace what the party has sent
            surrogate[:] = before
        arrays = {name: upload.arrays[name] for name in upload.arrays if name in _NAMES_OF_ROWS}
        window = window_of(self.config, read_order(message, messages.TrainOrder), arrays, self.rows)
        written = about.read(load_about(context.state))
        width = embedding_size(written.config, written.outputs)
        c, u = torch.from_numpy(
            self.generator.standard_normal((2, len(window.ids), width), np.float32)
        )
        queries: dict[str, Tensor] = {"embedding": c}
        estimator = estimators.choose(self.config)(self.config)
        if isinstance(estimator, ZerothOrder):
            mu, two_sided = self.config.estimator.mu, "two-sided"
            second = c - mu * u if self.config.estimator.differences == two_sided else c
            pair = c + mu * u, second
            queries = dict(zip(estimator.block_names(), estimator.blocks(pair), strict=True))
        table = torch.zeros(0) if surrogate is None else torch.from_numpy(surrogate)
        links = estimator.uplinks(table.view(-1, width))
        arrays |= links.encode(queries, window, f"query|{upload.exchange}")
        return to_reply(replace(upload, arrays=arrays), message)


def window_of(
    config: RunConfig,
    order: messages.TrainOrder,
    arrays: messages.Arrays,
    rows: int,
    party: int = 0,
) -> Window:
    """Return the rows of a party's upload, as it names them or as the order implies."""
    if "lengths" in arrays:
        return Window(arrays["ids"], arrays["lengths"])
    owner = None if order.coordinated else party
    sampling = sampling_of(sized(config, rows), rows)
    return sampling.window(owner, order.epoch, order.first, order.steps, b"")
