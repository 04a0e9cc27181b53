"""Server-update axis: how the top model learns from the rows of a window.

Either way the S steps of a window run in order, each on rows of its own: those of step 0 first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from vfl_flower.models import passes
from vfl_flower.models.losses import Loss
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.training import autocast, step_along
from vfl_flower.protocol.estimators.directions import (
    Directions,
    descend,
    differences,
    step_means,
    values_of_pairs,
)
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.subsets import Copies, row_losses


@torch.no_grad()
def by_gradient(
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    rows_wanted: bool = True,
    loss: Loss = Loss(),  # noqa: B008  (it is frozen)
    noise: ScalarNoise | None = None,
    key: bytes = b"",
    first: int = 0,
    copies: Copies | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Step along the gradient of each step's loss; gradient rows of embeddings, and the losses.

    Each step is evaluated with the top model that the last one left (VAFL Eq. 2). Without an
    optimizer the top model stays, and one batched pass serves them all. A bottom model of the label
    holder's own has its gradient by autograd.

    Parameters
    ----------
    h : rows as `TopModel` reads them: embeddings of all parties side by side, [R, M * E], and
        features of the label holder's own.
    labels : [R].
    lengths : rows of each step; they add up to R.
    divisors : what each step's sum of row losses is divided by.
    loss : of a row.
    noise : what is added to the mean of rows' gradients, whose norms are clipped then (DP-SGD).
    key : what is random in the top model follows from it.
    first : number of the first step, as in `step_along`.
    copies : of the rows, by whose weighted mean loss each row counts; else it counts as it is.

    Returns
    -------
    Gradient rows [R, M * E], if they are wanted, and losses [S].
    """
    of_window, steps = labels, lengths
    if copies is not None:
        h, labels, steps = copies.h, labels[copies.rows], copies.lengths
    counts = torch.tensor(steps, device=h.device)
    weights = 1 / torch.tensor(divisors, dtype=h.dtype, device=h.device)
    weights = weights.repeat_interleave(counts, output_size=len(h))  # else a GPU is waited for
    if loss.class_weights is not None:
        weights = weights * loss.row_weights(labels)
    if copies is not None:
        weights = weights * copies.weights
    weights = weights[:, None]
    own = top.own if optimizer else None  # which changes with each step
    x = h if own else top.combined(top.embedded(h), h)
    y = loss.targets(labels, top.outputs)
    gradient = partial(loss.gradient, squared=labels.is_floating_point())
    parts = list(steps) if optimizer or top.by_step else [len(h)]
    all_outputs, all_rows = [], []
    # Copies of a row, which weigh alike where there is noise, together add no more than one would.
    share = float(copies.weights.max()) if copies is not None and len(h) else 1.0
    bounds = [share * noise.top_clip / each if noise else math.inf for each in divisors]
    for step, (h_step, x_step, y_step, weights_step) in enumerate(
        zip(*(each.split(parts) for each in (h, x, y, weights)), strict=True)
    ):
        if own:
            with torch.enable_grad():
                embedding = own(top.features(h_step))
            blocks = torch.cat([h_step[:, : top.received], embedding.detach()], dim=1)
            x_step = top.combined(blocks, h_step)
        with (
            passes.repeatable(top, key, step, optimizer is not None)
            if top.by_step
            else nullcontext(),
            autocast(top, top.precision),
        ):
            outputs, rows, gradients = top.passes(
                x_step,
                y_step,
                weights_step,
                gradient,
                rows=rows_wanted or own is not None,
                parameters=optimizer is not None,
                bound=bounds[step],
                sums=_sums(noise),
            )
        if own:
            signal = top.spread_to(slice(top.received, None), rows, h_step)
            gradients += torch.autograd.grad(embedding, list(own.parameters()), signal)
        all_outputs.append(outputs)
        all_rows.append(rows)
        if optimizer:
            if noise:
                gradients = noise.added_to_gradients(gradients, divisors[step])
            step_along(optimizer, gradients, first + step)
    of_rows = row_losses(loss, torch.cat(all_outputs), of_window, copies)
    of_steps = step_means(of_rows, lengths, divisors)
    if not rows_wanted:
        return None, of_steps
    rows = top.spread(torch.cat(all_rows), h)
    return copies.total(rows) if copies is not None else rows, of_steps


@torch.no_grad()
def by_differences(
    directions: Directions,
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    loss: Loss = Loss(),  # noqa: B008  (it is frozen)
    noise: ScalarNoise | None = None,
    first: int = 0,
    copies: Copies | None = None,
) -> Tensor:
    """Step along directions of its own (AsyREVEL Eq. 17); the losses [S].

    Parameters
    ----------
    directions : of the top model; who knows them knows the gradient along them.
    noise : what is added to each difference, of which a row's is clipped then.
    first : number of the first step, as in `step_along`.
    copies : of the rows, by whose mean loss each counts; else it counts as it is.
    """
    x, of_steps = h, lengths
    if copies is not None:
        x, of_steps = copies.h, copies.lengths

    def by_row(outputs: Tensor) -> Tensor:
        return row_losses(loss, outputs, labels, copies)

    if optimizer is None:  # a top model without parameters
        outputs, _ = passes.window(top, x, of_steps, key=directions.key)
        return step_means(by_row(outputs), lengths, divisors)
    pair, u = values_of_pairs(top, x, of_steps, directions)
    of_rows, losses = differences(directions.config, [by_row(outputs) for outputs in pair])
    descend(optimizer, directions, u, noisy_means(of_rows, lengths, divisors, noise), first)
    return step_means(losses, lengths, divisors)


def noisy_means(
    of_rows: Tensor, lengths: Sequence[int], divisors: Sequence[int], noise: ScalarNoise | None
) -> Tensor:
    """Means of rows' differences [R] over each step, [S]; with noise, of clipped ones (DPZV Eq. 8).

    What is not a number counts as no difference, or it would pass the clip.
    """
    if noise is None:
        return step_means(of_rows, lengths, divisors)
    clipped = of_rows.nan_to_num(nan=0.0).clamp(-noise.clip, noise.clip).to(_sums(noise))
    return noise.added_to(step_means(clipped, lengths, divisors), divisors).to(of_rows.dtype)


def _sums(noise: ScalarNoise | None) -> torch.dtype:
    """The precision of sums over rows: noise is for what one row changes in an exact sum.

    In 32 bits one of 50,000 rows can change a mean by more, since that of the others rounds.
    """
    return torch.float64 if noise and noise.multiplier else torch.float32
