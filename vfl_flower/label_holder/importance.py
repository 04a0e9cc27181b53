"""Figures of permutation importance: how much a metric falls, its interval, and what is told.

The metric is AUC for two classes, accuracy for more, and R2 for numbers. A metric is a mean of one
share for each row. So the fall of a metric is a mean of differences by row. Their variance gives
the interval. For AUC, this is DeLong's covariance of two curves (DeLong et al., 1988).
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder.calibration import Calibration, probabilities
from vfl_flower.transport.explain_messages import Metric

AUC: Final = "auc"
ACCURACY: Final = "accuracy"
R2: Final = "r2"
_SURE = 1.96  # standard deviations in half of a 95 % interval

Floats = NDArray[np.float64]
Outputs = NDArray[np.float32]


class Fall(NamedTuple):
    """The fall of a metric, and half of its 95 % interval."""

    value: float
    margin: float


class Score:
    """The metric of outputs on rows with known labels, as a share of each row.

    Parameters
    ----------
    labels : class numbers, int64 [R], or standardised numbers, float32 [R].
    classes : number of classes; 0 for regression.
    calibration : the calibration of the model, if any. Predictions follow from it.

    Attributes
    ----------
    metric : name of the metric.
    influence : the most that one row's outputs can change the metric, if they are `bounded`.

    Raises
    ------
    ConfigError
        If these labels do not define the metric.
    """

    def __init__(
        self,
        labels: NDArray[np.float32] | NDArray[np.int64],
        classes: int,
        calibration: Calibration | None = None,
    ) -> None:
        self._calibration = calibration
        self.metric: Metric = R2 if not classes else AUC if classes == 2 else ACCURACY
        self._labels = labels
        self._groups = [np.ones(len(labels), bool)]
        if self.metric == R2:
            numbers = labels.astype(np.float64)
            self._squares = np.square(numbers - numbers.mean())
            if not self._squares.mean() > 0:
                raise ConfigError(
                    "All labels of the rows are equal, so R2 does not exist. Name a file with "
                    "other rows by dataset='files:PATH'."
                )
            self._range = numbers.min(), numbers.max()
            self.influence = (np.ptp(numbers) ** 2 / self._squares.mean()) / len(labels)
            return
        if self.metric == AUC:
            self._groups = [labels == 1, labels == 0]
        fewest = min(int(group.sum()) for group in self._groups)
        if fewest < 2:
            raise ConfigError(
                f"Only {fewest} of the {len(labels)} rows with labels have one of the two classes, "
                "and AUC needs 2 rows of each. Name a file with more rows by dataset='files:PATH'."
            )
        self.influence = 1 / fewest

    def shares(self, outputs: Outputs) -> Floats:
        """Return the share of each row in the metric, [R], of outputs [R, C]."""
        if self.metric == R2:
            errors = np.square(outputs[:, 0].astype(np.float64) - self._labels)
            found: Floats = 1 - errors / self._squares.mean()
            return found
        said: NDArray[Any] = outputs
        if self._calibration:
            said = probabilities(torch.from_numpy(outputs), self._calibration)
        if self.metric == ACCURACY:
            hits: Floats = (said.argmax(1) == self._labels).astype(np.float64)
            return hits
        return _placements(said[:, -1], self._groups[0])

    def bounded(self, outputs: Outputs) -> Outputs:
        """Return outputs that no party can make large: within the range of the labels, for R2."""
        return outputs.clip(*self._range) if self.metric == R2 else outputs

    def value(self, shares: Floats) -> float:
        """Return the metric, or a difference of metrics, from shares [R]."""
        return float(shares[self._groups[0]].mean())

    def fall(self, differences: Floats) -> Fall:
        """Return the fall of the metric from the falls of the shares [R]."""
        value = self.value(differences)
        if self.metric == R2:  # the variance of the labels is an estimate too
            differences = differences - value * self._squares / self._squares.mean()
        parts = (differences[group] for group in self._groups)
        variance = sum(part.var(ddof=1) / len(part) for part in parts if len(part) > 1)
        return Fall(value, _SURE * math.sqrt(variance))

    def grain(self, figures: int) -> float:
        """Return the unit of figures that a party is told: 1, 2 or 5 times a power of ten.

        The unit is at least the influence of one row times the square root of their number. With
        smaller errors, so many figures can reveal as many labels (Dinur and Nissim, 2003).
        """
        least = self.influence * math.sqrt(max(1, figures))
        power = 10.0 ** math.floor(math.log10(least))
        return float(next(each * power for each in (1, 2, 5, 10) if each * power >= least))


def _placements(scores: NDArray[Any], positive: NDArray[np.bool_]) -> Floats:
    """Return the share of the other class that each row ranks rightly against, [R].

    Equal scores count one half. The mean over either class is the AUC.
    """
    order = np.argsort(scores)
    ranked, is_positive = scores[order], positive[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    lengths = np.diff(np.r_[starts, len(ranked)])
    before = np.r_[0, np.cumsum(~is_positive)]
    negatives_below = (before[starts] + before[starts + lengths]) / 2
    before = np.r_[0, np.cumsum(is_positive)]
    positives_below = (before[starts] + before[starts + lengths]) / 2
    positives, negatives = int(positive.sum()), int((~positive).sum())
    of_ranked = np.where(
        is_positive,
        np.repeat(negatives_below, lengths) / negatives,
        1 - np.repeat(positives_below, lengths) / positives,
    )
    found = np.empty(len(scores))
    found[order] = of_ranked
    return found


def rounded(falls: Floats, margins: Floats, grain: float) -> tuple[Floats, Floats]:
    """Round falls to the grain, and margins up to the grain. Grain 0 leaves them as they are."""
    if not grain:
        return falls, margins
    return np.round(falls / grain) * grain, np.ceil(margins / grain) * grain
