"""Passes over the rows of a window, also by models in which rows of a mini-batch belong together.

Layers of ours look at each row alone, and one pass serves a whole window. A model of one's own may
normalise over its mini-batch, drop at random and keep running statistics. So it is passed one step
after the other, as if it were trained on them one by one; what is random in a step follows from a
key, so that a pass that is repeated gives the same; and of passes over the same mini-batch one
alone lets buffers learn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vfl_flower.data import samples
from vfl_flower.data.augmentation import GENERATOR
from vfl_flower.data.samples import Samples


class Noise(Protocol):
    """Noise inside a pass: of a window, or of one of its steps."""

    def of_step(self, step: int) -> Any:
        """The same noise, for a pass over the rows of one step of the window."""


def by_step(model: nn.Module) -> bool:
    """Whether rows of a step are to be passed together, and those of two steps apart."""
    return bool(getattr(model, "by_step", False))


def window(
    model: nn.Module,
    x: Samples,
    lengths: Sequence[int],
    noise: Noise | None = None,
    key: bytes = b"",
    learns: bool = True,
) -> list[Tensor]:
    """Outputs of a window's rows: of all, [R, ...], or where steps are passed apart of each."""
    if not by_step(model):
        return [model(x, noise) if noise else model(x)]
    parts = samples.split(x, lengths)
    return [
        one(model, part, step, noise.of_step(step) if noise else None, key, learns)
        for step, part in enumerate(parts)
    ]


def one(
    model: nn.Module,
    x: Samples,
    step: int,
    noise: Any = None,
    key: bytes = b"",
    learns: bool = True,
    parameters: dict[str, Tensor] | None = None,
) -> Tensor:
    """Outputs of the rows of one step of a window, perhaps at other parameters.

    Parameters
    ----------
    noise : of that step.
    key : what is random follows from it and the step.
    learns : whether buffers do, such as running statistics.
    """
    if by_step(model):  # which may write to what it reads
        x = samples.each(x, torch.clone)
    given = (x, noise) if noise else (x,)
    outputs: Tensor
    with repeatable(model, key, step, learns):
        outputs = model(*given) if parameters is None else functional_call(model, parameters, given)
    return outputs


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """The outputs of all rows of a `window`, [R, ...]."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))


def pair(
    model: nn.Module, first: Tensor, second: Tensor, lengths: Sequence[int], key: bytes
) -> tuple[Tensor, Tensor]:
    """Outputs [R, ...] of a window's rows as they are in two cases, by the same random numbers.

    Buffers do not learn.
    """
    of_first = window(model, first, lengths, key=key, learns=False)
    of_second = window(model, second, lengths, key=key, learns=False)
    return joined(of_first), joined(of_second)


def repeatable(
    model: nn.Module, key: bytes, step: int = 0, learns: bool = True
) -> AbstractContextManager[None]:
    """Have torch's random numbers follow from key and step, and buffers learn or stay as they are.

    Nothing of it for models of ours, which need neither.
    """
    return _repeatable(model, key, step, learns) if by_step(model) else nullcontext()


@contextmanager
def _repeatable(model: nn.Module, key: bytes, step: int, learns: bool) -> Iterator[None]:
    kept = {} if learns else {name: each.clone() for name, each in model.named_buffers()}
    cuda = {p.device for p in model.parameters() if p.device.type == "cuda"}
    seed = hashlib.sha256(key + f"|random|{step}".encode()).digest()
    try:
        with GENERATOR, torch.random.fork_rng(devices=cuda):
            torch.manual_seed(int.from_bytes(seed[:8], "big") >> 1)
            yield
    finally:
        for name, buffer in model.named_buffers() if kept else ():
            if name in kept and kept[name].shape == buffer.shape:  # else it was made by this pass
                buffer.data.copy_(kept[name])  # unseen by autograd, which backward passes allow
