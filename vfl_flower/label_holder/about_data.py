"""The description of a run's data in its summary."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.column_types import text_of
from vfl_flower.data.labels import Labels
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.tables import Table
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of
from vfl_flower.results.figures import MEAN

Array = NDArray[Any]


def data_of(labels: Labels, mechanism: Mechanism) -> dict[str, Any]:
    """Return the field ``data`` of ``summary.json``.

    With noise on labels, the shares of classes are estimated from the noisy labels. With noise on
    scalars, no statistic of labels is told, since epsilon covers none.
    """
    tested = labels.tested
    told = mechanism.learns_from_noise or not mechanism.hides_labels
    numbers = not labels.classes and not mechanism.hides_labels
    return {
        "rows": {
            "training": len(labels.train),
            "validation": labels.validation,
            "test": len(tested.test),
        },
        "tested_on_training_rows": labels.repeats,
        "ids": _digest(labels),
        "own_columns": 0 if labels.features is None else int(labels.features[1].shape[1]),
        "classes": list(labels.classes),
        "class_shares": _shares(labels, mechanism) if told and labels.classes else None,
        "label_mean": labels.mean if numbers else None,
        "label_deviation": labels.deviation if numbers else None,
    }


def of_people(own: Table, rows: Array, config: RunConfig) -> dict[str, Any]:
    """Return which file people come from, and how labels of those at ``rows`` differ from others'.

    There is no figure of fewer than ``min-segment`` people. If noise hides labels, there is none,
    and no digest of the file: it would confirm a guess of a label.
    """
    from pandas import Series, to_numeric

    file: dict[str, Any] = {"rows": own.count, "columns": len(own.names_besides_ids)}
    file |= own.about_file if isinstance(own, OwnFile) else {}
    hidden = mechanism_of(config).hides_labels
    if hidden or not own.has_labels:
        return {"file": {each: file[each] for each in file if each != "sha256" or not hidden}}
    every = Series(own.labels_with_gaps(np.arange(own.count)))
    every = to_numeric(every, errors="coerce") if config.data.target == "regression" else every
    used, known = every.index.isin(rows), every.notna()
    found = {"aligned": every[used & known], "left_out": every[~used & known]}
    if min(map(len, found.values())) < config.assessment.min_segment:
        found = {}
    elif config.data.target == "regression":
        found = {who: {MEAN: float(part.mean())} for who, part in found.items()}
    else:
        texts = {who: part.map(text_of) for who, part in found.items()}
        shares = {who: each.value_counts(normalize=True) for who, each in texts.items()}
        found = {who: each.sort_index().to_dict() for who, each in shares.items()}
    return {"file": file, "labels": found, "aligned without a label": int((used & ~known).sum())}


def _known(numbers: Array | None) -> Array:
    return np.zeros(0, np.int64) if numbers is None else numbers


def _digest(labels: Labels) -> str:
    """Return a digest of the rows' ids, or else of their numbers, whatever their order."""
    parts = labels.people or (labels.places, labels.test_places)
    every = np.concatenate([_known(each) for each in parts]).astype("<u8", copy=False)
    every.sort()  # in place: copies of the ids of many rows would be the run's peak of memory
    if (every[1:] == every[:-1]).any():  # the test repeats training rows
        every = np.unique(every)
    return hashlib.sha256(every.data).hexdigest()


def _shares(labels: Labels, mechanism: Mechanism) -> list[float]:
    """Return each class's share s of the training rows, which noise shows as q + (p - q) s."""
    classes = len(labels.classes)
    kept = mechanism.kept(classes)
    other = (1 - kept) / max(1, classes - 1)
    seen = np.bincount(labels.train, minlength=classes) / len(labels.train)
    shares = np.maximum((seen - other) / (kept - other), 0)
    found: list[float] = (shares / shares.sum()).tolist()
    return found
