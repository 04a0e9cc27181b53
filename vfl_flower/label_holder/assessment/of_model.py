"""The assessment of a trained model, on its run's test rows or on new rows with labels."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.logs import log, notice
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.assessment import threshold
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.segments import of_columns
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
