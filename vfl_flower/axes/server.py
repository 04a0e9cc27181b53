"""Server-update axis: how the top model learns from the rows of a window.

Either way the S steps of a window run in order, each on rows of its own: those of step 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vfl_flower.axes.estimators.directions import (
    Directions,
    descend,
    differences,
    step_means,
    values_of_pairs,
)
from vfl_flower.models.losses import loss_per_row, targets
from vfl_flower.models.tops import TopModel
from vfl_flower.models.training import step_along
from vfl_flower.sections import EstimatorConfig


@torch.no_grad()
def by_gradient(
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    rows_wanted: bool = True,
    class_weights: Tensor | None = None,
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
    class_weights : what a row's loss is multiplied by, by its class, [classes].

    Returns
    -------
    Gradient rows [R, M * E], if they are wanted, and losses [S].
    """
    counts = torch.tensor(lengths, device=h.device)
    weights = (1 / torch.tensor(divisors, dtype=h.dtype, device=h.device)).repeat_interleave(counts)
    if class_weights is not None:
        weights = weights * class_weights[labels]
    weights = weights[:, None]
    own = top.own if optimizer else None  # which changes with each step
    x = h if own else top.combined(top.embedded(h))
    y = targets(labels, top.outputs)
    squared = labels.is_floating_point()
    parts = list(lengths) if optimizer else [len(h)]
    all_outputs, all_rows = [], []
    for x_step, y_step, weights_step in zip(
        x.split(parts), y.split(parts), weights.split(parts), strict=True
    ):
        if own:
            with torch.enable_grad():
                embedding = own(x_step[:, top.received :])
            blocks = torch.cat([x_step[:, : top.received], embedding.detach()], dim=1)
            x_step = top.combined(blocks)
        outputs, rows, gradients = top.passes(
            x_step,
            y_step,
            weights_step,
            squared,
            rows=rows_wanted or own is not None,
            parameters=optimizer is not None,
        )
        if own:
            signal = top.spread_to(slice(top.received, None), rows)
            gradients += torch.autograd.grad(embedding, list(own.parameters()), signal)
        all_outputs.append(outputs)
        all_rows.append(rows)
        if optimizer:
            step_along(optimizer, gradients)
    losses = loss_per_row(torch.cat(all_outputs), labels) * weights[:, 0]  # by class, too
    of_steps = torch.stack([each.sum() for each in losses.split(list(lengths))])
    return top.spread(torch.cat(all_rows)) if rows_wanted else None, of_steps


@torch.no_grad()
def by_differences(
    config: EstimatorConfig,
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    key: bytes,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Step along directions of its own (AsyREVEL Eq. 17); the losses [S].

    Parameters
    ----------
    key : what the directions follow from; who knows them knows the gradient along them.
    """
    if optimizer is None:  # a top model without parameters
        return step_means(loss_per_row(top(h), labels, class_weights), lengths, divisors)
    directions = Directions(config, key, top)
    pair, u = values_of_pairs(top, h, lengths, directions)
    values = [loss_per_row(outputs, labels, class_weights) for outputs in pair]
    of_rows, losses = differences(config, values)
    descend(optimizer, directions, u, step_means(of_rows, lengths, divisors))
    return step_means(losses, lengths, divisors)
