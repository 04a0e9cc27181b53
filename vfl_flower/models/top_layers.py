"""Top model of this project: linear layers with explicit gradients."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional

from vfl_flower.config.options import ModelConfig
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.layers import MonotoneLinear, applied
from vfl_flower.models.training import autocast, in_float32

Block = tuple[slice, Tensor, Tensor]
"""The pair of a party: its columns in rows h, and two embeddings [R, E] for them."""
Outputs = tuple[Tensor, Tensor]
"""Outputs [P, R, C] of P parties, for the first and for the second embeddings."""
_AT_ONCE = 2**20  # numbers of a layer, for the pairs of many parties: 4 MB


class TopModel(nn.Module):
    """Map embeddings side by side to outputs, by linear layers with ReLU between.

    ``own`` is the bottom model for the label holder's features, if it has any. Rows h
    [R, M * E + F] then hold its F features to the right of the embeddings of M parties. Its
    embedding is one more block to combine: B blocks are [R, B * E]. ``own`` is part of this model.
    It has the label holder's learning rate, and no regulariser.
    """

    stackable = True
    by_step = False  # whether each step needs a separate pass (`models.passes`)

    def __init__(
        self,
        sizes: Sequence[int],
        combine: str,
        layers: Iterable[nn.Linear],
        outputs: int,
        own: BottomModel | None = None,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.precision, self.combine, self.outputs = precision, combine, outputs
        self.parties = len(sizes)
        self.blocks = self.parties + (own is not None)
        self.received = sum(sizes)  # columns of h with parties' embeddings
        self.starts = list(accumulate(sizes, initial=0))  # first column of each party
        self.layers = nn.ModuleList(layers)
        self.monotone = any(isinstance(layer, MonotoneLinear) for layer in self.layers)
        self.own = own

    @classmethod
    def placeholders(cls, parties: int) -> int:
        """Return the number of columns that the first layer reads besides blocks."""
        return 0

    @classmethod
    def whole(cls, blocks: Tensor, parties: int) -> Tensor:
        """Return rows h of embeddings [R, ...], if all parties have all rows."""
        return blocks

    def forward(self, h: Tensor) -> Tensor:
        """Return float32 outputs [R, C] of rows h, whatever the precision."""
        with autocast(self, self.precision):
            return in_float32(self.rest(self.first(h)))

    def first(self, h: Tensor) -> Tensor:
        """Return the first layer's output before its activation, [R, width]."""
        x = self.combined(self.embedded(h), h)
        return self.layers[0](x) if len(self.layers) else x

    def first_change(self, columns: slice, change: Tensor, h: Tensor) -> Tensor:
        """Return the change of `first`, [R, width], by a change of one block, [R, E]."""
        change = change / self.blocks if self.combine == "mean" else change
        if not len(self.layers):
            return change
        weight = applied(self.layers[0])
        return change @ (weight[:, columns] if self.combine == "concat" else weight).T

    def rest(self, z: Tensor) -> Tensor:
        """Return outputs [R, C] from the first layer's output."""
        for layer in self.layers[1:]:
            z = layer(functional.relu(z))
        return z

    def pairs(
        self, h: Tensor, blocks: Sequence[Block], lengths: Sequence[int], key: bytes
    ) -> Iterator[Outputs]:
        """Yield outputs of rows h with the first, and with the second of each party's pair.

        The first layer is linear, and a pair changes the columns of one party. So all pairs share
        the layer's output for h. The other layers are one pass for many parties, without learning.
        """
        z = self.first(h)
        # The second embeddings may be in h already. A GPU would wait for each comparison.
        in_h = h.is_cpu and all(torch.equal(b, h[:, columns]) for columns, _, b in blocks)
        at_once = max(1, _AT_ONCE // max(1, z.numel(), len(h) * self.outputs))
        for some in (blocks[i : i + at_once] for i in range(0, len(blocks), at_once)):
            at_second = z.expand(len(some), *z.shape)
            if not in_h:
                moved = [(columns, second - h[:, columns]) for columns, _, second in some]
                at_second = z + torch.stack([self.first_change(*each, h) for each in moved])
            changes = [self.first_change(at, first - second, h) for at, first, second in some]
            # Equal shapes round alike, so equal rows of a pair have no difference.
            yield self.rest(at_second + torch.stack(changes)), self.rest(at_second)

    def embedded(self, h: Tensor) -> Tensor:
        """Return embeddings of all blocks, [R, B * E], of rows h."""
        if self.own is None:
            return h
        return torch.cat([h[:, : self.received], self.own(self.features(h))], dim=1)

    def features(self, h: Tensor) -> Tensor:
        """Return the label holder's own features of rows h, [R, F]."""
        return h[:, self.received :]

    def combined(self, blocks: Tensor, h: Tensor) -> Tensor:
        """Return the first layer's input from the embeddings [R, B * E] of rows h."""
        if self.combine == "concat":
            return blocks
        blocks = blocks.view(len(blocks), self.blocks, blocks.shape[1] // self.blocks)
        return blocks.sum(1) if self.combine == "sum" else blocks.mean(1)

    def spread(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows [R, M * E] of the parties, from rows of the first layer's input."""
        if self.combine == "concat":
            return rows[:, : self.received]
        rows = rows / self.blocks if self.combine == "mean" else rows
        return rows.repeat(1, self.parties)

    def spread_to(self, columns: slice, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows [R, E] of one block, in these ``columns`` of [R, B * E]."""
        if self.combine == "concat":
            return rows[:, columns]
        return rows / self.blocks if self.combine == "mean" else rows

    def passes(
        self,
        x: Tensor,
        targets: Tensor,
        weights: Tensor | float,
        loss_gradient: Callable[[Tensor, Tensor], Tensor],
        rows: bool,
        parameters: bool,
        bound: float = math.inf,
        sums: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return outputs [R, C], gradient rows of x [R, width], and the layers' gradients.

        They are explicit, because autograd takes several times as long. Under `training.autocast`
        products have that precision, and results are float32. ``weights`` [R, 1] or a number
        multiply row losses. ``bound`` clips the norm of each row's part in the layers' gradients,
        which follows from its inputs and signals (Goodfellow, 2015). Then ``sums`` is the precision
        over rows.
        """
        layers = cast(list[nn.Linear], list(self.layers))
        inputs = [x]
        for layer in layers[:-1]:
            inputs.append(layer(inputs[-1]).relu_())
        outputs = layers[-1](inputs[-1]).float() if layers else x
        signal = loss_gradient(outputs, targets) * weights
        signals: list[Tensor] = []  # gradients of the layers' outputs, from the first layer
        for depth in reversed(range(len(layers))):
            signals.insert(0, signal)
            if depth or rows:
                layer = layers[depth]
                signal = signal @ (applied(layer) if self.monotone else layer.weight)
            if depth:
                signal *= inputs[depth] > 0
        if bound < math.inf and layers:
            both = zip(signals, inputs, strict=True)
            squares = [each.square().sum(1) * (read.square().sum(1) + 1) for each, read in both]
            signals = [each.to(sums) for each in clipped(signals, squares, bound)]
            inputs = [each.to(sums) for each in inputs]
        parts = zip(signals, inputs, strict=False) if parameters else ()
        gradients = [part for each, read in parts for part in (each.T @ read, each.sum(0))]
        if self.monotone:
            for at, layer in enumerate(layers[: len(gradients) // 2]):
                gradients[2 * at] = applied(layer, gradient=gradients[2 * at])
        if self.precision != "float32":
            gradients = [in_float32(gradient) for gradient in gradients]
        return outputs, signal.float(), gradients


def clipped(parts: list[Tensor], squares: list[Tensor], bound: float) -> list[Tensor]:
    """Return parts of rows, scaled so that the norm of each row, from its squares, is bounded."""
    norms = torch.stack(squares).sum(0).sqrt().clamp_min(1e-30)
    kept = (bound / norms).clamp_max(1.0).nan_to_num(nan=0.0)[:, None]
    return [torch.where(kept > 0, each * kept, 0.0) for each in parts]


class CombiningTop(TopModel):
    """Base of top models that combine embeddings in another way: override `combined`.

    Autograd gives the gradients of `combined`. The method has no parameters, treats each row by
    itself, and is the same in each step.
    """

    def pairs(
        self, h: Tensor, blocks: Sequence[Block], lengths: Sequence[int], key: bytes
    ) -> Iterator[Outputs]:
        """Yield outputs of rows h with the first, and with the second of each party's pair."""
        return one_by_one(h, blocks, self)

    def spread(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows of the parties, [R, M * E]."""
        return self._of_blocks(rows, h)[:, : self.received]

    def spread_to(self, columns: slice, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows of one block, [R, E]."""
        return self._of_blocks(rows, h)[:, columns]

    def _of_blocks(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows of all blocks, [R, B * E]."""
        return vjp(lambda blocks: self.combined(blocks, h), self.embedded(h))[1](rows)[0]


def one_by_one(
    h: Tensor, blocks: Sequence[Block], outputs: Callable[[Tensor], Tensor]
) -> Iterator[Outputs]:
    """Yield what `TopModel.pairs` yields, by two passes over all rows for each party."""
    for at, *pair in blocks:
        rows = [torch.cat([h[:, : at.start], each, h[:, at.stop :]], dim=1) for each in pair]
        yield outputs(rows[0])[None], outputs(rows[1])[None]


def no_layers(inputs: int, outputs: int, models: ModelConfig) -> list[int]:
    """Return no widths of layers, because the outputs are the sum of the embeddings."""
    return []


def one_layer(inputs: int, outputs: int, models: ModelConfig) -> list[int]:
    """Return the widths of one linear layer."""
    return [inputs, outputs]


def two_layers(inputs: int, outputs: int, models: ModelConfig) -> list[int]:
    """Return the widths of two layers."""
    return [inputs, models.top_hidden, outputs]
