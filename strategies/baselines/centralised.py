"""Baseline `centralised`: the same model, trained on all columns in one place.

It is an upper bound. It needs every party's columns, so it runs only in simulations. Columns of a
row that a party lacks are zero. Baseline `intersection-only` trains only on the rows that all
parties have.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.vertical import Vertical
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_party import FeatureBlock, load_partition
from vfl_flower.data.labels import Labels
from vfl_flower.data.samples import Samples, augmented
from vfl_flower.data.source import signs_in
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.checkpoint import Keeper
from vfl_flower.models import passes, rebuilt
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom, learn_bins
from vfl_flower.models.losses import penalty
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.training import (
    arrays_of,
    load_model,
    model_arrays,
    model_tensors,
    step_along,
    trained,
)
from vfl_flower.party.inputs import load_block
from vfl_flower.party.own_model import own_config
from vfl_flower.party.state import save_group
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import sized


class _Part(NamedTuple):
    """A party's model and data. ``build`` makes another model like it."""

    party: int
    bottom: BottomModel
    block: FeatureBlock
    train: Samples
    build: Callable[..., BottomModel]


class Joined(Vertical):
    """Trains on plain mini-batches: the same as a synchronous system draws."""

    keeps_checkpoints = False  # no run resumes; `finish` keeps the model
    trains_parties = False
    fills = True  # whether zeros stand for the values of missing rows

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        callbacks: Sequence[Callback] = (),
        keeper: Keeper | None = None,
    ) -> None:
        super().__init__(config, labels, callbacks, keeper)
        self._keeper = keeper

    def train(self) -> None:
        """Train bottom models and top model together, without messages."""
        mechanism_of(self.config).check_baseline(uploads=False)
        run, holder = self.run, self.run.holder
        holder.subsets = "off"  # without training on subsets, there is no validation on them
        self._build()
        if self.fills and holder.held_out.by_subsets:
            # Zeros fill all missing rows, and figures count all rows.
            for table in (holder.table, holder.held_out.table):
                table.rows[:, -len(run.records) :] = 1
            holder.held_out.by_subsets = False
        batches, epochs = self._batches(self._rows()), self.config.training.epochs
        best: dict[str, Tensor] = {}
        for epoch in range(epochs):
            for ids, divisor in islice(batches, run.budget.per_epoch):
                self._step(ids.to(holder.device, non_blocking=True), divisor)
            run.budget.answered += run.budget.of_epoch
            run.tell("progressed", run.budget.answered, run.budget.planned)
            if run.budget.evaluates_after(epoch + 1, epochs):
                self._embed_held_out()
                run.evaluate()
                if run.history.last_is_best:
                    best = {k: each.clone() for k, each in model_tensors(self.bottoms).items()}
            if run.budget.stopped:
                break
        if run.history.best is not None:
            load_model(self.bottoms, arrays_of(best))

    def _build(self) -> None:
        """Build the bottom models, and the optimizers of all models."""
        holder, blocks, configs = self.run.holder, self._blocks(), self._configs()
        sizes = [columns.stop - columns.start for columns in holder.columns.values()]
        builds = [
            partial(build_bottom, own, party, first, size, signs=signs_in(block.preparation))
            for party, own, block, size in zip(holder.columns, configs, blocks, sizes, strict=True)
            for first in (samples.first(block.train),)
        ]
        models = [build() for build in builds]
        for model, block in zip(models, blocks, strict=True):
            learn_bins(model, block.train)
        self.bottoms = torch.nn.ModuleList(models).to(holder.device)
        whole = [self._whole(block, 0) for block in blocks]
        self._parts = [
            _Part(*part) for part in zip(holder.columns, models, blocks, whole, builds, strict=True)
        ]
        self._optimizers = [
            build_optimizer(own, bottom, own.training.party_lr, self.run.budget.per_epoch)
            for own, bottom in zip(configs, models, strict=True)
        ]
        self._optimizers += [holder.optimizer] if holder.optimizer else []

    def _step(self, rows: Tensor, divisor: int) -> None:
        """Take a step of all models along the gradient of a mini-batch."""
        holder, training = self.run.holder, self.config.training
        embeddings = []
        for part in self._parts:
            key = holder.key + f"|{part.party}".encode()
            x = augmented(part.block.augment, samples.rows(part.train, rows), key, holder.steps)
            embeddings.append(passes.one(part.bottom, x, 0, key=key))
        own = holder.table.rows[rows, holder.table.received :]
        h = torch.cat([*embeddings, own], dim=1)
        outputs = passes.one(holder.top, h, 0, key=holder.key)
        loss = holder.loss.per_row(outputs, holder.labels[rows]).sum() / divisor
        weights = loss.new_zeros(())
        if training.regulariser_weight:
            terms = [penalty(training, p).sum() for p in trained(self.bottoms).values()]
            weights = torch.stack(terms)
        total = loss + training.regulariser_weight * weights.sum()
        learned = [optimizer.param_groups[0]["params"] for optimizer in self._optimizers]
        every = [*chain.from_iterable(learned)]
        gradients = iter(torch.autograd.grad(total, every, materialize_grads=True))
        for optimizer, parameters in zip(self._optimizers, learned, strict=True):
            step_along(optimizer, [*islice(gradients, len(parameters))], holder.steps)
        holder.count(loss.detach()[None])

    @torch.no_grad()
    def _embed_held_out(self) -> None:
        """Write the held-out rows' embeddings into their table."""
        held_out = self.run.holder.held_out.table
        self.bottoms.eval()
        for part in self._parts:
            x, bottom = self._whole(part.block, 1), part.bottom
            held_out.of(part.party)[:] = bottom(x)
            if rebuilt.is_own(bottom):
                some = samples.rows(x, slice(rebuilt.ROWS))
                said = f"Party {part.party}'s model {bottom.name!r}"
                rebuilt.check(said, bottom, partial(self._copy, part.build), some)
        self.bottoms.train()

    def finish(self) -> None:
        """Keep the model as any run does, so that the parties can predict with it.

        The parties must be in this process, to get their bottom models. A model that has read zeros
        for missing rows is not kept: predictions would leave such a party out.
        """
        contexts, keeper = self.run.transport.contexts, self._keeper
        filled = self.fills and self.run.holder.aggregation.any_subset
        if not (keeper and contexts) or keeper.found or keeper.earlier or filled:
            return
        for context, bottom in zip(contexts.values(), self.bottoms, strict=True):
            save_group(context.state, "model", model_arrays(bottom))
        self.checkpoints = self.keep_in(keeper)
        super().finish()

    def _copy(self, build: Callable[..., BottomModel]) -> BottomModel:
        """Build a bottom model as its party does to predict."""
        secret = secrets.token_bytes(16) if self.config.data.apart else b""
        return build(secret=secret).to(self.run.holder.device)

    def _rows(self) -> NDArray[np.int64]:
        """Return the training rows to use."""
        return np.arange(len(self.labels.train))

    def _batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, int]]:
        """Yield mini-batches of these rows without end, with the divisors of their losses."""
        sampling = sampling_of(self.config, len(rows))
        for epoch in count() if len(rows) else ():  # without rows there is no batch
            window = sampling.window(None, epoch, 0, sampling.per_epoch, b"")
            ids = torch.from_numpy(rows[window.ids]).split(window.lengths.tolist())
            divided = sampling.divisors(window.lengths).tolist()
            yield from zip(ids, divided, strict=True)

    def _whole(self, block: FeatureBlock, part: int) -> Samples:
        """Return a party's training (0) or test samples (1), with zeros for missing rows."""
        device = self.run.holder.device
        found = samples.tensors((block.train, block.test)[part][:], device)
        if not block.row_masks:
            return found
        known = block.row_masks[part]
        places = torch.from_numpy(known.ids).to(device)

        def filled(x: Tensor) -> Tensor:
            return x.new_zeros(known.rows, *x.shape[1:]).index_copy_(0, places.long(), x)

        return samples.each(found, filled)

    def _configs(self) -> list[RunConfig]:
        """Return the configuration of every party's bottom model."""
        contexts, rows = self.run.transport.contexts.values(), len(self.labels.train)
        own = [sized(own_config(context, self.given), rows) for context in contexts]
        return own or [self.config] * len(self.run.records)

    def _blocks(self) -> list[FeatureBlock]:
        """Return every party's columns."""
        transport, records = self.run.transport, self.run.records
        if not transport.simulated:
            raise ConfigError(
                "strategy = 'centralised' needs every party's columns in one place, and columns "
                "never leave a real node. Run it in process or in a simulation."
            )
        if transport.contexts:
            return [load_block(context, self.config) for context in transport.contexts.values()]
        return [load_partition(self.config, record.party, len(records)) for record in records]


class Common(Joined):
    """Trains on the rows that all parties have, for as many steps; predicts all rows."""

    fills = False

    def _rows(self) -> NDArray[np.int64]:
        rows = np.arange(len(self.labels.train))
        if self.labels.present is not None:
            rows = np.flatnonzero(self.labels.present[0].all(1))
        return rows
