"""FedBCD (Liu et al., 2022, "FedBCD: A Communication-Efficient Collaborative Learning Framework for
Distributed Features"), a rival in EF-VFL's experiments, as a user's estimator.

This is the parallel variant, FedBCD-p, without its proximal term. For each mini-batch there is one
exchange. Then all parties take Q steps on it in parallel, each on its own block of parameters. At
each local step a party computes its own part anew, from the same received numbers.

Labels are private. So a party receives the gradient of the loss with respect to its embeddings. At
each of its Q steps it multiplies these stale rows by the Jacobian of its present model. The label
holder's block is the top model. It takes its Q steps at the stale embeddings, with exact labels.

Option ``local-steps`` is Q. With ``local-steps=1`` this is split learning. An exchange has as many
bytes as one of split learning, whatever Q is.

Differences from the paper: its label holder K has features, and a model of them, and ours has the
top model alone. Its models for several parties add their outputs, and ours may have any top model.
With windows of several mini-batches, a party's Jacobians are at its present model, and not at the
model that made the upload.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.models import passes
from vfl_flower.models.losses import penalty_gradient
from vfl_flower.models.training import step_along
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.transport.messages import TrainOrder


class FedBcd(FirstOrder):
    """Embeddings go up, gradient rows come down, and all then take Q local steps."""

    windows = dict.fromkeys(("free", "cheap", "dear"), 1)  # one exchange for each mini-batch

    @property
    def word(self) -> str:
        """The system in a few words."""
        return f"first order, {self.config.estimator.local_steps} local steps"

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Accept ``local-steps`` with private labels; refuse parties that lack rows."""
        if config.data.partial:
            raise ConfigError(
                "FedBCD has all parties step on the same rows, and here parties may lack rows. "
                "Leave align and presence out."
            )

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer gradient rows at the top model before its steps, and take its Q steps.

        This is the exchange of FedBCD-p, where party K sends each party what its gradient needs,
        and then party K's local updates. A mini-batch counts as one step, whatever Q is.
        """
        if joint.places:
            raise ConfigError(
                "FedBCD has all parties step on the same rows. Choose a synchronous strategy."
            )
        h, labels = end.gather(joint.window)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        found = []
        for rows, of_rows, length, divisor in zip(
            h.split(lengths), labels.split(lengths), lengths, divided, strict=True
        ):
            gradient, losses = end.step(rows, of_rows, [length], [divisor], gradients=True)
            assert gradient is not None
            found.append(gradient)
            for _ in range(self.config.estimator.local_steps - 1):
                end.step(rows, of_rows, [length], [divisor], gradients=False)
            end.count(losses)
        every = torch.cat(found)
        return {
            each.party: {}
            if each.party in end.frozen
            else {"gradient": every[:, end.columns[each.party]]}
            for each in arrivals
        }

    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Take Q steps on each mini-batch along J(present model)^T times the stale rows.

        These are the local updates of FedBCD-p, for parties without labels: j = 1, ..., Q.
        """
        lengths = window.lengths.tolist()
        x, hs = end.trace or (end.features(window), None)
        noise = end.noise(order.exchange, window) if self.mechanism.perturbs_uploads else None
        key, training = end.secret + f"|{order.exchange}".encode(), self.config.training
        parameters = end.optimizer.param_groups[0]["params"]
        first = order.epoch * end.sampling.per_epoch + order.first
        stale = blocks["gradient"].to(end.device).split(lengths)
        for step, (rows, signal) in enumerate(zip(samples.split(x, lengths), stale, strict=True)):
            of_step = noise.of_step(step) if noise else None
            for local_step in range(self.config.estimator.local_steps):
                if hs is not None and len(lengths) == 1 and not local_step:
                    h = hs[0]
                else:
                    h = passes.one(end.model, rows, step, of_step, key, learns=False)
                gradients = torch.autograd.grad(h, parameters, signal, materialize_grads=True)
                whole = [
                    gradient + training.regulariser_weight * penalty_gradient(training, p.detach())
                    for p, gradient in zip(parameters, gradients, strict=True)
                ]
                step_along(end.optimizer, whole, first + step)
