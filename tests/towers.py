"""User models that tests name: ``tests.towers:NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Samples = Any  # a tensor, or a dictionary of them


class Conv(nn.Module):
    """A convolution with BatchNorm, on images [R, H, W]; perhaps with dropout."""

    def __init__(self, sample: Tensor, size: int, width: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        height, across = sample.shape
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(width * height * across, size)

    def forward(self, x: Tensor) -> Tensor:
        z = functional.relu(self.norm(self.first(x[:, None])))
        h: Tensor = self.last(self.drop(z).flatten(1))
        return h


class Normal(nn.Module):
    """A table's columns through BatchNorm, perhaps dropout, and a linear layer."""

    def __init__(self, sample: Tensor, size: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(len(sample))
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(len(sample), size)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(self.drop(self.norm(x)))
        return h


class Half(nn.Module):
    """A hidden layer that does not learn, one that does, and a parameter that has no part."""

    def __init__(self, sample: Tensor, size: int, hidden: int = 6) -> None:
        super().__init__()
        self.fixed = nn.Linear(len(sample), hidden).requires_grad_(False)
        self.last = nn.Linear(hidden, size)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(torch.tanh(self.fixed(x)))
        return h


class Named(nn.Module):
    """Reads two tensors by name, and adds what it makes of them up."""

    def __init__(self, sample: dict[str, Tensor], size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(10, size)
        self.numbers = nn.Linear(len(sample["numbers"]), size)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        h: Tensor = self.words(x["words"]).mean(1) + self.numbers(x["numbers"])
        return h


class Step(nn.Module):
    """Has no gradient, and says so."""

    gradients = False

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, len(sample)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.sign()) / 4


class Silent(Step):
    """Has no gradient, and does not say so."""

    gradients = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def plain(sample: Tensor, size: int, hidden: int = 5, bias: bool = True) -> nn.Module:
    """A function that gives a module."""
    return nn.Sequential(nn.Linear(len(sample), hidden, bias), nn.Tanh(), nn.Linear(hidden, size))


def unlucky(sample: Tensor, size: int) -> nn.Module:
    raise ValueError(f"the first number is {float(sample.flatten()[0])}")


def infinite(sample: Tensor, size: int) -> nn.Module:
    layer = nn.Linear(len(sample), size)
    nn.init.constant_(layer.bias, float("inf"))
    return layer


def fixed(sample: Tensor, size: int) -> nn.Module:
    return nn.Linear(len(sample), size).requires_grad_(False)


def double(sample: Tensor, size: int) -> nn.Module:
    return nn.Linear(len(sample), size).double()


def no_module(sample: Tensor, size: int) -> Any:
    return lambda x: x


class Mixing(nn.Linear):
    """Of a mini-batch, each row has a part in all."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__(len(sample), size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Later(nn.Linear):
    """Makes nonsense once it is trained."""

    what = "shape"

    def __init__(self, sample: Tensor, size: int, what: str = "shape") -> None:
        super().__init__(len(sample), size)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if not self.training:
            return h
        return h[:, 1:] if self.what == "shape" else h * float("nan")


# --- the label holder's -------------------------------------------------------------------------


def linear_top(sizes: Sequence[int], outputs: int) -> nn.Module:
    return nn.Linear(sum(sizes), outputs)


class Top(nn.Module):
    """A hidden layer, with BatchNorm and dropout if asked for."""

    def __init__(
        self,
        sizes: Sequence[int],
        outputs: int,
        width: int = 8,
        norm: bool = False,
        drop: float = 0,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(sum(sizes), width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(width, outputs)

    def forward(self, h: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.drop(functional.relu(self.norm(self.first(h)))))
        return outputs


def wide_top(sizes: Sequence[int], outputs: int) -> nn.Module:
    return nn.Linear(sum(sizes), outputs + 1)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The standard one."""
    if outputs.shape[1] == 1:
        y = labels.to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], y, reduction="none")
    return functional.cross_entropy(outputs, labels, reduction="none")


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return loss(outputs, labels).mean()


def mixed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return loss(outputs - outputs.mean(0), labels)


def figures(outputs: Tensor, labels: Tensor) -> dict[str, Any]:
    hits = ((outputs[:, 0] > 0) == labels) if outputs.shape[1] == 1 else outputs.argmax(1) == labels
    return {"hits": hits.sum(), "nothing": float("nan")}


def no_figures(outputs: Tensor, labels: Tensor) -> Any:
    return {"accuracy": 1.0}


def lazy(sample: Tensor, size: int) -> nn.Module:
    """A layer that finds out how many features there are by its first rows."""
    return nn.LazyLinear(size)


class Writes(nn.Linear):
    """Changes the rows that it reads."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__(len(sample), size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


def balanced(outputs: Tensor, labels: Tensor) -> Tensor:
    """Weights by how many rows of the mini-batch have that class."""
    weights = len(labels) / torch.bincount(labels)[labels]
    return weights * half(outputs, labels)


def half(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the logistic loss."""
    losses = functional.binary_cross_entropy_with_logits(
        outputs[:, 0], labels.float(), reduction="none"
    )
    return losses / 2


def strided(sample: Tensor, size: int) -> nn.Module:
    """A layer whose weights lie column by column."""
    layer = nn.Linear(len(sample), size)
    layer.weight.data = layer.weight.data.t().contiguous().t()
    return layer
