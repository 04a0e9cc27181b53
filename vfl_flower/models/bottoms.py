"""Bottom models: a party's, from features to embedding.

A bottom model is a `BottomModel`: layers, between which noise can be put. `registry.BOTTOMS` names
the builders of ours below; a torch module of your own, ``FILE.py:NAME``, is built with the shape of
a sample and the embedding size, and becomes its only layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_flower.config import RunConfig
from vfl_flower.data.samples import Samples
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.models.training import check_size
from vfl_flower.registry import BOTTOMS
from vfl_flower.sections import ModelConfig

Perturb = Callable[[int, Tensor], Tensor]
"""Noise for layer ``l``, counted from 0, given that layer's output before its activation."""

Shape = tuple[int, ...]
Layers = Sequence[tuple[nn.Module, str]]
Bottom = Callable[[Shape, int, ModelConfig], Layers]
"""From the shape of a sample and the embedding size to layers, and the activation after each; that
after the last is configured (`ModelConfig.embedding_activation`), and so is empty here."""

_GENERATOR = Lock()  # torch's own generator is one of all threads, which may each have a party

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class BottomModel(nn.Module):
    """Layers u_l = sigma_l(w_l u_{l-1} + b_l), VAFL Eq. (9), or with noise Z_l inside, Eq. (10)."""

    def __init__(self, layers: Iterable[nn.Module], activations: Iterable[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.activations = [_ACTIVATIONS[name] for name in activations]
        # Whether torch.func.vmap can evaluate it at many parameters at once.
        self.stackable = not any(isinstance(each, nn.RNNBase) for each in self.modules())

    def forward(self, x: Tensor, perturb: Perturb | None = None) -> Tensor:
        """Embeddings [R, E] of features [R, ...]."""
        for depth, (layer, activation) in enumerate(
            zip(self.layers, self.activations, strict=True)
        ):
            z = layer(x)
            x = activation(z if perturb is None else perturb(depth, z))
        return x


def embedding_size(config: RunConfig, outputs: int) -> int:
    """E: as configured; the number of outputs for a top model without parameters."""
    if config.models.top != "sum":
        return config.models.embedding_size or 32
    if config.models.embedding_size not in (None, outputs):
        raise ConfigError(
            f"embedding-size = {config.models.embedding_size} does not fit top-model = 'sum', "
            f"which on this data adds embeddings up to {outputs} outputs: leave it out, or choose "
            "another top model."
        )
    return outputs


def build_bottom(
    config: RunConfig, party: int, sample: Samples | Shape, size: int, secret: bytes = b""
) -> BottomModel:
    """The bottom model of a party, with the initial parameters that (seed, party, secret) give.

    Raises
    ------
    ConfigError
        If the model cannot read samples of this shape, or makes no embeddings of this size.
    """
    models = config.models
    sample_shape: Any = sample if isinstance(sample, tuple) else None
    if isinstance(sample, Tensor):
        sample_shape = tuple(sample.shape)
    last = models.embedding_activation or ("none" if models.top == "sum" else "relu")
    with seeded(config, party, secret):
        found: Any = BOTTOMS.load(models.bottom)
        if models.bottom.partition(":")[0] in BOTTOMS.of:
            try:
                module = found(sample, size)
            except VflError as error:
                raise ConfigError(f"Party {party}'s model {models.bottom!r} {error}") from None
            return BottomModel([module], [models.embedding_activation or "none"])
        if isinstance(found, type) and issubclass(found, nn.Module):
            module = found(sample_shape, size)
            _try_out(module, models.bottom, sample_shape, size)
            return BottomModel([module], [last])
        if models.bottom in BOTTOMS.known:
            _check_size(found, sample_shape, size, models)
        layers = found(sample_shape, size, models)
    return BottomModel([layer for layer, _ in layers], [each or last for _, each in layers])


def _check_size(bottom: Bottom, shape: Shape, size: int, models: ModelConfig) -> None:
    """Raise `ConfigError` if one of ours would not fit into memory; to find out takes none."""
    keys = "bottom-hidden or embedding-size"
    try:
        with torch.device("meta"):
            layers = [layer for layer, _ in bottom(shape, size, models)]
    except RuntimeError:  # not even its numbers can be counted
        check_size(float("inf"), keys)
        raise
    check_size(sum(p.numel() for layer in layers for p in layer.parameters()), keys)


def _try_out(module: nn.Module, name: str, shape: Shape, size: int) -> None:
    """Raise `ConfigError` unless a module makes embeddings of that size from such samples."""
    for buffer, _ in module.named_buffers():
        raise ConfigError(
            f"bottom-model = {name!r} keeps {buffer!r} besides its parameters, which would be lost "
            "between two messages: leave it out, such as by LayerNorm in place of BatchNorm."
        )
    module.eval()  # so that two rows of zeros change nothing in it
    try:
        with torch.no_grad():
            made = tuple(module(torch.zeros(2, *shape)).shape)
    except Exception as error:
        raise ConfigError(
            f"bottom-model = {name!r} cannot read samples of shape {shape}: {error}"
        ) from error
    module.train()
    if made != (2, size):
        raise ConfigError(
            f"bottom-model = {name!r} makes {made} of two samples, which have to become "
            f"embeddings of shape {(2, size)}."
        )


@contextmanager
def seeded(config: RunConfig, who: int, secret: bytes = b"") -> Iterator[None]:
    """Initialise a model from (seed, who, secret), leaving torch's own random state as it was."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        sequence = np.random.SeedSequence([config.training.seed, who + 1])
        words = sequence.generate_state(1, np.uint64)
        torch.manual_seed(int(words[0] >> np.uint64(1)))
        if secret:
            _seed_all_words(secret)
        yield


def _seed_all_words(secret: bytes) -> None:
    """Have torch's generator, an MT19937, follow from all of a secret.

    A seed decides it by 32 bits, which who sees an embedding could try out one by one.
    """
    stream = hashlib.shake_256(b"vfl-flower model|" + secret).digest(4 * 624)
    state = torch.get_rng_state()
    state.view(torch.int64)[3:627] = torch.from_numpy(np.frombuffer(stream, "<u4").astype(np.int64))
    torch.set_rng_state(state)


# --- ours ---------------------------------------------------------------------------------------


def linear(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """One linear layer on all features."""
    return [(nn.Sequential(nn.Flatten(), nn.Linear(_flat(shape), size, models.bottom_bias)), "")]


def mlp(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """One hidden layer."""
    hidden, bias = models.bottom_hidden, models.bottom_bias
    return [
        (nn.Sequential(nn.Flatten(), nn.Linear(_flat(shape), hidden, bias)), "relu"),
        (nn.Linear(hidden, size, bias), ""),
    ]


def cnn(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """Two 3x3 convolutions, each halving images of at least 4 pixels, and a linear layer."""
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"bottom-model = 'cnn' needs images, but a sample has shape {shape}: choose linear or "
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
    """An LSTM over sequences, and a linear layer on its last state."""
    if len(shape) != 2:
        raise ConfigError(
            "bottom-model = 'lstm' needs sequences of shape (time, signals), but a sample has "
            f"shape {shape}: choose linear or mlp."
        )
    hidden = models.bottom_hidden
    return [
        (_LastState(shape[1], hidden), "none"),
        (nn.Linear(hidden, size, models.bottom_bias), ""),
    ]


def binarised(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """A linear layer that uses the signs of its weights only."""
    return [(_Binarised(_flat(shape), size), "")]


def scorecard(shape: Shape, size: int, models: ModelConfig) -> Layers:
    """An integer table, as banks score with."""
    return [(_Scorecard(_flat(shape), size), "")]


BLACK_BOXES = ("binarised", "scorecard")
"""Bottom models without a gradient, which only zeroth-order systems can train."""


def _flat(shape: Shape) -> int:
    return int(np.prod(shape))


class _ChannelsFirst(nn.Module):
    """Images [R, H, W] or [R, H, W, colours] to [R, colours, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """The same images, colours first."""
        return x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)


class _LastState(nn.Module):
    """An LSTM's hidden state after the last time step: [R, T, F] to [R, hidden]."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden state after the last step."""
        states, _ = self.lstm(x)
        last: Tensor = states[:, -1]
        return last


class _Binarised(nn.Module):
    """A linear layer that uses the signs of its weights only: [R, ...] to [R, size]."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, features))
        self.scale = features**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Sums of the features, each with its sign, scaled to the spread of one feature."""
        sums: Tensor = self.scale * functional.linear(x.flatten(1), self.weight.sign())
        return sums


class _Scorecard(nn.Module):
    """An integer table: points for the bin of each feature, added up.

    A feature's bins are cut at -1, 0 and 1 standard deviation; ten points are 1.0.
    """

    edges: Tensor

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(4 * features, size))
        self.register_buffer("edges", torch.tensor([-1.0, 0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Points [R, size] of the rows' bins, in tens."""
        bins = (x.flatten(1)[..., None] > self.edges).sum(-1, keepdim=True)
        hits = (bins == torch.arange(4, device=x.device)).to(x.dtype)
        return hits.flatten(1) @ self.points.round() / 10
