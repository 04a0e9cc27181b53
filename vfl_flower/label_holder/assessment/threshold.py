"""The threshold above which the second of two classes is predicted.

Option ``threshold`` is a number, or a rule by which validation rows choose a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.options.assessment import Rule

Array = NDArray[np.float64]


def chosen(rule: Rule, chance: Array, positive: NDArray[np.bool_], kept: float = 1.0) -> float:
    """Return the threshold that a rule chooses on validation rows.

    It lies in the middle between two probabilities, so that rounding flags no other row. The rule
    ``f1`` takes the largest F1 score. ``cost`` takes the least cost, in which a missed positive
    counts as much as so many false alarms. ``rate`` takes the nearest share of flagged rows.

    Where noise keeps a label with probability p, true positives are estimated. Among n flagged
    rows with k noisy positives they are (k - (1 - p) n) / (2 p - 1). To follow less of the noise,
    the shares of positives rise with the probability, by isotonic regression.

    Parameters
    ----------
    chance : probability of the second class, [R].
    positive : whether the label is the second class, [R].
    kept : probability p that noise keeps a label.
    """
    if rule.kind == "number":
        return rule.number
    order = np.argsort(-chance, kind="stable")
    ranked, rows = chance[order], len(chance)
    shares = positive[order].astype(np.float64)
    if kept < 1 and rule.kind != "rate":
        shares = _debiased(ranked, shares, kept)
    last = np.append(np.flatnonzero(np.diff(ranked)), rows - 1)  # of equal probabilities
    flagged = np.append(0, last + 1)
    true = np.append(0.0, shares.cumsum())[flagged]
    positives = true[-1]
    if rule.kind == "f1":
        badness = -2 * true / np.maximum(flagged + positives, 1e-9)
    elif rule.kind == "cost":
        badness = rule.number * (positives - true) + (flagged - true)
    else:
        badness = np.abs(flagged / rows - rule.number)
    at = int(badness.argmin())
    edges = np.concatenate([[1.0], ranked[last], [0.0]])
    return float((edges[at] + edges[at + 1]) / 2)


def _debiased(ranked: Array, noisy: Array, kept: float) -> Array:
    """Return the estimated share of true positives of each row, by falling probability, [R]."""
    from sklearn.isotonic import IsotonicRegression

    smooth = IsotonicRegression().fit_transform(ranked, noisy)
    found: Array = np.clip((smooth - (1 - kept)) / (2 * kept - 1), 0, 1)
    return found
