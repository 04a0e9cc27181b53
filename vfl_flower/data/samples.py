"""Samples: the input of a bottom model for a number of rows, and augmentations of it.

Samples are one tensor [R, ...], or a dictionary of tensors by name, as from a tokenizer
(``input_ids`` and ``attention_mask``). A source gives the same as NumPy arrays.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data import samples

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Samples = Tensor | dict[str, Tensor]


def count(samples: Arrays | Samples) -> int:
    """Return the number of rows."""
    one: Any = next(iter(samples.values())) if isinstance(samples, Mapping) else samples
    return len(one)


def first(arrays: Any) -> Samples:
    """Return one row of arrays, or of a source, without the row dimension; zeros if empty."""
    cut = arrays[:1] if not isinstance(arrays, Mapping) else {k: v[:1] for k, v in arrays.items()}
    one = tensors(cut, torch.device("cpu"))
    return each(one, lambda rows: rows[0].clone() if len(rows) else rows.new_zeros(rows.shape[1:]))


def each(samples: Samples, change: Callable[[Tensor], Tensor]) -> Samples:
    """Apply ``change`` to each tensor."""
    if isinstance(samples, dict):
        return {name: change(tensor) for name, tensor in samples.items()}
    return change(samples)


def numbers(samples: Samples) -> int:
    """Return how many numbers the samples hold."""
    return sum(map(Tensor.numel, samples.values() if isinstance(samples, dict) else [samples]))


def shape(samples: Samples) -> Any:
    """Return the shape of the samples, or name -> shape."""
    if isinstance(samples, dict):
        return {name: tuple(tensor.shape) for name, tensor in samples.items()}
    return tuple(samples.shape)


def tensors(arrays: Arrays, device: torch.device) -> Samples:
    """Convert arrays to tensors on a device. The CPU does not wait for a GPU."""
    if isinstance(arrays, Mapping):
        return {k: torch.from_numpy(v).to(device, non_blocking=True) for k, v in arrays.items()}
    return torch.from_numpy(arrays).to(device, non_blocking=True)


def rows(samples: Samples, index: Any) -> Samples:
    """Return the rows at an index: a slice, or a tensor of places or of truth values."""
    return each(samples, lambda tensor: tensor[index])


def split(samples: Samples, lengths: Sequence[int]) -> list[Samples]:
    """Split rows into consecutive parts of these lengths, one for each step."""
    if not isinstance(samples, dict):
        return list(samples.split(list(lengths)))
    parts = {name: tensor.split(list(lengths)) for name, tensor in samples.items()}
    return [{name: part[step] for name, part in parts.items()} for step in range(len(lengths))]


Augment = Callable[[Samples, Generator], Samples]

_GENERATORS = Lock()  # one default generator serves all threads, and each may have a party
_MARGIN = 4


@contextmanager
def seeded(seed: int, secret: bytes = b"", devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seed the default generators inside the context: NumPy's and Python's by the secret too.

    All are restored at the end, and the generators of the GPUs ``devices`` too.
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

    The text of an error is the end of a sentence.
    """
    if augment is none:
        return x
    key = hashlib.sha256(secret + f"|augment|{exchange}".encode()).digest()
    generator = Generator().manual_seed(int.from_bytes(key[:8], "little"))
    with seeded(generator.initial_seed() >> 1):  # some use a default generator
        made = augment(samples.each(x, torch.clone), generator)
    kinds = [
        {name: (each.dtype, each.shape) for name, each in named.items()}
        for named in (part if isinstance(part, dict) else {"": part} for part in (made, x))
    ]
    if kinds[0] != kinds[1]:
        raise VflError(
            "has an augmentation that changes the shape or the type of samples. Correct it."
        )
    return made


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
