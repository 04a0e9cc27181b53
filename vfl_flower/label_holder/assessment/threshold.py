"""The threshold above which the second of two classes is predicted.

Option ``threshold`` is a number, or a rule that chooses a number on validation rows.
"""

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.options.data import Rule

Array = NDArray[np.float64]


def chosen(rule: Rule, chance: Array, positive: NDArray[np.bool_], kept: float = 1.0) -> float:
    """Return the threshold that a rule chooses on validation rows, midway between probabilities.

    ``f1`` takes the largest F1 score, ``cost`` the least cost of missed positives and false alarms,
    and ``rate`` the nearest share of flagged rows. Where noise keeps a label with probability p,
    ``kept``, n rows with k noisy positives have an estimate of (k - (1 - p) n) / (2 p - 1) true
    ones.
    """
    if rule.kind == "number":
        return rule.number
    order = np.argsort(-chance, kind="stable")
    ranked, rows = chance[order], len(chance)
    last = np.append(np.flatnonzero(np.diff(ranked)), rows - 1)  # of equal probabilities
    flagged = np.append(0, last + 1)
    noisy = np.append(0, positive[order].cumsum())[flagged]
    true = np.clip((noisy - (1 - kept) * flagged) / (2 * kept - 1), 0, flagged)
    positives = max(float(true[-1]), 1.0)
    if rule.kind == "f1":
        badness = -2 * true / (flagged + positives)
    elif rule.kind == "cost":
        badness = rule.number * (positives - true) + (flagged - true)
    else:
        badness = np.abs(flagged / rows - rule.number)
    at = int(badness.argmin())
    edges = np.concatenate([[1.0], ranked[last], [0.0]])
    return float((edges[at] + edges[at + 1]) / 2)
