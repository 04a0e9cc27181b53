"""Samples: the input of a bottom model for a number of rows.

Samples are one tensor [R, ...], or a dictionary of tensors by name, as from a tokenizer
(``input_ids`` and ``attention_mask``). A source gives the same as NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Samples = Tensor | dict[str, Tensor]


def count(samples: Arrays | Samples) -> int:
    """Return the number of rows."""
    one: Any = next(iter(samples.values())) if isinstance(samples, Mapping) else samples
    return len(one)


def first(arrays: Any) -> Samples:
    """Return one row from a source, without the row dimension; zeros if empty.

    arrays : `Arrays`, or an object that returns `Arrays` for a slice.
    """
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
        return {
            name: torch.from_numpy(array).to(device, non_blocking=True)
            for name, array in arrays.items()
        }
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
