"""A party: one feature holder, between the messages that reach it.

Its state (bottom model, optimizer, the window that awaits feedback) lives in Flower's
``Context.state``, because any process may serve any message. The feature block and the model's
skeleton are built once a process. The messages are served by `vfl_flower.client_app`.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

import strategies
from vfl_flower import codecs, first_order, records, zeroth_order
from vfl_flower.batches import Window, divisors, draw_window, take
from vfl_flower.config import RunConfig
from vfl_flower.data import load_features
from vfl_flower.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.models import (
    as_tensor,
    build_bottom,
    build_optimizer,
    build_top,
    choose_device,
    count,
    embedding_size,
    load_model,
    model_arrays,
)
from vfl_flower.privacy import Perturbation
from vfl_flower.provenance import code_digest, peak_memory_mb
from vfl_flower.records import (
    Arrays,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    RejoinOrder,
    TrainOrder,
    Upload,
    checked,
)


class Party:
    """One party. Between two messages it is its ``Context.state``: `resume`, serve, `keep`."""

    def __init__(self, config: RunConfig, index: int, parties: int, outputs: int) -> None:
        self.config = config
        self.index = index
        self.parties = parties
        self.outputs = outputs
        self.device = choose_device(config)
        self.block = load_features(config, index, parties)
        self.rows = torch.from_numpy(self.block.train)
        self.size = embedding_size(config, outputs)
        shape = len(self.rows), self.size
        codecs.check_memory("this party's", codecs.party_bytes(config, parties, shape))
        # The top model, where parties are to know it.
        sizes = [self.size] * parties if config.labels == "shared" else []
        self.top = build_top(config, sizes, outputs).to(self.device) if sizes else None
        top_size = count(self.top) if self.top else 0
        self.channels = codecs.party_channels(config, index, parties, shape, top_size)
        model = build_bottom(config, index, self.block.train.shape[1:], self.size)
        self.model = model.to(self.device)
        self.optimizer = build_optimizer(config, self.model, config.party_lr)
        self.labels = _NO_LABELS  # or those of its training rows, if they are shared
        self.exchange = 0  # number of the last message served
        self.pending: TrainOrder | None = None  # the window that awaits feedback
        # Decides noise, directions and Poisson mini-batches; known to this party alone.
        self.secret = secrets.token_bytes(16)
        if config.noise_seed >= 0:
            self.secret = f"{config.noise_seed} {index}".encode()
        # What this process may still have from the last message: the record that holds this very
        # model, and of the pending window the features, with the embeddings and their graph (first
        # order), or the directions (zeroth order).
        self.kept: object = None
        self.inputs: Tensor | None = None
        self.trace: Tensor | None = None

    @classmethod
    def resume(cls, context: Context) -> Party:
        """The party of a node, as the last message left it."""
        scalars = records.load_scalars(context.state)
        if not scalars:
            raise OutOfStepError("has no state of this run.")
        config, index, parties = identity(context)
        party = _skeletons.get((index, parties))
        if party is None or (party.config, party.outputs) != (config, scalars["outputs"]):
            party = _skeletons[index, parties] = cls(config, index, parties, scalars["outputs"])
        large = records.load_large(context.state)
        party.labels = large.pop("labels", _NO_LABELS)
        for name, surrogate in large.items():
            party.channels[name].surrogate = torch.from_numpy(surrogate)
        party.exchange = scalars["exchange"]
        party.secret = scalars["secret"]
        party.pending = None
        if scalars["pending"]:
            exchange, epoch, first, steps, coordinated = scalars["pending"]
            party.pending = TrainOrder(
                exchange=exchange,
                epoch=epoch,
                first=first,
                steps=steps,
                coordinated=bool(coordinated),
            )
        if party.kept is not context.state.get("model"):
            party.inputs = party.trace = None
            load_model(party.model, records.load_arrays(context.state, "model"))
            _load_optimizer(party.optimizer, records.load_arrays(context.state, "optimizer"))
        party.kept = None
        return party

    def keep(self, context: Context) -> None:
        """Leave everything that the next message needs in the node's ``Context.state``."""
        p = self.pending
        scalars = {
            "outputs": self.outputs,
            "exchange": self.exchange,
            "secret": self.secret,
            "pending": [p.exchange, p.epoch, p.first, p.steps, int(p.coordinated)] if p else [],
        }
        large = {
            name: channel.surrogate.numpy()
            for name, channel in self.channels.items()
            if channel.surrogate is not None
        }
        if self.labels is not _NO_LABELS:
            large["labels"] = self.labels
        records.save_state(
            context.state,
            scalars,
            large,
            model=model_arrays(self.model),
            optimizer=_optimizer_arrays(self.optimizer),
        )
        self.kept = context.state["model"]

    # --- the messages ---------------------------------------------------------------------------

    def describe(self, order: Order) -> Description:
        """What the label holder must check before this party may train."""
        return Description(
            party=self.index,
            parties=self.parties,
            train_rows=len(self.block.train),
            test_rows=len(self.block.test),
            columns=int(np.prod(self.block.train.shape[1:])),
            embedding_size=self.size,
            ids_digest=self.block.ids_digest,
            code_digest=code_digest(),
        )

    def train(self, order: TrainOrder) -> Upload:
        """Learn from the feedback for the last window; upload the next (VAFL Alg. 1 lines 3-7)."""
        self._count(order.exchange)
        if "labels" in order.arrays and self.config.labels == "shared":
            self.labels = self._checked_labels(order.arrays["labels"])
        self._learn(order.arrays)
        window = self._window(order)
        self.pending = order
        arrays = self._embed(order, window)
        if not order.coordinated:
            arrays["ids"] = window.ids
            if self.config.sampling == "poisson":
                arrays["lengths"] = window.lengths
        return self._upload(arrays)

    def evaluate(self, order: EvaluateOrder) -> Upload:
        """Learn from the feedback, if any; upload the embeddings of the test rows, as they are."""
        self._count(order.exchange)
        self._learn(order.arrays)
        h = self._embeddings(self.block.test).cpu().numpy()
        return replace(
            self._upload({"embedding": h}),
            surrogates=codecs.digest(self.channels.values()),
            peak_memory_mb=peak_memory_mb(),
        )

    def embed(self, order: EmbedOrder) -> Upload:
        """Upload fresh embeddings of the rows that have grown too old at the label holder."""
        self._count(order.exchange)
        feedback = dict(order.arrays)
        ids = feedback.pop("ids", np.zeros(0))
        if ids.dtype != np.int32 or ids.ndim != 1 or not _within(ids, len(self.block.train)):
            raise VflError("was asked for rows that it does not have.")
        if len(np.unique(ids)) < len(ids):
            raise VflError("was asked for a row more than once: each time has noise of its own.")
        if feedback:
            self._learn(feedback)
        h = self._embeddings(self.block.train[ids])
        window = Window(ids, np.array([len(ids)], np.int32))
        return self._upload(self._encoded("embedding", h, window))

    def rejoin(self, order: RejoinOrder) -> Description:
        """Go on after a failure, with the label holder's count and copy of the surrogate."""
        if order.exchange <= self.exchange:  # its number decides noise and directions
            raise VflError(f"was asked to go back to message {order.exchange}: it has served it.")
        self.exchange = order.exchange
        self.pending = self.trace = self.inputs = None
        for name, channel in self.channels.items():
            if channel.surrogate is not None:
                shape = tuple(channel.surrogate.shape)
                if name == "uplink":
                    known = checked(order.arrays, "embedding", "float32", shape)
                    channel.surrogate.copy_(as_tensor(known))
                else:
                    channel.surrogate.zero_()
        return self.describe(order)

    # --- what they have in common ---------------------------------------------------------------

    def _count(self, exchange: int) -> None:
        if exchange != self.exchange + 1:
            raise OutOfStepError(f"got message {exchange} after message {self.exchange}.")
        self.exchange = exchange

    def _embed(self, order: TrainOrder, window: Window) -> Arrays:
        """The window's embeddings, or pairs of them, as they are sent."""
        x, noise = self._features(window), self._noise(order.exchange, window.lengths)
        if self.config.estimator == "first-order":
            self.inputs = x
            self.trace = first_order.embed(self.model, x, noise)
            return self._encoded("embedding", self.trace, window)
        lengths, directions = window.lengths.tolist(), self._directions(order)
        pair, self.trace = zeroth_order.embed(self.model, x, lengths, directions, noise)
        arrays: Arrays = {}
        blocks = zeroth_order.blocks(self.config, pair)
        for name, rows in zip(zeroth_order.block_names(self.config), blocks, strict=True):
            arrays.update(self._encoded(name, rows, window))
        return arrays

    def _encoded(self, name: str, rows: Tensor, window: Window) -> Arrays:
        channel = self.channels["uplink" if name == "embedding" else "changes"]
        key = f"{self.config.seed}|up|{self.index}|{self.exchange}"
        return channel.send(name, rows, window, key)

    def _learn(self, arrays: Arrays) -> None:
        """Apply the feedback for the pending window, by the parameters that made its upload."""
        if self.pending is None:
            return
        order, window = self.pending, self._window(self.pending)
        try:
            if self.config.estimator == "zeroth-order":
                steps = (len(window.lengths),)
                differences = as_tensor(checked(arrays, "difference", "float32", steps))
            elif self.config.labels == "shared":
                embeddings, tops = self._broadcast(arrays, window)
            else:
                link = self.channels["gradient"]
                rows = link.receive("gradient", arrays, window, self.size)
        except VflError as error:
            raise VflError(f"was sent feedback that it cannot use: {error}") from None
        if self.config.estimator == "zeroth-order":
            zeroth_order.update(
                self.optimizer, self._directions(order), self.trace, differences.to(self.device)
            )
        else:
            x = self._features(window) if self.inputs is None else self.inputs
            lengths, noise = window.lengths.tolist(), self._noise(order.exchange, window.lengths)
            if self.top:
                first_order.update_with_labels(
                    self.model,
                    self.optimizer,
                    x,
                    self.trace,
                    embeddings,
                    slice(self.index * self.size, (self.index + 1) * self.size),
                    self.top,
                    tops,
                    torch.from_numpy(self.labels[window.ids].astype(np.int64)).to(self.device),
                    lengths,
                    divisors(self.config, window.lengths).tolist(),
                    self.config,
                    noise,
                )
            else:
                first_order.update(
                    self.model,
                    self.optimizer,
                    x,
                    self.trace,
                    rows.to(self.device),
                    lengths,
                    self.config,
                    noise,
                )
        self.pending = self.trace = self.inputs = None

    def _broadcast(self, arrays: Arrays, window: Window) -> tuple[Tensor, Tensor]:
        """The others' embeddings of the window's rows, [R, M * E], and each step's top model.

        Embeddings of the party's own are left for it to fill in.
        """
        if len(self.labels) != len(self.block.train):
            raise VflError("the labels, which were to be shared, have not come.")
        blocks = []
        for party in range(self.parties):
            shape = len(window.ids), self.size
            if party == self.index:
                blocks.append(torch.empty(shape))
                continue
            sent = codecs.of_party(party, arrays)
            link = self.channels[f"other-{party}"]
            blocks.append(link.receive("embedding", sent, window, self.size))
        assert self.top is not None
        steps = codecs.top_window(len(window.lengths))
        tops = torch.zeros(len(steps.ids), 0)
        if count(self.top):
            tops = self.channels["top"].receive("top", arrays, steps, count(self.top))
        return torch.cat(blocks, dim=1).to(self.device), tops.to(self.device)

    def _checked_labels(self, labels: NDArray[Any]) -> NDArray[Any]:
        if labels.dtype.kind != "u" or labels.shape != (len(self.block.train),):
            raise VflError("was sent labels that are not one for each of its training rows.")
        if labels.max(initial=0) >= max(2, self.outputs):
            raise VflError(f"was sent labels of more than {max(2, self.outputs)} classes.")
        return labels

    def _window(self, order: TrainOrder) -> Window:
        return draw_window(
            self.config,
            len(self.block.train),
            None if order.coordinated else self.index,
            order.epoch,
            order.first,
            order.steps,
            b"" if order.coordinated else self.secret,
        )

    def _directions(self, order: TrainOrder) -> zeroth_order.Directions:
        key = self.secret + f"|{order.exchange}".encode()
        return zeroth_order.Directions(self.config, key, self.model)

    def _features(self, window: Window) -> Tensor:
        return take(self.rows, window).to(self.device)

    def _embeddings(self, rows: NDArray[Any]) -> Tensor:
        noise = self._noise(self.exchange, np.array([len(rows)]))
        with torch.no_grad():
            return first_order.embed(self.model, torch.from_numpy(rows).to(self.device), noise)

    def _noise(self, exchange: int, lengths: NDArray[Any]) -> Perturbation | None:
        if self.config.privacy != "perturbed-embedding":
            return None
        last = len(self.model.layers) - 1
        return Perturbation(self.config, self.secret, exchange, tuple(lengths.tolist()), last)

    def _upload(self, arrays: Arrays) -> Upload:
        return Upload(party=self.index, exchange=self.exchange, arrays=arrays)


_NO_LABELS: NDArray[Any] = np.zeros(0, np.uint8)

_skeletons: dict[tuple[int, int], Party] = {}
"""What a process keeps of each party that it serves, for `Party.resume` to fill with its state."""


def identity(context: Context) -> tuple[RunConfig, int, int]:
    """The run configuration of a node, its party's index, and the number of parties."""
    node = context.node_config
    index, parties = node.get("partition-id"), node.get("num-partitions")
    if not (isinstance(index, int) and isinstance(parties, int) and 0 <= index < parties):
        raise ConfigError(
            "A SuperNode does not know which party it is: start it with "
            "--node-config 'partition-id=0 num-partitions=4', partition-id counting from 0."
        )
    return strategies.resolve(context.run_config), index, parties


def _optimizer_arrays(optimizer: torch.optim.Optimizer) -> Arrays:
    """The state of a torch optimizer, named as "parameter number.name"."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}.{name}": value.cpu().numpy()
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, arrays: Arrays) -> None:
    optimizer.state.clear()
    parameters = optimizer.param_groups[0]["params"]
    for key, array in arrays.items():
        number, name = key.split(".", 1)
        parameter = parameters[int(number)]
        device = "cpu" if array.ndim == 0 else parameter.device  # torch keeps step counts there
        optimizer.state[parameter][name] = as_tensor(array).clone().to(device)


def _within(ids: NDArray[np.int32], rows: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < rows)
