"""Augmentation: what a party does to samples in training passes alone.

A function of samples (`data.samples`) and a torch generator, which gives as many samples of the
same shape. The generator follows from the party's secret and the message, so that when a pass is
repeated it is of the same samples. `config.plugins.AUGMENTATIONS` names ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples

Augment = Callable[[Samples, Generator], Samples]

GENERATOR = Lock()  # torch's own generator is one of all threads, which may each have a party
_MARGIN = 4


def generator_of(secret: bytes, exchange: int) -> Generator:
    """The generator of the upload that answers a message."""
    key = hashlib.sha256(secret + f"|augment|{exchange}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(key[:8], "little"))


def augmented(augment: Augment, x: Samples, secret: bytes, exchange: int) -> Samples:
    """What an augmentation makes of samples; the same each time, and the samples stay as they are.

    Raises
    ------
    VflError
        If it does not make as many samples of the same kind, as the end of a sentence.
    """
    if augment is none:
        return x
    generator = generator_of(secret, exchange)
    with GENERATOR, torch.random.fork_rng(devices=[]):  # for those that use torch's own
        torch.manual_seed(generator.initial_seed() >> 1)
        made = augment(samples.each(x, torch.clone), generator)
    if _kind(made) != _kind(x):
        raise VflError("has an augmentation that changes the shape or the type of samples.")
    return made


def _kind(x: Samples) -> dict[str, tuple[Any, ...]]:
    named = x if isinstance(x, dict) else {"": x}
    return {name: (each.dtype, *each.shape) for name, each in named.items()}


def none(x: Samples, generator: Generator) -> Samples:
    """The samples as they are."""
    return x


def crop_flip(x: Samples, generator: Generator) -> Samples:
    """Images [R, H, W] or [R, H, W, colours]: moved by up to 4 pixels each way, and half mirrored.

    What moves in from outside is zero, the mean (He et al., 2016, Sec. 4.2).
    """
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        raise ConfigError(
            "augment = 'crop-flip' is for images: give augment='none' in the node configuration of "
            "a party that has none."
        )
    rows, height, width = x.shape[:3]
    beside = (0, 0) * (x.dim() - 3)
    padded = functional.pad(x, (*beside, *[_MARGIN] * 4))
    down, across = torch.randint(0, 2 * _MARGIN + 1, (2, rows, 1), generator=generator)
    mirrored = torch.rand(rows, 1, generator=generator) < 0.5
    y, to = torch.arange(height), torch.arange(width)
    to = torch.where(mirrored, to.flip(0), to) + across
    which = torch.arange(rows)[:, None, None]
    found: Tensor = padded[which, (y + down)[:, :, None], to[:, None, :]]
    return found
