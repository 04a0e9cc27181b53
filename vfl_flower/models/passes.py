"""Passes over the rows of a window, also by models that mix the rows of a mini-batch.

Our layers look at each row alone, so one pass serves a whole window. A user's model may normalise
over its mini-batch, use dropout and keep running statistics. So it is passed one step after the
other, as if it trained on them one by one. Random numbers of a step follow from a key, so that a
repeated pass gives the same. Of several passes over a mini-batch, only one updates the buffers.
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
    """Noise inside a pass: for a window, or for one of its steps."""

    def of_step(self, step: int) -> Any:
        """Return the same noise for a pass over the rows of one step of the window."""


def window(
    model: nn.Module,
    x: Samples,
    lengths: Sequence[int],
    noise: Noise | None = None,
    key: bytes = b"",
    learns: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of a window's rows, [R, ...], and the same by pass.

    There is one pass, or with ``by_step`` of the model one for each step.
    """
    if not model.by_step:
        outputs = model(x, noise) if noise else model(x)
        return outputs, [outputs]
    parts = [
        one(model, part, step, noise.of_step(step) if noise else None, key, learns)
        for step, part in enumerate(samples.split(x, lengths))
    ]
    return torch.cat(parts), parts


def one(
    model: nn.Module,
    x: Samples,
    step: int,
    noise: Any = None,
    key: bytes = b"",
    learns: bool = True,
    parameters: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the outputs of the rows of one step of a window.

    Parameters
    ----------
    noise : for that step.
    key : random numbers follow from it and the step.
    learns : whether the pass updates buffers, such as running statistics.
    parameters : to use in place of the model's.
    """
    if model.by_step:  # a user's model may write to what it reads
        x = samples.each(x, torch.clone)
    given = (x, noise) if noise else (x,)
    outputs: Tensor
    with repeatable(model, key, step, learns):
        outputs = model(*given) if parameters is None else functional_call(model, parameters, given)
    return outputs


def pair(
    model: nn.Module, first: Tensor, second: Tensor, lengths: Sequence[int], key: bytes
) -> tuple[Tensor, Tensor]:
    """Return the outputs [R, ...] of a window's rows in two cases, by the same random numbers.

    Neither pass updates buffers.
    """
    of_first, _ = window(model, first, lengths, key=key, learns=False)
    of_second, _ = window(model, second, lengths, key=key, learns=False)
    return of_first, of_second


def repeatable(
    model: nn.Module, key: bytes, step: int = 0, learns: bool = True
) -> AbstractContextManager[None]:
    """Have torch's random numbers follow from key and step, and decide whether buffers change.

    It does nothing for our models, which use neither.
    """
    return _repeatable(model, key, step, learns) if model.by_step else nullcontext()


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
            if name in kept and kept[name].shape == buffer.shape:  # else this pass made it
                buffer.data.copy_(kept[name])  # unseen by autograd, which backward passes allow
