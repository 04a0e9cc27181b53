"""A party's state in Flower's ``Context.state``: a text, scalars, array groups.

In a simulation any process may serve any message. On a SuperNode each message is a new process.
So only this state survives a message. `party.session` defines its content.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import VflError
from vfl_flower.transport.flower_internals import config_record, contents
from vfl_flower.transport.messages import Arrays, EvaluateOrder
from vfl_flower.transport.wire import NUMPY, record_of, to_numpy_format, unpack_one

Memory = Mapping[str, NDArray[Any] | Tensor]

_SCALARS, _LARGE, _ABOUT = "scalars", "large", "about"
_COPY = "model-at-"  # followed by the number of the evaluation that the copy is from


def save_groups(state: RecordDict, about: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a text, if it is new, scalars, and groups of named arrays, which are not copied."""
    if load_about(state) != about:
        state[_ABOUT] = ConfigRecord({_ABOUT: about})
    for name, values in groups.items():
        if name == _SCALARS:
            contents(state)[name] = config_record(dict(values))
        elif values or name != _LARGE:
            save_group(state, name, values)


def save_group(state: RecordDict, name: str, arrays: Memory) -> None:
    """Write one group of named arrays."""
    record = ArrayRecord()
    for key, array in arrays.items():
        record[key] = _LiveArray(array)
    state[name] = record


def shares_memory(record: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a record's arrays are these tensors."""
    arrays = contents(record)
    return arrays.keys() == tensors.keys() and all(
        isinstance(array, _LiveArray)
        and array.live is tensors[name]
        and array.shape == tensors[name].shape  # a new ``.data`` may have another
        for name, array in arrays.items()
    )


def settle(record: ArrayRecord) -> None:
    """Copy the arrays of a record, to detach it from shared memory."""
    for array in record.values():
        if isinstance(array, _LiveArray):
            array.live = array.array.copy()


def load_about(state: RecordDict) -> str:
    """Return the text about the party; empty in a new node."""
    there = _ABOUT in contents(state)
    return str(contents(record_of(state, _ABOUT, ConfigRecord))[_ABOUT]) if there else ""


def load_scalars(state: RecordDict) -> Mapping[str, Any]:
    """Return the scalars; none in a new node."""
    return record_of(state, _SCALARS, ConfigRecord) if _SCALARS in contents(state) else {}


def load_large(state: RecordDict) -> Arrays:
    """Return the large arrays for writing: themselves, or copies of their bytes."""
    if _LARGE not in state:
        return {}
    return {
        name: array.array if isinstance(array, _LiveArray) else unpack_one(name, array).copy()
        for name, array in record_of(state, _LARGE, ArrayRecord).items()
    }


def load_arrays(state: RecordDict, group: str) -> Arrays:
    """Return a group of arrays for reading, without a copy."""
    return {
        name: array.array if isinstance(array, _LiveArray) else unpack_one(name, array)
        for name, array in record_of(state, group, ArrayRecord).items()
    }


# --- copies of the model ------------------------------------------------------------------------


def forget_copies(state: RecordDict) -> None:
    """Delete all copies of models: they predate the run, or its resumption."""
    for name in [each for each in state if each.startswith(_COPY)]:
        del state[name]


def keep_copy(state: RecordDict, order: EvaluateOrder) -> None:
    """Copy the model at this evaluation, if the label holder may restore it.

    Keep two earlier copies: the label holder may not know yet which of them is better.
    """
    if not order.number:
        return
    kept = {f"{_COPY}{number}" for number in (order.best, order.last)}
    for name in [each for each in state if each.startswith(_COPY)]:
        if name not in kept:
            del state[name]
    model = load_arrays(state, "model")
    copies = {name: array.copy() for name, array in model.items()}
    save_group(state, f"{_COPY}{order.number}", copies)


def copy_there(state: RecordDict, number: int) -> int:
    """Return ``number`` if there is a copy of the model at that evaluation, else 0."""
    return number if f"{_COPY}{number}" in state else 0


def load_copy(state: RecordDict, number: int) -> Arrays:
    """Return the copy of the model at evaluation ``number``."""
    if not copy_there(state, number):
        raise VflError(f"has no copy of the model at evaluation {number}.")
    return load_arrays(state, f"{_COPY}{number}")


# --- shared memory of this process --------------------------------------------------------------


class _LiveArray(Array):
    """A Flower Array that shares the live memory of a NumPy array or a tensor."""

    def __init__(self, live: NDArray[Any] | Tensor) -> None:
        self.dtype, self.shape = str(live.dtype).removeprefix("torch."), tuple(live.shape)
        self.stype, self.live = NUMPY, live

    @property
    def array(self) -> NDArray[Any]:
        """Return the memory itself, or a copy of a GPU's memory."""
        live = self.live
        return live if isinstance(live, np.ndarray) else live.detach().cpu().numpy()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Return the current bytes, in NumPy's file format."""
        return to_numpy_format(self.array)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        return Array, (self.dtype, self.shape, self.stype, self.data)
