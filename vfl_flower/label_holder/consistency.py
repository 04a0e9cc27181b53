"""Consistency: find the party whose embedding of a row does not fit the other embeddings.

A Gaussian of the validation rows predicts each party's embedding of a row from the other parties'
embeddings, and from the label holder's own columns. No gradient has used these rows. Two measures
compare an embedding with its prediction:

- the distance, in standard deviations (Mahalanobis), which also bounds the embedding's norm;
- the part of the score: what the embedding adds to the log-probability of the predicted class, or
  to a predicted number, if it replaces its prediction.

VFLIP (Cho et al., ESORICS 2024) measures the first by an autoencoder that also learns from training
rows. Each measure has a limit, in proportion to its usual size. A row is flagged if a measure
exceeds its limit. Validation rows set the limits by cross-fitting: their measures come from a
Gaussian of other rows. A hostile party sends validation rows too. So the Gaussian describes the
bulk of these rows (FAST-MCD, Rousseeuw and Van Driessen, 1999).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.options.data import CONFIDENCE, rows_to_flag
from vfl_flower.label_holder.scored_rows import ScoredRows

Masks = NDArray[np.bool_]
Outputs = Callable[[Tensor, NDArray[np.float32], Masks], Tensor]

NOBODY = -1
"""The suspect of a row whose embeddings fit each other."""
_FOLDS = 5
_RIDGE = 1e-3  # added to the variance of each column, in units of its participant's mean variance
_LEAST = 0.01  # usual size of a measure that is nearly always 0
_BULK = 0.9  # share of the validation rows that the Gaussian is fitted to
_TAIL = 2.5  # times the bulk's largest distance: the last fit has these rows too
_STEPS = 3  # fits of the Gaussian, each to the bulk by the one before
_COMMON = 0.95  # a hostile party cannot move this quantile by fewer rows than the rest
_BEYOND = 6.0  # times that quantile of a party's distances; more is flagged in any case
_WIDEST = 4096  # columns: their covariance has 128 MiB


class Consistency:
    """A Gaussian of honest embeddings, and the limits of what does not fit.

    columns : party -> its columns of the embeddings.
    outputs : returns the top model's outputs, from embeddings, own columns and who gave a row.
    numbers : whether the model predicts numbers.
    """

    def __init__(self, columns: Mapping[int, slice], outputs: Outputs, numbers: bool) -> None:
        self._columns, self._outputs, self._numbers = columns, outputs, numbers

    def fit(self, rows: ScoredRows, rate: float) -> Consistency:
        """Fit the Gaussian and the limits to honest rows; refuse too few rows of a party.

        At `CONFIDENCE`, at most ``rate`` of further honest rows exceed a limit, but for a warning.
        """
        from scipy.stats import binom  # lazy: slow to import

        given, width = rows.given.sum(0), rows.blocks.shape[1] + rows.own.shape[1]
        least, party = given.min(), given.argmin()
        if least < rows_to_flag(rate) or width > _WIDEST:
            why = f"{width:,} columns of embeddings exceed {_WIDEST:,}"
            if width <= _WIDEST:
                why = f"party {party} has {least} validation rows, fewer than {rows_to_flag(rate)}"
            raise ConfigError(f"flag-rate = {rate:g} is not possible: {why}. Leave it out.")
        number, lacks = len(rows.given), torch.from_numpy(~rows.given)
        fold, found = np.arange(number) % _FOLDS, torch.zeros(*rows.given.shape, 2)
        for each in range(_FOLDS):
            self._learn(rows.at(np.flatnonzero(fold != each)))
            found[fold == each] = self.measures(rows.at(np.flatnonzero(fold == each)))
        self._learn(rows)
        found[lacks] = torch.nan
        most = (_BEYOND * found[:, :, 0].nanquantile(_COMMON, 0)).clamp_min(_LEAST)
        beyond = (found[:, :, 0] / most).nan_to_num(0)
        far = beyond.amax(1) > 1
        usual = found[~far].nanquantile(1 - rate, 0).clamp_min(_LEAST)
        largest = (found[~far] / usual).nan_to_num(0).amax((1, 2)).sort(descending=True).values
        exceed = int(binom.ppf(1 - CONFIDENCE, number, rate)) - int(far.sum())
        self.limits = (largest[max(exceed, 1) - 1] * usual).clamp_min(_LEAST)
        self.limits[:, 0] = torch.minimum(self.limits[:, 0], most)
        if exceed < 1:
            said = "%d validation rows are far from the others: party %d attacks, or has odd rows."
            notice.warning(said, far.sum(), beyond[far].argmax(1).mode().values)
        return self

    def suspects(self, rows: ScoredRows) -> NDArray[np.int64]:
        """Return the suspect of each row, or `NOBODY` if no measure exceeds its limit.

        Distances come first: an odd embedding also moves the parts of the score of others.
        """
        distance, part = (self.measures(rows) / self.limits).unbind(2)
        (far, at_distance), (decides, by_part) = distance.max(1), part.max(1)
        suspect = torch.where(far > 1, at_distance, by_part)
        return torch.where((far > 1) | (decides > 1), suspect, NOBODY).numpy()

    def measures(self, rows: ScoredRows) -> Tensor:
        """Return distances and parts of the score, float32 [R, M, 2]; 0 of what is not given."""
        found = torch.zeros(*rows.given.shape, 2)
        for at, party, residual, distance in self._residuals(rows):
            some, expected, mine = rows.at(at), rows.blocks[at], self._columns[party]
            expected[:, mine] -= (residual * self._scales[mine]).float()
            said = self._outputs(expected, some.own, some.given)
            found[at, party] = torch.stack([distance, self._part(some, said)], 1)
        return found

    def _residuals(self, rows: ScoredRows) -> Iterator[tuple[NDArray[Any], int, Tensor, Tensor]]:
        """Yield places of rows, a party that gave them, its residuals, and its distances."""
        x = torch.cat([rows.blocks, torch.from_numpy(rows.own)], 1).double()
        x = (x - self._mean) / self._scales
        sets, of_row = np.unique(rows.given, axis=0, return_inverse=True)
        for number, given in enumerate(sets):
            at = np.flatnonzero(of_row.ravel() == number)
            places, operators = self._operators(given.tobytes())
            shown = x[at][:, places]
            for party, (pulls, residuals) in operators.items():
                residual = shown @ residuals
                distance = (residual * (shown @ pulls)).sum(1).clamp_min(0).sqrt()
                yield at, party, residual, distance.float()

    def _part(self, rows: ScoredRows, without: Tensor) -> Tensor:
        """Return what outputs add to those ``without`` a party's surprise, [R]."""
        if self._numbers:
            return (rows.outputs - without).abs()[:, 0].nan_to_num(0.0)
        logits = [
            torch.cat([torch.zeros_like(each), each], 1) if each.shape[1] == 1 else each
            for each in (rows.outputs, without)
        ]
        said, other = (each.log_softmax(1) for each in logits)
        predicted = said.argmax(1, keepdim=True)
        part = (said - other).gather(1, predicted)[:, 0].clamp_min(0)
        return part.nan_to_num(0.0)  # of outputs that are not finite: the distance is

    # --- the Gaussian -----------------------------------------------------------------------------

    def _learn(self, rows: ScoredRows) -> None:
        """Fit the Gaussian to the rows without the largest distances, at first from medians."""
        far = torch.full(rows.given.shape, torch.nan)
        for party, columns in self._columns.items():
            at = np.flatnonzero(rows.given[:, party])
            block = rows.blocks[at][:, columns]
            far[at, party] = (block - block.median(0).values).norm(dim=1)
        for step in range(_STEPS):
            for at, party, _, distance in self._residuals(rows) if step else ():
                far[at, party] = distance
            most = (far / far.nanmedian(0).values.clamp_min(1e-9)).nan_to_num(0).amax(1)
            widest = most.quantile(_BULK) * (_TAIL if step == _STEPS - 1 else 1)
            self._estimate(rows.at(np.flatnonzero(most <= widest)))

    def _estimate(self, rows: ScoredRows) -> None:
        """Compute mean and covariance, each from the rows that have both columns."""
        x = torch.cat([rows.blocks, torch.from_numpy(rows.own)], 1).double()
        has = torch.ones_like(x)
        for party, columns in self._columns.items():
            has[:, columns] = torch.from_numpy(rows.given[:, party, None]).double()
        self._width = x.shape[1]
        self._mean = (x * has).sum(0) / has.sum(0).clamp_min(1)
        centred = (x - self._mean) * has
        covariance = centred.T @ centred / (has.T @ has).clamp_min(1)
        self._scales = torch.ones(self._width).double()
        for number in range(len(self._columns) + 1):  # the last are the label holder's columns
            if (mean := covariance.diagonal()[self._of(number)].mean()) > 0:
                self._scales[self._of(number)] = mean.sqrt()
        values, vectors = torch.linalg.eigh(covariance / self._scales.outer(self._scales))
        self._covariance = vectors * (values.clamp_min(0) + _RIDGE) @ vectors.T
        self._operators = lru_cache(16)(self._operators_of)

    def _of(self, party: int) -> Tensor:
        """Return the columns of a party, or after the last party, of the label holder."""
        received = max((each.stop for each in self._columns.values()), default=0)
        return torch.arange(self._width)[self._columns.get(party, slice(received, None))]

    def _operators_of(self, given: bytes) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Return the columns of all who gave a row; by party, what gives its pull and residual."""
        parties = np.flatnonzero(np.frombuffer(given, np.bool_)).tolist()
        places = torch.cat([self._of(party) for party in [*parties, len(given)]])
        precision, operators = torch.linalg.inv(self._covariance[places][:, places]), {}
        for party in parties:
            own = torch.isin(places, self._of(party))
            pulls = precision[:, own]
            operators[party] = pulls, torch.linalg.solve(precision[own][:, own], pulls.T).T
        return places, operators
