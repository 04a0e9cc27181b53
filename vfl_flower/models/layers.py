"""Bottom models of this project, which `config.plugins.BOTTOMS` lists by name.

Each model is a builder. It maps the shape of a sample and the embedding size to layers, each with
its activation. The last activation is empty: `ModelConfig.embedding_activation` sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import ModelConfig

Shape = tuple[int, ...]
Layers = Sequence[tuple[nn.Module, str]]
Builder = Callable[[Shape, int, ModelConfig], Layers]


def black_box(builder: Builder) -> Builder:
    """Mark a builder of layers without gradients, for zeroth-order systems only."""
    setattr(builder, "gradients", False)  # noqa: B010  (mypy knows no attributes of functions)
    return builder


def linear(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return one linear layer on all features."""
    return [(nn.Sequential(nn.Flatten(), nn.Linear(_flat(shape), size, models.bottom_bias)), "")]


def mlp(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return a hidden layer with ReLU, and a linear layer."""
    hidden, bias = models.bottom_hidden, models.bottom_bias
    return [
        (nn.Sequential(nn.Flatten(), nn.Linear(_flat(shape), hidden, bias)), "relu"),
        (nn.Linear(hidden, size, bias), ""),
    ]


def cnn(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return two 3x3 convolutions and a linear layer.

    A convolution halves height and width if both are at least 4 pixels.
    """
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"bottom-model = 'cnn' needs images, but a sample has shape {shape}. Choose linear or "
            "mlp."
        )
    channels = models.bottom_hidden
    colours = shape[2] if len(shape) == 3 else 1
    height, width = shape[0], shape[1]
    layers: list[tuple[nn.Module, str]] = []
    for depth, inputs in enumerate((colours, channels)):
        stride = 2 if min(height, width) >= 4 else 1
        convolution = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1)
        first = nn.Sequential(_ChannelsFirst(), convolution)
        layers.append((convolution if depth else first, "relu"))
        height, width = -(-height // stride), -(-width // stride)
    last = nn.Linear(channels * height * width, size, models.bottom_bias)
    return [*layers, (nn.Sequential(nn.Flatten(), last), "")]


def lstm(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return an LSTM over sequences, and a linear layer on its last state."""
    if len(shape) != 2:
        raise ConfigError(
            "bottom-model = 'lstm' needs sequences of shape (time, signals), but a sample has "
            f"shape {shape}. Choose linear or mlp."
        )
    hidden = models.bottom_hidden
    return [
        (_LastState(shape[1], hidden), "none"),
        (nn.Linear(hidden, size, models.bottom_bias), ""),
    ]


@black_box
def binarised(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return a linear layer that uses the signs of its weights only."""
    return [(_Binarised(_flat(shape), size), "")]


@black_box
def scorecard(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return an integer scorecard, as banks use."""
    return [(_Scorecard(_flat(shape), size), "")]


def _flat(shape: Shape) -> int:
    return int(np.prod(shape))


class _ChannelsFirst(nn.Module):
    """Convert images [R, H, W] or [R, H, W, colours] to [R, colours, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same images, colours first."""
        return x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)


class _LastState(nn.Module):
    """Map sequences [R, T, F] to an LSTM's last hidden state [R, hidden]."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state after the last step, [R, hidden]."""
        try:
            states, _ = self.lstm(x)
        except RuntimeError as error:
            if "primitive descriptor" not in str(error):
                raise
            raise ConfigError(
                "precision = 'bfloat16' does not work with bottom-model = 'lstm' on this processor"
                ". Leave precision out, or use a GPU."
            ) from None
        last: Tensor = states[:, -1]
        return last


class _Binarised(nn.Module):
    """Map [R, ...] to [R, size] linearly, by the signs of the weights only."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, features))
        self.scale = features**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return signed sums of the features, scaled to the spread of one feature."""
        sums: Tensor = self.scale * functional.linear(x.flatten(1), self.weight.sign())
        return sums


class _Scorecard(nn.Module):
    """Add up integer points for the bin of each feature.

    The cuts between bins are at -1, 0 and 1 standard deviation. Ten points make 1.0.
    """

    edges: Tensor

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(4 * features, size))
        self.register_buffer("edges", torch.tensor([-1.0, 0.0, 1.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return points [R, size] of the rows' bins, divided by ten."""
        bins = (x.flatten(1)[..., None] > self.edges).sum(-1, keepdim=True)
        hits = (bins == torch.arange(4, device=x.device)).to(x.dtype)
        return hits.flatten(1) @ self.points.round() / 10
