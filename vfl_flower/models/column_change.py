"""Embeddings of a `tabular` bottom model when one column of its rows changes.

The first layer adds up a part for each column. So a change of one column of F needs a share 1/F of
that layer's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.layers import EncodedMembers, MeanOfMembers, applied
from vfl_flower.models.threads import for_each

_ROWS = 1024  # rows at once, so that their hidden units stay in the processor's cache


class ColumnChange:
    """Embed rows [R, F] again and again, with other values in some columns.

    The model must satisfy `fits`, and keep its parameters. Results differ from it by rounding only.
    """

    def __init__(self, model: BottomModel) -> None:
        first, last = model.layers
        assert isinstance(first, EncodedMembers) and isinstance(last, MeanOfMembers)
        self._last_activation = model.activations[1]
        self.encoder, members = first.encoder, first.members
        self._features, self._bins = self.encoder.edges.shape[0], self.encoder.edges.shape[1] - 1
        # Weights of each encoded number to the hidden units of all members, [F * (1 + bins), U].
        into, shared, out_of = (applied(members, each) for each in ("into", "shared", "out_of"))
        weight = shared * into[:, None] * out_of[..., None]
        self._weight = weight.flatten(0, 1).T.contiguous().detach()
        self._bias = torch.zeros(1) if members.bias is None else members.bias.detach().flatten()
        self._last = applied(last).detach() / len(into), last.bias

    @staticmethod
    def fits(model: BottomModel) -> bool:
        """Return whether a model is a `tabular` model in single precision."""
        layers = list(model.layers) if type(model) is BottomModel else []
        kinds = [type(each) for each in layers]
        return (
            kinds == [EncodedMembers, MeanOfMembers]
            and model.activations[0] is functional.relu
            and model.precision == "float32"
        )

    def parts(self, rows: Tensor, columns: Sequence[slice]) -> Tensor:
        """Return what columns of rows [R, F] add to the first layer, [R, columns, U]."""
        numbers, bins = self.encoder(rows).split([self._features, rows.shape[1] * self._bins], 1)
        encoded = torch.cat([numbers[..., None], bins.unflatten(1, (-1, self._bins))], 2)
        weights = self._weight.split([self._features, len(self._weight) - self._features])
        of_bins = weights[1].unflatten(0, (-1, self._bins))
        weight = torch.cat([weights[0][:, None], of_bins], 1)
        own = [encoded[:, at].flatten(1) @ weight[at].flatten(0, 1) for at in columns]
        return torch.stack(own, 1)

    def rest(self, units: Tensor) -> Tensor:
        """Return embeddings [R, E] of what all columns add to the first layer, [R, U]."""
        return self._last_activation(functional.linear(torch.relu(units + self._bias), *self._last))

    def embeddings(self, rows: Tensor, changes: Sequence[tuple[slice, Tensor]]) -> Tensor:
        """Return embeddings [changes, R, E] of rows [R, F], where a change sets columns."""
        found = rows.new_empty(len(changes), len(rows), len(self._last[0]))
        parts = [slice(at, at + _ROWS) for at in range(0, len(rows), _ROWS)]
        for_each(partial(self._embed, rows, changes, found), parts)
        return found

    def plain(self, rows: Tensor) -> Tensor:
        """Return embeddings of the rows as they are, [R, E]."""
        return self.embeddings(rows, [(slice(0, 0), rows[:, :0])])[0]

    @torch.no_grad()
    def _embed(
        self, rows: Tensor, changes: Sequence[tuple[slice, Tensor]], found: Tensor, part: slice
    ) -> None:
        """Write the embeddings of some of the rows into ``found``."""
        rows = rows[part]
        plain = torch.addmm(self._bias.to(rows), self.encoder(rows), self._weight)
        units, (weight, bias) = torch.empty_like(plain), self._last
        for at, (columns, values) in enumerate(changes):
            low, high = columns.start, columns.stop
            change = self.encoder(values[part], columns) - self.encoder(rows[:, columns], columns)
            bins = slice(self._features + low * self._bins, self._features + high * self._bins)
            of_change = torch.cat([self._weight[low:high], self._weight[bins]])
            torch.relu_(torch.addmm(plain, change, of_change, out=units))
            found[at, part] = self._last_activation(functional.linear(units, weight, bias))
