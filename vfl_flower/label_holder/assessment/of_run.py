"""The assessment of a trained model, at the end of its run."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.assessment import threshold
from vfl_flower.label_holder.assessment.form import Scored
from vfl_flower.label_holder.assessment.segments import of_columns
from vfl_flower.label_holder.calibration import probabilities
from vfl_flower.label_holder.held_out import outputs_of
from vfl_flower.label_holder.label_holder import LabelHolder

log = logging.getLogger("flwr")


@torch.no_grad()
def of_run(holder: LabelHolder, labels: Labels) -> dict[str, Any] | None:
    """Choose the threshold on validation rows, and assess the model on the test rows.

    Return None if no rows are held out for testing, or if all of them have one class.

    Parameters
    ----------
    labels : labels of the run, from which the segments are taken.
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
        return None
    scored = Scored(said[first:], known[first:], labels.classes, flags)
    if scored.lack:
        log.info("The test set %s, so the model is not assessed.", scored.lack)
        return None
    segments = of_columns(scored, labels.tested.segments, options.min_segment)
    return {**scored.form(options.threshold, held_out.calibration), "segments": segments}
