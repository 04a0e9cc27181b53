"""Forward passes over a window, also for models that mix the rows of a mini-batch.

Layers of this project read each row alone, so one pass serves a whole window. A user's model may
normalise over its mini-batch, use dropout and keep running statistics. It therefore makes one pass
for each step, in order. A key decides the random numbers of a step, so a repeated pass has the same
result. Only one of several passes over a mini-batch updates the buffers.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models.training import extra_states, load_extra_states


class Noise(Protocol):
    """Noise inside a pass over a window, or over one of its steps."""

    def of_step(self, step: int) -> Any:
        """Return the part of this noise for the rows of one step of the window."""


def window(
    model: nn.Module,
    x: Samples,
    lengths: Sequence[int],
    noise: Noise | None = None,
    key: bytes = b"",
    learns: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of a window's rows, [R, ...], and of each pass: one, or one a step."""
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
    """Return the outputs of one step's rows. Buffers change if the model ``learns``."""
    given = (x, noise) if noise else (x,)
    outputs: Tensor
    with repeatable(model, key, step, learns):
        outputs = model(*given) if parameters is None else functional_call(model, parameters, given)
    return outputs


def pair(
    model: nn.Module, first: Tensor, second: Tensor, lengths: Sequence[int], key: bytes
) -> tuple[Tensor, Tensor]:
    """Return the outputs [R, ...] of two versions of a window's rows, with equal random numbers."""
    of_first, _ = window(model, first, lengths, key=key, learns=False)
    of_second, _ = window(model, second, lengths, key=key, learns=False)
    return of_first, of_second


def repeatable(
    model: nn.Module, key: bytes, step: int = 0, learns: bool = True
) -> AbstractContextManager[None]:
    """Seed random draws inside the context; restore buffers and extra states unless it ``learns``.

    It does nothing for models of this project, which have no random draws and no such buffers.
    """
    return _repeatable(model, key, step, learns) if model.by_step else nullcontext()


@contextmanager
def _repeatable(model: nn.Module, key: bytes, step: int, learns: bool) -> Iterator[None]:
    kept = {} if learns else {name: each.clone() for name, each in model.named_buffers()}
    extra = {} if learns else extra_states(model)
    first = next(model.parameters(), None)  # all others are on the same device
    cuda = [first.device] if first is not None and first.device.type == "cuda" else []
    seed = hashlib.sha256(key + f"|random|{step}".encode()).digest()
    try:
        with samples.seeded(int.from_bytes(seed[:8], "big") >> 1, devices=cuda):
            yield
    finally:
        for name, buffer in model.named_buffers() if kept else ():
            if name in kept and kept[name].shape == buffer.shape:  # else this pass created it
                buffer.data.copy_(kept[name])  # .data, so that a later backward pass still works
        if extra:
            load_extra_states(model, extra)
