"""Baseline `joined`: the same model, centralised on joined data; the ceiling.

It needs every party's columns in one place, so it runs in simulations only.
"""

from __future__ import annotations

import torch

from strategies.checkpoints import Checkpoints
from strategies.vertical import Vertical
from vfl_flower.axes.batches import divisors, draw_window
from vfl_flower.axes.privacy.ledger import ledger_of
from vfl_flower.config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.augmentation import augmented
from vfl_flower.data.blocks import FeatureBlock, load_block, load_part
from vfl_flower.errors import ConfigError
from vfl_flower.models import passes
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.losses import penalty
from vfl_flower.models.training import build_optimizer, step_along, trained
from vfl_flower.party.rules import own_config


class Joined(Vertical):
    """Plain mini-batch training; the batches are those of a synchronous system."""

    keeps_checkpoints = False
    trains_parties = False

    def train(self, checkpoints: Checkpoints | None = None) -> None:
        """Train bottom models and top model together, without messages."""
        if ledger_of(self.config).noise_on == "embeddings":
            raise ConfigError(
                "strategy = 'joined' sends nothing that noise could protect: leave `privacy` out."
            )
        run, holder, training = self.run, self.run.holder, self.config.training
        blocks, configs = self._blocks(), self._configs()
        inputs = [samples.tensors(block.train[:], holder.device) for block in blocks]
        sizes = [columns.stop - columns.start for columns in holder.columns.values()]
        models = [
            build_bottom(own, party, samples.first(block.train), size)
            for party, own, block, size in zip(holder.columns, configs, blocks, sizes, strict=True)
        ]
        bottoms = torch.nn.ModuleList(models).to(holder.device)
        optimizers = [
            build_optimizer(own, bottom, own.training.party_lr, run.plan.per_epoch)
            for own, bottom in zip(configs, models, strict=True)
        ]
        optimizers += [holder.optimizer] if holder.optimizer else []
        for epoch in range(training.epochs):
            rows_of = len(inputs[0])
            window = draw_window(self.config, rows_of, None, epoch, 0, run.plan.per_epoch)
            batches = torch.from_numpy(window.ids).split(window.lengths.tolist())
            divided = divisors(self.config, rows_of, window.lengths).tolist()
            for ids, divisor in zip(batches, divided, strict=True):
                rows = ids.to(holder.device)
                embeddings = []
                for party, bottom, block, x in zip(
                    holder.columns, bottoms, blocks, inputs, strict=True
                ):
                    key = holder.key + f"|{party}".encode()
                    of_rows = augmented(block.augment, samples.rows(x, rows), key, holder.steps)
                    embeddings.append(passes.one(bottom, of_rows, 0, key=key))
                own = holder.table.rows[rows, holder.table.received :]
                h = torch.cat([*embeddings, own], dim=1)
                outputs = passes.one(holder.top, h, 0, key=holder.key)
                losses = holder.loss.per_row(outputs, holder.labels[rows])
                loss = losses.sum() / divisor
                weights = loss.new_zeros(())
                if training.regulariser_weight:
                    terms = [penalty(training, p).sum() for p in trained(bottoms).values()]
                    weights = torch.stack(terms)
                total = loss + training.regulariser_weight * weights.sum()
                parameters = [p for each in optimizers for p in each.param_groups[0]["params"]]
                found = torch.autograd.grad(total, parameters, materialize_grads=True)
                for optimizer in optimizers:
                    learned = len(optimizer.param_groups[0]["params"])
                    step_along(optimizer, found[:learned], holder.steps)
                    found = found[learned:]
                holder.count(loss.detach()[None])
            run.plan.answered += run.plan.of_epoch
            run.history.progressed(run.plan.answered, run.plan.planned)
            if run.history.is_due(epoch + 1, training.epochs):
                bottoms.eval()
                with torch.no_grad():
                    for party, bottom, block in zip(holder.columns, bottoms, blocks, strict=True):
                        test = samples.tensors(block.test[:], holder.device)
                        holder.test_table.of(party)[:] = bottom(test)
                bottoms.train()
                run.record()

    def _configs(self) -> list[RunConfig]:
        """The configuration of every party's bottom model."""
        contexts = self.run.carrier.contexts.values()
        own = [own_config(context, self.config) for context in contexts]
        return own or [self.config] * len(self.run.seats)

    def _blocks(self) -> list[FeatureBlock]:
        """Every party's columns."""
        carrier, seats = self.run.carrier, self.run.seats
        if not carrier.simulated:
            raise ConfigError(
                "strategy = 'joined' needs every party's columns in one place, and those of real "
                "nodes never leave them: run it in process or in a simulation."
            )
        if carrier.contexts:
            return [load_block(context, self.config) for context in carrier.contexts.values()]
        return [load_part(self.config, seat.party, len(seats)) for seat in seats]
