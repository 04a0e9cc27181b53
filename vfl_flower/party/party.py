"""A party: one feature holder, between the messages that reach it.

Its state (bottom model, optimizer, the window that awaits feedback) lives in Flower's
``Context.state``, because any process may serve any message. The feature block and the model's
skeleton are built once a process. The messages are served by `vfl_flower.client_app`.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor

import strategies
from vfl_flower import records
from vfl_flower.axes import codecs
from vfl_flower.axes.batches import Window, divisors, draw_window, take
from vfl_flower.axes.estimators import first_order, zeroth_order
from vfl_flower.axes.privacy import Perturbation
from vfl_flower.config import RunConfig
from vfl_flower.data.alignment import common_rows
from vfl_flower.data.own_files import OwnFile, Preparation
from vfl_flower.data.sources import FeatureBlock, class_weights, load_block, load_features, seat
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
    load_optimizer,
    model_arrays,
    optimizer_arrays,
)
from vfl_flower.provenance import code_digest, peak_memory_mb
from vfl_flower.records import (
    Arrays,
    CheckpointOrder,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    Predicted,
    PredictOrder,
    RejoinOrder,
    TrainOrder,
    Upload,
    checked,
)


class Party:
    """One party. Between two messages it is its ``Context.state``: `resume`, serve, `keep`."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        parties: int,
        outputs: int,
        block: FeatureBlock | None = None,  # of its own file; else of the data set that is divided
    ) -> None:
        self.config = config
        self.index = index
        self.parties = parties
        self.outputs = outputs
        self.device = choose_device(config)
        self.block = block = block or load_features(config, index, parties)
        # What stays the same through a run, and is needed to use its model afterwards.
        preparation = block.preparation.as_json() if block.preparation else None
        about = {"config": asdict(config), "parties": parties, "outputs": outputs}
        about["ids"] = block.ids_digest
        self.about = json.dumps({**about, "preparation": preparation})
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
    def begin(cls, context: Context, order: DescribeOrder | RejoinOrder) -> Party:
        """The party of a node at the beginning of a run."""
        index, parties = seat(context)
        config = strategies.resolve(context.run_config)
        if config.resume:
            raise VflError("has lost the state from which it went on.")
        party = cls(config, index, parties, order.outputs, load_block(context, config))
        _skeletons[index, parties] = party
        return party

    @classmethod
    def resume(cls, context: Context) -> Party:
        """The party of a node, as the last message left it."""
        about = records.load_about(context.state)
        if not about:
            raise OutOfStepError("has no state of this run.")
        place = seat(context)
        party = _skeletons.get(place)
        if party is None or party.about != about:
            config, outputs, _ = read_about(about)
            _check_number(about, place[1])
            party = cls(config, *place, outputs, load_block(context, config))
            if party.about != about:
                raise VflError(
                    "has not the data that this run began with: its file has changed since."
                )
            _skeletons[place] = party
        scalars = records.load_scalars(context.state)
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
            load_optimizer(party.optimizer, records.load_arrays(context.state, "optimizer"))
        party.kept = None
        return party

    def keep(self, context: Context) -> None:
        """Leave everything that the next message needs in the node's ``Context.state``."""
        p = self.pending
        scalars = {
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
            self.about,
            scalars,
            large,
            model=model_arrays(self.model),
            optimizer=optimizer_arrays(self.optimizer),
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
            exchange=self.exchange,
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

    def checkpoint(self, order: CheckpointOrder) -> Upload:
        """Learn from the feedback, if any; the state is then kept as it is (`party_file`)."""
        self._count(order.exchange)
        self._learn(order.arrays)
        return self._upload({})

    def go_on(self, order: Order) -> Description:
        """Go on from a checkpoint, after which others may have seen more than it knows of."""
        if self.config.noise_seed < 0:
            self.secret = secrets.token_bytes(16)  # so that no noise and no direction comes twice
        return self.describe(order)

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
                weights = class_weights(self.config, self.labels, max(2, self.outputs))
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
                    None if weights is None else torch.from_numpy(weights).to(self.device),
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


def predict(context: Context, saved: RecordDict, order: PredictOrder) -> Predicted:
    """Embeddings by a model that was kept: of the rows just aligned, or of the test rows.

    Raises
    ------
    ConfigError
        If the party's columns, or rows, are not those that the model was trained with.
    """
    index, parties = seat(context)
    about = records.load_about(saved)
    config, outputs, preparation = read_about(about)
    _check_number(about, parties)
    if preparation is None:
        block = load_block(context, config)
        if block.ids_digest != json.loads(about)["ids"]:
            raise ConfigError(f"Party {index} has other rows than its model was trained with.")
    else:
        own, rows = OwnFile.of_party(context.node_config, index), common_rows(context)
        features = own.prepared_as_before(preparation, rows)
        block = FeatureBlock(features[:0], features, own.digest(rows), preparation)
    party = Party(config, index, parties, outputs, block)
    load_model(party.model, records.load_arrays(saved, "model"))
    h = party._embeddings(block.test).cpu().numpy()
    return Predicted(
        party=index,
        parties=parties,
        exchange=records.load_scalars(saved)["exchange"],
        ids_digest=block.ids_digest,
        code_digest=code_digest(),
        arrays={"embedding": h},
    )


def _check_number(about: str, parties: int) -> None:
    then = json.loads(about)["parties"]
    if then != parties:
        raise ConfigError(
            f"The run was of {then} parties, and this one says num-partitions = {parties}."
        )


@lru_cache(maxsize=16)
def read_about(about: str) -> tuple[RunConfig, int, Preparation | None]:
    """Configuration, outputs and preparation that a `Party` wrote down."""
    values = json.loads(about)
    preparation = values["preparation"]
    return (
        RunConfig(**values["config"]),
        values["outputs"],
        Preparation(**preparation) if preparation else None,
    )


def _within(ids: NDArray[np.int32], rows: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < rows)
