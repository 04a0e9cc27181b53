"""Losses of the outputs, and the party's own regulariser."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vfl_flower.sections import TrainingConfig


def loss_per_row(outputs: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Loss of each row, [R], times the weight of its class where classes have weights.

    Logistic for class indices: one output is the logit of class 1, else one a class. For labels
    that are floating-point numbers, half the squared error.
    """
    losses = _loss(outputs, labels, "none")
    return losses if class_weights is None else losses * class_weights[labels]


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
