"""Server update by loss differences along random directions (AsyREVEL Eq. 17)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from vfl_flower.models import passes
from vfl_flower.protocol.batches import step_means
from vfl_flower.protocol.directions.differences import descend, differences, values_of_pairs
from vfl_flower.protocol.privacy.noise import clipped_noisy_means
from vfl_flower.protocol.server_update.base import ServerUpdate, TopBatches
from vfl_flower.protocol.server_update.gradient import ByGradient
from vfl_flower.protocol.subsets import row_losses


class ByDifferences(ServerUpdate):
    """Update the top model by zeroth-order gradient estimates.

    Anybody with the directions knows the gradient along them. With noise, rows' differences are
    clipped, and the mean of each step gets noise.
    """

    by_differences: ClassVar[bool] = True

    @torch.no_grad()
    def step(self, batches: TopBatches, gradients: bool) -> tuple[Tensor | None, Tensor]:
        """Step along the directions; gradient rows are at the parameters before all steps."""
        assert batches.draw_directions
        rows = None
        if gradients:
            still = replace(batches, optimizer=None, noise=None, first=0)
            rows, _ = ByGradient(self.config).step(still, gradients)
        directions, top, optimizer = batches.draw_directions(), batches.top, batches.optimizer
        x, lengths, divisors, copies = batches.h, batches.lengths, batches.divisors, batches.copies
        of_steps = lengths
        if copies is not None:
            x, of_steps = copies.h, copies.lengths

        def by_row(outputs: Tensor) -> Tensor:
            return row_losses(batches.loss, outputs, batches.labels, copies)

        if optimizer is None:  # a top model without parameters
            outputs, _ = passes.window(top, x, of_steps, key=directions.key)
            return rows, step_means(by_row(outputs), lengths, divisors)
        pair, u = values_of_pairs(top, x, of_steps, directions)
        of_rows, losses = differences(directions.config, [by_row(outputs) for outputs in pair])
        means = clipped_noisy_means(of_rows, lengths, divisors, batches.noise)
        descend(optimizer, directions, u, means, batches.first)
        return rows, step_means(losses, lengths, divisors)
