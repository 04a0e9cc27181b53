"""Calibration: fit a model's probabilities to labels, and turn outputs into probabilities.

A calibration is a mapping in JSON, which the checkpoint keeps. The methods are those of
scikit-learn's CalibratedClassifierCV:

- ``{"method": "platt", "slope": [...], "offset": [...]}``: sigmoid(slope * score + offset).
- ``{"method": "isotonic", "scores": [[...], ...], "chances": [[...], ...]}``: knots of a function
  that never falls. It is linear between knots, and constant outside of them.

The lists have one entry for two classes. Several classes have one entry each, for that class
against the rest. Their chances are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Calibration = Mapping[str, Any]


def probabilities(
    outputs: Tensor,
    calibration: Calibration | None,
    known: NDArray[np.bool_] | None = None,
) -> Array:
    """Return the probability of each class, float64 [R, classes].

    Without a calibration, they are the sigmoid or the softmax of the outputs.

    Parameters
    ----------
    outputs : logits [R, C]. Two classes have one output, the logit of the second class.
    calibration : the calibration of the model, if any (`Checkpoint.calibration`).
    known : rows that a participant knows, [R]; None means all. Other rows have the class shares of
        training as outputs, which need no calibration.
    """
    outputs = outputs.detach().cpu().double()
    if outputs.shape[1] == 1:
        second = outputs[:, 0].sigmoid()
        plain: Array = torch.stack([1 - second, second], dim=1).numpy()
    else:
        plain = outputs.softmax(1).numpy()
    if calibration is None:
        return plain
    chances = np.stack([_chances(calibration, *each) for each in enumerate(scores(outputs))], 1)
    if chances.shape[1] == 1:
        calibrated = np.hstack([1 - chances, chances])
    else:
        total = chances.sum(1, keepdims=True)
        even = np.full_like(chances, 1 / chances.shape[1])
        calibrated = np.divide(chances, total, out=even, where=total > 0)
    return calibrated if known is None else np.where(known[:, None], calibrated, plain)


def scores(outputs: Tensor) -> list[Array]:
    """Return what a calibration reads, for each class: float64 [R].

    Two classes have one score, the output. Each of several classes has its log odds against the
    rest, z_c - log(sum of exp(z_k) over k != c). So a number that is added to all outputs of a row
    changes nothing, as in the softmax.
    """
    outputs = outputs.detach().cpu().double()
    if outputs.shape[1] == 1:
        return [outputs[:, 0].numpy()]
    found = []
    for number in range(outputs.shape[1]):
        others = torch.cat([outputs[:, :number], outputs[:, number + 1 :]], 1)
        found.append((outputs[:, number] - others.logsumexp(1)).numpy())
    return found


def _chances(calibration: Calibration, number: int, score: Array) -> Array:
    """Return the probability of one class against the rest, [R]."""
    if calibration["method"] == "platt":
        line = calibration["slope"][number] * score + calibration["offset"][number]
        chances: Array = torch.from_numpy(line).sigmoid().numpy()
    else:
        knots = calibration["scores"][number], calibration["chances"][number]
        chances = np.interp(score, *knots)
    return chances
