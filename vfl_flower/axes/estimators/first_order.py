"""First-order estimator: embeddings go up, gradient rows with respect to them come down.

Read from top to bottom as data meets it: the party embeds (VAFL Alg. 1 line 5), the label holder
evaluates, steps its top model and answers (lines 9, 10 and 12), the party steps (line 7, Eq. 4a).
Every gradient of a window is taken at the party parameters that made the upload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from vfl_flower.axes.batches import Joint, Window, divisors
from vfl_flower.axes.codecs.channel import Channel, zeros
from vfl_flower.axes.estimators.base import (
    Arrival,
    Estimator,
    HolderEnd,
    Links,
    PartyEnd,
    Reading,
)
from vfl_flower.axes.privacy.noise import Perturbation
from vfl_flower.messages import Arrays, TrainOrder
from vfl_flower.models.bottoms import BottomModel
from vfl_flower.models.losses import penalty_gradient
from vfl_flower.models.training import is_plain_sgd
from vfl_flower.sections import TrainingConfig


class FirstOrder(Estimator):
    """Gradient rows, with the labels at the label holder alone (EF-VFL Alg. 2)."""

    def party_links(self, end: PartyEnd) -> Links:
        """Embeddings up, gradient rows down."""
        gradient = self.downlink(zeros((end.rows, end.size)))
        return {**super().party_links(end), "gradient": gradient}

    def holder_links(self, table: Tensor) -> Links:
        """Embeddings up, gradient rows down."""
        rows, size = table.shape
        return {**super().holder_links(table), "gradient": self.downlink(zeros((rows, size)))}

    def party_tables(self, parties: int) -> int:
        """One for each direction with error feedback."""
        return super().party_tables(parties) + self.holder_tables()

    def holder_tables(self) -> int:
        """One for the gradient rows, with error feedback."""
        return int(self.config.downlink.surrogates)

    # --- the party ------------------------------------------------------------------------------

    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Arrays:
        """The embeddings of the window's rows."""
        x = end.features(window)
        h = end.model(x, end.noise(order.exchange, window))
        end.trace = x, h
        return end.send("embedding", h, window)

    # --- the label holder -----------------------------------------------------------------------

    def read(self, links: Links, arrays: Arrays, window: Window, size: int) -> Reading:
        """The embeddings."""
        return Reading(links["uplink"].receive("embedding", arrays, window, size))

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Arrays]:
        """Gradient rows of each party's own mean loss, each step's at the top model it met."""
        h, labels = end.gather(joint.window)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        rows, losses = end.step(h, labels, lengths, divided, gradients=True)
        assert rows is not None
        end.count(losses)
        feedback: dict[int, Arrays] = {}
        for number, arrival in enumerate(arrivals):
            mine = rows[:, end.columns[arrival.party]]
            if joint.places:
                mine = self._of_own_batches(mine, joint, number, arrival.window, len(end.labels))
            key = f"{self.config.training.seed}|down|{arrival.party}|{end.steps}"
            link: Channel = end.links[arrival.party]["gradient"]
            feedback[arrival.party] = link.send("gradient", mine, arrival.window, key)
        return feedback

    def _of_own_batches(
        self, rows: Tensor, joint: Joint, number: int, window: Window, of: int
    ) -> Tensor:
        """Of rows of joint steps those of one window, in its order, over its own divisors."""
        own = divisors(self.config, of, window.lengths)
        scale = np.repeat(joint.divisors[: len(own)] / own, window.lengths).astype(np.float32)
        mine = rows[torch.from_numpy(joint.places[number]).to(rows.device)]
        return mine * torch.from_numpy(scale).to(rows.device)[:, None]

    # --- the party again ------------------------------------------------------------------------

    def update(self, end: PartyEnd, arrays: Arrays, order: TrainOrder, window: Window) -> None:
        """Optimizer steps along the gradient rows."""
        rows = end.links["gradient"].receive("gradient", arrays, window, end.size)
        x, h = end.trace or (end.features(window), None)
        noise, training = end.noise(order.exchange, window), self.config.training
        rows, lengths = rows.to(end.device), window.lengths.tolist()
        descend(end.model, end.optimizer, x, h, rows, lengths, training, noise)


def descend(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    h: Tensor | None,
    gradient_rows: Tensor,
    lengths: Sequence[int],
    training: TrainingConfig,
    noise: Perturbation | None = None,
) -> None:
    """S optimizer steps, from the gradient rows [R, E] that answer the upload of ``x``.

    Plain SGD is linear in the gradient, so one backward pass and one step do the work of S.
    ``h`` is the upload, if its graph is still at hand; else the forward pass is repeated, which
    gives the same, since the parameters have not changed since.
    """
    weight = training.regulariser_weight
    if is_plain_sgd(optimizer):
        h = model(x, noise) if h is None else h
        parameters = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(h, parameters, gradient_rows)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
            if weight:
                at = penalty_gradient(training, p.detach())
                p.grad = gradient + len(lengths) * weight * at
        optimizer.step()
        return
    uploaded_with = {
        name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()
    }
    start = 0
    for step, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        of_step = noise.of_step(step) if noise else None
        h = functional_call(model, uploaded_with, (x[rows], of_step))
        gradients = torch.autograd.grad(h, list(uploaded_with.values()), gradient_rows[rows])
        for p, at, gradient in zip(
            model.parameters(), uploaded_with.values(), gradients, strict=True
        ):
            p.grad = gradient + weight * penalty_gradient(training, at.detach())
        optimizer.step()
