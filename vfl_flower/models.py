"""Bottom models (a party's, features to embedding) and top models (the label holder's)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError

Perturb = Callable[[int, Tensor], Tensor]
"""Noise for layer ``l``, counted from 0, given that layer's output before its activation."""

# Arrays of messages are read-only, and so are the tensors over them: nothing writes to those.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

BLACK_BOXES = ("binarised", "scorecard")
"""Bottom models without a gradient, which only zeroth-order systems can train."""


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
    """An integer table, as banks score with: points for the bin of each feature, added up.

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
    ) -> None:
        super().__init__()
        self.parties = len(sizes)
        self.blocks = self.parties + (own is not None)
        self.received = sum(sizes)  # columns of h that are parties' embeddings
        self.combine = combine
        self.outputs = outputs
        self.layers = nn.ModuleList(layers)
        self.own = own

    def forward(self, h: Tensor) -> Tensor:
        """Outputs [R, C] of rows h."""
        return self.rest(self.first(h))

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


def embedding_size(config: RunConfig, outputs: int) -> int:
    """E: as configured; the number of outputs for a top model without parameters."""
    if config.top_model != "sum":
        return config.embedding_size or 32
    if config.embedding_size not in (None, outputs):
        raise ConfigError(
            f"embedding-size = {config.embedding_size} does not fit top-model = 'sum', which on "
            f"this data adds embeddings up to {outputs} outputs: leave it out, or choose another "
            "top model."
        )
    return outputs


def build_bottom(
    config: RunConfig, party: int, sample_shape: tuple[int, ...], size: int
) -> BottomModel:
    """The bottom model of a party, with the initial parameters that (seed, party) give.

    Raises
    ------
    ConfigError
        If the model cannot read samples of this shape.
    """
    hidden, bias = config.bottom_hidden, config.bottom_bias
    activation = config.embedding_activation or ("none" if config.top_model == "sum" else "relu")
    flat = int(np.prod(sample_shape))
    with _seeded(config, party):
        if config.bottom_model == "linear":
            layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Linear(flat, size, bias))]
            activations = [activation]
        elif config.bottom_model == "mlp":
            layers = [
                nn.Sequential(nn.Flatten(), nn.Linear(flat, hidden, bias)),
                nn.Linear(hidden, size, bias),
            ]
            activations = ["relu", activation]
        elif config.bottom_model == "binarised":
            layers, activations = [_Binarised(flat, size)], [activation]
        elif config.bottom_model == "scorecard":
            layers, activations = [_Scorecard(flat, size)], [activation]
        elif config.bottom_model == "cnn":
            if len(sample_shape) not in (2, 3):
                raise ConfigError(
                    f"bottom-model = 'cnn' needs images, but a sample of {config.dataset} has "
                    f"shape {sample_shape}: choose linear or mlp."
                )
            layers = _convolutions(sample_shape, hidden, size, bias)
            activations = ["relu", "relu"]
            activations.append(activation)
        else:
            if len(sample_shape) != 2:
                raise ConfigError(
                    f"bottom-model = 'lstm' needs sequences of shape (time, signals), but a sample "
                    f"of {config.dataset} has shape {sample_shape}: choose linear or mlp."
                )
            layers = [_LastState(sample_shape[1], hidden), nn.Linear(hidden, size, bias)]
            activations = ["none", activation]
    return BottomModel(layers, activations)


def _convolutions(shape: tuple[int, ...], channels: int, size: int, bias: bool) -> list[nn.Module]:
    """Two 3x3 convolutions, each halving images of at least 4 pixels, and a linear layer."""
    colours = shape[2] if len(shape) == 3 else 1
    to_planes: nn.Module = _ChannelsFirst()
    height, width = shape[0], shape[1]
    layers: list[nn.Module] = []
    for depth, inputs in enumerate((colours, channels)):
        stride = 2 if min(height, width) >= 4 else 1
        convolution = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1)
        layers.append(nn.Sequential(to_planes, convolution) if depth == 0 else convolution)
        height, width = -(-height // stride), -(-width // stride)
    layers.append(nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, size, bias)))
    return layers


class _ChannelsFirst(nn.Module):
    """Images [R, H, W] or [R, H, W, colours] to [R, colours, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """The same images, colours first."""
        return x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)


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
        of_a_table = config.bottom_model not in ("cnn", "lstm")
        own_config = config if of_a_table else replace(config, bottom_model="mlp")
        own = build_bottom(own_config, len(sizes), (own_columns,), blocks[-1])
    if config.top_model == "sum":
        return TopModel(sizes, "sum", [], outputs, own)
    inputs = sum(blocks) if config.combine == "concat" else blocks[0]
    with _seeded(config, -1):
        widths = [inputs, config.top_hidden, outputs]
        if config.top_model == "linear":
            widths = [inputs, outputs]
        layers = [nn.Linear(wide, out) for wide, out in pairwise(widths)]
    return TopModel(sizes, config.combine, layers, outputs, own)


@contextmanager
def _seeded(config: RunConfig, who: int) -> Iterator[None]:
    """Initialise a model from (seed, who), leaving torch's own random state as it was."""
    with torch.random.fork_rng(devices=[]):
        words = np.random.SeedSequence([config.seed, who + 1]).generate_state(1, np.uint64)
        torch.manual_seed(int(words[0] >> np.uint64(1)))
        yield


def loss_per_row(outputs: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Loss of each row, [R], times the weight of its class where classes have weights.

    Logistic for class indices: one output is the logit of class 1, else one a class. For labels
    that are floating-point numbers, half the squared error.
    """
    losses = _loss(outputs, labels, "none")
    return losses if class_weights is None else losses * class_weights[labels]


def targets(labels: Tensor, outputs: int) -> Tensor:
    """What `loss_gradient` compares outputs with, [R, C]: numbers, or classes' probabilities."""
    if outputs == 1:
        return labels.to(torch.float32)[:, None]
    return functional.one_hot(labels, outputs).to(torch.float32)


def loss_gradient(outputs: Tensor, targets: Tensor, squared: bool = False) -> Tensor:
    """The gradient [R, C] of the sum of `loss_per_row`, unweighted, with respect to the outputs.

    ``squared`` : whether targets are numbers, so that it is the squared error's.
    """
    if squared:
        return outputs - targets
    if outputs.shape[1] == 1:
        return outputs.sigmoid() - targets
    # torch's own softmax takes six times as long for many rows of few columns.
    weights = (outputs - outputs.amax(1, keepdim=True)).exp_()
    return weights.div_(weights.sum(1, keepdim=True)).sub_(targets)


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of `loss_per_row`, unweighted, a scalar."""
    return _loss(outputs, labels, "mean")


def _loss(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if labels.is_floating_point():
        return functional.mse_loss(outputs[:, 0], labels, reduction=reduction) / 2
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.to(outputs.dtype), reduction=reduction
        )
    return functional.cross_entropy(outputs, labels, reduction=reduction)


def penalty(config: RunConfig, w: Tensor) -> Tensor:
    """The regulariser's terms, elementwise: g(w) is their sum. l2, or AsyREVEL Eq. (22)."""
    half = 0.5 * w.square()
    return half if config.regulariser == "l2" else half / (1 + w.square())


def penalty_gradient(config: RunConfig, w: Tensor) -> Tensor:
    """The gradient of `penalty`, elementwise."""
    return w if config.regulariser == "l2" else w / (1 + w.square()).square()


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are linear in the gradients, so that several can be taken as one."""
    return isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0


def step_along(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """One optimizer step along these gradients; plain SGD without torch's overhead."""
    group = optimizer.param_groups[0]
    if is_plain_sgd(optimizer):
        with torch.no_grad():
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.add_(gradient, alpha=-group["lr"])
        return
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def build_optimizer(config: RunConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The configured torch optimizer."""
    parameters = list(model.parameters())
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    momentum = 0.9 if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def choose_device(config: RunConfig) -> torch.device:
    """The GPU where there is one, unless the configuration says otherwise."""
    if config.device != "auto":
        try:
            return torch.empty(0, device=config.device).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device = {config.device!r} is not to be had here.") from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy named arrays into a model's parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(as_tensor(arrays[name]))


def count(model: nn.Module) -> int:
    """Numbers that a model is made of."""
    return sum(p.numel() for p in model.parameters())


def flat(model: nn.Module) -> Tensor:
    """A model's parameters as one vector."""
    return torch.cat([torch.zeros(0), *(p.detach().cpu().reshape(-1) for p in model.parameters())])


def load_flat(model: nn.Module, vector: Tensor) -> None:
    """Copy such a vector into a model's parameters."""
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def model_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """A model's parameters as named arrays, which share its memory where it is on the CPU."""
    return {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> dict[str, NDArray[Any]]:
    """The state of a torch optimizer, named as "parameter number.name"."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}.{name}": value.cpu().numpy()
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Take over the state that `optimizer_arrays` gave."""
    optimizer.state.clear()
    parameters = optimizer.param_groups[0]["params"]
    for key, array in arrays.items():
        number, name = key.split(".", 1)
        parameter = parameters[int(number)]
        device = "cpu" if array.ndim == 0 else parameter.device  # torch keeps step counts there
        optimizer.state[parameter][name] = as_tensor(array).clone().to(device)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over an array that may be read-only, for reading only."""
    return torch.from_numpy(array)
