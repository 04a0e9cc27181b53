"""Losses of the outputs, and the party's own regulariser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vfl_flower.config.errors import CodeError, ConfigError
from vfl_flower.config.options import TrainingConfig
from vfl_flower.config.plugins import LOSSES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import class_weights, kept_share

RowLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """What training minimises, by class and with regard to noise on the labels.

    Where labels are noisy it is the forward-corrected loss of Patrini et al. (2017): -log s for
    s = sum_j T[j, y] q_j, of the classes' probabilities q and the chances T that class j is noted
    as y. Its minimum is where that of the loss on the true labels is. Nobody knows then which
    class's weight w a row has: so q is softmax(z - log w) of outputs z, whose own softmax then is
    what weighted classes have for probabilities.

    Parameters
    ----------
    class_weights : what a row's loss is multiplied by, by its true class, [classes]; none: by 1.
    kept : chance p by which a label is the true one, else evenly one of the others.
    own : a function of one's own, from outputs [R, C] and labels [R] to the loss of each row, [R],
        in place of ours. Labels are classes' numbers, or standardised numbers.
    """

    class_weights: Tensor | None = None
    kept: float = 1.0
    own: RowLoss | None = None

    def per_row(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of each row, [R], times the weight of its class where classes have weights."""
        if self.kept < 1 and not labels.is_floating_point():
            q = _probability(self._unweighted(outputs), targets(labels, outputs.shape[1]))
            other = self._other(outputs)
            return -(other + (self.kept - other) * q[:, 0]).log()
        losses, weights = (self.own or loss_per_row)(outputs, labels), self.row_weights(labels)
        return losses if weights is None else losses * weights

    def row_weights(self, labels: Tensor) -> Tensor | None:
        """What losses of rows are multiplied by, [R], if they are."""
        if self.class_weights is None or self.kept < 1:
            return None
        return self.class_weights[labels]

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """What `gradient` compares outputs with: those of `targets`, or the labels themselves."""
        return labels if self.own else targets(labels, outputs)

    def gradient(self, outputs: Tensor, targets: Tensor, squared: bool = False) -> Tensor:
        """The gradient [R, C] of the sum of `per_row`, unweighted, with respect to the outputs.

        ``squared`` : whether targets are numbers, so that it is the squared error's.
        """
        if self.own:
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                total = self.own(leaf, targets).sum()
            return torch.autograd.grad(total, leaf)[0]
        if squared or self.kept == 1:
            return loss_gradient(outputs, targets, squared)
        outputs = self._unweighted(outputs)
        plain = loss_gradient(outputs, targets)
        q, other = _probability(outputs, targets), self._other(outputs)
        return plain * ((self.kept - other) * q / (other + (self.kept - other) * q))

    def _unweighted(self, outputs: Tensor) -> Tensor:
        """Outputs whose softmax is the classes' probabilities without their weights."""
        if self.class_weights is None:
            return outputs
        logs = self.class_weights.log().to(outputs)
        return outputs - (logs[1] - logs[0] if outputs.shape[1] == 1 else logs)

    def _other(self, outputs: Tensor) -> float:
        """The chance of each class that is not the true one."""
        return (1 - self.kept) / max(1, outputs.shape[1] - 1)


def loss_of(config: RunConfig, labels: NDArray[Any], classes: int, device: torch.device) -> Loss:
    """The loss of a run, from the labels of its training rows, [N], of so many classes.

    Raises
    ------
    ConfigError
        If the configured class weights are not one positive number for each class.
    """
    kept = kept_share(config.privacy, classes)
    weights = class_weights(config.data, labels, classes, kept)
    on_device = None if weights is None else torch.from_numpy(weights).to(device)
    name = config.models.loss
    return Loss(on_device, kept, None if name in LOSSES.known else LOSSES.load(name))


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if keys of the loss contradict others."""
    name, of_classes = config.models.loss, config.data.target == "classification"
    if name not in LOSSES.known and config.privacy.mechanism == "labels" and of_classes:
        raise ConfigError(
            f"loss = {name!r} is not corrected for the noise of privacy = 'labels': leave one of "
            "them out."
        )


def try_out(loss: Loss, name: str, outputs: int, labels: Tensor, alone: bool) -> None:
    """Raise `ConfigError` if a loss of one's own makes no losses of rows, before training.

    Parameters
    ----------
    labels : of some rows, [N].
    alone : whether noise hides what one row adds, so that none may have a part in another's.
    """
    if loss.own is None:
        return
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(len(labels), outputs, generator=generator).to(labels.device)
    try:
        losses, _ = loss.own(z, labels), loss.gradient(z, labels)
        beside = [
            (torch.cat([z[:1], 2 * z[1:] + 1]), of_others) for of_others in _turned(labels, outputs)
        ]
        others = [loss.own(*each)[0] for each in beside] if alone else []
    except Exception as error:
        one = outputs == 1 and not labels.is_floating_point()
        hint = ", where two classes have one output, the logit of the second" * one
        said = f"loss = {name!r} cannot read outputs {tuple(z.shape)}{hint}"
        raise CodeError(said, error) from error
    if losses.shape != labels.shape or not torch.isfinite(losses).all():
        raise ConfigError(
            f"loss = {name!r} makes {tuple(losses.shape)} of {len(labels)} rows, where a finite "
            "loss of each is due: correct it."
        )
    if any(not torch.allclose(losses[0], other) for other in others):
        raise ConfigError(
            f"loss = {name!r} lets a row have a part in another's loss, where privacy = 'scalar' "
            "hides what one row adds: take each row by itself."
        )


def _turned(labels: Tensor, outputs: int) -> list[Tensor]:
    """Labels of which the first stays: as they are, each another, and all others alike."""
    numbers = labels.is_floating_point()
    another = 2 * labels + 1 if numbers else (labels + 1) % max(2, outputs)
    alike = [torch.full_like(labels, each) for each in (0, 1)]
    return [labels, *(torch.cat([labels[:1], each[1:]]) for each in (another, *alike))]


def _probability(outputs: Tensor, targets: Tensor) -> Tensor:
    """The probability of each row's own class, [R, 1]."""
    if outputs.shape[1] == 1:
        return (outputs * (2 * targets - 1)).sigmoid()
    return (outputs.softmax(1) * targets).sum(1, keepdim=True)


def loss_per_row(outputs: Tensor, labels: Tensor) -> Tensor:
    """Loss of each row, [R].

    Logistic for class indices: one output is the logit of class 1, else one a class. For labels
    that are floating-point numbers, half the squared error.
    """
    return _loss(outputs, labels, "none")


def targets(labels: Tensor, outputs: int) -> Tensor:
    """What `loss_gradient` compares outputs with, [R, C]: numbers, or classes' probabilities."""
    if outputs == 1:
        return labels.to(torch.float32)[:, None]
    return functional.one_hot(labels, outputs).to(torch.float32)


def loss_gradient(outputs: Tensor, targets: Tensor, squared: bool = False) -> Tensor:
    """The gradient [R, C] of the sum of `loss_per_row`, unweighted, with respect to the outputs.

    ``squared`` : whether targets are numbers, so that it is the squared error's.
    """
    if squared:
        return outputs - targets
    if outputs.shape[1] == 1:
        return outputs.sigmoid() - targets
    # torch's own softmax takes six times as long for many rows of few columns.
    weights = (outputs - outputs.amax(1, keepdim=True)).exp_()
    return weights.div_(weights.sum(1, keepdim=True)).sub_(targets)


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of `loss_per_row`, unweighted, a scalar."""
    return _loss(outputs, labels, "mean")


def _loss(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if labels.is_floating_point():
        return functional.mse_loss(outputs[:, 0], labels, reduction=reduction) / 2
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.to(outputs.dtype), reduction=reduction
        )
    return functional.cross_entropy(outputs, labels, reduction=reduction)


def penalty(training: TrainingConfig, w: Tensor) -> Tensor:
    """The regulariser's terms, elementwise: g(w) is their sum. l2, or AsyREVEL Eq. (22)."""
    half = 0.5 * w.square()
    return half if training.regulariser == "l2" else half / (1 + w.square())


def penalty_gradient(training: TrainingConfig, w: Tensor) -> Tensor:
    """The gradient of `penalty`, elementwise."""
    return w if training.regulariser == "l2" else w / (1 + w.square()).square()
