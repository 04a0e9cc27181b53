"""How a model does on rows whose labels are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vfl_flower.errors import DivergedError
from vfl_flower.models.losses import mean_loss


@dataclass(frozen=True)
class Metrics:
    """How the model does on the test rows; what does not apply is none.

    ``loss`` is the mean without class weights, to compare with runs that have others; ``auc`` is
    for two classes. Under regression ``rmse`` is in units of the labels, and ``r2`` the share of
    the test labels' variance explained, in place of accuracy.
    """

    loss: float
    accuracy: float | None = None
    auc: float | None = None
    rmse: float | None = None
    r2: float | None = None


def metrics(outputs: Tensor, labels: Tensor, deviation: float) -> Metrics:
    """How outputs [R, C] do as predictions of labels [R]; ``deviation`` is a unit of regression."""
    mean = mean_loss(outputs, labels)
    check_finite(mean)
    loss = mean.item()
    if labels.is_floating_point():
        error = (outputs[:, 0] - labels).double().square().mean()
        variance = labels.double().var(correction=0)
        r2 = (1 - error / variance).item() if variance > 0 else None
        return Metrics(loss, rmse=deviation * error.sqrt().item(), r2=r2)
    if outputs.shape[1] > 1:
        return Metrics(loss, (outputs.argmax(1) == labels).float().mean().item())
    from sklearn.metrics import roc_auc_score  # here, since a party imports this module too

    hits = (outputs[:, 0] > 0).long() == labels
    both = 0 < labels.sum() < len(labels)
    auc = roc_auc_score(labels.cpu(), outputs[:, 0].cpu()) if both else None
    return Metrics(loss, hits.float().mean().item(), auc)


def check_finite(losses: Tensor) -> None:
    """Raise `DivergedError` unless losses are finite."""
    if not torch.isfinite(losses).all():
        raise DivergedError
