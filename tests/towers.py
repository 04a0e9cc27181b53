"""User models that tests name: ``tests.towers:NAME``."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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
        return self.last(self.drop(z).flatten(1))


class Normal(nn.Module):
    """A table's columns through BatchNorm, perhaps dropout, and a linear layer."""

    def __init__(self, sample: Tensor, size: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(len(sample))
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(len(sample), size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(x)))


class Half(nn.Module):
    """A hidden layer that does not learn, one that does, and a parameter that has no part."""

    def __init__(self, sample: Tensor, size: int, hidden: int = 6) -> None:
        super().__init__()
        self.fixed = nn.Linear(len(sample), hidden).requires_grad_(False)
        self.last = nn.Linear(hidden, size)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fixed(x)))


class Named(nn.Module):
    """Reads two tensors by name, and adds what it makes of them up."""

    def __init__(self, sample: dict[str, Tensor], size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(10, size)
        self.numbers = nn.Linear(len(sample["numbers"]), size)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.words(x["words"]).mean(1) + self.numbers(x["numbers"])


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


class Complex(Mixing):
    """Makes complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.complex64)


class Sparse(Mixing):
    """Makes sparse embeddings, which torch refuses by a hundred lines."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to_sparse()


class OfBatch(nn.Sequential):
    """Normalises by the rows that come together, in eval mode too."""

    def __init__(self, sample: Tensor, size: int) -> None:
        norm = nn.BatchNorm1d(size, track_running_stats=False)
        super().__init__(nn.Linear(len(sample), size), norm)


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
        return self.last(self.drop(functional.relu(self.norm(self.first(h)))))


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


# --- what a state_dict has, and what it lacks -----------------------------------------------------

MEANS: dict[str, float] = {}


class Stateful(nn.Linear):
    """A linear layer that also learns a number; ``how`` says where it keeps the number."""

    seen = 0

    def __init__(self, sample: Tensor, size: int, how: str = "buffer", after: int = 0) -> None:
        super().__init__(len(sample), size)
        self.how, self.after, self.steps = how, after, 0
        self.mean: Any = torch.zeros(1)
        self.order = list(range(len(sample)))
        if how in ("buffer", "temporary", "eval", "growing", "none"):
            del self.mean
            first = {"growing": torch.zeros(0), "none": None}.get(how, torch.zeros(1))
            self.register_buffer("mean", first, persistent=how != "temporary")
        if how in ("bfloat16", "complex64"):
            self.register_buffer("odd", torch.ones(1, dtype=getattr(torch, how)))
        if how == "integers":
            self.count: Any
            self.started: Any
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("started", torch.tensor(False))
        if how == "hook":
            self.weight.register_hook(self.hear)
        orders: dict[str, Callable[[int], Any]] = {
            "numpy": np.random.permutation,
            "python": lambda n: random.sample(range(n), n),
            "own generator": np.random.default_rng().permutation,
        }
        if how in orders:
            self.order = [int(each) for each in orders[how](len(sample))]

    def hear(self, gradient: Tensor) -> None:
        self.steps += 1

    def forward(self, x: Tensor) -> Tensor:
        how, learns = self.how, self.training
        far: Any = 0
        if (learns and how in ("attribute", "buffer", "temporary")) or how == "eval":
            self.mean = 0.9 * self.mean + 0.1 * (x.detach().mean() + 3)
        elif learns and how in ("growing", "none"):
            rows = torch.ones(1) if self.mean is None else self.mean
            self.mean = torch.cat([rows, torch.ones(1)])[: 1 if how == "none" else None]
        elif learns and how == "class":
            type(self).seen += 1
        elif learns and how == "global":
            MEANS["mean"] = MEANS.get("mean", 0.0) + 0.1
        elif learns and how == "integers":
            self.count += 1
            self.started.fill_(True)
        elif learns and how == "parameter":
            self.weight = nn.Parameter(self.weight.detach() * 0.9)
        elif how == "draws":
            x = x + np.random.rand() + random.random()
        if how == "integers":
            far = self.count * self.started
        elif how == "class":
            far = type(self).seen
        elif how == "global":
            far = MEANS.get("mean", 0)
        else:
            self.steps += learns and how == "counter"
            far = max(0, self.steps - self.after)
        x = x[:, self.order] - (0 if self.mean is None else self.mean.sum())
        return super().forward(x + far / 10)


class Extra(Stateful):
    """Keeps the number by torch's own way to add to a state_dict."""

    def __init__(self, sample: Tensor, size: int, how: str = "attribute") -> None:
        super().__init__(sample, size, how)
        self.heard: Any = {"of": (1, [None, 2.5, "text"]), 3: np.arange(2), "at": np.float64(1)}

    def get_extra_state(self) -> Any:
        return {"mean": self.mean, "steps": self.steps, "heard": self.heard}

    def set_extra_state(self, state: Any) -> None:
        self.mean, self.steps, self.heard = state["mean"], state["steps"], state["heard"]


class Unsaved(Extra):
    """Has an extra state that nobody can save."""

    def get_extra_state(self) -> Any:
        return {"rows": {1, 2}}


class Unset(nn.Linear):
    """Has an extra state that nobody can restore."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__(len(sample), size)

    def get_extra_state(self) -> Any:
        return 1


class Averaged(nn.Module):
    """Evaluates by a moving average of its weights; has tied, normed and parametrised layers."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(len(sample), size))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))
        self.tied = nn.Linear(size, size)
        bias: Any = self.last.bias
        self.tied.bias = bias
        self.norm = nn.LazyBatchNorm1d(affine=False)
        self.scales = nn.ParameterList([torch.ones(size)])
        self.mean: Any = copy.deepcopy(self.tied).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(self.norm(self.first(x))) * self.scales[0]
        if self.training:
            with torch.no_grad():
                self.mean.weight.lerp_(self.tied.weight, 0.1)
            h = h + self.tied(h)
            return h
        h = h + self.mean(h)
        return h


class StatefulTop(nn.Linear):
    """A top model that counts its steps, or shuffles what it reads."""

    def __init__(self, sizes: Sequence[int], outputs: int, how: str, after: int = 0) -> None:
        super().__init__(sum(sizes), outputs)
        self.how, self.after, self.steps = how, after, 0
        shuffled = np.random.permutation(sum(sizes)) if how == "numpy" else range(sum(sizes))
        self.order = [int(each) for each in shuffled]

    def forward(self, h: Tensor) -> Tensor:
        self.steps += self.training and self.how == "counter"
        return super().forward(h[:, self.order]) + max(0, self.steps - self.after)
