"""Messages and arrays to Flower records and back, checked on arrival; nothing is ever unpickled.

The scalars of a message travel in a ConfigRecord, its arrays in an ArrayRecord, in NumPy's own file
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from vfl_flower.errors import OutOfStepError, VflError
from vfl_flower.messages import Arrays, Order, Payload

P = TypeVar("P", bound=Payload)
R = TypeVar("R", ArrayRecord, ConfigRecord)

_SCALARS, _ARRAYS, _FAILURE = "scalars", "arrays", "failure"
NUMPY = "numpy.ndarray"
"""Flower's name for NumPy's file format."""
_DTYPES = {  # every dtype of a number, by NumPy's name for it
    str(dtype): dtype
    for code in "?bBhHiIlLqQefd"
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}


# --- messages -----------------------------------------------------------------------------------


def to_message(order: Order, node_id: int, ttl: float) -> Message:
    """The Flower message that carries an order to a node."""
    return Message(_to_record(order), node_id, order.kind, ttl=ttl)


def read_order(message: Message, kind: type[P]) -> P:
    """The order in a message, at the party."""
    return _from_record(message.content, kind)


def to_reply(payload: Payload, message: Message) -> Message:
    """A party's answer to a message."""
    return Message(_to_record(payload), reply_to=message)


def to_failure(sentence: str, message: Message, out_of_step: bool = False) -> Message:
    """A party's answer to a message that it could not serve; the sentence holds no data."""
    failure = ConfigRecord({"cause": sentence, "out-of-step": out_of_step})
    return Message(RecordDict({_FAILURE: failure}), reply_to=message)


def read_reply(message: Message, kind: type[P]) -> P:
    """The answer of a party, at the label holder.

    Raises
    ------
    VflError
        If the party failed, or its answer lacks the fields and types that it should have; a
        sentence without its subject, the party. `OutOfStepError`, if all that it lacks is state.
    """
    if message.has_error():
        reason = " ".join((message.error.reason or "").split())[:300]
        raise VflError(f"failed: {reason or f'Flower error {message.error.code}'}")
    if _FAILURE in message.content:
        failure = record_of(message.content, _FAILURE, ConfigRecord)
        kind_of_error = OutOfStepError if failure.get("out-of-step") is True else VflError
        raise kind_of_error(f"failed: {failure.get('cause', 'it did not say why')!s}")
    return _from_record(message.content, kind)


def _to_record(payload: Payload) -> RecordDict:
    scalars = {f.name: getattr(payload, f.name) for f in fields(payload) if f.name != "arrays"}
    return RecordDict({_SCALARS: ConfigRecord(scalars), _ARRAYS: pack(payload.arrays)})


def _from_record(record: RecordDict, kind: type[P]) -> P:
    try:
        scalars = record_of(record, _SCALARS, ConfigRecord)
        values: dict[str, Any] = {"arrays": unpack(record_of(record, _ARRAYS, ArrayRecord))}
        for spec in fields(kind):
            if spec.name != "arrays":
                values[spec.name] = scalars[spec.name]
                if type(values[spec.name]).__name__ != spec.type:
                    raise VflError(f"sent a {kind.__name__} whose {spec.name} is no {spec.type}.")
        return kind(**values)
    except KeyError as error:
        raise VflError(f"sent a message without the field {error} of {kind.__name__}.") from None


def record_of(record: RecordDict, name: str, kind: type[R]) -> R:
    """The record of that name, if it is of that kind."""
    found = record[name]
    if not isinstance(found, kind):
        raise VflError(f"sent {name!r} as another kind of record than {kind.__name__}.")
    return found


# --- arrays -------------------------------------------------------------------------------------


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays as an ArrayRecord."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = _pack_one(array)
    return record


def unpack(record: ArrayRecord) -> Arrays:
    """The arrays of an ArrayRecord, read-only and without a copy.

    Raises
    ------
    VflError
        If an array is not numeric, or its bytes are not what its dtype and shape say.
    """
    return {name: unpack_one(name, array) for name, array in record.items()}


def _pack_one(array: NDArray[Any]) -> Array:
    return Array(str(array.dtype), array.shape, NUMPY, to_numpy_format(array))


def to_numpy_format(array: NDArray[Any]) -> bytes:
    """An array's bytes in NumPy's file format."""
    header = _header(array.dtype.str, array.shape)
    return b"".join((header, np.ascontiguousarray(array).data))


def unpack_one(name: str, array: Array) -> NDArray[Any]:
    """The array in a Flower Array, as `unpack` gives it."""
    try:
        dtype = _DTYPES[array.dtype]  # NumPy would parse, and so evaluate, any text
        if array.stype != NUMPY:
            raise ValueError
        header = _header(dtype.str, tuple(array.shape))
        if not array.data.startswith(header):
            raise ValueError
        return np.frombuffer(array.data, dtype, offset=len(header)).reshape(array.shape)
    except (KeyError, TypeError, ValueError):
        raise VflError(f"sent an array {name!r} whose bytes do not decode.") from None


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The head of NumPy's file format (version 1.0, row-major)."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()
