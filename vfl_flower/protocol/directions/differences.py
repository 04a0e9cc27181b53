"""Evaluate models at shifted parameters, and step by differences of the values.

A difference estimates the derivative along u: [f(w + mu u) - f(w)] / mu one-sided, or
[f(w + mu u) - f(w - mu u)] / (2 mu) two-sided. Times phi(d) u it estimates the gradient. phi(d) is
1 for Gaussian directions and on the sphere of radius sqrt(d). It is d on the unit sphere.

All differences of a window use the parameters from before the window. They need no order, so S
steps are one batched evaluation at S perturbed models.

If S models are too large, or the model cannot be stacked, steps run in order in the model's memory,
as in MeZO. A step perturbs the parameters in place and restores them. It draws the direction from
its seed each time. Restoring makes random rounding errors, after 5,000 steps about 3e-6 of a
parameter. A copy would be exact, but as large as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from vfl_flower.config.options import EstimatorConfig
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models import passes
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.training import step_along, subtract, trained
from vfl_flower.protocol.batches import padded_steps
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.privacy.noise import Perturbation


@torch.no_grad()
def values_of_pairs(
    model: BottomModel | TopModel,
    x: Samples,
    lengths: Sequence[int],
    directions: Directions,
    perturb: Perturbation | None = None,
    second: Samples | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Return outputs [R, ...] at w + mu u, and at w, or w - mu u if two-sided.

    Step s has ``lengths[s]`` rows and one direction. The function returns the pair, and the
    directions [S, d] if they were stacked. Random draws are the same at both points. Buffers learn
    at the second point, which may have other rows, ``second``.
    """
    mu, two_sided = directions.config.mu, directions.config.differences == "two-sided"
    second = x if second is None else second
    at_w: Tensor | None = None
    if not two_sided and (model.by_step or not directions.large):
        at_w, _ = passes.window(model, second, lengths, perturb, directions.key)
    # A model that mixes rows would mix the padding of a shorter step into the step's rows.
    stacked = directions.can_be_stacked(len(lengths)) and perturb is None
    if stacked and model.stackable and (not model.by_step or len(set(lengths)) == 1):
        u = directions.stack(len(lengths))
        parts = u.split(directions.sizes, dim=-1)
        plus = _at_many(model, x, lengths, parts, mu)
        return (plus, _at_many(model, second, lengths, parts, -mu) if at_w is None else at_w), u
    by_step = samples.split(second, lengths), samples.split(x, lengths)

    def evaluate(step: int, first: bool) -> Tensor:
        noise = perturb.of_step(step) if perturb else None
        noise = noise.of_pair() if noise and first else noise
        return passes.one(model, by_step[first][step], step, noise, directions.key, not first)

    if not two_sided and at_w is None:  # step by step, because activations need much memory
        at_w = torch.cat([evaluate(step, False) for step in range(len(lengths))])
    firsts, seconds = in_place(directions, len(lengths), evaluate)
    return (torch.cat(firsts), torch.cat(seconds) if at_w is None else at_w), None


def in_place(
    directions: Directions, steps: int, evaluate: Callable[[int, bool], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``evaluate(step, first)`` at w + mu u, and if two-sided at w - mu u.

    Parameters are perturbed in place, and restored up to rounding, even after an error.
    """
    mu, two_sided = directions.config.mu, directions.config.differences == "two-sided"
    firsts, seconds = [], []
    for step in range(steps):
        directions.add(step, directions.parameters, mu)
        at = mu
        try:
            firsts.append(evaluate(step, True))
            if two_sided:
                directions.add(step, directions.parameters, -2 * mu)
                at = -mu
                seconds.append(evaluate(step, False))
        finally:
            directions.add(step, directions.parameters, -at)
    return firsts, seconds


def _at_many(
    model: BottomModel | TopModel,
    x: Samples,
    lengths: Sequence[int],
    parts: Sequence[Tensor],
    mu: float,
) -> Tensor:
    """Return outputs [R, ...], by w + mu u_s in step s; ``parts`` are u of each parameter."""
    named = trained(model)
    shifted = {
        name: torch.add(p, part.view(-1, *p.shape), alpha=mu)
        for (name, p), part in zip(named.items(), parts, strict=True)
    }
    places: Tensor | None = None

    def pad(tensor: Tensor) -> Tensor:
        nonlocal places
        padded, places = padded_steps(tensor, lengths)
        return padded

    padded = samples.each(x, pad)
    evaluate = vmap(lambda of_step, rows: functional_call(model, of_step, (rows,)))
    outputs: Tensor = evaluate(shifted, padded)
    outputs = outputs.flatten(0, 1)
    return outputs if places is None else outputs.index_select(0, places)


def differences(config: EstimatorConfig, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a pair's difference over mu, or 2 mu if two-sided; and values at w, or their mean."""
    if config.differences == "two-sided":
        return (values[0] - values[1]) / (2 * config.mu), (values[0] + values[1]) / 2
    return (values[0] - values[1]) / config.mu, values[1]


def descend(
    optimizer: torch.optim.Optimizer,
    directions: Directions,
    u: Tensor | None,
    differences: Tensor,
    first: int = 0,
) -> None:
    """Take optimizer steps along the gradient estimates phi(d) Delta_s u_s, from step ``first``.

    Plain SGD takes all steps with stacked directions u [S, d] as one. A stack of M parties has
    directions [S, M, d] and differences [S, M].
    """
    group = optimizer.param_groups[0]
    parameters, plain, rates = group["params"], group["plain"], group["rates"]
    scalars = directions.set.phi * differences
    if plain and not rates.constant:
        factors = rates.factors(first, len(scalars)).to(scalars, non_blocking=True)
        scalars = scalars * factors.view(-1, *[1] * (scalars.dim() - 1))

    def shaped(estimate: Tensor) -> list[Tensor]:
        parts = estimate.split(directions.sizes, dim=-1)
        return [part.view_as(p) for p, part in zip(parameters, parts, strict=True)]

    if plain and u is not None:
        whole = scalars @ u if u.dim() == 2 else torch.einsum("sm,smd->md", scalars, u)
        subtract(parameters, shaped(whole), rates.lr)
    elif plain:
        for step, factor in enumerate((-rates.lr * scalars.double()).tolist()):
            directions.add(step, directions.parameters, factor)
    elif u is not None:
        for step, estimate in enumerate(scalars[..., None] * u):
            step_along(optimizer, shaped(estimate), first + step)
    else:
        for step, scalar in enumerate(scalars.tolist()):
            gradients = [torch.zeros_like(p) for p in parameters]
            directions.add(step, gradients, scalar)
            step_along(optimizer, gradients, first + step)
