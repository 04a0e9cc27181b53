"""Judge kept predictions by labels that are known later, in a new file of the label holder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_json
from vfl_flower.config.logs import notice
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.drift import LEAST, between
from vfl_flower.data.later import pd
from vfl_flower.data.own_files import OwnFile
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.about_data import of_people
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.results import TESTED
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.predictions import encoded, numbers_of
from vfl_flower.tasks.inference.rows import OF_FILE, learnt_by


def evaluate(
    folder: Path, labels: str, predictions: Path | None, given: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Join labels, read as ``given``, with predictions by id; return figures, and their file."""
    from vfl_flower.label_holder.assessment.form import Scored  # lazy: scikit-learn is slow
    from vfl_flower.label_holder.assessment.of_model import assessed

    path, found = predictions or folder / "predictions.csv", checkpoint.load(folder)
    named = {name: given[name] for name in OF_FILE if name in given}
    words = found.config.with_values({**named, "dataset": f"files:{labels}", "match": ""})
    file = own_table(words.data).with_known_segments(given)
    file.check()
    people = file.people(np.arange(file.count))
    ids, scores = _columns(path, found)
    _, rows, at = np.intersect1d(people, ids, return_indices=True)
    if not len(rows):
        how = """Name its column of ids, as in -c "id='customer'"."""
        raise ConfigError(f"{path} has no id of {file.path}. {how}")
    true = file.labels_with_gaps(rows)
    used, learnt = ~pd.isna(true), learnt_by(found, file, rows)
    counts = {"with a prediction": len(ids), "in the file of labels": len(people)}
    counts |= {"in both": len(rows), "in both, without a label": int((~used).sum())}
    if mechanism_of(found.config).hides_labels:
        counts["in both, but noise protects their labels"] = int((used & learnt).sum())
        used &= ~learnt
    elif learnt.any():
        notice.warning("%d of these people trained or chose the model.", int(learnt.sum()))
    counts["in the figures"] = int(used.sum())
    classes, said, true = found.about_labels["classes"], scores[at[used]], true[used]
    known = encoded(true, classes) if classes else numbers_of(true)
    scored = Scored(said if classes else said[:, 0], known, classes, found.threshold)
    least = given.get("min-segment", words.assessment.min_segment)
    by = file.segments_of(rows[used]), least, file.time
    about = words.assessment.threshold, found.calibration, by, notice.warning
    figures = {
        "predictions": str(path),
        "outcomes": str(file.path),
        **of_people(file, rows, words),
        "people": counts,
        "assessment": assessed("file of labels", scored, *about) if used.any() else None,
        "drift": _drift(folder / TESTED, scores, found),
    }
    out = path.with_suffix(".evaluation.json")
    write_json(out, figures)
    return out, figures


def _drift(tested: Path, scores: Any, found: Checkpoint) -> dict[str, Any]:
    """Return the drift of these scores since the test rows, if a file has the scores of both."""
    if len(scores) < LEAST or not tested.exists():
        return {}
    several = slice(len(found.about_labels["classes"]) == 2, None)  # one probability says both
    columns = (each.T[several] for each in (_columns(tested, found)[1], scores))
    return between(*(zip(_names(found)[several], each, strict=True) for each in columns))


def _names(found: Checkpoint) -> list[str]:
    return [f"probability_{each}" for each in found.about_labels["classes"]] or ["prediction"]


def _columns(path: Path, found: Checkpoint) -> tuple[Any, Any]:
    """Return numbers [N] of the ids in a file, and its scores [N, columns]."""
    first, *others = OwnFile(str(path), id="").names_besides_ids
    if absent := [name for name in _names(found) if name not in others]:
        raise ConfigError(
            f"{path} has no column {absent[0]!r}: another model made it. Name a file of this run."
        )
    table = OwnFile(str(path), id=first)
    every = np.arange(table.count)
    columns = table.raw_columns(every, _names(found), ())
    return table.people(every), np.column_stack([each for _, each in columns])
