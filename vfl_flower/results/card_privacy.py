"""The paragraph of a model card on privacy: what is protected, how far, and what is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

ONE_PLACE = "centralised", "intersection-only"  # baselines that send nothing
_HIDE_LABELS = "labels", "scalar"
_LARGE = 10.0  # epsilon, at which one data set may be 22,000 times as likely as the other


def paragraph(summary: Mapping[str, Any]) -> str:
    """Return the paragraph for a run with this ``summary.json``."""
    return " ".join([*_mechanism(summary), *_epsilon(summary), *_unprotected(summary)])


def covers_figures(summary: Mapping[str, Any]) -> bool:
    """Return whether figures of the test rows would be of labels that the noise protects."""
    repeated: bool = summary["data"]["tested_on_training_rows"]
    return repeated and summary["config"]["privacy"] in _HIDE_LABELS


def _mechanism(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was done with noise and masks."""
    config = summary["config"]
    kind, rows = config["privacy"], summary["data"]["rows"]
    if kind == "none":
        yield "No noise was added to anything that left a participant."
    elif kind == "labels":
        which = "training and validation" if rows["validation"] else "training"
        yield (
            f"The label holder randomised each label of the {which} rows once, and learned only "
            "from the random labels."
        )
    elif kind == "scalar":
        yield "The label holder added Gaussian noise to the loss differences that it sent."
        if config["calibration"] != "paper":
            yield "It also added noise to the steps of its model."
    elif kind == "perturbed-embedding":
        yield (
            f"Each party clipped its embeddings to norm {config['embedding-bound']:g}, and added "
            f"Gaussian noise of standard deviation {config['embedding-noise']:g} to each of them."
        )
    else:
        yield f"Noise was added by the mechanism {kind}."
    if config["aggregation"] == "secure":
        yield "Parties masked their embeddings, so the label holder saw only sums over all parties."


def _epsilon(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the claim, and its meaning; or why there is none."""
    config, epsilon, delta = summary["config"], summary.get("epsilon"), summary.get("delta")
    if epsilon is None:
        yield f"No epsilon is claimed{_why_none(config)}."
        return
    yield f"The run claims epsilon {epsilon:.3g} at delta {delta:.3g}."
    if "epsilon_protects" not in summary:
        return
    yield f"It protects: {summary['epsilon_protects']}."
    yield f"It is about two data sets that differ in this: {summary['epsilon_relation']}."
    yield f"It holds against {summary['epsilon_adversary']}."
    most = f"{math.exp(epsilon):.3g}" if epsilon < 20 else f"e^{epsilon:.3g}"
    but = f", apart from a probability of {delta:.3g}" if delta else ""
    yield (
        f"Whatever such an observer sees is at most {most} times as likely with the one data set "
        f"as with the other{but}."
    )
    if epsilon > _LARGE:
        yield "So large an epsilon says little."


def _why_none(config: Mapping[str, Any]) -> str:
    """Return the reason for no epsilon, to append."""
    if config["privacy"] == "none":
        return ""
    if config["noise-seed"] >= 0:
        return ", since the noise follows from noise-seed and can be repeated"
    if config["privacy"] == "scalar" and config["calibration"] == "paper":
        return ", since the label holder's own model learned without noise"
    return ", since the noise was zero or its cost is unknown"


def _unprotected(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what remains unprotected."""
    config = summary["config"]
    kind, strategy = config["privacy"], summary["strategy"]
    claims = summary.get("epsilon") is not None
    if distilled := summary.get("distilled"):
        yield (
            "This model sends nothing when it predicts. Scores stand in for every label that noise "
            f"protects. The card of the run in {distilled['run']} says what that run showed."
        )
        return
    if strategy in ONE_PLACE:
        yield "This baseline reads all columns and labels in one place, and keeps nothing apart."
        return
    yield "Not protected:"
    left = []
    if config["aggregation"] == "secure":
        left.append("what sums of embeddings tell of features, above all with few parties")
    elif kind == "perturbed-embedding" and claims:
        left.append("what a party's model learns from a record, and later predictions of it")
    else:
        left.append("features, which the label holder can decode in part from embeddings")
    if kind in _HIDE_LABELS and claims:
        if not covers_figures(summary):
            left.append("labels of the test rows, from which the figures of this card follow")
    elif config["labels"] == "shared":
        left.append("labels of the training rows, which all parties receive")
    elif strategy != "frozen":  # which answers no party
        left.append("labels of the training rows, which parties can read in part from the answers")
    left.append("who is in the data" + _alignment(summary))
    yield "; ".join(left) + "."
    yield "vfl audit measures what published attacks make of such messages."


def _alignment(summary: Mapping[str, Any]) -> str:
    """Return who learns which ids, for participants with files."""
    if not str(summary["dataset"]).startswith("files:"):
        return ""
    if summary["config"]["align"] == "ids":
        return ": all participants have the same ids"
    return (
        ", since the label holder knows which of its ids each party has, and each party knows "
        "which of its ids are used"
    )
