"""The paragraphs of a model card on privacy, and on the limits of the model."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vfl_flower.config.names import called
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.results.figures import percent

ONE_PLACE = "centralised", "intersection-only"  # baselines that send nothing
_HIDE_LABELS = "labels", "scalar"
_LARGE = 10.0  # epsilon, at which one data set may be 22,000 times as likely as the other


def paragraph(summary: Mapping[str, Any]) -> str:
    """Return the paragraph for a run with this ``summary.json``."""
    return " ".join([*_mechanism(summary), *_epsilon(summary), *_unprotected(summary)])


def covers_figures(summary: Mapping[str, Any]) -> bool:
    """Return whether figures of the test rows would be of labels that the noise protects."""
    hidden = summary["config"]["privacy"] in _HIDE_LABELS
    return hidden and bool(summary["data"]["tested_on_training_rows"])


def _mechanism(summary: Mapping[str, Any]) -> Iterator[str]:
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
    learns = ""
    if str(summary["dataset"]).startswith("files:"):
        learns = (
            ": all participants have the same ids"
            if config["align"] == "ids"
            else ", since the label holder knows which of its ids each party has, and each party "
            "knows which of its ids are used"
        )
    yield "; ".join([*left, "which people are in the data" + learns]) + "."
    yield "vfl audit measures what published attacks make of such messages."


_FEW = 100  # test rows of a class
_POINTS = "percentage points"


def limits(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on what the model must not be used for, and what its figures do not say."""
    return [*_of_use(summary), *_of_rows(summary), *_of_figures(summary), *_of_segments(summary)]


def _of_use(summary: Mapping[str, Any]) -> Iterator[str]:
    config = summary["config"]
    yield (
        "Do not score rows unlike the training rows, for example of another product, country or "
        "year. Check new rows for drift first."
    )
    if summary.get("distilled"):
        yield "Scores do not follow what parties learn of a person later. Distil a new run then."
        return
    yield (
        "The label holder does not know what the parties' columns hold. Ask each party whether "
        "they hold, or stand for, attributes that must not decide."
    )
    parties = len(summary["by_party"])
    if not aggregation_of(RunConfig.of(config)).any_subset:
        yield f"Each prediction needs every one of the {parties} parties."
    else:
        yield "Rows that parties lack are predicted from the other parties, and less well."
    if gone := summary.get("failed_parties"):
        failed = ", ".join(called(each) for each in summary["by_party"] if each["party"] in gone)
        failed = "P" + failed.removeprefix("p")
        yield f"{failed} had failed when the run ended: the rest trained without it."
    if not str(summary["dataset"]).startswith(("files:", "memory:")):
        yield (
            "The columns come from one data set, which the program divided among the parties. "
            "Parties with their own files have other rows, columns and gaps."
        )
    elif summary["engine"] != "supernodes":
        yield "All participants ran on one machine, which held the data of all of them."
    if config["grow"]:
        yield "The run began with the model of an earlier run, whose rows this card leaves out."


def _of_rows(summary: Mapping[str, Any]) -> Iterator[str]:
    rows = summary["data"]["rows"]
    if not rows["validation"]:
        yield (
            "There were no validation rows: the run kept the model of the last epoch, even if an "
            "earlier one was better."
        )
    if covers_figures(summary):
        yield "No rows were held out for testing, so nothing shows how good the model is."
    elif summary["data"]["tested_on_training_rows"]:
        yield "No rows were held out for testing: the figures are of training rows, and too good."
    elif rows["test"] < 2 * _FEW:
        yield f"There are only {rows['test']} test rows: the figures are uncertain."
    if unknown := summary.get("unknown_rows"):
        yield f"Too few parties know {unknown:,} rows of the label holder. They are in no figure."
    if summary["config"]["privacy"] == "labels":
        yield "The model learned from random labels, and is usually worse than one without noise."


def _of_figures(summary: Mapping[str, Any]) -> Iterator[str]:
    found = summary.get("assessment") or {}
    if not found:
        if not covers_figures(summary):
            yield "The figures have no intervals."
        return
    rows, positives = found["rows"], found.get("positives")
    if positives is not None and min(positives, rows - positives) < _FEW:
        yield (
            f"Only {min(positives, rows - positives)} test rows are of the rarer class: figures "
            "of it are uncertain."
        )
    error = found["figures"].get("ece")
    if error and error["low"] > 0 and found.get("calibrate") == "none":
        yield (
            "Scores rank rows. As probabilities they are off by "
            f"{percent(error['value'], _POINTS)} on average, since they are not calibrated."
        )


def _of_segments(summary: Mapping[str, Any]) -> Iterator[str]:
    found = summary.get("assessment") or {}
    if not found:
        return
    if not (found.get("segments") or {}).keys() - {summary["config"].get("time")}:
        yield "No segments were named: the model may do worse for some groups of rows."
    for column, of in (found.get("segments") or {}).items():
        for name, why in of["left_out"].items():
            yield f"There is no figure of {name} in {column}: it {why}."
        for kind, each in (of.get("differences") or {}).items():
            if each["low"] > 0:
                what = "share flagged" if kind == "demographic_parity" else "recall"
                yield (
                    f"The {what} differs between segments of {column}, by at least "
                    f"{percent(each['low'], _POINTS)}."
                )
