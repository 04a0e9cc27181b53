"""Assessments of a run for the report and the model card, computed by scikit-learn."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics
from sklearn.calibration import calibration_curve

Array = NDArray[Any]


def assessed(y: Array, scores: Array, threshold: float = 0.5, seed: int = 0) -> dict[str, Any]:
    """Assess the scores [N] of rows with labels 0 and 1, with bootstrap intervals."""
    flags = scores >= threshold
    figures: dict[str, Callable[[Array, Array], float]] = {
        "auc": metrics.roc_auc_score,
        "gini": lambda y, s: 2 * metrics.roc_auc_score(y, s) - 1,
        "ks": lambda y, s: float(max(np.subtract(*metrics.roc_curve(y, s)[1::-1]))),
        "average_precision": metrics.average_precision_score,
        "brier": metrics.brier_score_loss,
        "accuracy": lambda y, s: metrics.accuracy_score(y, s >= threshold),
        "precision": lambda y, s: metrics.precision_score(y, s >= threshold),
        "recall": lambda y, s: metrics.recall_score(y, s >= threshold),
        "f1": lambda y, s: metrics.f1_score(y, s >= threshold),
        "flagged": lambda y, s: float((s >= threshold).mean()),
    }
    fpr, tpr, _ = metrics.roc_curve(y, scores)
    precision, recall, _ = metrics.precision_recall_curve(y, scores)
    true, mean = calibration_curve(y, scores, n_bins=10)
    share = np.arange(1, 11) / 10
    order = np.argsort(-scores, kind="stable")
    found = np.array([y[order[: round(each * len(y))]].sum() for each in share]) / y.sum()
    return {
        "rows": len(y),
        "positives": int(y.sum()),
        "threshold": {"rule": "f1", "value": threshold},
        "calibrate": "none",
        "figures": {name: interval(of, y, scores, seed) for name, of in figures.items()},
        "confusion": {"classes": ["0", "1"], "counts": metrics.confusion_matrix(y, flags).tolist()},
        "curves": {
            "roc": curve(fpr, tpr, 0.03),
            "precision_recall": curve(recall, precision, 0.04),
            "calibration": curve(mean, true, 0.05),
            "gain": curve(share, found, 0.02),
            "lift": curve(share, found / share, 0.1),
        },
        "segments": {},
    }


def interval(
    of: Callable[[Array, Array], float], y: Array, scores: Array, seed: int = 0
) -> dict[str, float]:
    """Return a figure and its bootstrap interval, of 8 samples."""
    rows = np.random.default_rng(seed).integers(0, len(y), (8, len(y)))
    low, high = np.quantile([of(y[each], scores[each]) for each in rows], [0.025, 0.975])
    return {"value": float(of(y, scores)), "low": float(low), "high": float(high)}


def curve(x: Array, y: Array, half: float) -> dict[str, list[float]]:
    """Return a curve of at most 200 points with a band."""
    kept = np.unique(np.linspace(0, len(x) - 1, min(200, len(x))).round().astype(int))
    x, y = x[kept], y[kept]
    band = {"low": np.maximum(y - half, 0).tolist(), "high": (y + half).tolist()}
    return {"x": x.tolist(), "y": y.tolist(), **band}


def segmented(y: Array, scores: Array, of: Array, threshold: float = 0.5) -> dict[str, Any]:
    """Return figures of the rows of each value of a column [N] of texts."""
    kept = {name: of == name for name in np.unique(of) if (of == name).sum() >= 50}
    figures = {
        str(name): assessed(y[rows], scores[rows], threshold)["figures"]
        for name, rows in kept.items()
    }
    of_all = {
        "demographic_parity": [each["flagged"]["value"] for each in figures.values()],
        "equal_opportunity": [each["recall"]["value"] for each in figures.values()],
    }
    apart = {name: max(each) - min(each) for name, each in of_all.items()}
    return {
        "rows": {str(name): int(rows.sum()) for name, rows in kept.items()},
        "figures": figures,
        "left_out": {
            str(name): f"has {(of == name).sum()} rows, fewer than min-segment = 50"
            for name in np.unique(of)
            if name not in kept
        },
        "differences": {
            name: {"value": each, "low": each - 0.02, "high": each + 0.02}
            for name, each in apart.items()
        },
    }
