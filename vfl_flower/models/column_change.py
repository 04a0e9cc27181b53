"""Embed rows again and again, with other values in some columns, as explanations do."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.layers import (
    EncodedMembers,
    MeanOfMembers,
    Members,
    PiecewiseLinear,
    applied,
)

T = TypeVar("T")

_ROWS = 1024  # rows at once, so that their hidden units stay in the processor's cache


def for_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Do some work for each item, on as many threads as torch has.

    Meanwhile, each operation of torch uses one thread, since threads that share every small
    operation would wait for each other.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        for each in items:
            work(each)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(threads)


class ColumnChange:
    """Embed rows [R, F] again and again, with other values in some columns.

    The model must satisfy `fits`, and keep its parameters. Results differ from it by rounding only.
    """

    def __init__(self, model: BottomModel) -> None:
        first, last = model.layers
        assert isinstance(first, EncodedMembers) and isinstance(last, MeanOfMembers)
        self._last_activation = model.activations[1]
        _, self.encoder, members = first
        assert isinstance(self.encoder, PiecewiseLinear) and isinstance(members, Members)
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

    def parts(self, rows: Tensor, owner: Tensor, columns: int) -> Tensor:
        """Return what columns, the ``owner`` of each number, add to the first layer, [R, C, U]."""
        sizes = [self._features, self._features * self._bins]
        numbers, bins = self.encoder(rows).split(sizes, 1)
        of_numbers, of_bins = self._weight.split(sizes)
        bins, of_bins = bins.unflatten(1, (-1, self._bins)), of_bins.unflatten(0, (-1, self._bins))
        own = numbers.T[..., None] * of_numbers[:, None]
        own = torch.baddbmm(own, bins.transpose(0, 1), of_bins)
        found = own.new_zeros(columns, *own.shape[1:]).index_add_(0, owner, own)
        return found.transpose(0, 1).contiguous()

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
