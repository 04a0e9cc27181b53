"""First-order estimator: embeddings go up, gradient rows with respect to them come down.

Read from top to bottom as data meets it: the party embeds (VAFL Alg. 1 line 5), the label holder
evaluates, steps its top model and answers (lines 9, 10 and 12), the party steps (line 7, Eq. 4a).
Every gradient of a window is taken at the party parameters that made the upload.

With shared labels (EF-VFL, Algorithm 1) a party gets the other parties' embeddings and the top
model of each step instead, and finds the gradient rows itself, with its own embedding exact (Eq.
4), at its parameters as they are by then: so it can take several local steps on a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from vfl_flower.axes.privacy import Perturbation
from vfl_flower.config import RunConfig
from vfl_flower.models import (
    BottomModel,
    TopModel,
    is_plain_sgd,
    load_flat,
    loss_gradient,
    loss_per_row,
    penalty_gradient,
    step_along,
    targets,
)


def embed(model: BottomModel, x: Tensor, perturb: Perturbation | None) -> Tensor:
    """Party: embeddings [R, E] of the window's rows, with their autograd graph."""
    h: Tensor = model(x, perturb)
    return h


@torch.no_grad()
def answer(
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    rows_wanted: bool = True,
    class_weights: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Label holder: gradient rows of each step's loss, and those losses, stepping the top model.

    The S steps run in order, each evaluated with the top model that the last one left (Eq. 2).
    Without an optimizer the top model stays, and one batched pass serves them all. The passes are
    written out, since autograd would take several times their arithmetic; a bottom model of the
    label holder's own has its gradient by autograd.

    Parameters
    ----------
    h : rows as `TopModel` reads them: embeddings of all parties side by side, [R, M * E], and
        features of the label holder's own; the rows of step 0 first.
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
        outputs, rows, gradients = _passes(
            top,
            x_step,
            y_step,
            weights_step,
            rows_wanted or own is not None,
            optimizer is not None,
            squared,
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


def _passes(
    top: TopModel,
    x: Tensor,
    y: Tensor,
    weights: Tensor | float,
    rows: bool,
    parameters: bool,
    squared: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Forward and backward: outputs, gradient rows of x, and gradients of layers, if wanted."""
    layers = cast(list[torch.nn.Linear], list(top.layers))
    inputs = [x]
    for layer in layers[:-1]:
        inputs.append(layer(inputs[-1]).relu_())
    outputs = layers[-1](inputs[-1]) if layers else x
    signal = loss_gradient(outputs, y, squared) * weights
    gradients: list[Tensor] = []
    for depth in reversed(range(len(layers))):
        if parameters:
            gradients = [signal.T @ inputs[depth], signal.sum(0), *gradients]
        if depth or rows:
            signal = signal @ layers[depth].weight
        if depth:
            signal *= inputs[depth] > 0
    return outputs, signal, gradients


def update(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    h: Tensor | None,
    gradient_rows: Tensor,
    lengths: Sequence[int],
    config: RunConfig,
    perturb: Perturbation | None,
) -> None:
    """Party: S optimizer steps, from the gradient rows [R, E] that answer its upload of ``x``.

    Plain SGD is linear in the gradient, so one backward pass and one step do the work of S.
    ``h`` is what `embed` returned, if it is still at hand; else the forward pass is repeated, which
    gives the same, since the parameters have not changed since.
    """
    weight = config.regulariser_weight
    if is_plain_sgd(optimizer):
        h = embed(model, x, perturb) if h is None else h
        parameters = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(h, parameters, gradient_rows)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
            if weight:
                p.grad = gradient + len(lengths) * weight * penalty_gradient(config, p.detach())
        optimizer.step()
        return
    uploaded_with = {
        name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()
    }
    start = 0
    for step, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        noise = perturb.of_step(step) if perturb else None
        h = functional_call(model, uploaded_with, (x[rows], noise))
        gradients = torch.autograd.grad(h, list(uploaded_with.values()), gradient_rows[rows])
        for p, at, gradient in zip(
            model.parameters(), uploaded_with.values(), gradients, strict=True
        ):
            p.grad = gradient + weight * penalty_gradient(config, at.detach())
        optimizer.step()


def update_with_labels(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    h: Tensor | None,
    embeddings: Tensor,
    columns: slice,
    top: TopModel,
    tops: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    class_weights: Tensor | None,
    config: RunConfig,
    perturb: Perturbation | None,
) -> None:
    """Party, with shared labels: Q steps on each mini-batch of its upload of ``x`` (Alg. 1 line 2).

    Parameters
    ----------
    embeddings : of all parties, [R, M * E]; this party's ``columns`` are overwritten.
    top, tops : a top model, and the parameters that each step is to meet it with, [S, d_0].
    """
    parameters = optimizer.param_groups[0]["params"]
    y = targets(labels, top.outputs)
    start = 0
    for step, (length, divisor) in enumerate(zip(lengths, divisors, strict=True)):
        rows = slice(start, start + length)
        start += length
        noise = perturb.of_step(step) if perturb else None
        weights: Tensor | float = 1 / divisor
        if class_weights is not None:
            weights = weights * class_weights[labels[rows], None]
        load_flat(top, tops[step])
        for local_step in range(config.local_steps):
            if h is None or len(lengths) > 1 or local_step:  # else it is the upload's own
                h = embed(model, x[rows], noise)
            embeddings[rows, columns] = h.detach()
            with torch.no_grad():
                met = top.combined(embeddings[rows])
                _, signal, _ = _passes(top, met, y[rows], weights, True, False)
            gradients = torch.autograd.grad(h, parameters, top.spread_to(columns, signal))
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient + config.regulariser_weight * penalty_gradient(config, p.detach())
            optimizer.step()
