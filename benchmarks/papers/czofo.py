"""VFL-CZOFO (Wang et al., 2023, "A Unified Solution for Privacy and Communication Efficiency in
Vertical Federated Learning"), a rival in DPZV's experiments, as an estimator of one's own.

The gradient with respect to the embeddings is estimated by differences, and what is behind them
learns by its own gradient: Avg-RandGradEst, the mean over q directions u of d / mu (l(h + mu u) -
l(h)) u, of one mini-batch's mean loss l and unit directions of all its embeddings' d numbers. The
label holder answers the q differences, and from what the directions are drawn.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.models.training import as_tensor
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.estimators.base import HolderEnd, PartyEnd
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.uploads import Arrival
from vfl_flower.transport.messages import Arrays, TrainOrder, checked

Q, MU = 20, 1e-2


class Czofo(FirstOrder):
    """Embeddings go up; Q differences of a step's mean loss come down."""

    @property
    def word(self) -> str:
        """What it is, in few words."""
        return "cascaded zeroth and first order"

    @torch.no_grad()
    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Arrays]:
        """Differences at the top model that the windows met; then it steps by its gradient."""
        answers: dict[int, Arrays] = {}
        for arrival in arrivals:
            seed = np.array([secrets.randbits(63)], np.int64)
            h, labels = end.gather(arrival.window)
            mine, found = end.columns[arrival.party], []
            u = directions(seed, arrival.window, mine.stop - mine.start)
            lengths = arrival.window.lengths.tolist()
            parts = zip(h.split(lengths), labels.split(lengths), u, strict=True)
            for h_step, y, u_step in parts:
                many = h_step.repeat(Q + 1, 1, 1)
                many[1:, :, mine] += MU * u_step
                outputs = end.top(many.flatten(0, 1))
                losses = end.loss.per_row(outputs, y.repeat(Q + 1)).view(Q + 1, -1).mean(1)
                found.append((losses[1:] - losses[0]) / MU)
            answers[arrival.party] = {"difference": torch.stack(found).numpy(), "seed": seed}
        h, labels = end.gather(joint.window)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        end.count(end.step(h, labels, lengths, divided, gradients=False)[1])
        return answers

    def update(self, end: PartyEnd, arrays: Arrays, order: TrainOrder, window: Window) -> None:
        """The estimated gradient rows, by which the party steps as it does by any."""
        steps = len(window.lengths)
        sent = as_tensor(checked(arrays, "difference", "float32", (steps, Q)))
        seed = checked(arrays, "seed", "int64", (1,))
        rows = [
            torch.einsum("q,qre->re", each, u) * u[0].numel() / Q
            for each, u in zip(sent, directions(seed, window, end.size), strict=True)
        ]
        super().update(end, {"gradient": torch.cat(rows).numpy()}, order, window)


def directions(seed: NDArray[Any], window: Window, size: int) -> list[Tensor]:
    """Unit directions of each step's embeddings, [Q, R, E]."""
    generator = torch.Generator().manual_seed(int(seed[0]))
    drawn = [torch.randn(Q, rows, size, generator=generator) for rows in window.lengths.tolist()]
    return [u / u.flatten(1).norm(dim=1)[:, None, None] for u in drawn]
