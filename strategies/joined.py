"""Baseline `joined`: the same model, centralised on joined data; the ceiling.

It needs every party's columns in one place, so it runs in simulations only.
"""

from __future__ import annotations

import torch

from strategies.checkpoints import Checkpoints
from strategies.vertical import Vertical
from vfl_flower.axes.batches import divisors, draw_window
from vfl_flower.axes.privacy.ledger import ledger_of
from vfl_flower.data.blocks import FeatureBlock, load_block, load_part
from vfl_flower.errors import ConfigError
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.losses import penalty
from vfl_flower.models.training import build_optimizer


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
        blocks = self._blocks()
        inputs = [torch.from_numpy(block.train[:]).to(holder.device) for block in blocks]
        bottoms = torch.nn.ModuleList(
            build_bottom(self.config, party, x.shape[1:], columns.stop - columns.start)
            for (party, columns), x in zip(holder.columns.items(), inputs, strict=True)
        ).to(holder.device)
        optimizers = [build_optimizer(self.config, bottoms, training.party_lr)]
        optimizers += [holder.optimizer] if holder.optimizer else []
        for epoch in range(training.epochs):
            rows_of = len(inputs[0])
            window = draw_window(self.config, rows_of, None, epoch, 0, run.plan.per_epoch)
            batches = torch.from_numpy(window.ids).split(window.lengths.tolist())
            divided = divisors(self.config, rows_of, window.lengths).tolist()
            for ids, divisor in zip(batches, divided, strict=True):
                rows = ids.to(holder.device)
                embeddings = [bottom(x[rows]) for bottom, x in zip(bottoms, inputs, strict=True)]
                own = holder.table.rows[rows, holder.table.received :]
                outputs = holder.top(torch.cat([*embeddings, own], dim=1))
                losses = holder.loss.per_row(outputs, holder.labels[rows])
                loss = losses.sum() / divisor
                weights = loss.new_zeros(())
                if training.regulariser_weight:
                    terms = [penalty(training, p).sum() for p in bottoms.parameters()]
                    weights = torch.stack(terms)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (loss + training.regulariser_weight * weights.sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                holder.count(loss.detach()[None])
            run.plan.answered += run.plan.of_epoch
            run.history.progressed(run.plan.answered, run.plan.planned)
            if run.history.is_due(epoch + 1, training.epochs):
                with torch.no_grad():
                    for party, bottom, block in zip(holder.columns, bottoms, blocks, strict=True):
                        test = torch.from_numpy(block.test[:]).to(holder.device)
                        holder.test_table.of(party)[:] = bottom(test)
                run.record()

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
