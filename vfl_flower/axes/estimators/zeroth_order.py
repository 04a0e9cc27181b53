"""Zeroth-order estimator: pairs of embeddings go up, scalar loss differences come down.

Read from top to bottom as data meets it: the party draws a direction u for each step and embeds at
perturbed parameters (AsyREVEL Alg. 1 line 4; DPZV Eq. 6), the label holder evaluates both
embeddings of a pair and answers one scalar a step (line 9; DPZV Eq. 7-8), the party steps along u
(lines 6-7; Cascaded Eq. 2-3). A top model that is trained this way too steps along directions of
its own (AsyREVEL Eq. 17).

A difference estimates the derivative along u: [f(w + mu u) - f(w)] / mu one-sided, or
[f(w + mu u) - f(w - mu u)] / (2 mu) two-sided. Times phi(d) u it estimates the gradient, phi(d)
being 1 for Gaussian directions and those on the sphere of radius sqrt(d), and d on the unit sphere.

All differences of a window are taken at the parameters that the window met. They need no order, so
S steps are one batched evaluation at S perturbed models. Where that many models are too large, and
for models that cannot be stacked, steps are evaluated one after the other in the model's own
memory, as MeZO does: perturbed in place, restored, and the direction drawn anew from its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vfl_flower.axes.batches import secret_generator
from vfl_flower.axes.privacy import Perturbation, ScalarNoise
from vfl_flower.config import RunConfig
from vfl_flower.errors import VflError
from vfl_flower.models import (
    BottomModel,
    TopModel,
    is_plain_sgd,
    loss_per_row,
    penalty,
    step_along,
)

_STACK = 2**24  # numbers in the perturbed models that are evaluated at once: 64 MB
_ANY_SEED = np.random.SeedSequence(0)
_BLOCK = 2**18  # numbers of a direction that are drawn at once, in place


def block_names(config: RunConfig) -> tuple[str, str]:
    """Names of the two blocks of a pair, in messages: see `blocks`."""
    if config.codec != "identity":
        return "change", "embedding"
    return ("plus", "minus") if config.differences == "two-sided" else ("perturbed", "embedding")


def fresh(config: RunConfig, pair: tuple[Tensor, Tensor]) -> Tensor:
    """The embedding that a pair brings to the table: f(w), or the centre of a two-sided pair."""
    return (pair[0] + pair[1]) / 2 if config.differences == "two-sided" else pair[1]


def blocks(config: RunConfig, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What is sent of a pair: both embeddings; through a lossy codec, their difference and `fresh`.

    Compressed apart, two embeddings that are nearly equal would lose what tells them apart.
    """
    return pair if config.codec == "identity" else (pair[0] - pair[1], fresh(config, pair))


def pair_of(config: RunConfig, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The pair of which these `blocks` were sent."""
    if config.codec == "identity":
        return first, second
    if config.differences == "two-sided":
        return second + first / 2, second - first / 2
    return second + first, second


class Directions:
    """The directions u_1 ... u_S of a window, in order, as its key gives them again and again.

    Parameters
    ----------
    key : who draws, for which window; with a secret in it that nobody else knows, since who knows
        the directions can solve pairs of embeddings for the features.
    model : whose d parameters the directions are for.
    """

    def __init__(self, config: RunConfig, key: bytes, model: nn.Module) -> None:
        self.config = config
        self.parameters = [p.detach() for p in model.parameters()]
        self.size = sum(p.numel() for p in self.parameters)  # d
        self.phi = self.size if config.directions == "sphere" else 1
        self._radius = self.size**0.5 if config.directions == "scaled-sphere" else 1.0
        self._seeds = secret_generator(b"direction|" + key)
        self._states = np.zeros((0, 4), np.uint64)  # by step, of the generator that draws it

    def stack(self, steps: int) -> Tensor:
        """The directions of all steps, [S, d]."""
        drawn = np.empty((steps, self.size), np.float32)
        states = self._states_of(steps)

        def fill(share: range) -> None:
            bits = np.random.SFC64(_ANY_SEED)
            for step in share:
                _at(bits, states[step]).standard_normal(out=drawn[step], dtype=np.float32)

        threads = torch.get_num_threads() if drawn.size > _BLOCK else 1
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # NumPy draws without Python's lock
                list(pool.map(fill, [range(first, steps, threads) for first in range(threads)]))
        else:
            fill(range(steps))
        u = torch.from_numpy(drawn).to(self.parameters[0].device)
        if self.config.directions != "gaussian":
            u *= self._radius / u.norm(dim=1, keepdim=True)
        return u

    def add(self, step: int, tensors: Sequence[Tensor], factor: float) -> None:
        """Add a step's direction times a factor to tensors shaped as the parameters are."""
        if self.config.directions != "gaussian":
            squares = sum(float(drawn.square().sum()) for _, drawn in self._draw(step, tensors))
            factor *= self._radius / squares**0.5
        for part, drawn in self._draw(step, tensors):
            part.add_(drawn.to(part.device), alpha=factor)

    def _draw(self, step: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Slices of the tensors, each with as many normal draws."""
        generator = _at(np.random.SFC64(_ANY_SEED), self._states_of(step + 1)[step])
        for tensor in tensors:
            for part in tensor.view(-1).split(_BLOCK):
                yield part, torch.from_numpy(generator.standard_normal(len(part), np.float32))

    def _states_of(self, steps: int) -> NDArray[np.uint64]:
        """States from which the first steps' directions are drawn; seeding would take longer."""
        missing = steps - len(self._states)
        if missing > 0:
            more = self._seeds.integers(0, 2**64, (missing, 4), np.uint64)
            self._states = np.concatenate([self._states, more])
        return self._states


def _at(bits: np.random.SFC64, state: NDArray[np.uint64]) -> np.random.Generator:
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": state},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits)


# --- the party ----------------------------------------------------------------------------------


@torch.no_grad()
def embed(
    model: BottomModel | TopModel,
    x: Tensor,
    lengths: Sequence[int],
    directions: Directions,
    perturb: Perturbation | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Party: the two embeddings [R, E] of each of the window's rows, in order of `block_names`.

    Step s has rows of its own, ``lengths[s]`` of them, and a direction of its own. Returns the
    pair, and the directions [S, d] where they were stacked.
    """
    mu, two_sided = directions.config.mu, directions.config.differences == "two-sided"
    at_w = None if two_sided else _call(model, x, perturb)
    if model.stackable and perturb is None and 1 < len(lengths) <= _STACK // directions.size:
        u = directions.stack(len(lengths))
        plus = _at_many(model, x, lengths, u, mu)
        return (plus, _at_many(model, x, lengths, u, -mu) if at_w is None else at_w), u
    by_step = x.split(list(lengths))

    def evaluate(step: int, first: bool) -> Tensor:
        noise = perturb.of_step(step) if perturb else None
        return _call(model, by_step[step], noise.of_pair() if noise and first else noise)

    firsts, seconds = _in_place(directions, len(lengths), evaluate)
    return (torch.cat(firsts), torch.cat(seconds) if at_w is None else at_w), None


def _in_place(
    directions: Directions, steps: int, evaluate: Callable[[int, bool], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``evaluate(step, first)`` gives at w + mu u, and if two-sided at w - mu u.

    The parameters themselves are perturbed and restored, to rounding.
    """
    mu, two_sided = directions.config.mu, directions.config.differences == "two-sided"
    firsts, seconds = [], []
    for step in range(steps):
        directions.add(step, directions.parameters, mu)
        firsts.append(evaluate(step, True))
        if two_sided:
            directions.add(step, directions.parameters, -2 * mu)
            seconds.append(evaluate(step, False))
        directions.add(step, directions.parameters, mu if two_sided else -mu)
    return firsts, seconds


def _at_many(
    model: BottomModel | TopModel, x: Tensor, lengths: Sequence[int], u: Tensor, mu: float
) -> Tensor:
    """Outputs [R, ...] where the rows of step s meet the model at w + mu u_s."""
    named = dict(model.named_parameters())
    parts = u.split([p.numel() for p in named.values()], dim=1)
    shifted = {
        name: torch.add(p, part.view(-1, *p.shape), alpha=mu)
        for (name, p), part in zip(named.items(), parts, strict=True)
    }
    padded, held = _pad(x, lengths)
    evaluate = vmap(lambda of_step, rows: functional_call(model, of_step, (rows,)))
    outputs: Tensor = evaluate(shifted, padded)
    return outputs.flatten(0, 1) if held is None else outputs[held]


def _call(model: nn.Module, x: Tensor, perturb: Perturbation | None) -> Tensor:
    outputs: Tensor = model(x, perturb) if perturb else model(x)
    return outputs


def _pad(rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Rows [R, ...] by step, [S, longest, ...], and which are real unless all are."""
    steps, longest = len(lengths), max(1, *lengths)
    if steps * longest == len(rows):
        return rows.view(steps, longest, *rows.shape[1:]), None
    counts = torch.tensor(lengths, device=rows.device)
    held = torch.arange(longest, device=rows.device) < counts[:, None]
    padded = rows.new_zeros(steps, longest, *rows.shape[1:])
    padded[held] = rows
    return padded, held


# --- the label holder ---------------------------------------------------------------------------


@torch.no_grad()
def answer(
    config: RunConfig,
    top: TopModel,
    h: Tensor,
    columns: slice,
    pair: tuple[Tensor, Tensor],
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    noise: ScalarNoise | None,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Label holder: one difference for each step of a party's window, [S].

    Every row's difference is taken before rows are averaged; with noise, it is clipped to [-C, C],
    and the average gets one Gaussian number (DPZV Eq. 8).

    Parameters
    ----------
    h : rows as `TopModel` reads them, whose ``columns`` are this party's embeddings; overwritten.
    pair : the party's embeddings, as `embed` returns them.
    class_weights : what a row's loss is multiplied by, by its class, [classes].
    """
    h[:, columns] = pair[1]
    z = top.first(h)
    change = top.first_change(columns, pair[0] - pair[1])  # the other parties' part is the same
    values = [loss_per_row(top.rest(each), labels, class_weights) for each in (z + change, z)]
    differences, _ = _differences(config, values)
    if noise:  # not a number counts as no difference, or it would pass the clip
        differences = differences.nan_to_num(nan=0.0).clamp(-noise.clip, noise.clip)
    elif not torch.isfinite(differences).all():
        raise VflError("The loss is no longer finite: lower the learning rates.")
    means = _step_means(differences, lengths, divisors)
    return noise.added_to(means) if noise else means


@torch.no_grad()
def step_top(
    config: RunConfig,
    top: TopModel,
    optimizer: torch.optim.Optimizer | None,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    key: bytes,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Label holder: S steps of the top model along directions of its own; the losses [S]."""
    if optimizer is None:  # a top model without parameters
        return _step_means(loss_per_row(top(h), labels, class_weights), lengths, divisors)
    directions = Directions(config, key, top)
    pair, u = embed(top, h, lengths, directions)
    values = [loss_per_row(outputs, labels, class_weights) for outputs in pair]
    differences, losses = _differences(config, values)
    descend(optimizer, directions, u, _step_means(differences, lengths, divisors))
    return _step_means(losses, lengths, divisors)


def _differences(config: RunConfig, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Differences of the function values at a pair, over their distance; and values at w."""
    if config.differences == "two-sided":
        return (values[0] - values[1]) / (2 * config.mu), (values[0] + values[1]) / 2
    return (values[0] - values[1]) / config.mu, values[1]


def _step_means(values: Tensor, lengths: Sequence[int], divisors: Sequence[int]) -> Tensor:
    """Sums over the rows of each step, over its divisor: [R] to [S]."""
    sums = _pad(values, lengths)[0].sum(1)
    return sums / torch.tensor(divisors, dtype=sums.dtype, device=sums.device)


# --- the party again ----------------------------------------------------------------------------


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    directions: Directions,
    u: Tensor | None,
    differences: Tensor,
) -> None:
    """Party: S optimizer steps, from the label holder's differences [S].

    The party adds its own regulariser's differences first (AsyREVEL Eq. 16). ``u`` is what `embed`
    returned, if it is still at hand; else the directions are drawn anew.
    """
    config = directions.config
    steps = len(differences)
    if u is None and 1 < steps <= _STACK // directions.size:
        u = directions.stack(steps)
    if config.regulariser_weight:
        differences = differences + config.regulariser_weight * _penalties(directions, u, steps)
    descend(optimizer, directions, u, differences)


def _penalties(directions: Directions, u: Tensor | None, steps: int) -> Tensor:
    """Differences [S] of the regulariser g along the directions."""
    config, two_sided = directions.config, directions.config.differences == "two-sided"
    if u is not None:
        w = torch.cat([p.view(-1) for p in directions.parameters])
        ends = [w + config.mu * u, w - config.mu * u if two_sided else w]
        return _differences(config, [penalty(config, end) for end in ends])[0].sum(-1)

    def g() -> Tensor:
        return torch.stack([penalty(config, p).sum() for p in directions.parameters]).sum()

    firsts, seconds = _in_place(directions, steps, lambda step, first: g())
    ends = [torch.stack(firsts), torch.stack(seconds) if two_sided else g()]
    return _differences(config, ends)[0]


def descend(
    optimizer: torch.optim.Optimizer,
    directions: Directions,
    u: Tensor | None,
    differences: Tensor,
) -> None:
    """Optimizer steps by the estimates phi(d) Delta_s u_s; plain SGD takes stacked ones as one."""
    parameters = optimizer.param_groups[0]["params"]
    scalars = directions.phi * differences
    if u is not None:
        estimates = (scalars @ u)[None] if is_plain_sgd(optimizer) else scalars[:, None] * u
        for estimate in estimates:
            parts = estimate.split([p.numel() for p in parameters])
            gradients = [part.view_as(p) for p, part in zip(parameters, parts, strict=True)]
            step_along(optimizer, gradients)
        return
    for step, scalar in enumerate(scalars.tolist()):
        if is_plain_sgd(optimizer):
            directions.add(step, directions.parameters, -optimizer.param_groups[0]["lr"] * scalar)
            continue
        gradients = [torch.zeros_like(p) for p in parameters]
        directions.add(step, gradients, scalar)
        step_along(optimizer, gradients)
