"""The limits in a model card: each is there only where it applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vfl_flower.config.names import called
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.results.card_privacy import covers_figures
from vfl_flower.results.figures import percent

_FEW = 100  # test rows of a class
_POINTS = "percentage points"


def limits(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on what the model must not be used for, and what its figures do not say."""
    return [
        *_of_use(summary),
        *_of_rows(summary),
        *_of_figures(summary),
        *_of_segments(summary),
    ]


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
