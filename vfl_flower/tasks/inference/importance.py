"""Figures of permutation importance: how much a metric falls, and its interval.

The metric is AUC for two classes, accuracy for more, and R2 for numbers. A metric is a mean of one
share for each row. So the fall of a metric is a mean of differences by row. Their variance gives
the interval. For AUC, this is DeLong's covariance of two curves (DeLong et al., 1988).
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder.assessment.intervals import placements
from vfl_flower.label_holder.calibration import Calibration, probabilities
from vfl_flower.transport.explain_messages import Metric

AUC: Final = "auc"
ACCURACY: Final = "accuracy"
R2: Final = "r2"
SURE = 1.96
"""Standard deviations in half of a 95 % interval."""
_MOST = 3.0  # deviations of a number: labels and outputs are clipped there for `possible`

Floats = NDArray[np.float64]
Outputs = NDArray[np.float32]


class Fall(NamedTuple):
    """The fall of a metric, and half of its 95 % interval."""

    value: float
    margin: float

    def ends(self) -> dict[str, float]:
        """Return the fall and its interval, for the results."""
        low, high = self.value - self.margin, self.value + self.margin
        return {"value": self.value, "low": low, "high": high}


class Score:
    """The metric of outputs on rows with known labels, as a share of each row.

    labels : class numbers, int64 [R], or standardised numbers, float32 [R], with 0 ``classes``.
    metric : another metric than the first that fits.
    weights : the weight of each possible label at each row, [R, L] (`possible`).
    """

    def __init__(
        self,
        labels: NDArray[np.float32] | NDArray[np.int64],
        classes: int,
        calibration: Calibration | None = None,
        metric: Metric | None = None,
    ) -> None:
        self._calibration = calibration
        self.metric: Metric = metric or (R2 if not classes else AUC if classes == 2 else ACCURACY)
        self._labels = labels
        self._groups = [np.ones(len(labels), bool)]
        if self.metric == R2:
            numbers = labels.astype(np.float64)
            high = (numbers.clip(-_MOST, _MOST) + _MOST) / (2 * _MOST)
            self.weights = np.stack([1 - high, high], axis=1)
            self._squares = np.square(numbers - numbers.mean())
            if not self._squares.mean() > 0:
                raise ConfigError(
                    "All labels of the rows are equal, so R2 does not exist. Name a file with "
                    "other rows by dataset='files:PATH'."
                )
            return
        self.weights = np.eye(classes)[labels]
        if self.metric == AUC:
            self._groups = [labels == 1, labels == 0]
        fewest = min(int(group.sum()) for group in self._groups)
        if fewest < 2:
            raise ConfigError(
                f"Only {fewest} of the {len(labels)} rows with labels have one of the two classes, "
                "and AUC needs 2 rows of each. Name a file with more rows by dataset='files:PATH'."
            )

    def shares(self, outputs: Outputs) -> Floats:
        """Return the share of each row in the metric, [R], of outputs [R, C]."""
        if self.metric == R2:
            errors = np.square(outputs[:, 0].astype(np.float64) - self._labels)
            return 1 - errors / self._squares.mean()
        said = self._calibrated(outputs)
        if self.metric == ACCURACY:
            one = said.shape[1] == 1  # the log odds of the second of two classes
            decided = said[:, 0] > 0 if one else said.argmax(1)
            return (decided == self._labels).astype(np.float64)
        return placements(said[:, -1], self._groups[0])

    def possible(self, outputs: Outputs) -> Outputs:
        """Return the share of each row for each possible label, [R, L], from no label.

        The fall of a share, for the row's own label, is the sum of falls times `weights`. For AUC,
        the share of a row of the second class is its rank among all rows, over R. So the sum of all
        shares, times R, is the AUC times the rows of both classes, and a constant. For R2, the
        labels are -3 and 3 training deviations, and the unit is the variance of training labels.
        """
        if self.metric == R2:
            bounded = np.nan_to_num(outputs[:, :1]).clip(-_MOST, _MOST)
            errors: Outputs = bounded - np.array([-_MOST, _MOST], np.float32)
            return -np.square(errors)
        said = self._calibrated(outputs)
        if self.metric == ACCURACY:
            return np.eye(said.shape[1], dtype=np.float32)[said.argmax(1)]
        _, place, equal = np.unique(said[:, -1], return_inverse=True, return_counts=True)
        ranks = (np.cumsum(equal) - (equal - 1) / 2)[place] / len(said)
        return np.stack([np.zeros_like(ranks), ranks], axis=1).astype(np.float32)

    def _calibrated(self, outputs: Outputs) -> NDArray[Any]:
        if not self._calibration:
            return outputs
        return probabilities(torch.from_numpy(outputs), self._calibration)

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
        return Fall(value, SURE * math.sqrt(variance))
