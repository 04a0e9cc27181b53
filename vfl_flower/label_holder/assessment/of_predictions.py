"""The assessment of predictions for rows with labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.segments import of_columns
from vfl_flower.label_holder.calibration import probabilities
from vfl_flower.label_holder.checkpoint import Checkpoint

notice = logging.getLogger("flwr.notice")  # `vfl predict` shows these records too


def of_predictions(
    outputs: Tensor,
    labels: NDArray[Any],
    found: Checkpoint,
    segments: Mapping[str, NDArray[Any]],
    least: int,
) -> dict[str, Any] | None:
    """Return the assessment of a model's outputs [R, C]; None for rows of one class.

    Parameters
    ----------
    labels : class indices, or standardised numbers, [R].
    segments, least : as for `of_columns`.
    """
    about = found.about_labels
    if about["classes"]:
        said = probabilities(outputs, found.calibration)
    else:
        said, labels = (
            about["mean"] + about["deviation"] * np.asarray(each, np.float64)
            for each in (outputs[:, 0], labels)
        )
    scored = Scored(said, labels, about["classes"], found.threshold)
    if scored.lack:
        notice.warning("The data with labels %s, so the model is not assessed.", scored.lack)
        return None
    form = scored.form(found.config.assessment.threshold, found.calibration)
    return {**form, "segments": of_columns(scored, segments, least)}
