"""Top models: the label holder's, from embeddings to outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError
from vfl_flower.models.bottoms import BottomModel, build_bottom, embedding_size, seeded
from vfl_flower.models.training import autocast, check_size, in_float32
from vfl_flower.sections import ModelConfig


class TopModel(nn.Module):
    """From the parties' embeddings, side by side, to the outputs: linear layers, ReLU between.

    A label holder with features of its own has a bottom model for them here, ``own``. Rows h [R, M
    * E + F] then hold its F features to the right of the embeddings of M parties, and its embedding
    of them is one more block to combine: of [R, B * E] where there are B blocks. It is part of this
    model, and so has the label holder's learning rate, and no regulariser.
    """

    stackable = True

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
        self.precision = precision
        self.parties = len(sizes)
        self.blocks = self.parties + (own is not None)
        self.received = sum(sizes)  # columns of h that are parties' embeddings
        self.combine = combine
        self.outputs = outputs
        self.layers = nn.ModuleList(layers)
        self.own = own

    def forward(self, h: Tensor) -> Tensor:
        """Outputs [R, C] of rows h; whatever the precision, both are float32."""
        with autocast(self, self.precision):
            return in_float32(self.rest(self.first(h)))

    def first(self, h: Tensor) -> Tensor:
        """The first layer's output before its activation, [R, width]."""
        x = self.combined(self.embedded(h))
        return self.layers[0](x) if len(self.layers) else x

    def first_change(self, columns: slice, change: Tensor) -> Tensor:
        """How `first` changes when one party's ``columns`` of h change so, [R, E] to [R, width]."""
        change = change / self.blocks if self.combine == "mean" else change
        if not len(self.layers):
            return change
        weight = next(self.parameters())
        return change @ (weight[:, columns] if self.combine == "concat" else weight).T

    def rest(self, z: Tensor) -> Tensor:
        """Outputs [R, C] from the first layer's output."""
        for layer in self.layers[1:]:
            z = layer(functional.relu(z))
        return z

    def embedded(self, h: Tensor) -> Tensor:
        """Embeddings of all blocks, [R, B * E], of rows h."""
        if self.own is None:
            return h
        return torch.cat([h[:, : self.received], self.own(h[:, self.received :])], dim=1)

    def combined(self, blocks: Tensor) -> Tensor:
        """What the first layer reads of embeddings [R, B * E]."""
        if self.combine == "concat":
            return blocks
        blocks = blocks.view(len(blocks), self.blocks, blocks.shape[1] // self.blocks)
        return blocks.sum(1) if self.combine == "sum" else blocks.mean(1)

    def spread(self, rows: Tensor) -> Tensor:
        """Gradient rows of the parties, [R, M * E], from those of what the first layer reads."""
        if self.combine == "concat":
            return rows[:, : self.received]
        rows = rows / self.blocks if self.combine == "mean" else rows
        return rows.repeat(1, self.parties)

    def spread_to(self, columns: slice, rows: Tensor) -> Tensor:
        """Gradient rows of one block, whose ``columns`` of [R, B * E] these are, [R, E]."""
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
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Forward and backward, written out, since autograd would take several times as long.

        Under `training.autocast` its products are of that precision, and what it gives float32.

        Parameters
        ----------
        x : what the first layer reads, [R, width].
        targets : `losses.targets` of the rows.
        weights : what each row's loss is multiplied by, [R, 1] or one number.
        loss_gradient : from outputs and targets, as `losses.Loss.gradient`.
        rows, parameters : whether gradients of x, and of the layers, are wanted.
        bound : of the norm of what each row adds to the gradients of the layers' parameters, which
            is found from norms of its inputs and signals alone (Goodfellow, 2015).

        Returns
        -------
        Outputs [R, C], gradient rows of x, and gradients of the layers' parameters.
        """
        layers = cast(list[nn.Linear], list(self.layers))
        inputs = [x]
        for layer in layers[:-1]:
            inputs.append(layer(inputs[-1]).relu_())
        outputs = in_float32(layers[-1](inputs[-1])) if layers else x
        signal = loss_gradient(outputs, targets) * weights
        signals: list[Tensor] = []  # of the layers' outputs, from the first
        for depth in reversed(range(len(layers))):
            signals.insert(0, signal)
            if depth or rows:
                signal = signal @ layers[depth].weight
            if depth:
                signal *= inputs[depth] > 0
        if bound < math.inf and layers:
            squares = [
                each.square().sum(1) * (read.square().sum(1) + 1)
                for each, read in zip(signals, inputs, strict=True)
            ]
            norms = torch.stack(squares).sum(0).sqrt().clamp_min(1e-30)
            kept = (bound / norms).clamp_max(1.0).nan_to_num(nan=0.0)[:, None]
            signals = [torch.where(kept > 0, each * kept, 0.0) for each in signals]
        gradients: list[Tensor] = []
        for each, read in zip(signals, inputs, strict=False) if parameters else ():
            gradients += [each.T @ read, each.sum(0)]
        return outputs, in_float32(signal), list(map(in_float32, gradients))


def check(models: ModelConfig) -> None:
    """Raise `ConfigError` if keys of the top model contradict each other."""
    if models.top == "sum" and models.combine != "concat":
        raise ConfigError(
            "combine has no meaning for top-model = 'sum', which adds the embeddings itself: "
            "leave it out, or choose a linear or mlp top model."
        )


def build_top(
    config: RunConfig, sizes: Sequence[int], outputs: int, own_columns: int = 0
) -> TopModel:
    """The label holder's model, with the initial parameters that the seed gives.

    A bottom model for columns of its own is such as the parties', with the parameters that a party
    after the last would have; an mlp where theirs is a cnn or lstm, since these columns are a
    table.

    Parameters
    ----------
    sizes : embedding size of each party; all the same unless embeddings are concatenated.
    own_columns : how many columns the label holder has itself.
    """
    own = None
    blocks = list(sizes)
    if own_columns:
        blocks.append(embedding_size(config, outputs))
        of_a_table = config.models.bottom not in ("cnn", "lstm")
        own_config = config if of_a_table else config.with_values({"bottom-model": "mlp"})
        own = build_bottom(own_config, len(sizes), (own_columns,), blocks[-1])
    if config.models.top == "sum":
        return TopModel(sizes, "sum", [], outputs, own, config.training.precision)
    inputs = sum(blocks) if config.models.combine == "concat" else blocks[0]
    with seeded(config, -1):
        widths = [inputs, config.models.top_hidden, outputs]
        if config.models.top == "linear":
            widths = [inputs, outputs]
        check_size(
            sum(wide * out for wide, out in pairwise(widths)), "top-hidden or embedding-size"
        )
        layers = [nn.Linear(wide, out) for wide, out in pairwise(widths)]
    combine, precision = config.models.combine, config.training.precision
    return TopModel(sizes, combine, layers, outputs, own, precision)
