"""Segments of a trained model by columns of the parties, from flags and labels with noise.

A test row is in one of four cells, by its flag and its label. The label holder randomises each cell
once, and sends every party the same draw. A party counts the draw in the groups of the columns that
its own option ``segments`` names. So it learns no flag and no label for sure. The label holder
learns sums over people, and `party.label_sets` bounds what they say about one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError, sent_by
from vfl_flower.config.files import write_json
from vfl_flower.config.logs import notice
from vfl_flower.config.names import in_words
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.assessment.intervals import Z, figure, inflated
from vfl_flower.label_holder.results import SUMMARY
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.contribution import outputs_of
from vfl_flower.tasks.inference.rows import labels_of
from vfl_flower.tasks.information.label_holder import randomised
from vfl_flower.transport.base import Transport
from vfl_flower.transport.explain_messages import GroupCounts, GroupsOrder
from vfl_flower.transport.gather import gather_all
from vfl_flower.transport.messages import checked

Cells = NDArray[Any]
"""Cells of rows, [R], or counts of them, [4]."""
CELLS = 4
"""Cells of a test row: twice its flag, plus its label."""

_FLAGGED, _POSITIVE = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
_RATES = {  # figure -> the cells that it counts, the cells that it is a share of, its difference
    "flagged": (_FLAGGED, np.ones(CELLS), "demographic_parity"),
    "recall": (_FLAGGED * _POSITIVE, _POSITIVE, "equal_opportunity"),
    "false_positives": (_FLAGGED * (1 - _POSITIVE), 1 - _POSITIVE, ""),
}
_LEAST = 3.0  # standard errors: a share of fewer rows than these has no figure


def segments(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Add figures by groups of the parties' columns to summary and card of the run ``model``."""
    from vfl_flower.label_holder.assessment.of_model import scored_by  # lazy: slow
    from vfl_flower.results.model_card import write_card

    found, path = checkpoint.load(config.model), Path(config.model).expanduser() / SUMMARY
    labels = labels_of(found).tested
    summary = json.loads(path.read_bytes()) if path.exists() else {}
    assessment = summary.get("assessment")
    fits = found.parties and found.config.data.own_data and len(labels.classes) == 2
    if config.information == "exact" or not fits or not assessment or labels.repeats:
        raise ConfigError(
            f"{config.model} has no segments by columns of parties: they need files of the "
            "parties, labels of two classes, test rows, and information = 'noisy'."
        )
    outputs = outputs_of(found, labels)((True,) * found.parties)
    scored = scored_by(found, outputs, labels.test)
    cells = 2 * (scored.said[:, 1] > scored.threshold) + scored.positive
    config = replace(config, data=found.config.data)
    sent, spent = randomised(config, _of_cells(labels, cells))
    noise = {"epsilon": config.privacy.epsilon, "spent": spent}
    own = assessment["segments"].items()
    assessment["segments"] = {name: each for name, each in own if "epsilon" not in each}
    least, arrays = given.get("min-segment", found.config.assessment.min_segment), {"cells": sent}
    order = GroupsOrder(run=found.run, number=found.number, least=least, arrays=arrays)
    transport.parties = found.parties
    for each in gather_all(transport, order, GroupCounts, config.running).values():
        if each.refused:
            notice.warning("Party %d takes no part: %s", each.party, each.refused)
            continue
        has = labels.present[1][:, each.party] if labels.present else np.ones(len(cells), bool)
        true, noisy = (np.bincount(of[has], minlength=CELLS) for of in (cells, sent))
        with sent_by(each.party):
            counted = _checked(each, noisy)
        for column, counts in counted.items():
            figures = of_groups(counts, true, mechanism_of(config).kept(CELLS))
            assessment["segments"][in_words(f"party {each.party}, {column}")] = figures | noise
    write_json(path, summary)
    write_card(path.parent)


def _of_cells(labels: Labels, cells: Cells) -> Labels:
    """Return the cells of test rows as labels of training rows, which get noise."""
    assert labels.people is not None  # they are of a file
    names = tuple(f"{name}{flag}" for flag in ("", ", flagged") for name in labels.classes)
    none, at = cells[:0], labels.test_places
    people = labels.people[1], none
    return Labels(cells, none, names, "", people=people, places=at, test_places=none)


def _checked(answer: GroupCounts, sent: Cells) -> dict[str, dict[str, Cells]]:
    """Return column -> group -> counts of the cells [4], or raise `VflError`."""
    try:
        named = {str(name): [*map(str, each)] for name, each in json.loads(answer.groups).items()}
    except (ValueError, TypeError, AttributeError):
        raise VflError("names of groups that cannot be read.") from None
    rows = iter(checked(answer.arrays, "counts", "int64", (sum(map(len, named.values())), CELLS)))
    found = {column: {name: next(rows) for name in names} for column, names in named.items()}
    for column, of in found.items():
        fits = len(of) == len(named[column]) and np.array_equal(sum(of.values()), sent)
        if not fits or min(each.min() for each in of.values()) < 0:
            raise VflError("counts that do not fit the rows that it was sent.")
    return found


# --- figures from counts of noisy cells -----------------------------------------------------------


def of_groups(counts: Mapping[str, Cells], true: Cells, kept: float) -> dict[str, Any]:
    """Return the figures of a column's G groups from counts of noisy cells, [4] each.

    ``true`` are the true cells of all groups, [4]. On average, noise turns them into P true. A
    group with a share f of all rows has a share f of the noise that is left, which is subtracted.
    Then P^-1 gives the group's true cells, without bias. All groups add up to ``true``.
    """
    chances = np.full((CELLS, CELLS), (1 - kept) / (CELLS - 1))  # P: a column for each true cell
    np.fill_diagonal(chances, kept)
    names, observed = [*counts], np.array([*counts.values()], np.float64)
    share = observed.sum(1, keepdims=True) / observed.sum()  # f
    back = np.linalg.inv(chances)
    cells = (observed - share * (observed.sum(0) - chances @ true)) @ back.T
    own = np.eye(len(cells))[..., None] * cells
    crossed = share[:, None] * cells  # [G, G, 4]
    of = own - crossed - crossed.swapaxes(0, 1) + share[:, None] * share * true
    noise = (of @ chances.T)[..., None] * np.eye(CELLS) - (chances * of[..., None, :]) @ chances.T
    # People are a sample too: the counts of cells are Poisson's.
    covariance = back @ noise @ back.T + np.maximum(own, 0)[..., None] * np.eye(CELLS)
    found: dict[str, Any] = {"left_out": {}, "differences": {}}
    found["rows"] = {name: int(each.sum()) for name, each in counts.items()}
    found["figures"] = {name: {} for name in counts}
    for rate, (part, whole, difference) in _RATES.items():
        rows = cells @ whole
        error = np.sqrt(np.einsum("c,ggcd,d->g", whole, covariance, whole))
        at = np.flatnonzero(rows > np.maximum(_LEAST * error, 1))
        values = np.clip(cells[at] @ part / rows[at], 0, 1)
        slopes = (part - values[:, None] * whole) / rows[at, None]
        spread = np.einsum("gc,ghcd,hd->gh", slopes, covariance[np.ix_(at, at)], slopes)
        spread += 1e-12 * np.eye(len(at))  # a share of 0 or 1 may have no variance
        errors = np.sqrt(np.diag(spread))
        for g, value, error in zip(at, values, errors.tolist(), strict=True):
            ends = figure(value, value - Z * error, value + Z * error, 0, 1)
            found["figures"][names[g]][rate] = {**ends, "error": error}
        if difference and len(at) > 1:
            mixed = np.linalg.cholesky(spread) / errors  # noise of groups is correlated
            spans = lambda of: np.ptp(of @ mixed.T, axis=-1)  # noqa: B023, E731 (called here)
            low, high = inflated(np.linalg.solve(mixed, values), errors, spans)
            which = {"highest": names[at[values.argmax()]], "lowest": names[at[values.argmin()]]}
            found["differences"][difference] = {**figure(np.ptp(values), low, high, 0, 1), **which}
    return found
