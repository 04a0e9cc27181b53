"""Metrics: figures of a model on rows with known labels."""

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
"""User function from outputs [R, C] and labels [R] of the evaluated rows to figures by name.

Outputs are logits of the classes, and labels are class numbers. Two classes have one output, the
logit of the second class. Under regression both are standardised numbers. A figure that is not
finite is recorded as none.
"""


@dataclass(frozen=True)
class Metrics:
    """Figures of a model on rows with labels. A figure that does not apply, or is hidden, is None.

    The loss on test rows is the mean without class weights, which compares runs with other weights.
    On validation rows it is the loss that training minimises, with weights.
    """

    loss: float | None
    accuracy: float | None = None  # for classes
    auc: float | None = None  # for two classes
    rmse: float | None = None  # for regression, in units of the labels
    r2: float | None = None  # for regression: the share of the labels' variance that is explained
    more: Mapping[str, float | None] = field(default_factory=dict)  # of a user's function
    subsets: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return all figures by name."""
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
    """Return figures of outputs [R, C] as predictions of labels [R], in units of ``deviation``."""
    found = _metrics(outputs, labels, deviation, loss)
    if found.rmse is not None and found.r2 is None:
        found = replace(found, r2=0.0)  # of equal labels, as in scikit-learn
    return replace(found, more=_numbers(more(outputs, labels))) if more else found


def corrected(found: Metrics, outputs: Tensor, labels: Tensor, noise: LabelNoise) -> Metrics:
    """Estimate figures by true labels from figures by randomised labels, in the same order."""
    if noise.variance:
        variance = labels.double().var(correction=0).item()
        # Estimate the labels' own variance, and bound it below by the error of this difference.
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
    """Return the AUC by true labels of two classes (Menon et al., 2015, Cor. 3)."""
    if area is None:
        return None
    noted = labels.double().mean().item()  # the share of ones
    share = (noted - (1 - kept)) / (2 * kept - 1)  # of true ones, estimated
    share = min(max(share, 1 / len(labels)), 1 - 1 / len(labels))
    noted = kept * share + (1 - kept) * (1 - share)
    apart = (2 * kept - 1) * share * (1 - share) / (noted * (1 - noted))
    return 0.5 + (area - 0.5) / apart


def by_subset(
    outputs: Callable[[Tensor], Tensor], present: Tensor, labels: Tensor, deviation: float
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return figures by the number of parties, and by each party alone.

    ``outputs`` maps the parties to use, [R, M], to outputs [R, C]. ``by_parties`` has the rows that
    exactly so many parties have.
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
    """Raise `ConfigError` if a user's metrics function fails on a trial batch."""
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
            "metrics must return a dictionary of numbers. Use names such as 'recall', which the "
            "summary does not have yet."
        )
    numbers = {name: float(value) for name, value in figures.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def no_more(outputs: Tensor, labels: Tensor) -> Mapping[str, Any]:
    """Return no further figures."""
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
    from sklearn.metrics import roc_auc_score  # lazy: parties import this module too

    hits = (outputs[:, 0] > 0).long() == labels
    both = 0 < labels.sum() < len(labels)
    auc = roc_auc_score(labels.cpu(), outputs[:, 0].cpu()) if both else None
    return Metrics(loss, hits.float().mean().item(), auc)


def check_finite(numbers: Tensor) -> None:
    """Raise `DivergedError` unless losses or outputs are finite."""
    if not torch.isfinite(numbers).all():
        raise DivergedError
