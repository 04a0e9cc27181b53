"""How a model does on rows whose labels are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from vfl_flower.config.errors import CodeError, ConfigError, DivergedError, VflError
from vfl_flower.config.plugins import METRICS
from vfl_flower.data.labels import LabelNoise
from vfl_flower.models.losses import RowLoss, loss_per_row

More = Callable[[Tensor, Tensor], Mapping[str, Any]]
"""A function of one's own, from outputs [R, C] and labels [R] of the rows evaluated to numbers by
name. Outputs are logits of the classes (one of two classes, that of the second) and labels their
numbers, or both are standardised numbers; a number that is not finite is recorded as none."""


@dataclass(frozen=True)
class Metrics:
    """How the model does on the test rows; what does not apply is none.

    ``loss`` is the mean without class weights, to compare with runs that have others. On validation
    rows it is the loss that training minimises, weights included. ``auc`` is for two classes. Under
    regression ``rmse`` is in units of the labels, and ``r2`` the share of the test labels' variance
    explained, in place of accuracy. ``more`` are figures of one's own, and ``subsets`` those of
    `by_subset`.
    """

    loss: float
    accuracy: float | None = None
    auc: float | None = None
    rmse: float | None = None
    r2: float | None = None
    more: Mapping[str, float | None] = field(default_factory=dict)
    subsets: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """All by name, what does not apply as none."""
        ours = asdict(self)
        more, subsets = ours.pop("more"), ours.pop("subsets")
        return {**ours, **more, **subsets}


def metrics(
    outputs: Tensor,
    labels: Tensor,
    deviation: float,
    loss: RowLoss | None = None,
    more: More | None = None,
) -> Metrics:
    """How outputs [R, C] do as predictions of labels [R].

    Parameters
    ----------
    deviation : a unit of regression.
    loss, more : functions of one's own, if there are: of the rows' losses, and of further figures.

    Raises
    ------
    DivergedError, ConfigError
        If the loss is not finite; if further figures are none.
    """
    found = _metrics(outputs, labels, deviation, loss)
    return replace(found, more=_numbers(more(outputs, labels))) if more else found


def corrected(found: Metrics, outputs: Tensor, labels: Tensor, noise: LabelNoise) -> Metrics:
    """Return what figures by randomised labels say of the true labels.

    A figure is an estimate: of few rows, an accuracy can be below 0 or above 1. The order of models
    by a figure stays the same, so nothing is lost where models are chosen.

    Parameters
    ----------
    found : figures of the outputs [R, C] by these labels [R].
    noise : on the labels. Without noise the figures stay as they are.
    """
    if noise.variance:
        variance = labels.double().var(correction=0).item()
        # The labels' own variance; no less than such a difference is known to within.
        own = max(variance - noise.variance, variance / math.sqrt(len(labels)))
        error = (outputs[:, 0] - labels).double().square().mean().item() - noise.variance
        unit = 0.0 if found.rmse is None else found.rmse / math.sqrt(error + noise.variance)
        return replace(found, rmse=unit * math.sqrt(max(0.0, error)), r2=1 - error / own)
    if noise.kept == 1 or found.accuracy is None:
        return found
    classes = max(2, outputs.shape[1])
    other = (1 - noise.kept) / (classes - 1)
    accuracy = (found.accuracy - other) / (noise.kept - other)
    return replace(found, accuracy=accuracy, auc=_corrected_area(found.auc, labels, noise.kept))


def _corrected_area(area: float | None, labels: Tensor, kept: float) -> float | None:
    """Return the AUC by the true labels of two classes (Menon et al., 2015, Corollary 3).

    By randomised labels the area is as much nearer to 1/2 as positives and negatives are mixed.
    """
    if area is None:
        return None
    noted = labels.double().mean().item()  # the share of ones
    share = (noted - (1 - kept)) / (2 * kept - 1)  # of true ones
    share = min(max(share, 1 / len(labels)), 1 - 1 / len(labels))
    noted = kept * share + (1 - kept) * (1 - share)
    apart = (2 * kept - 1) * share * (1 - share) / (noted * (1 - noted))
    return 0.5 + (area - 0.5) / apart


def by_subset(
    outputs: Callable[[Tensor], Tensor], present: Tensor, labels: Tensor, deviation: float
) -> dict[str, dict[str, dict[str, float | None]]]:
    """How a model of any subset does on the rows that so many parties have, and by each alone.

    Parameters
    ----------
    outputs : of all rows [R, C], by who is to be used, [R, M].
    present : who has which row, [R, M].

    Returns
    -------
    ``by_parties``, by how many have a row, and ``by_party``, by whom alone is used, on the rows
    that it has: the number of rows, and accuracy and AUC, or R2.
    """

    def figures(said: Tensor, rows: Tensor) -> dict[str, float | None]:
        found = _metrics(said[rows], labels[rows], deviation)
        given = {"accuracy": found.accuracy, "auc": found.auc, "r2": found.r2}
        known = {name: value for name, value in given.items() if value is not None}
        return {"rows": int(rows.sum()), **known}

    said, counts, parties = outputs(present), present.sum(1), range(present.shape[1])
    of_counts = {k: counts == k for k in sorted(set(counts.int().tolist()))}
    by_party = {}
    for party in parties:
        alone = torch.zeros_like(present)
        alone[:, party] = present[:, party]
        if alone.any():
            by_party[str(party)] = figures(outputs(alone), alone[:, party] > 0)
    return {
        "by_parties": {str(k): figures(said, rows) for k, rows in of_counts.items()},
        "by_party": by_party,
    }


def try_out(more: More, name: str, outputs: int, labels: Tensor) -> None:
    """Raise `ConfigError` if a function of one's own gives no figures, before training."""
    if name in METRICS.known:
        return
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(len(labels), outputs, generator=generator).to(labels.device)
    try:
        _numbers(more(z, labels))
    except VflError:
        raise
    except Exception as error:
        one = outputs == 1 and not labels.is_floating_point()
        hint = ", where two classes have one output, the logit of the second" * one
        said = f"metrics = {name!r} cannot read {len(labels)} rows{hint}"
        raise CodeError(said, error) from error


def _numbers(figures: Any) -> dict[str, float | None]:
    ours = {each.name for each in fields(Metrics)}
    if not isinstance(figures, Mapping) or not all(
        isinstance(name, str) and name.isidentifier() and name not in ours for name in figures
    ):
        raise ConfigError(
            "metrics gives no numbers by names that are not ours: have it return a dictionary, "
            "whose names are words such as 'recall'."
        )
    numbers = {name: float(value) for name, value in figures.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def no_more(outputs: Tensor, labels: Tensor) -> Mapping[str, Any]:
    """No further figures."""
    return {}


def _metrics(
    outputs: Tensor, labels: Tensor, deviation: float, own: RowLoss | None = None
) -> Metrics:
    mean = own(outputs, labels).mean() if own else loss_per_row(outputs, labels, "mean")
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
