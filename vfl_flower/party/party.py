"""A party: one feature holder, between the messages that reach it.

Each message is a method; `vfl_flower.client_app` serves them, and `vfl_flower.party.context` keeps
the party in between.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.config.provenance import code_digest, peak_memory_mb
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import augmentation, samples
from vfl_flower.data.at_party import FeatureBlock, load_partition
from vfl_flower.data.augmentation import augmented
from vfl_flower.data.samples import Samples
from vfl_flower.models.bottoms import OwnBottom, build_bottom, embedding_size
from vfl_flower.models.training import (
    as_tensor,
    build_optimizer,
    choose_device,
    is_large,
    load_model,
)
from vfl_flower.party import about
from vfl_flower.party.limits import Limits
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.protocol.batches import (
    Window,
    check_order,
    draw_window,
    kept,
    most_rows,
    steps_per_epoch,
    take,
)
from vfl_flower.protocol.codecs.channel import Blocks, Links, check_memory, digest, zeros
from vfl_flower.protocol.privacy.ledger import ledger_of
from vfl_flower.protocol.privacy.noise import Perturbation
from vfl_flower.protocol.systems import sized
from vfl_flower.transport.messages import (
    SMALL,
    Arrays,
    CheckpointOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    RejoinOrder,
    RestoreOrder,
    ResumeOrder,
    TrainOrder,
    Turn,
    Upload,
    bounded,
    checked,
)

_AT_ONCE = 2**22
"""Numbers of samples that layers of ours evaluate at once.

Other models evaluate 256 rows, and large ones a mini-batch.
"""


class Party:
    """One party: bottom model, optimizer, links, and the window that awaits feedback."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        parties: int,
        outputs: int,
        block: FeatureBlock | None = None,  # of its own data; else of the data set that is divided
        own: RunConfig | None = None,  # with what it has set for its own model; else as all
        grown: bool = False,  # whether its model began in an earlier run
    ) -> None:
        self.frozen = grown and config.training.freeze  # whether its model stays as it is
        self.index = index
        self.parties = parties
        self.outputs = outputs
        self.device = choose_device(config)
        self.block = block = block or load_partition(config, index, parties)
        self.rows = block.row_masks[0].rows if block.row_masks else len(block.train)  # of the run
        given, own = config, sized(own or config, self.rows)
        self.config = config = sized(given, self.rows)
        self.mask = block.row_masks[0].mask if block.row_masks else None  # which of them it has
        self.places = np.cumsum(self.mask) - 1 if self.mask is not None else None  # in its block
        self.size = embedding_size(own, outputs)
        # Decides noise, directions and Poisson mini-batches; known to this party alone, and fresh
        # for each message, unless the run has a seed of noise.
        self.secret = secrets.token_bytes(16)
        if config.privacy.noise_seed >= 0:
            self.secret = f"{config.privacy.noise_seed} {index}".encode()
        # With a file of its own also its first model: who knows that could solve for the features.
        of_model = self.secret if config.data.apart and config.privacy.noise_seed < 0 else b""
        sample = samples.first(block.train if len(block.train) else block.test)
        self.columns = samples.numbers(sample)
        self.model = build_bottom(own, index, sample, self.size, of_model).to(self.device)
        if ledger_of(config).noise_on == "embeddings" and not self.model.apart():
            raise ConfigError(
                f"Party {index}'s model {own.models.bottom!r} lets a row have a part in another's "
                "embedding, so that noise on its own would not hide it: leave out such as "
                "BatchNorm, or privacy."
            )
        self._check_rows(samples.each(sample, lambda x: x[None]))
        rows, model = self.rows, self.model
        self.about = about.write(given, own, parties, outputs, block, rows, model, grown)
        rate, every = own.training.party_lr, steps_per_epoch(config, self.rows)
        self.optimizer = build_optimizer(own, self.model, rate, every)
        self.estimator = estimators.choose(config)(config)
        tables = self.estimator.party_tables(parties)
        check_memory("this party's", 4 * tables * self.rows * self.size)
        # This party's ends of the links of uploads, and of answers.
        self.uplinks = self.estimator.uplinks(zeros((self.rows, self.size)))
        self.downlinks = self.estimator.downlinks_of(self)
        self.arrays: Arrays = {}  # the estimator's own
        self.exchange = 0  # number of the last message served
        self.brought = 0  # and of the last that its model of an earlier run had seen
        self.steps = 0  # mini-batches that the model was trained on, with the pending window's
        self.pending: TrainOrder | None = None  # the window that awaits feedback
        self.pending_secret = b""  # the secret by which it was uploaded
        self.limits = Limits()  # by rules of its own
        self.seal = aggregation_of(config).seal(index, parties)  # of its uploads, if there is one
        self.run = ""  # the name of its run, under which its states are kept
        self.brought_from = 0  # and the number of that from which its model of an earlier run is
        self.origin = ""  # the Flower run in which this one began, since when uploads are counted
        # What this process may still have from the last message: the record over this very model's
        # memory, and what the estimator needs of the pending window's upload.
        self.kept: weakref.ref[Any] | None = None
        self.left: Any = None  # the record of scalars, unless the message after it has failed
        self.node_config: Mapping[str, Any] = {}  # by which the state was last taken up
        self.trace: Any = None
        self.stack: Any = None  # the `stacked.Stack` in which it last trained
        self.stacks_as: Any = None  # what `stacked` has found out of it
        self.learning()

    def learning(self) -> None:
        """Have the model learn from passes over mini-batches, unless it is to stay as it is."""
        self.model.train(not self.frozen)

    def _check_rows(self, one: Samples) -> None:
        """Refuse, by `ConfigError`, what would fail at some row, or take a row's noise in vain."""
        config, augment = self.config, self.block.augment
        of_embeddings = ledger_of(config).noise_on == "embeddings"
        if of_embeddings and augment not in (augmentation.none, augmentation.crop_flip):
            raise ConfigError(
                f"Party {self.index} has an augmentation of its own, by which a row could have a "
                "part in another's embedding, and noise would not hide it: leave out one of them."
            )
        small, batch = config.schedule.sampling == "poisson", config.training.batch_size
        try:
            augmented(augment, one, b"", 0)
            few = small or batch == 1 or self.rows % batch == 1 or self.mask is not None
            if isinstance(self.model, OwnBottom) and few and not self.frozen:
                self.model.check_one_row()
        except ConfigError:
            raise
        except VflError as error:
            raise ConfigError(f"Party {self.index} {error}") from None

    # --- the messages ---------------------------------------------------------------------------

    def describe(self, order: Order) -> Description:
        """What the label holder must check before this party may train."""
        if self.seal and isinstance(order, ResumeOrder):
            self.seal.resume(order)
        masks = self.block.row_masks
        return Description(
            party=self.index,
            parties=self.parties,
            train_rows=self.rows,
            test_rows=masks[1].rows if masks else len(self.block.test),
            columns=self.columns,
            embedding_size=self.size,
            alignment=self.block.alignment,
            code_digest=code_digest(),
            exchange=self.exchange or self.brought,
            checkpoint=self.brought_from,
        )

    def train(self, order: TrainOrder) -> Upload:
        """Learn from the feedback for the last window; upload the next (VAFL Alg. 1 lines 3-7)."""
        window = self.begin(order)
        self.learn(order.arrays)
        return self.embed_window(order, window)

    def begin(self, order: TrainOrder) -> Window:
        """Count what a turn asks for, and draw its rows."""
        check_order(self.config, self.rows, self.parties, order)
        if self.seal and not order.coordinated:
            self.seal.refuse_alone()
        self._count(order)
        self.steps += 0 if self.frozen else order.steps
        self.limits.check_steps(self.steps, steps_per_epoch(self.config, self.rows))
        window = self._window(order, self.secret)
        places = self._places(window.ids)
        self.limits.count(self.block.train_rows, places, self.estimator.uploads_per_row)
        return window

    def embed_window(self, order: TrainOrder, window: Window) -> Upload:
        """Upload a turn's window, whose answer is awaited from then on."""
        self.await_answer(order)
        with torch.set_grad_enabled(not self.frozen):
            blocks = self.estimator.embed(self, order, window)
        return self.uploaded(order, window, blocks)

    def await_answer(self, order: TrainOrder) -> None:
        """The window of this order is the one that feedback will be for."""
        self.pending, self.pending_secret = order, self.secret

    def uploaded(self, order: TrainOrder, window: Window, blocks: Blocks) -> Upload:
        """The upload of a turn's window, of which the estimator has made these blocks."""
        arrays = self.encoded(self.uplinks, blocks, window)
        if not order.coordinated:
            arrays["ids"] = window.ids
            if self.config.schedule.sampling == "poisson":
                arrays["lengths"] = window.lengths
        return self._upload(arrays)

    def evaluate(self, order: EvaluateOrder) -> Upload:
        """Learn from the feedback, if any; upload the embeddings of the test rows, as they are."""
        self._count(order)
        self.limits.count(self.block.test_rows)
        self.learn(order.arrays)
        h = self.embeddings(self.block.test).cpu().numpy()
        return replace(
            self._upload(self._sealed({"embedding": h})),
            surrogates=digest(each for _, each in self.surrogates()),
            peak_memory_mb=peak_memory_mb(),
        )

    def embed(self, order: EmbedOrder) -> Upload:
        """Upload fresh embeddings of the rows that have grown too old at the label holder."""
        self._count(order)
        if self.seal:
            self.seal.refuse_alone()
        ids = order.arrays.get("ids", np.zeros(0))
        if ids.dtype != np.int32 or ids.ndim != 1 or not _within(ids, self.rows):
            raise VflError("was asked for rows that it does not have.")
        if len(np.unique(ids)) < len(ids):
            raise VflError("was asked for a row more than once: each time has noise of its own.")
        if self.mask is not None and not self.mask[ids].all():
            raise VflError("was asked for rows that it does not have.")
        places = self._places(ids)
        self.limits.count(self.block.train_rows, places)
        if len(order.arrays) > 1:
            self.learn(order.arrays)
        h = self.embeddings(self.block.train, places)
        window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
        links = self.estimator.fresh_links(self.uplinks, zeros((self.rows, self.size)))
        return self._upload(self.encoded(links, {"embedding": h}, window))

    def restore(self, order: RestoreOrder, then: Arrays) -> Upload:
        """Have the model of an earlier evaluation; it learns no more."""
        self._count(order)
        self.pending = self.trace = None
        load_model(self.model, then)
        return self._upload({})

    def checkpoint(self, order: CheckpointOrder) -> Upload:
        """Learn from the feedback, if any; the state is then kept as it is (`state_file`)."""
        self._count(order)
        self.learn(order.arrays)
        return self._upload({})

    def rejoin(self, order: RejoinOrder) -> Description:
        """Go on after a failure, with the label holder's count and copy of the surrogate."""
        if self.seal:
            self.seal.refuse_alone()
        if order.exchange <= self.exchange:  # with a seed, its number decides noise and directions
            raise VflError(f"was asked to go back to message {order.exchange}: it has served it.")
        self.exchange = order.exchange
        self.pending = self.trace = None
        for name, surrogate in self.surrogates():
            if name == "uplink":
                known = checked(order.arrays, "embedding", "float32", tuple(surrogate.shape))
                surrogate.copy_(as_tensor(bounded("embedding", known)))
            else:
                surrogate.zero_()
        return self.describe(order)

    # --- what an estimator has of it ------------------------------------------------------------

    def features(self, window: Window) -> Samples:
        """The pending window's rows, augmented alike in each pass."""
        train = self.block.train
        if isinstance(train, np.ndarray) and self.places is None:
            x: Samples = take(torch.from_numpy(train), window).to(self.device)
        else:
            x = samples.tensors(train[self._places(window.ids)], self.device)
        if self.pending is None or self.block.augment is augmentation.none:
            return x
        return augmented(self.block.augment, x, self.secret, self.pending.exchange)

    def noise(self, exchange: int, window: Window) -> Perturbation | None:
        """The noise of the upload that answers this message, if there is any.

        Raises
        ------
        VflError
            If the model has diverged, which its embeddings would not show under noise.
        """
        if ledger_of(self.config).noise_on != "embeddings":
            return None
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise VflError("has parameters that are not finite; lower the learning rates.")
        last, lengths = len(self.model.layers) - 1, tuple(window.lengths.tolist())
        return Perturbation(self.config.privacy, self.secret, exchange, lengths, last)

    def encoded(self, links: Links, blocks: Blocks, window: Window) -> Arrays:
        """Make the arrays of an upload from its blocks, each of rows [R, E]."""
        key = f"{self.config.training.seed}|up|{self.index}|{self.exchange}"
        arrays = links.encode(blocks, window, key)
        return self._sealed(arrays) if self.seal else arrays

    def surrogates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this party's surrogates, by the names under which they are saved."""
        yield from self.uplinks.with_surrogates()
        yield from self.downlinks.with_surrogates()

    def _sealed(self, arrays: Arrays) -> Arrays:
        """Return blocks of embeddings as the party uploads them."""
        return self.seal.hide(arrays) if self.seal else arrays

    @property
    def alike(self) -> bytes:
        """Return a hash of what must be the same at all parties that agree on something."""
        run = json.dumps([self.config.values(), self.parties, self.outputs, self.size])
        return alike(run, self.block.ids_digest)

    @property
    def epochs(self) -> float:
        """Passes over its rows that the model was trained for, those in earlier runs too."""
        return self.steps / steps_per_epoch(self.config, self.rows)

    @cached_property
    def largest_order(self) -> int:
        """Bytes of the arrays of an order, at most: an answer to an epoch's rows, or surrogates."""
        steps = steps_per_epoch(self.config, self.rows)
        rows = most_rows(self.config, self.rows, steps)
        keys = self.estimator.aggregation.order_bytes(self.parties)
        return SMALL + keys + self.estimator.answer_bytes(self, rows, steps)

    # --- what the messages have in common -------------------------------------------------------

    def _count(self, order: Turn) -> None:
        if order.exchange != self.exchange + 1:
            raise OutOfStepError(f"got message {order.exchange} after message {self.exchange}.")
        self.exchange = order.exchange
        if self.seal:
            self.seal.bind(order)
        if self.config.privacy.noise_seed < 0:
            # So that what is served twice, by an older state or by two processes at once, has other
            # noise and directions each time.
            self.secret = secrets.token_bytes(16)

    def learn(self, arrays: Arrays) -> None:
        """Apply the feedback for the pending window, by the parameters that made its upload."""
        self.stack = None
        if self.pending is None or self.frozen:  # which is sent no feedback
            self.forget_window()
            return
        window = self.pending_window()
        present, self.secret = self.secret, self.pending_secret
        try:
            blocks = self.downlinks.decode(arrays, window)
            self.estimator.update(self, blocks, self.pending, window)
        except VflError as error:
            raise VflError(f"was sent feedback that it cannot use: {error}") from None
        finally:
            self.secret = present
            self.forget_window()  # feedback is used once, even if it fails halfway

    def forget_window(self) -> None:
        """No window awaits feedback any more."""
        self.pending = self.trace = None

    def pending_window(self) -> Window:
        """The rows that await feedback."""
        assert self.pending
        return self._window(self.pending, self.pending_secret)

    def _window(self, order: TrainOrder, secret: bytes) -> Window:
        batches = draw_window(
            self.config,
            self.rows,
            None if order.coordinated else self.index,
            order.epoch,
            order.first,
            order.steps,
            b"" if order.coordinated else secret,
        )
        return kept(batches, self.mask)

    def _places(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where in its block the party has rows of the run."""
        return ids if self.places is None else self.places[ids].astype(np.int32)

    def embeddings(self, rows: Any, ids: NDArray[np.int32] | None = None) -> Tensor:
        """Embeddings [n, E] of rows of a block, all or these, with noise if there is any.

        They are read and embedded by parts, so that memory does not grow with their number.
        """
        places = np.arange(len(rows), dtype=np.int32) if ids is None else ids
        most = 256 if self.model.by_step else max(1, _AT_ONCE // self.columns)
        if is_large(self.model):
            most = self.config.training.batch_size
        starts = range(0, max(1, len(places)), most)
        parts = [places[start : start + most] for start in starts]
        window = Window(places, np.array([len(part) for part in parts], np.int32))
        noise = self.noise(self.exchange, window)
        found = []
        self.model.eval()
        try:
            with torch.no_grad():
                for number, part in enumerate(parts):
                    read = rows[part] if len(parts) > 1 or ids is not None else rows[:]
                    x = samples.tensors(read, self.device)
                    found.append(self.model(x, noise.of_step(number) if noise else None))
        finally:
            self.learning()
        return found[0] if len(found) == 1 else torch.cat(found)

    def _upload(self, arrays: Arrays) -> Upload:
        return Upload(party=self.index, exchange=self.exchange, arrays=arrays)


def _within(ids: NDArray[np.int32], rows: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < rows)
