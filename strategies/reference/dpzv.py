"""DPZV on one page: Zhang et al. (2026), "Communication-Efficient and Differentially Private
Vertical Federated Learning with Zeroth-Order Optimization", Algorithm 1, with noise on the top
model.

A device learns from one noised scalar a step. So noise that hides the labels is one number, where
noise on gradient rows would be B x E of them.

Where this page and the paper differ:
- Differences are divided by 2 lambda, as in Eq. (3); line 6 divides by lambda.
- They are clipped to [-C, C]; the paper's min{delta, C} bounds one side, and so has no sensitivity.
- The server's step is DP-SGD (``top_noise``): all later scalars follow from the top model, so a
  server that steps without noise gives labels away. With None it steps as in the paper.
- The server keeps the centre (h+ + h-) / 2 in its table.

Notation: M devices; B rows in a mini-batch; E numbers in an embedding; d parameters of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Draw = Callable[[], Tensor]
"""Gives new random numbers: a direction u, [d]; or noise, [1] for a scalar, [d] for a gradient."""


def at(model: nn.Module, w: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of a model at other parameters w, [d]."""
    named, start = {}, 0
    for name, parameter in model.named_parameters():
        named[name] = w[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return functional_call(model, named, (x,))


def on_sphere(model: nn.Module) -> Draw:
    """Return a source of directions for a model, uniform on the sphere of radius sqrt(d)."""
    d = sum(parameter.numel() for parameter in model.parameters())

    def draw() -> Tensor:
        u = torch.randn(d)
        return math.sqrt(d) * u / u.norm()

    return draw


class Device:
    """Device m: its columns of all rows, [D, ...], and its model with parameters w_m."""

    def __init__(
        self, model: nn.Module, features: Tensor, lr: float, smoothing: float, draw: Draw
    ) -> None:
        self.model, self.features = model, features
        self.lr, self.smoothing, self.draw = lr, smoothing, draw

    @torch.no_grad()
    def upload(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Line 5, Eq. (6): return h+ at w + lambda u and h- at w - lambda u, [B, E] each."""
        self.w, self.u = parameters_to_vector(self.model.parameters()), self.draw()
        shift, x = self.smoothing * self.u, self.features[rows]
        return at(self.model, self.w + shift, x), at(self.model, self.w - shift, x)

    @torch.no_grad()
    def update(self, scalar: Tensor) -> None:
        """Line 9, Eq. (9): step along u."""
        vector_to_parameters(self.w - self.lr * scalar * self.u, self.model.parameters())


class Server:
    """The label holder: labels [D], model w_0, and the last embeddings, [M, D, E].

    C (``clip``) bounds a row's difference, and ``noise`` gives z of Eq. (8), [1]. ``top_clip``
    bounds a row's gradient, and ``top_noise`` is the noise on a mean gradient, [d].
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Tensor,
        devices: int,
        size: int,
        lr: float,
        smoothing: float,
        clip: float,
        noise: Draw,
        top_clip: float = 1.0,
        top_noise: Draw | None = None,
    ) -> None:
        self.model, self.labels = model, labels
        self.table = torch.zeros(devices, len(labels), size)
        self.lr, self.smoothing = lr, smoothing
        self.clip, self.noise, self.top_clip, self.top_noise = clip, noise, top_clip, top_noise

    @torch.no_grad()
    def scalar(self, m: int, rows: Tensor, plus: Tensor, minus: Tensor, batch_size: int) -> Tensor:
        """Line 6, Eq. (7) and (8): return what device m receives, one number.

        ``batch_size`` is B: a mini-batch that is drawn by chance may have more or fewer rows.
        """
        self.table[m, rows] = (plus + minus) / 2
        of_rows = self._losses(rows, {m: plus}) - self._losses(rows, {m: minus})
        of_rows = (of_rows / (2 * self.smoothing)).clamp(-self.clip, self.clip)
        return of_rows.sum() / batch_size + self.noise()

    def step(self, rows: Tensor, batch_size: int) -> None:
        """Step w_0 by its gradient (section IV-B); with noise, by DP-SGD (Abadi et al., 2016)."""
        parameters = list(self.model.parameters())
        total = torch.zeros(sum(parameter.numel() for parameter in parameters))
        for loss in self._losses(rows):
            gradient = parameters_to_vector(
                torch.autograd.grad(loss, parameters, retain_graph=True)
            )
            if self.top_noise is not None:
                gradient = gradient * (self.top_clip / gradient.norm()).clamp_max(1)
            total += gradient
        mean = total / batch_size
        if self.top_noise is not None:
            mean = mean + self.top_noise()
        w = parameters_to_vector(parameters).detach()
        vector_to_parameters(w - self.lr * mean, parameters)

    def _losses(self, rows: Tensor, instead: dict[int, Tensor] | None = None) -> Tensor:
        """Losses of rows, [B]; the embeddings of one device may be others."""
        h = {**dict(enumerate(self.table[:, rows])), **(instead or {})}
        outputs = self.model(torch.cat(list(h.values()), dim=1))
        return functional.cross_entropy(outputs, self.labels[rows], reduction="none")


def train(
    devices: Sequence[Device],
    server: Server,
    activations: Iterable[tuple[int, Tensor]],
    batch_size: int,
) -> Iterator[None]:
    """Train by activations (line 3: device m; line 4: its mini-batch); yield after each."""
    for m, rows in activations:
        scalar = server.scalar(m, rows, *devices[m].upload(rows), batch_size)  # lines 5 and 6
        server.step(rows, batch_size)
        devices[m].update(scalar)  # lines 7 to 9
        yield
