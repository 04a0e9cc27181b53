"""A party's state in Flower's ``Context.state``: scalars, a text, and groups of arrays.

In simulation any process may serve any message, and on a SuperNode every message is a new process:
nothing else survives a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.transport.flower_internals import config_record
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.wire import NUMPY, record_of, to_numpy_format, unpack_one

_SCALARS, _LARGE, _ABOUT = "scalars", "large", "about"

Memory = Mapping[str, NDArray[Any] | Tensor]


def save_state(
    state: RecordDict, about: str, scalars: dict[str, Any], large: Memory, **groups: Memory
) -> None:
    """Keep scalars and groups of named arrays in a node's ``Context.state``.

    ``about`` is a text that stays the same from message to message. Arrays are kept as they are,
    without a copy, and become bytes when they leave the process.
    """
    if load_about(state) != about:
        state[_ABOUT] = ConfigRecord({_ABOUT: about})
    state[_SCALARS] = config_record(scalars)
    if large:
        groups[_LARGE] = large
    for name, arrays in groups.items():
        save_group(state, name, arrays)


def save_group(state: RecordDict, name: str, arrays: Memory) -> None:
    """Keep one group of named arrays."""
    record = ArrayRecord()
    for key, array in arrays.items():
        record[key] = _LiveArray(array)
    state[name] = record


def settle(record: ArrayRecord) -> None:
    """Have a record keep what it now holds, whatever becomes of the memory that it was over."""
    for array in record.values():
        if isinstance(array, _LiveArray):
            array.live = array.array.copy()


def load_large(state: RecordDict) -> Arrays:
    """The large arrays kept by `save_state`, to write to: the same, or copies from their bytes."""
    if _LARGE not in state:
        return {}
    return {
        name: array.array if isinstance(array, _LiveArray) else unpack_one(name, array).copy()
        for name, array in record_of(state, _LARGE, ArrayRecord).items()
    }


class _LiveArray(Array):
    """An Array over the memory of a NumPy array or a tensor, which goes on changing."""

    def __init__(self, live: NDArray[Any] | Tensor) -> None:
        self.dtype, self.shape = str(live.dtype).removeprefix("torch."), tuple(live.shape)
        self.stype, self.live = NUMPY, live

    @property
    def array(self) -> NDArray[Any]:
        """That memory itself, unless it is a GPU's."""
        live = self.live
        return live if isinstance(live, np.ndarray) else live.detach().cpu().numpy()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Its bytes as it is now, in NumPy's file format."""
        return to_numpy_format(self.array)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def load_about(state: RecordDict) -> str:
    """The text kept by `save_state`; empty in a new node."""
    return str(record_of(state, _ABOUT, ConfigRecord)[_ABOUT]) if _ABOUT in state else ""


def load_scalars(state: RecordDict) -> Mapping[str, Any]:
    """The scalars kept by `save_state`; empty in a new node."""
    return record_of(state, _SCALARS, ConfigRecord) if _SCALARS in state else {}


def load_arrays(state: RecordDict, group: str) -> Arrays:
    """A group of arrays kept by `save_state`, for reading only: without a copy."""
    return {
        name: array.array if isinstance(array, _LiveArray) else unpack_one(name, array)
        for name, array in record_of(state, group, ArrayRecord).items()
    }
