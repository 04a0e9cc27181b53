"""Baseline `joined`: the same model, centralised on joined data; the ceiling.

It needs every party's columns in one place, so it runs in simulations only.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from strategies.vertical import Vertical
from vfl_flower.axes.batches import divisors, draw_window
from vfl_flower.config import RunConfig
from vfl_flower.data.sources import load_block, load_features
from vfl_flower.errors import ConfigError
from vfl_flower.models import build_bottom, build_optimizer, loss_per_row, penalty
from vfl_flower.runtimes.local import LocalGrid


class Joined(Vertical):
    """Baseline: the same model, centralised on joined data; simulations only."""

    name = "joined"
    keeps_checkpoints = False
    trains_parties = False
    axes = "no messages · centralised mini-batch training of bottom and top models together"

    @classmethod
    def serves_black_boxes(cls, config: RunConfig) -> bool:
        """No: it is trained by gradients, whatever the estimator."""
        return False

    def train(self) -> None:
        """Plain mini-batch training; the batches are those of a synchronous system."""
        if self.engine == "supernodes":
            raise ConfigError(
                "strategy = 'joined' needs every party's columns in one place, and those of real "
                "nodes never leave them: run it in process or in a simulation."
            )
        if self.config.privacy != "none":
            raise ConfigError(
                "strategy = 'joined' sends nothing that noise could protect: leave `privacy` out."
            )
        config, holder = self.config, self.holder
        if isinstance(self.grid, LocalGrid):
            blocks = [load_block(context, config) for context in self.grid.contexts.values()]
        else:
            blocks = [load_features(config, seat.party, len(self.seats)) for seat in self.seats]
        inputs = [torch.from_numpy(block.train).to(holder.device) for block in blocks]
        bottoms = torch.nn.ModuleList(
            build_bottom(config, seat.party, block.train.shape[1:], columns.stop - columns.start)
            for seat, block, columns in zip(
                self.seats, blocks, holder.columns.values(), strict=True
            )
        ).to(holder.device)
        optimizers = [build_optimizer(config, bottoms, config.party_lr)]
        optimizers += [holder.optimizer] if holder.optimizer else []
        for epoch in tqdm(range(config.epochs), unit="epoch", disable=None, leave=False):
            window = draw_window(config, len(inputs[0]), None, epoch, 0, self.steps_per_epoch)
            batches = torch.from_numpy(window.ids).split(window.lengths.tolist())
            for ids, divisor in zip(
                batches, divisors(config, window.lengths).tolist(), strict=True
            ):
                rows = ids.to(holder.device)
                embeddings = [bottom(x[rows]) for bottom, x in zip(bottoms, inputs, strict=True)]
                h = torch.cat([*embeddings, holder.table[rows, holder.own]], dim=1)
                labels = holder.train_labels[rows]
                losses = loss_per_row(holder.top(h), labels, holder.class_weights)
                loss = losses.sum() / divisor
                own = loss.new_zeros(())
                if config.regulariser_weight:
                    own = torch.stack([penalty(config, p).sum() for p in bottoms.parameters()])
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (loss + config.regulariser_weight * own.sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                holder.losses.append(loss.detach()[None])
                holder.steps += 1
            self.party_steps += self.steps_of_epoch
            if self.is_due(epoch + 1):
                with torch.no_grad():
                    for bottom, block, columns in zip(
                        bottoms, blocks, holder.columns.values(), strict=True
                    ):
                        test = torch.from_numpy(block.test).to(holder.device)
                        holder.test_table[:, columns] = bottom(test)
                self._record(holder.evaluate())
