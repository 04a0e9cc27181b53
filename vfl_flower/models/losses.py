"""Losses of the outputs, and the regulariser of each party."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vfl_flower.config.errors import CodeError, ConfigError
from vfl_flower.config.options import TrainingConfig
from vfl_flower.config.plugins import LOSSES, METRICS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import class_weights

RowLoss = Callable[[Tensor, Tensor], Tensor]
_FEW = 1000  # classes, whose unit rows take 4 MB


def on_copies(own: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    """Return a user's function of outputs and labels, which may write to its arguments."""
    return lambda outputs, labels: own(outputs.clone(), labels.clone())


def own_loss(name: str) -> RowLoss | None:
    """Return a user's loss by its name; None for the standard loss."""
    return None if name in LOSSES.known else on_copies(LOSSES.load(name))


def own_figures(name: str) -> Callable[[Tensor, Tensor], Mapping[str, Any]]:
    """Return a user's function of further figures by its name."""
    return on_copies(METRICS.load(name))


def loss_per_row(outputs: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
    """Return the standard loss of each row, [R], or their mean for reduction "mean".

    For class indices it is the logistic loss. One output is the logit of class 1; otherwise each
    class has a logit. For floating-point labels it is half the squared error.
    """
    if labels.is_floating_point():
        return functional.mse_loss(outputs[:, 0], labels, reduction=reduction) / 2
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.to(outputs.dtype), reduction=reduction
        )
    return functional.cross_entropy(outputs, labels, reduction=reduction)


@dataclass(frozen=True)
class Loss:
    """Compute the training loss, with class weights and a correction for label noise.

    For noisy labels it is the forward-corrected loss of Patrini et al. (2017): -log s with s =
    sum_j T[j, y] q_j. Here q are the probabilities of the classes. T[j, y] is the probability that
    label y is recorded for class j. The minimum is the same as for the true labels. A noisy label
    does not tell which class weight w a row has. So q is softmax(z - log w) for outputs z.
    Softmax(z) then has the probabilities of the weighted classes.

    A label is true with probability ``kept``, and otherwise uniform over the other classes. A
    user's ``own`` loss maps outputs [R, C] and labels [R] to row losses [R].
    """

    class_weights: Tensor | None = None
    kept: float = 1.0
    own: RowLoss | None = None

    def per_row(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, [R], with class weights."""
        if self.kept < 1 and not labels.is_floating_point():
            q = self._probability(outputs, self.targets(labels, outputs.shape[1]))
            other = self._other(outputs)
            return -(other + (self.kept - other) * q[:, 0]).log()
        losses = (self.own or loss_per_row)(outputs, labels)
        return losses if self.class_weights is None else losses * self.row_weights(labels)

    def row_weights(self, labels: Tensor) -> Tensor:
        """Return the factor of each row's loss, [R]; `class_weights` must not be None."""
        assert self.class_weights is not None
        if self.kept < 1:  # the corrected loss of `per_row` contains the weights already
            return self.class_weights.new_ones(len(labels))
        return self.class_weights[labels]

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """Return the targets of `gradient`, [R, C], or the labels [R] for a user's loss."""
        if self.own:
            return labels
        if outputs == 1:
            return labels.to(torch.float32)[:, None]
        if outputs > _FEW:
            return functional.one_hot(labels, outputs).to(torch.float32)
        return _unit_rows(outputs, labels.device).index_select(0, labels)

    def gradient(self, outputs: Tensor, targets: Tensor, squared: bool = False) -> Tensor:
        """Return the gradient [R, C] of the sum of `per_row` without weights, or of squares."""
        if self.own:
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                total = self.own(leaf, targets).sum()
            return torch.autograd.grad(total, leaf)[0]
        if squared:
            return outputs - targets
        z = outputs if self.kept == 1 else self._unweighted(outputs)
        if z.shape[1] == 1:
            plain = z.sigmoid() - targets
        else:  # torch's softmax takes six times as long for many rows of few columns
            weights = (z - z.amax(1, keepdim=True)).exp_()
            plain = weights.div_(weights.sum(1, keepdim=True)).sub_(targets)
        if self.kept == 1:
            return plain
        q, other = self._probability(outputs, targets), self._other(outputs)
        return plain * ((self.kept - other) * q / (other + (self.kept - other) * q))

    def _unweighted(self, outputs: Tensor) -> Tensor:
        """Return outputs z - log w, from which the softmax gives unweighted probabilities."""
        if self.class_weights is None:
            return outputs
        logs = self.class_weights.log().to(outputs)
        return outputs - (logs[1] - logs[0] if outputs.shape[1] == 1 else logs)

    def _probability(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the unweighted probability q of each row's recorded class, [R, 1]."""
        z = self._unweighted(outputs)
        if z.shape[1] == 1:
            return (z * (2 * targets - 1)).sigmoid()
        return (z.softmax(1) * targets).sum(1, keepdim=True)

    def _other(self, outputs: Tensor) -> float:
        """Return the probability that a label names one given false class."""
        return (1 - self.kept) / max(1, outputs.shape[1] - 1)


def with_soft_targets(loss: Loss) -> RowLoss:
    """Return the loss -w sum_k t_k log q_k of targets t and weights w [R, K + 1].

    A single target is a number, with w times its ``loss``. Labels [R] keep their ``loss``.
    """

    def per_row(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.dim() == 1:
            return loss.per_row(outputs, labels)
        targets, weights, z = labels[:, :-1], labels[:, -1], outputs
        if targets.shape[1] == 1:
            return weights * loss.per_row(z, targets[:, 0])
        if z.shape[1] == 1:
            z = torch.cat([torch.zeros_like(z), z], 1)
        return -weights * (targets * z.log_softmax(1)).sum(1)

    return per_row


@lru_cache(maxsize=4)
def _unit_rows(classes: int, device: torch.device) -> Tensor:
    """Return the identity matrix, whose row c is the target of class c."""
    return torch.eye(classes, dtype=torch.float32, device=device)


def loss_of(
    config: RunConfig, labels: NDArray[Any], classes: int, kept: float, device: torch.device
) -> Loss:
    """Return the loss of a run with these training labels [N], true with probability ``kept``."""
    weights = class_weights(config.data, labels, classes, kept)
    on_device = None if weights is None else torch.from_numpy(weights).to(device)
    return Loss(on_device, kept, own_loss(config.models.loss))


def try_out(loss: Loss, name: str, outputs: int, labels: Tensor, alone: bool) -> None:
    """Refuse a user's loss that does not return a loss for each row.

    With ``alone``, noise hides each row's part, so that no row may affect another's loss.
    """
    if loss.own is None:
        return
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(len(labels), outputs, generator=generator).to(labels.device)
    other_z = torch.cat([z[:1], 2 * z[1:] + 1])
    try:
        losses, _ = loss.own(z, labels), loss.gradient(z, labels)
        beside = _with_other_rows(labels, outputs) if alone else []
        others = [loss.own(other_z, each)[0] for each in beside]
    except Exception as error:
        one = outputs == 1 and not labels.is_floating_point()
        hint = ", where two classes have one output, the logit of the second" * one
        said = f"loss = {name!r} cannot read outputs {tuple(z.shape)}{hint}"
        raise CodeError(said, error) from error
    if losses.shape != labels.shape or not torch.isfinite(losses).all():
        raise ConfigError(
            f"loss = {name!r} returns {tuple(losses.shape)} for {len(labels)} rows, but each row "
            "needs a finite loss. Correct it."
        )
    if any(not torch.allclose(losses[0], other) for other in others):
        raise ConfigError(
            f"loss = {name!r} lets one row affect another row's loss, but privacy = 'scalar' "
            "hides each row by itself. Compute each row's loss from that row alone."
        )


def _with_other_rows(labels: Tensor, outputs: int) -> list[Tensor]:
    """Return label vectors with the same first label, and different other labels."""
    numbers = labels.is_floating_point()
    another = 2 * labels + 1 if numbers else (labels + 1) % max(2, outputs)
    equal = [torch.full_like(labels, each) for each in (0, 1)]
    return [labels, *(torch.cat([labels[:1], each[1:]]) for each in (another, *equal))]


def penalty(training: TrainingConfig, w: Tensor) -> Tensor:
    """Return the terms of the regulariser g(w), elementwise: of l2, or of AsyREVEL Eq. (22)."""
    half = 0.5 * w.square()
    return half if training.regulariser == "l2" else half / (1 + w.square())


def penalty_gradient(training: TrainingConfig, w: Tensor) -> Tensor:
    """Return the gradient of `penalty`, elementwise."""
    return w if training.regulariser == "l2" else w / (1 + w.square()).square()
