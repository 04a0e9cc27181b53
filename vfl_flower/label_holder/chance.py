"""Whether a trained model predicts held-out rows better than one answer for all rows."""

import math

import torch
from torch import Tensor

from vfl_flower.label_holder.held_out import HeldOut, outputs_of
from vfl_flower.label_holder.metrics import metrics
from vfl_flower.models.top_layers import TopModel

_SURE = 2.0
"""A model must be better than one answer by this many standard errors."""
_LEAST_AUC = 0.6
"""AUC below which a model is hardly better than one answer, however many rows there are."""


@torch.no_grad()
def no_better(held_out: HeldOut, top: TopModel) -> str:
    """Say that a model is no better than one answer for all rows; empty if it is better.

    The answer is the most frequent class or the mean of the rows, so held-out labels alone decide.
    """
    if held_out.hidden:  # these rows are training rows, and noise hides their labels
        return ""
    first = held_out.validation
    rows = slice(first) if first else slice(None)
    top.eval()
    outputs, labels = outputs_of(top, held_out.table.rows[rows]), held_out.labels[rows]
    top.train()
    if len(labels) < 2:
        return ""
    noisy = bool(held_out.label_noise.variance) or held_out.label_noise.kept < 1
    said = _judged(outputs, labels, held_out.deviation, noisy and bool(first or held_out.repeats))
    if not said:
        return ""
    which = "validation" if first else "test"
    return (
        f"The model is hardly better than one answer for all rows: on {len(labels)} {which} rows, "
        f"{said}. Use more rows, a larger epsilon if there is noise, or another strategy."
    )


def _judged(outputs: Tensor, labels: Tensor, deviation: float, noisy: bool) -> str:
    """Return the figure of a model that is no better than one answer; empty if it is better."""
    found = metrics(outputs, labels, deviation)
    if labels.is_floating_point():
        gain = (labels - labels.mean()).square() - (outputs[:, 0] - labels).square()
        return f"R2 is {found.r2:.2f}, and the mean alone has 0" * (not _above(gain))
    counts = labels.bincount()
    if outputs.shape[1] > 1:
        gain = (outputs.argmax(1) == labels).float() - (labels == counts.argmax()).float()
        most = float(counts.max()) / len(labels)
        said = f"accuracy is {found.accuracy:.2f}, and the most frequent class alone has {most:.2f}"
        return said * (not _above(gain))
    if found.auc is None:  # all rows have one class
        return ""
    error = math.sqrt((len(labels) + 1) / 12 / float(counts.prod()))  # of Mann and Whitney's U
    least = max(0.5 + _SURE * error, 0 if noisy else _LEAST_AUC)
    return f"AUC is {found.auc:.2f}, and guessing has 0.50" * (found.auc < least)


def _above(gain: Tensor) -> bool:
    """Return whether the mean of the rows' gains is above 0 for sure."""
    gain = gain.double()
    return bool(gain.mean() > _SURE * gain.std() / math.sqrt(len(gain)))
