"""Augmentation: how a party changes samples, in training passes only.

An augmentation is a function of samples (`data.samples`) and a torch generator. It returns as many
samples of the same shape. The party's secret and the message seed the generator, so that a repeated
pass uses the same samples. `config.plugins.AUGMENTATIONS` names the built-in ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples

Augment = Callable[[Samples, Generator], Samples]

_GENERATORS = Lock()  # one default generator serves all threads, and each may have a party
_MARGIN = 4


@contextmanager
def seeded(seed: int, secret: bytes = b"", devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seed the default generators of torch, NumPy and Python inside the context.

    secret : seeds NumPy and Python too.
    devices : GPUs whose generators are restored at the end, as the others are.
    """
    key = hashlib.sha512(f"{seed}|".encode() + secret).digest()
    with _GENERATORS, torch.random.fork_rng(devices=list(devices)):
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            # Not torch.manual_seed: it notes the stack for each kind of device that is not in use.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(np.frombuffer(key, np.uint32))
            random.seed(key)
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def augmented(augment: Augment, x: Samples, secret: bytes, exchange: int) -> Samples:
    """Return augmented samples, the same each time. The input stays unchanged.

    Raise `VflError` if it changes the number, shape or type of samples. The text is the end of a
    sentence.
    """
    if augment is none:
        return x
    key = hashlib.sha256(secret + f"|augment|{exchange}".encode()).digest()
    generator = Generator().manual_seed(int.from_bytes(key[:8], "little"))
    with seeded(generator.initial_seed() >> 1):  # some use a default generator
        made = augment(samples.each(x, torch.clone), generator)
    if _kind(made) != _kind(x):
        raise VflError(
            "has an augmentation that changes the shape or the type of samples. Correct it."
        )
    return made


def _kind(x: Samples) -> dict[str, tuple[Any, ...]]:
    named = x if isinstance(x, dict) else {"": x}
    return {name: (each.dtype, *each.shape) for name, each in named.items()}


def none(x: Samples, generator: Generator) -> Samples:
    """Return the samples unchanged."""
    return x


def crop_flip(x: Samples, generator: Generator) -> Samples:
    """Shift images by up to 4 pixels each way, and mirror half of them.

    Images are [R, H, W] or [R, H, W, colours]. Pixels from outside are zero, the mean (He et al.,
    2016, Sec. 4.2).
    """
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        raise ConfigError(
            "augment = 'crop-flip' is for images. Set augment='none' in the node configuration of "
            "a party without images."
        )
    rows, height, width = x.shape[:3]
    beside = (0, 0) * (x.dim() - 3)
    padded = functional.pad(x, (*beside, *[_MARGIN] * 4))
    down, across = torch.randint(0, 2 * _MARGIN + 1, (2, rows, 1), generator=generator)
    mirrored = torch.rand(rows, 1, generator=generator) < 0.5
    y, to = torch.arange(height), torch.arange(width)
    to = torch.where(mirrored, to.flip(0), to) + across
    which = torch.arange(rows)[:, None, None]
    moved: Tensor = padded[which, (y + down)[:, :, None], to[:, None, :]]
    return moved
