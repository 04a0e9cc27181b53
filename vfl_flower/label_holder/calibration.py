"""Calibration: fit a model's probabilities to labels, and turn outputs into probabilities.

A calibration is a mapping in JSON, which the checkpoint keeps. The methods equal scikit-learn's
CalibratedClassifierCV:

- ``{"method": "platt", "slope": [...], "offset": [...]}``: sigmoid(slope * score + offset).
- ``{"method": "isotonic", "scores": [[...], ...], "chances": [[...], ...]}``: knots of a function
  that never falls. It is linear between knots, and constant outside of them.

The lists have one entry for two classes. Several classes have one entry each, for that class
against the rest. Their chances are divided by their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.checkpoint import Checkpoint

Array = NDArray[np.float64]
Calibration = Mapping[str, Any]

LEAST = 10
"""Least number of validation rows of each class."""


def fit(method: str, outputs: Tensor, labels: Tensor, kept: float = 1.0) -> dict[str, Any]:
    """Fit a calibration, ``platt`` or ``isotonic``, of logits [R, C] to labels, which may have
    noise.

    Without noise, the fit equals scikit-learn's. Noise records class y with probability s = q + (p
    - q) P(y). It keeps a label with probability p, and q = (1 - p) / (classes - 1). Platt's method
    then maximises the likelihood of s. Isotonic regression fits the debiased labels (t - q) / (p -
    q) by least squares, where t is 1 for rows of the class and 0 for others. It clips the result to
    [0, 1].
    """
    found, numbers = scores(outputs), labels.cpu().numpy()
    first = 1 if len(found) == 1 else 0  # two classes: the second against the first
    targets = [(numbers == first + number).astype(np.float64) for number in range(len(found))]
    other = (1 - kept) / max(1, len(found) - 1)
    if method == "platt":
        lines = [
            _line(score, target) if kept == 1 else _corrected_line(score, target, kept, other)
            for score, target in zip(found, targets, strict=True)
        ]
        shares = [(target.mean() - other) / (kept - other) for target in targets]
        level = [(0.0, math.log(s / (1 - s))) for s in np.clip(shares, 1e-6, 1 - 1e-6)]
        # As isotonic regression, never turn the order of scores around.
        rising = [line if line[0] > 0 else flat for line, flat in zip(lines, level, strict=True)]
        slopes, offsets = zip(*rising, strict=True)
        return {"method": method, "slope": list(slopes), "offset": list(offsets)}
    from sklearn.isotonic import IsotonicRegression  # lazy: parties import this module too

    knots, chances = [], []
    for score, target in zip(found, targets, strict=True):
        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        fitted.fit(score, (target - other) / (kept - other))
        knots.append(fitted.X_thresholds_.tolist())
        chances.append(fitted.y_thresholds_.tolist())
    return {"method": method, "scores": knots, "chances": chances}


def probabilities(
    outputs: Tensor,
    calibration: Calibration | None,
    known: NDArray[np.bool_] | None = None,
) -> Array:
    """Return class probabilities [R, classes] from logits [R, C], plain without a calibration.

    Rows that no participant ``known`` has stay plain too: their outputs are shares of training.
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


def logits(chances: Array) -> Tensor:
    """Return outputs [R, C] of probabilities [R, classes], kept 1e-15 off 0 and 1."""
    inside = torch.from_numpy(chances).clamp(1e-15, 1 - 1e-15)
    return inside[:, 1:].logit() if chances.shape[1] == 2 else inside.log()


def scores(outputs: Tensor) -> list[Array]:
    """Return what a calibration reads, for each class: float64 [R].

    Two classes have one score. Each of several has its log odds against the rest, which do not
    change with all outputs of a row, as the softmax does not.
    """
    outputs = outputs.detach().cpu().double()
    if outputs.shape[1] == 1:
        return [outputs[:, 0].numpy()]
    found = []
    for number in range(outputs.shape[1]):
        others = torch.cat([outputs[:, :number], outputs[:, number + 1 :]], 1)
        found.append((outputs[:, number] - others.logsumexp(1)).numpy())
    return found


def check(config: RunConfig, labels: Labels, kept: float) -> None:
    """Raise `ConfigError` if there are too few validation rows to calibrate by."""
    method, rows = config.training.calibrate, labels.validation
    if method == "none":
        return
    classes = len(labels.classes)
    gap = kept - (other := (1 - kept) / (classes - 1))
    recorded = np.bincount(labels.test[:rows], minlength=classes)
    # Noise makes N rows worth (p - q)^2 N rows.
    least = int(max(0.0, gap * (recorded - other * rows).min()))
    if least < LEAST:
        noise = ", worth as many without noise" if kept < 1 else ""
        raise ConfigError(
            f"calibrate = {method!r} needs at least {LEAST} validation rows of each class{noise}, "
            f"but one class has {least}. Raise validation-fraction, use more rows, or leave "
            "calibrate out."
        )


def check_fitted(found: Checkpoint) -> None:
    """Raise `ConfigError` if an interrupted run has not yet fitted its calibration."""
    method = found.config.training.calibrate
    if method != "none" and found.calibration is None:
        raise ConfigError(
            f"The run was interrupted before it fitted calibrate = {method!r}. Resume it first, by "
            "the option resume."
        )


def _line(score: Array, target: Array) -> tuple[float, float]:
    """Return slope and offset, exactly as scikit-learn's sigmoid calibration finds them."""
    from sklearn.calibration import _SigmoidCalibration

    fitted = _SigmoidCalibration().fit(score, target)
    return -float(fitted.a_), -float(fitted.b_)


def _corrected_line(score: Array, target: Array, kept: float, other: float) -> tuple[float, float]:
    """Return the slope and offset of most likelihood, given the noise on the labels.

    As Platt (1999) moves the targets, one row of each class is added, spread over all scores. So
    the slope stays finite.
    """
    from scipy.optimize import minimize

    x, t = torch.from_numpy(score), torch.from_numpy(target)
    unit = max(1.0, float(np.abs(score).max()))

    @torch.enable_grad()
    def loss(line: Array) -> tuple[float, Array]:
        leaf = torch.from_numpy(line).requires_grad_()
        z = leaf[0] / unit * x + leaf[1]
        recorded = other + (kept - other) * z.sigmoid()
        noisy = t * recorded.log() + (1 - t) * (-recorded).log1p()
        added = (functional.logsigmoid(z) + functional.logsigmoid(-z)) / len(t)
        mean = -(noisy + added).mean()
        return mean.item(), torch.autograd.grad(mean, leaf)[0].numpy()

    found = minimize(loss, [unit, 0.0], jac=True, method="BFGS", options={"gtol": 1e-9}).x
    return float(found[0] / unit), float(found[1])


def _chances(calibration: Calibration, number: int, score: Array) -> Array:
    """Return the probability of one class against the rest, [R]."""
    if calibration["method"] == "platt":
        line = calibration["slope"][number] * score + calibration["offset"][number]
        chances: Array = torch.from_numpy(line).sigmoid().numpy()
    else:
        knots = calibration["scores"][number], calibration["chances"][number]
        chances = np.interp(score, *knots)
    return chances
