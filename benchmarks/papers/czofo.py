"""VFL-CZOFO (Wang et al., 2023, "A Unified Solution for Privacy and Communication Efficiency in
Vertical Federated Learning"), a rival in DPZV's experiments, as a user's estimator.

Differences estimate the gradient with respect to the embeddings. Each bottom model then learns by
its own gradient. The estimate is Avg-RandGradEst: the mean over q directions u of
d / mu (l(h + mu u) - l(h)) u. Here l is one mini-batch's mean loss, and directions are unit vectors
of the d numbers of all its embeddings. The label holder answers the q differences, and the seed of
the directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks, Links, of_steps
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.transport.messages import TrainOrder

Q, MU = 20, 1e-2


class Czofo(FirstOrder):
    """Embeddings go up; Q differences of a step's mean loss come down."""

    @property
    def word(self) -> str:
        """The system in a few words."""
        return "cascaded zeroth and first order"

    def downlinks(self, rows: int, size: int) -> Links:
        """Carry Q differences of each step, and what their directions are drawn from."""
        return Links(difference=of_steps(Q), seed=of_steps(dtype="int64"))

    @torch.no_grad()
    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer differences at the top model that the windows met; then step by its gradient."""
        answers: dict[int, Blocks] = {}
        for arrival in arrivals:
            random = Random(end.key + b"|%d" % arrival.party)
            seeds = [random.getrandbits(63) for _ in arrival.window.lengths]
            seed = torch.tensor(seeds)
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
            answers[arrival.party] = {"difference": torch.stack(found), "seed": seed}
        h, labels = end.gather(joint.window)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        end.count(end.step(h, labels, lengths, divided, gradients=False)[1])
        return answers

    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Step along the estimated gradient rows, as along any."""
        of_steps = directions(blocks["seed"], window, end.size)
        rows = [
            torch.einsum("q,qre->re", each, u) * u[0].numel() / Q
            for each, u in zip(blocks["difference"], of_steps, strict=True)
        ]
        super().update(end, {"gradient": torch.cat(rows)}, order, window)


def directions(seeds: Tensor, window: Window, size: int) -> list[Tensor]:
    """Draw unit directions of each step's embeddings, [Q, R, E]."""
    found = []
    for seed, rows in zip(seeds.tolist(), window.lengths.tolist(), strict=True):
        u = torch.randn(Q, rows, size, generator=torch.Generator().manual_seed(seed))
        found.append(u / u.flatten(1).norm(dim=1)[:, None, None])
    return found
