"""Held-out rows: their embeddings, and figures of the model on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import SumError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder import calibration
from vfl_flower.label_holder.metrics import (
    Metrics,
    by_subset,
    check_finite,
    corrected,
    metrics,
    try_out,
)
from vfl_flower.label_holder.table import Table
from vfl_flower.models.losses import Loss, own_figures
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.training import load_model, model_arrays
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import row_losses
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.subsets import Copies
from vfl_flower.transport.messages import Arrays, Upload

_AT_ONCE = 2**14  # rows to evaluate at once, so that hidden units of millions fit in memory
_SURE = 2.0
"""A model must be better than one answer by this many standard errors."""
_LEAST_AUC = 0.6
"""AUC below which a model is hardly better than one answer, however many rows there are."""


class Evaluated(NamedTuple):
    """Figures of the model at one evaluation; None if they would tell labels that noise hides."""

    train_loss: float | None  # mean of the steps since the last evaluation, as training minimises
    validation: Metrics | None  # None without such rows
    test: Metrics


class HeldOut:
    """The validation rows, then the test rows, with own features [N, F] and row mask [N, M]."""

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        columns: Mapping[int, slice],
        own: NDArray[Any],
        present: NDArray[np.bool_] | None,
        device: torch.device,
    ) -> None:
        self.labels = torch.from_numpy(labels.test).to(device)
        self.validation = labels.validation  # number of validation rows
        self.repeats = labels.repeats  # whether the test rows are training rows
        self.deviation = labels.deviation  # unit of regression outputs
        mechanism = mechanism_of(config)
        self.label_noise = mechanism.label_noise(labels)
        # Whether test rows have true labels that an epsilon covers.
        self.hidden = labels.repeats and mechanism.hides_figures
        self.more = own_figures(config.models.metrics)
        try_out(self.more, config.models.metrics, labels.outputs, self.labels)
        self.table = Table(columns, own, device, 0, present)
        aggregation = aggregation_of(config)
        self.collection = aggregation.collection(len(columns))
        self.by_subsets = aggregation.any_subset
        self.calibration: dict[str, Any] | None = None  # of the finished model
        calibration.check(config, labels, self.label_noise.kept)
        self.best: Arrays = {}  # top model and embeddings at the best evaluation

    def receive(self, party: int, digest: str, upload: Upload) -> None:
        """Check a party's embeddings and its surrogates' digest, and write them into the table."""
        columns, held = self.table.of(party), self.table.present[party]
        rows = len(columns) if held is None else int(held.sum())
        try:
            new = self.collection.add(party, upload.arrays, (rows, columns.shape[1]))
        except SumError:
            raise
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        if new is not None:
            at = slice(None) if held is None else torch.from_numpy(held)
            columns[at] = new.to(columns.device, non_blocking=True)
        if digest != upload.surrogates:
            raise VflError("has other surrogates than the label holder. Start the run again.")

    def remember(self, top: TopModel) -> None:
        """Keep a copy of the last evaluated model, as the best so far."""
        copies = {f"top.{name}": each.copy() for name, each in model_arrays(top).items()}
        self.best = {"rows": self.table.state_dict()["rows"].copy(), **copies}

    def restore(self, top: TopModel) -> None:
        """Restore embeddings and top model (into ``top``) of the best evaluation."""
        self.table.load_state_dict(self.best)
        load_model(top, of_group("top", self.best))

    @torch.no_grad()
    def calibrate(self, top: TopModel, method: str) -> None:
        """Fit the calibration to the validation rows, by the parties that have each row."""
        top.eval()
        given = outputs_of(top, self.validation_rows), self.labels[: self.validation]
        self.calibration = calibration.fit(method, *given, self.label_noise.kept)
        top.train()

    @property
    def validation_rows(self) -> Tensor:
        """Return the validation rows of the table."""
        return self.table.rows[: self.validation]

    def metrics(
        self, top: TopModel, loss: Loss, copies: Copies | None
    ) -> tuple[Metrics | None, Metrics]:
        """Return figures of the validation rows, perhaps by ``copies``, and of the test rows."""
        outputs, first = outputs_of(top, self.table.rows), self.validation
        rows, labels = self.table.rows[first:], self.labels[first:]
        validation = self._validated(top, outputs[:first], loss, copies) if first else None
        if self.hidden:
            check_finite(outputs)  # no label may decide whether the run ends
            return validation, Metrics(None)
        test = metrics(outputs[first:], labels, self.deviation, loss.own, self.more)
        if self.repeats:  # labels of training rows, perhaps with noise
            test = corrected(test, outputs[first:], labels, self.label_noise)
        if self.by_subsets:
            parties = len(self.table.columns)
            known, present = rows[:, : rows.shape[1] - parties], rows[:, rows.shape[1] - parties :]

            def outputs_by(used: Tensor) -> Tensor:
                return outputs_of(top, torch.cat([known, used], 1))

            test = replace(test, subsets=by_subset(outputs_by, present, labels, self.deviation))
        return validation, test

    def _validated(
        self, top: TopModel, outputs: Tensor, loss: Loss, copies: Copies | None
    ) -> Metrics:
        """Return figures of the validation rows; ``outputs`` use all their parties.

        The loss is the training loss, over the same subsets each time, so that only models differ.
        """
        labels = self.labels[: self.validation]
        said = outputs if copies is None else outputs_of(top, copies.h)
        losses = row_losses(loss, said, labels, copies)
        found = metrics(outputs, labels, self.deviation, loss.own)
        check_finite(mean := losses.mean())
        found = replace(found, loss=mean.item())
        return corrected(found, outputs, labels, self.label_noise)


def outputs_of(top: TopModel, rows: Tensor) -> Tensor:
    """Return the outputs [R, C] of the top model, some rows at a time."""
    return torch.cat([top(part) for part in rows.split(_AT_ONCE)])


def of_group(group: str, arrays: Arrays) -> Arrays:
    """Return the arrays of one group of a checkpoint, without the group's prefix."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


# --- whether the model is better than one answer for all rows -------------------------------------


@torch.no_grad()
def no_better(held_out: HeldOut, top: TopModel) -> str:
    """Say that a model is no better than one answer for all rows; empty if it is better.

    The answer is the most frequent class or the mean of the rows, so held-out labels alone decide.
    """
    if held_out.hidden:  # these rows are training rows, and noise hides their labels
        return ""
    first = held_out.validation
    rows = slice(first) if first else slice(None)
    top.eval()
    outputs, labels = outputs_of(top, held_out.table.rows[rows]), held_out.labels[rows]
    top.train()
    if len(labels) < 2:
        return ""
    noisy = bool(held_out.label_noise.variance) or held_out.label_noise.kept < 1
    said = _judged(outputs, labels, held_out.deviation, noisy and bool(first or held_out.repeats))
    if not said:
        return ""
    which = "validation" if first else "test"
    return (
        f"The model is hardly better than one answer for all rows: on {len(labels)} {which} rows, "
        f"{said}. Use more rows, a larger epsilon if there is noise, or another strategy."
    )


def _judged(outputs: Tensor, labels: Tensor, deviation: float, noisy: bool) -> str:
    """Return the figure of a model that is no better than one answer; empty if it is better."""
    found = metrics(outputs, labels, deviation)
    if labels.is_floating_point():
        gain = (labels - labels.mean()).square() - (outputs[:, 0] - labels).square()
        return f"R2 is {found.r2:.2f}, and the mean alone has 0" * (not _above(gain))
    counts = labels.bincount()
    if outputs.shape[1] > 1:
        gain = (outputs.argmax(1) == labels).float() - (labels == counts.argmax()).float()
        most = float(counts.max()) / len(labels)
        said = f"accuracy is {found.accuracy:.2f}, and the most frequent class alone has {most:.2f}"
        return said * (not _above(gain))
    if found.auc is None:  # all rows have one class
        return ""
    error = math.sqrt((len(labels) + 1) / 12 / float(counts.prod()))  # of Mann and Whitney's U
    least = max(0.5 + _SURE * error, 0 if noisy else _LEAST_AUC)
    return f"AUC is {found.auc:.2f}, and guessing has 0.50" * (found.auc < least)


def _above(gain: Tensor) -> bool:
    """Return whether the mean of the rows' gains is above 0 for sure."""
    gain = gain.double()
    return bool(gain.mean() > _SURE * gain.std() / math.sqrt(len(gain)))
