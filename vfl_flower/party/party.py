"""A party: one feature holder, between the messages that reach it.

Its state (bottom model, optimizer, the window that awaits feedback) lives in Flower's
``Context.state``, because any process may serve any message. The feature block and the model's
skeleton are built once a process. The messages are served by `vfl_flower.client_app`.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.axes import estimators
from vfl_flower.axes.batches import Window, draw_window, take
from vfl_flower.axes.codecs.channel import check_memory, digest
from vfl_flower.axes.privacy.noise import Perturbation
from vfl_flower.config import RunConfig
from vfl_flower.data.alignment import common_rows
from vfl_flower.data.blocks import (
    FeatureBlock,
    load_block,
    load_features,
    own_source,
    prepared,
    seat,
)
from vfl_flower.data.source import Preparation
from vfl_flower.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.flower_internals import in_ray
from vfl_flower.messages import (
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
from vfl_flower.models.bottoms import build_bottom, embedding_size
from vfl_flower.models.training import (
    as_tensor,
    build_optimizer,
    choose_device,
    load_model,
    load_optimizer,
    model_arrays,
    optimizer_arrays,
)
from vfl_flower.party import state
from vfl_flower.provenance import code_digest, peak_memory_mb
from vfl_flower.systems import refuse_places, resolve


class Party:
    """One party. Between two messages it is its ``Context.state``: `resume`, serve, `keep`."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        parties: int,
        outputs: int,
        block: FeatureBlock | None = None,  # of its own data; else of the data set that is divided
    ) -> None:
        self.config = config
        self.index = index
        self.parties = parties
        self.outputs = outputs
        self.device = choose_device(config)
        self.block = block = block or load_features(config, index, parties)
        # What stays the same through a run, and is needed to use its model afterwards.
        preparation = block.preparation.as_json() if block.preparation else None
        about = {"config": config.values(), "parties": parties, "outputs": outputs}
        about["ids"] = block.ids_digest
        self.about = json.dumps({**about, "preparation": preparation})
        self.rows = len(block.train)
        self.size = embedding_size(config, outputs)
        self.estimator = estimators.choose(config)(config)
        tables = self.estimator.party_tables(parties)
        check_memory("this party's", 4 * tables * self.rows * self.size)
        self.links = self.estimator.party_links(self)
        model = build_bottom(config, index, block.train.shape[1:], self.size)
        self.model = model.to(self.device)
        self.optimizer = build_optimizer(config, self.model, config.training.party_lr)
        self.arrays: Arrays = {}  # the estimator's own
        self.exchange = 0  # number of the last message served
        self.pending: TrainOrder | None = None  # the window that awaits feedback
        # Decides noise, directions and Poisson mini-batches; known to this party alone.
        self.secret = secrets.token_bytes(16)
        if config.privacy.noise_seed >= 0:
            self.secret = f"{config.privacy.noise_seed} {index}".encode()
        # What this process may still have from the last message: the record that holds this very
        # model, and what the estimator needs of the pending window's upload.
        self.kept: object = None
        self.trace: Any = None

    @classmethod
    def begin(cls, context: Context, order: DescribeOrder | RejoinOrder) -> Party:
        """The party of a node at the beginning of a run."""
        index, parties = seat(context)
        config = resolve(context.run_config)
        if not (context.node_config.get("simulated") or in_ray()):
            refuse_places(config)
        if config.running.resume:
            raise VflError("has lost the state from which it went on.")
        party = cls(config, index, parties, order.outputs, load_block(context, config))
        _skeletons[index, parties] = context.run_id, party
        return party

    @classmethod
    def resume(cls, context: Context) -> Party:
        """The party of a node, as the last message left it."""
        about = state.load_about(context.state)
        if not about:
            raise OutOfStepError("has no state of this run.")
        place = seat(context)
        run, party = _skeletons.get(place, (None, None))
        if party is None or run != context.run_id or party.about != about:
            config, outputs, _ = read_about(about)
            _check_number(about, place[1])
            party = cls(config, *place, outputs, load_block(context, config))
            if party.about != about:
                raise VflError(
                    "has not the data that this run began with: its file has changed since."
                )
            _skeletons[place] = context.run_id, party
        scalars = state.load_scalars(context.state)
        party.arrays = state.load_large(context.state)
        for name, link in party.links.items():
            if link.surrogate is not None:
                link.surrogate = torch.from_numpy(party.arrays.pop(name))
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
            party.trace = None
            load_model(party.model, state.load_arrays(context.state, "model"))
            load_optimizer(party.optimizer, state.load_arrays(context.state, "optimizer"))
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
        surrogates = {
            name: link.surrogate.numpy()
            for name, link in self.links.items()
            if link.surrogate is not None
        }
        state.save_state(
            context.state,
            self.about,
            scalars,
            {**surrogates, **self.arrays},
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
            train_rows=self.rows,
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
        self._learn(order.arrays)
        window = self._window(order)
        self.pending = order
        arrays = self.estimator.embed(self, order, window)
        if not order.coordinated:
            arrays["ids"] = window.ids
            if self.config.schedule.sampling == "poisson":
                arrays["lengths"] = window.lengths
        return self._upload(arrays)

    def evaluate(self, order: EvaluateOrder) -> Upload:
        """Learn from the feedback, if any; upload the embeddings of the test rows, as they are."""
        self._count(order.exchange)
        self._learn(order.arrays)
        h = self.embeddings(self.block.test[:]).cpu().numpy()
        return replace(
            self._upload({"embedding": h}),
            surrogates=digest(self.links.values()),
            peak_memory_mb=peak_memory_mb(),
        )

    def embed(self, order: EmbedOrder) -> Upload:
        """Upload fresh embeddings of the rows that have grown too old at the label holder."""
        self._count(order.exchange)
        feedback = dict(order.arrays)
        ids = feedback.pop("ids", np.zeros(0))
        if ids.dtype != np.int32 or ids.ndim != 1 or not _within(ids, self.rows):
            raise VflError("was asked for rows that it does not have.")
        if len(np.unique(ids)) < len(ids):
            raise VflError("was asked for a row more than once: each time has noise of its own.")
        if feedback:
            self._learn(feedback)
        h = self.embeddings(self.block.train[ids])
        window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
        return self._upload(self.send("embedding", h, window))

    def checkpoint(self, order: CheckpointOrder) -> Upload:
        """Learn from the feedback, if any; the state is then kept as it is (`state_file`)."""
        self._count(order.exchange)
        self._learn(order.arrays)
        return self._upload({})

    def go_on(self, order: Order) -> Description:
        """Go on from a checkpoint, after which others may have seen more than it knows of."""
        if self.config.privacy.noise_seed < 0:
            self.secret = secrets.token_bytes(16)  # so that no noise and no direction comes twice
        return self.describe(order)

    def rejoin(self, order: RejoinOrder) -> Description:
        """Go on after a failure, with the label holder's count and copy of the surrogate."""
        if order.exchange <= self.exchange:  # its number decides noise and directions
            raise VflError(f"was asked to go back to message {order.exchange}: it has served it.")
        self.exchange = order.exchange
        self.pending = self.trace = None
        for name, link in self.links.items():
            if link.surrogate is not None:
                shape = tuple(link.surrogate.shape)
                if name == "uplink":
                    known = checked(order.arrays, "embedding", "float32", shape)
                    link.surrogate.copy_(as_tensor(known))
                else:
                    link.surrogate.zero_()
        return self.describe(order)

    # --- what an estimator has of it ------------------------------------------------------------

    def features(self, window: Window) -> Tensor:
        """The window's rows, [R, ...]."""
        train = self.block.train
        if isinstance(train, np.ndarray):
            return take(torch.from_numpy(train), window).to(self.device)
        return torch.from_numpy(train[window.ids]).to(self.device)

    def noise(self, exchange: int, window: Window) -> Perturbation | None:
        """The noise of the upload that answers this message, if there is any."""
        if self.config.privacy.mechanism != "perturbed-embedding":
            return None
        last, lengths = len(self.model.layers) - 1, tuple(window.lengths.tolist())
        return Perturbation(self.config.privacy, self.secret, exchange, lengths, last)

    def send(self, name: str, rows: Tensor, window: Window) -> Arrays:
        """What is sent of rows [R, E], over the link for blocks of this name."""
        link = self.links["uplink" if name == "embedding" else "changes"]
        key = f"{self.config.training.seed}|up|{self.index}|{self.exchange}"
        return link.send(name, rows, window, key)

    # --- what the messages have in common -------------------------------------------------------

    def _count(self, exchange: int) -> None:
        if exchange != self.exchange + 1:
            raise OutOfStepError(f"got message {exchange} after message {self.exchange}.")
        self.exchange = exchange

    def _learn(self, arrays: Arrays) -> None:
        """Apply the feedback for the pending window, by the parameters that made its upload."""
        if self.pending is None:
            return
        order, window = self.pending, self._window(self.pending)
        try:
            self.estimator.update(self, arrays, order, window)
        except VflError as error:
            raise VflError(f"was sent feedback that it cannot use: {error}") from None
        self.pending = self.trace = None

    def _window(self, order: TrainOrder) -> Window:
        return draw_window(
            self.config,
            self.rows,
            None if order.coordinated else self.index,
            order.epoch,
            order.first,
            order.steps,
            b"" if order.coordinated else self.secret,
        )

    def embeddings(self, rows: NDArray[Any]) -> Tensor:
        """Embeddings [n, E] of samples, with noise if there is any."""
        window = Window(np.zeros(0, np.int32), np.array([len(rows)], np.int32))
        noise = self.noise(self.exchange, window)
        with torch.no_grad():
            h: Tensor = self.model(torch.from_numpy(rows).to(self.device), noise)
            return h

    def _upload(self, arrays: Arrays) -> Upload:
        return Upload(party=self.index, exchange=self.exchange, arrays=arrays)


_skeletons: dict[tuple[int, int], tuple[int, Party]] = {}
"""What a process keeps of each party that it serves, and the run that it is of."""


def predict(context: Context, saved: RecordDict, order: PredictOrder) -> Predicted:
    """Embeddings by a model that was kept: of the rows just aligned, or of the test rows.

    Raises
    ------
    ConfigError
        If the party's columns, or rows, are not those that the model was trained with.
    """
    index, parties = seat(context)
    about = state.load_about(saved)
    config, outputs, preparation = read_about(about)
    _check_number(about, parties)
    if preparation is None:
        block = load_block(context, config)
        if block.ids_digest != json.loads(about)["ids"]:
            raise ConfigError(f"Party {index} has other rows than its model was trained with.")
    else:
        own, places = own_source(context), common_rows(context)
        rows = prepared(own, places, preparation)
        block = FeatureBlock(rows[:0], rows, own.digest(places), preparation)
    party = Party(config, index, parties, outputs, block)
    load_model(party.model, state.load_arrays(saved, "model"))
    return Predicted(
        party=index,
        parties=parties,
        exchange=state.load_scalars(saved)["exchange"],
        ids_digest=block.ids_digest,
        code_digest=code_digest(),
        arrays={"embedding": party.embeddings(block.test[:]).cpu().numpy()},
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
        RunConfig.of(values["config"]),
        values["outputs"],
        Preparation(**preparation) if preparation else None,
    )


def _within(ids: NDArray[np.int32], rows: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < rows)
