"""The assessment of a trained model, and its segments, on test rows or new rows with labels."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.logs import log, notice
from vfl_flower.data.bins import segments
from vfl_flower.data.drift import LEAST, between
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.assessment import threshold
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.intervals import difference, figure, inflated
from vfl_flower.label_holder.calibration import probabilities
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.held_out import outputs_of
from vfl_flower.label_holder.label_holder import LabelHolder

Segments = tuple[Mapping[str, NDArray[Any]], int, str]
"""Name of a column -> its values [R], fewest rows of a segment, and which column has periods."""
Tell = Callable[..., None]


@torch.no_grad()
def of_run(
    holder: LabelHolder, labels: Labels
) -> tuple[dict[str, Any] | None, dict[str, NDArray[Any]]]:
    """Choose the threshold on validation rows; return the assessment, and columns, of test rows.

    There is no assessment of one class, and nothing if no rows are held out for testing.
    """
    held_out, options = holder.held_out, holder.config.assessment
    first, known = held_out.validation, held_out.labels.cpu().numpy()
    holder.top.eval()
    outputs = outputs_of(holder.top, held_out.table.rows).cpu()
    holder.top.train()
    if labels.classes:
        said = probabilities(outputs, held_out.calibration)
    else:
        said = labels.mean + labels.deviation * outputs[:, 0].double().numpy()
        known = labels.mean + labels.deviation * known.astype(np.float64)
    flags = 0.5
    if len(labels.classes) == 2:
        flags = holder.threshold = threshold.chosen(
            options.rule, said[:first, 1], known[:first] == 1, held_out.label_noise.kept
        )
    if labels.repeats:
        return None, {}
    scored = Scored(said[first:], known[first:], labels.classes, flags)
    by = labels.tested.segments, options.min_segment, holder.config.data.time
    about = options.threshold, held_out.calibration, by, log.info
    return assessed("test set", scored, *about), {**labels.tested.segments, **scored.columns}


def of_predictions(
    outputs: Tensor, labels: NDArray[Any], found: Checkpoint, by: Segments
) -> dict[str, Any] | None:
    """Return the assessment of outputs [R, C] by labels [R]; None for rows of one class."""
    scored = scored_by(found, outputs, labels)
    rule = found.config.assessment.threshold
    return assessed("data with labels", scored, rule, found.calibration, by, notice.warning)


def scored_by(found: Checkpoint, outputs: Tensor, labels: NDArray[Any]) -> Scored:
    """Return rows with the predictions of a trained model, from its outputs [R, C]."""
    about = found.about_labels
    if about["classes"]:
        said = probabilities(outputs, found.calibration)
    else:
        said, labels = (
            about["mean"] + about["deviation"] * np.asarray(each, np.float64)
            for each in (outputs[:, 0], labels)
        )
    return Scored(said, labels, about["classes"], found.threshold)


def assessed(
    what: str,
    scored: Scored,
    rule: str,
    calibration: Mapping[str, Any] | None,
    by: Segments,
    tell: Tell,
) -> dict[str, Any] | None:
    """Return the assessment of rows, by a rule ``threshold``; tell why there is none."""
    if scored.lack:
        tell("The %s %s, so the model is not assessed.", what, scored.lack)
        return None
    return {**scored.form(rule, calibration), "segments": of_columns(scored, *by)}


# --- segments -------------------------------------------------------------------------------------


def of_columns(
    scored: Scored, columns: Mapping[str, NDArray[Any]], least: int, time: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the figures of segments of at least so many rows, by column; ``time`` has periods."""
    by = columns.items()
    return {name: _of_column(scored, name, each, least, name == time) for name, each in by}


def _of_column(
    scored: Scored, column: str, values: NDArray[Any], least: int, is_time: bool
) -> dict[str, Any]:
    names, numbers = segments(column, values)
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=len(names))
    parts = dict(zip(names, np.split(order, counts.cumsum()[:-1]), strict=True))
    kept, left_out = {}, {}
    for name, rows in parts.items():
        part = scored[rows]
        if len(part) < least:
            left_out[name] = f"has {len(part)} rows, fewer than min-segment = {least}"
        elif part.lack:
            left_out[name] = part.lack
        else:
            kept[name] = part
    found: dict[str, Any] = {
        "rows": {name: len(rows) for name, rows in parts.items()},
        "figures": {name: part.figures() for name, part in kept.items()},
        "left_out": left_out,
    }
    if is_time:
        found["drift"] = _drift({name: scored[rows] for name, rows in parts.items()})
    elif len(scored.classes) == 2 and len(kept) > 1:
        flagged = {name: _flagged(part) for name, part in kept.items()}
        recalled = {name: _flagged(part[part.positive]) for name, part in kept.items()}
        found["differences"] = {
            "demographic_parity": largest_difference(flagged),
            "equal_opportunity": largest_difference(recalled),
        }
    return found


def _drift(parts: Mapping[str, Scored]) -> dict[str, dict[str, Any]]:
    """Return the drift of scores and labels from each period to the next, if both have the rows."""
    return {
        name: {"since": before, **between(earlier.watched.items(), part.watched.items())}
        for (before, earlier), (name, part) in pairwise(parts.items())
        if min(len(earlier), len(part)) >= LEAST
    }


def _flagged(part: Scored) -> tuple[int, int]:
    """Return how many rows are predicted to be of the second class, and all rows."""
    return int((part.said[:, 1] > part.threshold).sum()), len(part)


def largest_difference(shares: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the largest difference between the shares of two segments.

    Among more than two it is too large on average, which `inflated` corrects.
    """
    by_share = sorted(shares, key=lambda name: shares[name][0] / shares[name][1])
    lowest, highest = by_share[0], by_share[-1]
    found = difference(shares[highest], shares[lowest])
    if len(shares) > 2:
        number, of = np.array(list(shares.values()), np.float64).T
        smooth = (number + 1) / (of + 2)  # a share of 0 or 1 is not certain either
        spread = np.sqrt(smooth * (1 - smooth) / of)
        ends = inflated(number / of, spread, lambda each: np.ptp(each, axis=-1))
        found = figure(found["value"], *ends, 0, 1)
    found["low"] = max(0.0, found["low"])
    return {**found, "highest": highest, "lowest": lowest}
