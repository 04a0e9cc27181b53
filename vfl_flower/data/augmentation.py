"""Augmentation: what a party does to samples in training passes alone.

A function of samples (`data.samples`) and a torch generator, which gives as many samples of the
same shape. The generator follows from the party's secret and the message, so that when a pass is
repeated it is of the same samples. `registry.AUGMENTATIONS` names ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from vfl_flower.data.samples import Samples
from vfl_flower.errors import ConfigError

Augment = Callable[[Samples, Generator], Samples]

_MARGIN = 4


def generator_of(secret: bytes, exchange: int) -> Generator:
    """The generator of the upload that answers a message."""
    key = hashlib.sha256(secret + f"|augment|{exchange}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(key[:8], "little"))


def none(samples: Samples, generator: Generator) -> Samples:
    """The samples as they are."""
    return samples


def crop_flip(samples: Samples, generator: Generator) -> Samples:
    """Images [R, H, W] or [R, H, W, colours]: moved by up to 4 pixels each way, and half mirrored.

    What moves in from outside is zero, the mean (He et al., 2016, Sec. 4.2).
    """
    if not isinstance(samples, Tensor) or samples.dim() not in (3, 4):
        raise ConfigError("augment = 'crop-flip' is for images: leave it out.")
    rows, height, width = samples.shape[:3]
    beside = (0, 0) * (samples.dim() - 3)
    padded = functional.pad(samples, (*beside, *[_MARGIN] * 4))
    down, across = torch.randint(0, 2 * _MARGIN + 1, (2, rows, 1), generator=generator)
    mirrored = torch.rand(rows, 1, generator=generator) < 0.5
    y, x = torch.arange(height), torch.arange(width)
    x = torch.where(mirrored, x.flip(0), x) + across
    which = torch.arange(rows)[:, None, None]
    found: Tensor = padded[which, (y + down)[:, :, None], x[:, None, :]]
    return found
