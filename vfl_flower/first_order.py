"""First-order estimator: embeddings go up, gradient rows with respect to them come down.

Read from top to bottom as data meets it: the party embeds (VAFL Alg. 1 line 5), the label holder
evaluates, steps its top model and answers (lines 9, 10 and 12), the party steps (line 7, Eq. 4a).
Every gradient of a window is taken at the party parameters that made the upload.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from vfl_flower.models import BottomModel, TopModel, loss_per_row, mean_loss
from vfl_flower.privacy import Perturbation


def embed(model: BottomModel, x: Tensor, perturb: Perturbation | None) -> Tensor:
    """Party: embeddings [R, E] of the window's rows, with their autograd graph."""
    h: Tensor = model(x, perturb)
    return h


def answer(
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor]:
    """Label holder: gradient rows of each step's mean loss, and those losses.

    The S steps run in order, each evaluated with the top model that the last one left (Eq. 2);
    a top model without parameters needs no order, so one batched pass serves them all.

    Parameters
    ----------
    h : embeddings of all parties side by side, [R, M * E], the rows of step 0 first.
    labels : [R].
    lengths : rows of each step; they add up to R.

    Returns
    -------
    Gradient rows [R, M * E] and losses [S].
    """
    if optimizer is None:
        leaf = h.detach().requires_grad_()
        each = loss_per_row(top(leaf), labels).split(lengths)
        losses = torch.stack([of_step.mean() for of_step in each])
        (rows,) = torch.autograd.grad(losses.sum(), leaf)
        return rows, losses.detach()
    parameters = optimizer.param_groups[0]["params"]
    gradients, mean_losses = [], []
    for h_step, labels_step in zip(h.split(lengths), labels.split(lengths), strict=True):
        leaf = h_step.detach().requires_grad_()
        loss = mean_loss(top(leaf), labels_step)
        rows, *of_parameters = torch.autograd.grad(loss, [leaf, *parameters])
        for parameter, gradient in zip(parameters, of_parameters, strict=True):
            parameter.grad = gradient
        optimizer.step()
        gradients.append(rows)
        mean_losses.append(loss.detach())
    return torch.cat(gradients), torch.stack(mean_losses)


def update(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    h: Tensor | None,
    gradient_rows: Tensor,
    lengths: list[int],
    l2: float,
    perturb: Perturbation | None,
) -> None:
    """Party: S optimizer steps, from the gradient rows [R, E] that answer its upload of ``x``.

    Plain SGD is linear in the gradient, so one backward pass and one step do the work of S.
    ``h`` is what `embed` returned, if it is still at hand; else the forward pass is repeated, which
    gives the same, since the parameters have not changed since.
    """
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] == 0:
        h = embed(model, x, perturb) if h is None else h
        parameters = group["params"]
        gradients = torch.autograd.grad(h, parameters, gradient_rows)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient + len(lengths) * l2 * p.detach() if l2 else gradient
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
            p.grad = gradient + l2 * at.detach()
        optimizer.step()
