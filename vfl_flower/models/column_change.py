"""Embeddings of a `tabular` bottom model when one column of its rows changes.

The first layer adds up a part for each column. So a change of one column of F needs a share 1/F of
that layer's products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.layers import EncodedMembers, MeanOfMembers


class ColumnChange:
    """Embed rows [R, F], and embed them again with other values in some columns.

    Results equal those of the model except for rounding in single precision.

    Parameters
    ----------
    model : a model for which `fits` is true. Its parameters must not change meanwhile.
    """

    def __init__(self, model: BottomModel) -> None:
        first, last = model.layers
        assert isinstance(first, EncodedMembers) and isinstance(last, MeanOfMembers)
        self._first, self._activations = first, model.activations
        _, self._encoder, members = first
        self._features, self._bins = self._encoder.edges.shape[0], self._encoder.edges.shape[1] - 1
        # Weights of each encoded number to all hidden units of all members, [F * (1 + bins), units].
        weight = members.shared * members.into[:, None] * members.out_of[..., None]
        self._weight = weight.flatten(0, 1).T.contiguous().detach()
        self._last = last.weight.detach() / len(members.into), last.bias
        self._rows = self._units = torch.zeros(0)

    @staticmethod
    def fits(model: BottomModel) -> bool:
        """Return whether a model is a `tabular` model in single precision."""
        layers = list(model.layers) if type(model) is BottomModel else []
        kinds = [type(each) for each in layers]
        return kinds == [EncodedMembers, MeanOfMembers] and model.precision == "float32"

    @torch.no_grad()
    def begin(self, rows: Tensor) -> None:
        """Take the rows [R, F] whose columns then change. Keep their hidden units."""
        self._rows = rows
        parts = [self._first(part) for part in rows.split(self._first.rows_at_once)]
        self._units = torch.cat(parts).flatten(1)

    @torch.no_grad()
    def embeddings(self, columns: slice, values: Tensor) -> Tensor:
        """Return embeddings [R, E] of the rows with these values [R, n] in n columns."""
        low, high = columns.start, columns.stop
        change = self._encoder(values, columns) - self._encoder(self._rows[:, columns], columns)
        bins = slice(self._features + low * self._bins, self._features + high * self._bins)
        weight = torch.cat([self._weight[low:high], self._weight[bins]])
        units = self._activations[0](torch.addmm(self._units, change, weight))
        weight, bias = self._last
        return self._activations[1](functional.linear(units, weight, bias))
