"""Server updates: by the gradient of each step's loss (VAFL Eq. 2), or by differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from vfl_flower.models import passes
from vfl_flower.models.training import autocast, step_along, trained
from vfl_flower.protocol.batches import joined, row_losses, step_means
from vfl_flower.protocol.directions.differences import descend, differences, values_of_pairs
from vfl_flower.protocol.privacy.noise import clipped_noisy_means
from vfl_flower.protocol.server_update.base import ServerUpdate, TopBatches


class ByGradient(ServerUpdate):
    """Update the top model by gradients.

    Each step evaluates the top model that the step before it left (VAFL Eq. 2). Without an
    optimizer the top model does not learn, and one batched pass serves all steps. The label
    holder's bottom model gets its gradient by autograd. With noise, the norm of each row's gradient
    is clipped, and noise is added to the mean (DP-SGD).
    """

    @torch.no_grad()
    def step(self, batches: TopBatches, gradients: bool) -> tuple[Tensor | None, Tensor]:
        """Step along the gradient of each mini-batch's loss; return as in the base class."""
        top, optimizer, h, labels = batches.top, batches.optimizer, batches.h, batches.labels
        steps, divisors = batches.lengths, batches.divisors
        loss, noise, copies = batches.loss, batches.noise, batches.copies
        if copies is not None:
            h, labels, steps = copies.h, labels[copies.rows], copies.lengths
        own = top.own if optimizer else None
        x = h if own else top.combined(top.embedded(h), h)
        y = loss.targets(labels, top.outputs)
        gradient = partial(loss.gradient, squared=labels.is_floating_point())
        parts = list(steps) if optimizer or top.by_step else [len(h)]
        weights: Sequence[Tensor | float] = [1 / each for each in divisors]
        if loss.class_weights is not None or copies is not None or len(parts) < len(steps):
            weights = self._row_weights(batches, labels, steps).split_with_sizes(parts)
        all_outputs, all_rows = [], []
        # With noise, all copies of a row have the same weight. Together they must not add more to
        # the sum than the row could, so each copy's bound is its share of the row's bound.
        share = float(copies.weights.max()) if noise and copies is not None and len(h) else 1.0
        bounds = [share * noise.top_clip / each if noise else math.inf for each in divisors]
        split = zip(*(each.split_with_sizes(parts) for each in (h, x, y)), weights, strict=True)
        for step, (h_step, x_step, y_step, weights_step) in enumerate(split):
            if own:
                with torch.enable_grad():
                    embedding = own(top.features(h_step))
                blocks = torch.cat([h_step[:, : top.received], embedding.detach()], dim=1)
                x_step = top.combined(blocks, h_step)
            random = passes.repeatable(top, batches.key, step, optimizer is not None)
            with random, autocast(top, top.precision):
                outputs, rows, whole = top.passes(
                    *(x_step, y_step, weights_step, gradient),
                    rows=gradients or own is not None,
                    parameters=optimizer is not None,
                    bound=bounds[step],
                    sums=noise.sums if noise else torch.float32,
                )
            if own:
                signal = top.spread_to(slice(top.received, None), rows, h_step)
                whole += torch.autograd.grad(embedding, list(trained(own).values()), signal)
            all_outputs.append(outputs)
            all_rows.append(rows)
            if optimizer:
                whole = noise.added_to_gradients(whole, divisors[step]) if noise else whole
                step_along(optimizer, whole, batches.first + step)
        of_rows = row_losses(loss, joined(all_outputs), batches.labels, copies)
        of_steps = step_means(of_rows, batches.lengths, divisors)
        if not gradients:
            return None, of_steps
        rows = top.spread(joined(all_rows), h)
        return copies.total(rows) if copies is not None else rows, of_steps

    def _row_weights(self, batches: TopBatches, labels: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the factor of each row's loss, [R, 1], with class weights and copies."""
        h, loss, copies = batches.h, batches.loss, batches.copies
        weights = 1 / torch.tensor(batches.divisors, dtype=h.dtype)
        weights = weights.repeat_interleave(torch.tensor(steps))
        weights = weights.to(h.device, non_blocking=True)  # a GPU would wait for the counts
        if loss.class_weights is not None:
            weights = weights * loss.row_weights(labels)
        if copies is not None:
            weights = weights * copies.weights
        return weights[:, None]


class ByDifferences(ServerUpdate):
    """Update the top model by zeroth-order gradient estimates.

    With noise, rows' differences are clipped: anybody with the directions knows these means.
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
