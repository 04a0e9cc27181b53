"""A party's state in Flower's ``Context.state``: scalars, a text, and groups of arrays.

In simulation any process may serve any message, and on a SuperNode every message is a new process:
nothing else survives a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from vfl_flower.messages import Arrays
from vfl_flower.wire import NUMPY, pack, record_of, to_numpy_format, unpack, unpack_one

_SCALARS, _LARGE, _ABOUT = "scalars", "large", "about"


def save_state(
    state: RecordDict, about: str, scalars: dict[str, Any], large: Arrays, **groups: Arrays
) -> None:
    """Keep scalars and groups of named arrays in a node's ``Context.state``.

    ``about`` is a text that stays the same from message to message. ``large`` arrays are kept as
    they are, and become bytes when they leave the process.
    """
    if load_about(state) != about:
        state[_ABOUT] = ConfigRecord({_ABOUT: about})
    state[_SCALARS] = ConfigRecord(scalars)
    for name, arrays in groups.items():
        state[name] = pack(arrays)
    if large:
        record = ArrayRecord()
        for name, array in large.items():
            record[name] = _LiveArray(array)
        state[_LARGE] = record


def load_large(state: RecordDict) -> Arrays:
    """The large arrays kept by `save_state`, to write to: the same, or copies from their bytes."""
    if _LARGE not in state:
        return {}
    return {
        name: array.live if isinstance(array, _LiveArray) else unpack_one(name, array).copy()
        for name, array in record_of(state, _LARGE, ArrayRecord).items()
    }


class _LiveArray(Array):
    """An Array over NumPy memory that goes on changing."""

    def __init__(self, live: NDArray[Any]) -> None:
        self.dtype, self.shape, self.stype = str(live.dtype), live.shape, NUMPY
        self.live = live

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Its bytes as it is now, in NumPy's file format."""
        return to_numpy_format(self.live)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def load_about(state: RecordDict) -> str:
    """The text kept by `save_state`; empty in a new node."""
    return str(record_of(state, _ABOUT, ConfigRecord)[_ABOUT]) if _ABOUT in state else ""


def load_scalars(state: RecordDict) -> Mapping[str, Any]:
    """The scalars kept by `save_state`; empty in a new node."""
    return record_of(state, _SCALARS, ConfigRecord) if _SCALARS in state else {}


def load_arrays(state: RecordDict, group: str) -> Arrays:
    """A group of arrays kept by `save_state`, read-only."""
    return unpack(record_of(state, group, ArrayRecord))
