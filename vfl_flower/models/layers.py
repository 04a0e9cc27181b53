"""Bottom models of this project, which `config.plugins.BOTTOMS` lists by name.

Each model is a builder. It maps the shape of a sample and the embedding size to layers, each with
its activation. The last activation is empty: `ModelConfig.embedding_activation` sets it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, cast

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
    vars(builder)["gradients"] = False  # mypy knows no attributes of functions
    return builder


def linear(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return one linear layer on all features."""
    return [(nn.Sequential(nn.Flatten(), Linear(_flat(shape), size, models.bottom_bias)), "")]


def mlp(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return a hidden layer with ReLU, and a linear layer."""
    hidden, bias = models.bottom_hidden, models.bottom_bias
    return [
        (nn.Sequential(nn.Flatten(), Linear(_flat(shape), hidden, bias)), "relu"),
        (Linear(hidden, size, bias), ""),
    ]


def tabular(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return parallel members on piecewise-linear encodings of numbers, for tables.

    Gorishniy et al. (2022), section 3.2.1, describe the encoding. The members share their large
    weights, as in TabM (Gorishniy et al., 2025).
    """
    features, hidden, bias = _flat(shape), models.bottom_hidden, models.bottom_bias
    return [
        (EncodedMembers(features, hidden, bias), "relu"),
        (MeanOfMembers(hidden, size, bias), ""),
    ]


def tabular_or_mlp(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return `tabular` for a row of a table that is not too wide, else `mlp`."""
    is_table = len(shape) == 1 and shape[0] <= _WIDEST
    return (tabular if is_table else mlp)(shape, size, models)


def cnn(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Return two 3x3 convolutions and a linear layer.

    A convolution halves height and width if both are at least 4 pixels.
    """
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"bottom-model = 'cnn' needs images, but a sample has shape {shape}. Choose linear or "
            "mlp."
        )
    channels, (height, width) = models.bottom_hidden, shape[:2]
    colours = shape[2] if len(shape) == 3 else 1
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


# --- monotone layers ------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A linear layer that `rise` can make monotone."""


class MonotoneLinear(Linear):
    """A linear layer that applies the signs of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs [R, outputs] of rows [R, inputs]."""
        return functional.linear(x, applied(self), self.bias)


def applied(layer: nn.Module, name: str = "weight", gradient: Tensor | None = None) -> Tensor:
    """Return a weight as its layer applies it: |w| or -|w| where `rise` has given it a sign.

    With a ``gradient`` of the applied weight, return that of the weight. At 0 the slope is not 0.
    """
    weight: Tensor = getattr(layer, name)
    found = weight if gradient is None else gradient
    if (signs := vars(layer).get("signs")) is None:
        return found
    of = signs[name].to(weight.device)
    turned = (of < 0) != ((of != 0) & (weight.detach() < 0))
    return torch.where(turned, -found, found)


def turns(units: int) -> Tensor:
    """Return the directions of a monotone layer's units: 1, -1, 1, and so on."""
    return 1.0 - 2 * (torch.arange(units) % 2)


def rise(layers: Iterable[nn.Module], into: Tensor) -> None:
    """Make the first output rise with inputs of sign 1, and fall with inputs of sign -1, [inputs].

    Every weight on a path from such an input gets a sign, so this holds at any parameters. Inputs
    of sign 0 stay free. Units of each layer rise and fall in turn (`turns`), so the function can be
    convex and concave (Runje and Shankaranarayana, 2023, section 3).
    """
    every = [m for layer in layers for m in layer.modules() if [*m.parameters(recurse=False)]]
    for each in every:
        if isinstance(each, PiecewiseLinear):  # it rises
            continue
        if isinstance(each, Linear):
            each.__class__ = MonotoneLinear
        elif not isinstance(each, Members | MeanOfMembers):
            raise ConfigError(
                "monotonic columns need a linear, mlp or tabular model: others cannot be monotone. "
                "Choose one, or leave monotonic out."
            )
        members = isinstance(each, Members)
        into = torch.cat([into, into.repeat_interleave(_BINS)]) if members else into
        out = turns(len(cast(Tensor, each.shared if members else each.weight)))
        signs = {"shared" if members else "weight": out[:, None] * into}
        vars(each)["signs"] = signs | {"into": into.abs(), "out_of": out.abs()}
        into = out.repeat(_MEMBERS) if members else out


_BINS = 32  # of each number; a number with fewer values fills fewer
_MEMBERS = 8
_AT_ONCE = 2**22  # numbers inside a tabular model: 16 MB
_WIDEST = 128  # numbers in a row that `tabular_or_mlp` encodes


class PiecewiseLinear(nn.Module):
    """Encode numbers by bins between the quantiles of the training rows.

    Each bin has one output. It is 0 below the bin, 1 above it, and rises linearly inside. The
    numbers themselves stay in front of the outputs: [R, F] becomes [R, F + F * bins].
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        # A parameter without a gradient: checkpoints hold it, and nothing trains it.
        # NaN before `learn`, so that no model trains with bins that nothing has learnt.
        edges = torch.full((features, _BINS + 1), torch.nan)
        self.edges = nn.Parameter(edges, requires_grad=False)

    def learn(self, rows: Tensor) -> None:
        """Take the edges of the bins from training rows [N, ...]; without rows, bins stay empty."""
        if not len(rows):
            self.edges.data.zero_()
            return
        shares = np.linspace(0.0, 1.0, _BINS + 1)
        quantiles = np.quantile(rows.flatten(1).numpy(), shares, axis=0).astype(np.float32)
        for edges, found in zip(self.edges, quantiles.T, strict=True):
            distinct = np.unique(found)
            edges.data.fill_(float(distinct[-1]))  # the other bins have no width
            edges.data[: len(distinct)] = torch.from_numpy(distinct)

    def forward(self, x: Tensor, columns: slice = slice(None)) -> Tensor:
        """Return the numbers of these columns and their bins' outputs, [R, F + F * bins]."""
        low, high = self.edges[columns, :-1], self.edges[columns, 1:]
        wide = high > low
        inside = (x[..., None] - low) / torch.where(wide, high - low, 1.0)
        return torch.cat([x, (inside.clamp(0.0, 1.0) * wide).flatten(1)], 1)


class Members(nn.Module):
    """Map encodings [R, F + F * bins] to the hidden units of each member, [R, members, hidden].

    Each member scales the shared layer's inputs and outputs by its own factors (BatchEnsemble, Wen
    et al., 2020). At first the bins do not count, and all members are the first layer of an mlp.
    """

    signs: ClassVar[Mapping[str, Tensor] | None] = None  # `rise` sets them

    def __init__(self, features: int, hidden: int, bias: bool) -> None:
        super().__init__()
        first, bins = nn.Linear(features, hidden, bias), features * _BINS
        self.shared = nn.Parameter(functional.pad(first.weight.detach(), (0, bins)))
        self.into = nn.Parameter(torch.ones(_MEMBERS, features + bins))
        # Signs that differ make members differ. They need not be secret, and no seed draws them. Of
        # signs that cancel, the first gradient would be rounding errors, which Adam magnifies.
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (_MEMBERS, bins))
        signs[0, signs.sum(0) == 0] *= -1
        self.into.data[:, features:] = torch.from_numpy(signs)
        self.out_of = nn.Parameter(torch.ones(_MEMBERS, hidden))
        self.bias = nn.Parameter(first.bias.detach().repeat(_MEMBERS, 1)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden units before their activation, [R, members, hidden]."""
        own: Iterable[Tensor] = (self.into, self.shared, self.out_of)
        if self.signs:
            own = (applied(self, name) for name in ("into", "shared", "out_of"))
        into, shared, out_of = own
        z = functional.linear(x[:, None] * into, shared) * out_of
        return z if self.bias is None else z + self.bias


class EncodedMembers(nn.Sequential):
    """Encode rows [R, F], and map them to the hidden units of each member."""

    def __init__(self, features: int, hidden: int, bias: bool) -> None:
        encoder, members = PiecewiseLinear(features), Members(features, hidden, bias)
        super().__init__(nn.Flatten(), encoder, members)
        numbers = _MEMBERS * (features * (1 + _BINS) + hidden)  # of a row, inside the layer
        self.rows_at_once = max(1, _AT_ONCE // numbers)  # for `BottomModel.rows_at_once`


class MeanOfMembers(nn.Module):
    """Map the hidden units of members [R, members, hidden] to their mean output [R, size].

    All members begin as the same last layer of an mlp.
    """

    signs: ClassVar[Mapping[str, Tensor] | None] = None

    def __init__(self, hidden: int, size: int, bias: bool) -> None:
        super().__init__()
        last = nn.Linear(hidden, size, bias)
        self.weight = nn.Parameter(last.weight.detach().repeat(1, _MEMBERS))
        self.bias = last.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the members' outputs, [R, size]."""
        weight = applied(self) if self.signs else self.weight
        return functional.linear(x.flatten(1) / _MEMBERS, weight, self.bias)


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
