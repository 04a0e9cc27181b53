"""Whether the rows of a run can carry the noise on their labels, before anything is learned."""

from __future__ import annotations

import logging
import math

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels

notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

LEAST = 50.0
"""Clean rows that noisy rows must be worth, at least. `docs/privacy.md` has the runs behind it."""


def rows_left(rows: int, classes: int, epsilon: float) -> float:
    """Return how many clean rows carry as much signal as all noisy rows.

    A label is kept by chance p, and is each other class by chance q. The share of a label among
    rows alike is q + (p - q) s, where s is its true share. So noise multiplies the signal by p - q,
    and N rows are worth (p - q)^2 N.

    Parameters
    ----------
    rows, classes : number N of training rows, and K of classes.
    """
    gap = math.expm1(epsilon) / (math.exp(epsilon) + classes - 1)
    return gap**2 * rows


def epsilon_for(rows: int, classes: int, left: float = LEAST) -> float | None:
    """Return the least epsilon at which `rows_left` is ``left``, or None if there is none."""
    gap = math.sqrt(left / rows)
    return math.log((1 + (classes - 1) * gap) / (1 - gap)) if gap < 1 else None


def warn_if_lost(config: RunConfig, labels: Labels) -> None:
    """Warn if noise on the labels of classes leaves too little to learn from."""
    rows, classes, epsilon = len(labels.train), len(labels.classes), config.privacy.epsilon
    if config.privacy.mechanism != "labels" or not classes or epsilon is None:
        return
    left, enough = rows_left(rows, classes, epsilon), epsilon_for(rows, classes)
    if left >= LEAST or enough is None:
        return
    notice.warning(
        "epsilon = %g is too small for %d training rows of %d classes: they are worth about %.0f "
        "rows without noise. Set epsilon to %.2f or more, or use more rows.",
        *(epsilon, rows, classes, left, math.ceil(20 * enough) / 20),
    )
