"""A column of sequences: lists of numbers, or of lists with equally many numbers.

A sample is float32 [T, signals], scaled by the mean and the deviation of each signal over training
rows. It has the last T values. A shorter sequence gets zeros, the mean, in front. So a model that
reads from first to last ends with the newest values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.data.on_disk import KeptFile
from vfl_flower.data.source import Moments, Preparation, scaled


@dataclass(frozen=True)
class SequenceColumn(KeptFile):
    """A parquet file whose only feature column holds lists, or a file of rows of people."""

    piece: ClassVar[int] = 1024

    length: int = 0  # T; 0: length of the longest sequence in the training rows

    def learn(self, train: Array) -> Preparation:
        """Return length, signals, and mean and deviation of each signal."""
        wanted, moments, longest = np.zeros(self.count, bool), Moments(), 1
        wanted[train] = True
        signals = 0
        for _, piece in self._pieces(wanted, Preparation({}, {}, [], [])):
            for values in self._values(piece, signals):
                signals = values.shape[1]
                longest = max(longest, len(values))
                moments.add(values)
        if not signals:
            raise self.wrong(
                "has no sequence in the training rows. Fill some in.", "all are empty."
            )
        shape = [self.length or longest, signals]
        names = self.feature_names if self.repeats == "sequence" else ()  # to keep their order
        return Preparation(dict.fromkeys(names, 0.0), {}, *moments.result(), shape=shape)

    def _needed(self, preparation: Preparation) -> list[str]:
        return self._check_columns(preparation) if preparation.numbers else self.feature_names

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        length, signals = preparation.shape
        mean, deviation = np.array(preparation.mean), np.array(preparation.deviation)
        rows = np.zeros((len(piece), length, signals), np.float32)
        for row, values in zip(rows, self._values(piece, signals), strict=True):
            last = scaled(values, mean, deviation)[-length:]
            row[length - len(last) :] = last
        if not np.isfinite(rows).all():
            raise self.wrong(
                "has numbers that are too large. Scale them.", "some are infinite in 32 bits."
            )
        return rows

    def _values(self, piece: Any, signals: int) -> list[Array]:
        """Return the values [T, signals] of each row of a piece."""
        sequences = []
        for place, *cells in piece.itertuples(name=None):
            cell = cells[0] if len(cells) == 1 else np.stack(cells, 1)  # of numeric columns
            try:
                values = np.array([np.asarray(each, np.float64) for each in cell], np.float64)
            except (TypeError, ValueError):
                values = np.full((1, 1, 1), np.nan)
            if not values.size:
                values = np.zeros((0, signals or 1))
            values = values[:, None] if values.ndim == 1 else values
            signals = signals or values.shape[1]
            if values.ndim > 2 or values.shape[1] != signals or not np.isfinite(values).all():
                raise self.wrong(
                    "has a sequence with missing or infinite values, or of other signals than the "
                    "others. Correct it.",
                    f"row {place}.",
                )
            sequences.append(values)
        return sequences
