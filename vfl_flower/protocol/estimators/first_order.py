"""First-order estimator: embeddings go up, and their gradient rows come down.

The methods stand in the order in which data meets them. The party embeds (VAFL Alg. 1 line 5). The
label holder evaluates, steps its top model and answers (lines 9, 10 and 12). The party steps
(line 7, Eq. 4a). Every gradient of a window is taken at the party's parameters that made the
upload.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vfl_flower.config.options import TrainingConfig
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models import passes
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.losses import penalty_gradient
from vfl_flower.models.training import step_along, subtract, trained
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks, Links, zeros
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd
from vfl_flower.protocol.estimators.base import Estimator, window_key
from vfl_flower.protocol.privacy.noise import Perturbation
from vfl_flower.protocol.sampling.base import Sampling
from vfl_flower.transport.messages import TrainOrder


class FirstOrder(Estimator):
    """Gradient rows as answers. Only the label holder has the labels (EF-VFL Alg. 2)."""

    def downlinks(self, rows: int, size: int) -> Links:
        """Make the label holder's end of the link of gradient rows."""
        return Links(gradient=self.downlink(zeros((rows, size)), "gradient"))

    def party_tables(self, parties: int) -> int:
        """Return one table for each direction with error feedback."""
        return super().party_tables(parties) + self.holder_tables()

    def holder_tables(self) -> int:
        """Return one table, for the gradient rows, with error feedback; else 0."""
        return int(self.config.downlink.surrogates)

    # --- the party ------------------------------------------------------------------------------

    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Blocks:
        """Embed the window's rows, [R, E]."""
        x = end.features(window)
        noise = end.noise(order.exchange, window) if self.mechanism.perturbs_uploads else None
        key = window_key(end.secret, order) if end.model.by_step else b""
        lengths = window.lengths.tolist()
        h, hs = passes.window(end.model, x, lengths, noise, key, learns=not end.frozen)
        in_one = end.optimizer.param_groups[0]["plain"] or len(window.lengths) == 1
        end.trace = x, hs if in_one else None
        return {"embedding": h}

    # --- the label holder -----------------------------------------------------------------------

    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Answer with the gradient rows [R, E] of each party's mean losses.

        The rows of each step are gradients at the top model before that step.
        """
        h, labels = end.gather(joint.window)
        lengths, divided = joint.window.lengths.tolist(), joint.divisors.tolist()
        rows, losses = end.step(h, labels, lengths, divided, gradients=True)
        assert rows is not None
        end.count(losses)
        rows = rows.cpu()  # once for all parties
        answers: dict[int, Blocks] = {}
        for number, arrival in enumerate(arrivals):
            if arrival.party in end.frozen:
                answers[arrival.party] = {}
                continue
            mine = rows[:, end.columns[arrival.party]]
            if joint.places:
                mine = _of_own_batches(mine, joint, number, arrival, end.sampling)
            answers[arrival.party] = {"gradient": mine}
        return answers

    # --- the party again ------------------------------------------------------------------------

    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Step along the gradient rows [R, E]."""
        rows = blocks["gradient"]
        x, hs = end.trace or (end.features(window), None)
        noise = end.noise(order.exchange, window) if self.mechanism.perturbs_uploads else None
        rows, lengths = rows.to(end.device, non_blocking=True), window.lengths.tolist()
        key = window_key(end.secret, order) if end.model.by_step else b""
        training = self.config.training
        first = order.epoch * end.sampling.per_epoch + order.first
        descend(end.model, end.optimizer, x, hs, rows, lengths, training, noise, key, first)


def _of_own_batches(
    rows: Tensor, joint: Joint, number: int, arrival: Arrival, sampling: Sampling
) -> Tensor:
    """Return one window's rows from gradient rows of joint steps, by the window's own divisors."""
    own, lengths = sampling.divisors(arrival.batches.lengths), arrival.window.lengths
    scale = np.repeat(joint.divisors[: len(own)] / own, lengths).astype(np.float32)
    return rows[torch.from_numpy(joint.places[number])] * torch.from_numpy(scale)[:, None]


def descend(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Samples,
    hs: Sequence[Tensor] | None,
    gradient_rows: Tensor,
    lengths: Sequence[int],
    training: TrainingConfig,
    noise: Perturbation | None = None,
    key: bytes = b"",
    first: int = 0,
) -> None:
    """Take S optimizer steps along the gradient rows [R, E] of the upload of ``x``, from ``first``.

    Plain SGD is linear in the gradient, so one backward pass and one step do the work of S. Other
    optimizers need a copy of the parameters that made the upload, if the window has several steps.
    Without the graph of the uploaded embeddings ``hs``, the forward pass runs again, with equal
    results.
    """
    weight, group = training.regulariser_weight, optimizer.param_groups[0]
    parameters, plain, rates = group["params"], group["plain"], group["rates"]
    if plain or len(lengths) == 1:
        if hs is None:
            _, hs = passes.window(model, x, lengths, noise, key, learns=False)
        steps = float(len(lengths))
        if plain and not rates.constant:
            factors = rates.factors(first, len(lengths))
            steps = float(factors.sum())
            of_rows = factors.repeat_interleave(torch.tensor(lengths))
            shape = len(of_rows), *[1] * (gradient_rows.dim() - 1)
            of_rows = of_rows.to(gradient_rows, non_blocking=True).view(shape)
            gradient_rows = gradient_rows * of_rows
        parts = gradient_rows.split_with_sizes([h.shape[0] for h in hs])
        gradients = torch.autograd.grad(hs, parameters, parts, materialize_grads=True)
        if weight:
            gradients = tuple(
                gradient + steps * weight * penalty_gradient(training, p.detach())
                for p, gradient in zip(parameters, gradients, strict=True)
            )
        if plain:
            subtract(parameters, gradients, rates.lr)
        else:
            step_along(optimizer, gradients, first)
    else:
        _step_by_step(model, optimizer, x, gradient_rows, lengths, training, noise, key, first)


def _step_by_step(
    model: BottomModel,
    optimizer: torch.optim.Optimizer,
    x: Samples,
    gradient_rows: Tensor,
    lengths: Sequence[int],
    training: TrainingConfig,
    noise: Perturbation | None,
    key: bytes,
    first: int,
) -> None:
    """Take the steps of `descend` one by one, with a copy of the uploaded parameters."""
    weight, named = training.regulariser_weight, trained(model).items()
    uploaded_with = {name: p.detach().clone().requires_grad_() for name, p in named}
    of_steps = samples.split(x, lengths), gradient_rows.split(list(lengths))
    for step, (rows, gradient_of) in enumerate(zip(*of_steps, strict=True)):
        of_step = noise.of_step(step) if noise else None
        h = passes.one(model, rows, step, of_step, key, False, uploaded_with)
        at_upload = list(uploaded_with.values())
        gradients = torch.autograd.grad([h], at_upload, [gradient_of], materialize_grads=True)
        whole = [
            gradient + weight * penalty_gradient(training, at.detach())
            for at, gradient in zip(at_upload, gradients, strict=True)
        ]
        step_along(optimizer, whole, first + step)
