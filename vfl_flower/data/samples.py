"""Samples: what a bottom model reads of so many rows.

One tensor [R, ...], or a dictionary of them by name, as a tokenizer gives (``input_ids`` and
``attention_mask``). A source gives the same as NumPy arrays.
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
    """How many rows there are."""
    of: Any = next(iter(samples.values())) if isinstance(samples, Mapping) else samples
    return len(of)


def first(arrays: Any) -> Samples:
    """One row as the source gives it, without the dimension of rows; zeros if there is none.

    ``arrays`` : `Arrays`, or what gives them when it is cut.
    """
    cut = arrays[:1] if not isinstance(arrays, Mapping) else {k: v[:1] for k, v in arrays.items()}
    one = tensors(cut, torch.device("cpu"))
    return each(one, lambda rows: rows[0].clone() if len(rows) else rows.new_zeros(rows.shape[1:]))


def each(samples: Samples, change: Callable[[Tensor], Tensor]) -> Samples:
    """What ``change`` makes of each tensor."""
    if isinstance(samples, dict):
        return {name: change(tensor) for name, tensor in samples.items()}
    return change(samples)


def tensors(arrays: Arrays, device: torch.device) -> Samples:
    """Arrays as tensors on a device."""
    if isinstance(arrays, Mapping):
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return torch.from_numpy(arrays).to(device)


def rows(samples: Samples, index: Any) -> Samples:
    """Those rows that a slice, or a tensor of places or of truth values, picks."""
    return each(samples, lambda tensor: tensor[index])


def split(samples: Samples, lengths: Sequence[int]) -> list[Samples]:
    """Rows of one step after the other, of which each has its length."""
    if not isinstance(samples, dict):
        return list(samples.split(list(lengths)))
    parts = {name: tensor.split(list(lengths)) for name, tensor in samples.items()}
    return [{name: part[step] for name, part in parts.items()} for step in range(len(lengths))]
