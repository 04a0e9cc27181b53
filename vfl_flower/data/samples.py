"""Samples: what a bottom model reads of so many rows.

One tensor [R, ...], or a dictionary of them by name, as a tokenizer gives (``input_ids`` and
``attention_mask``). A source gives the same as NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Samples = Tensor | dict[str, Tensor]


def count(samples: Arrays | Samples) -> int:
    """How many rows there are."""
    one: Any = next(iter(samples.values())) if isinstance(samples, Mapping) else samples
    return len(one)


def tensors(arrays: Arrays, device: torch.device) -> Samples:
    """Arrays as tensors on a device."""
    if isinstance(arrays, Mapping):
        return {name: torch.from_numpy(each).to(device) for name, each in arrays.items()}
    return torch.from_numpy(arrays).to(device)


def rows(samples: Samples, index: Any) -> Samples:
    """Those rows that a slice, or a tensor of places or of truth values, picks."""
    if isinstance(samples, dict):
        return {name: each[index] for name, each in samples.items()}
    return samples[index]


def split(samples: Samples, lengths: Sequence[int]) -> list[Samples]:
    """Rows of one step after the other, of which each has its length."""
    if not isinstance(samples, dict):
        return list(samples.split(list(lengths)))
    parts = {name: each.split(list(lengths)) for name, each in samples.items()}
    return [{name: each[step] for name, each in parts.items()} for step in range(len(lengths))]
