"""Typed messages to and from Flower records, checked on arrival; no other module names a record.

A message of the protocol is a small dataclass of scalars and named NumPy arrays. The scalars travel
in a ConfigRecord, the arrays in an ArrayRecord, in NumPy's own file format, and nothing is ever
unpickled. The byte counters count the arrays, as sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from io import BytesIO
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from numpy.typing import NDArray

from vfl_flower.errors import OutOfStepError, VflError

Arrays = dict[str, NDArray[Any]]
P = TypeVar("P", bound="Payload")
R = TypeVar("R", ArrayRecord, ConfigRecord)

_SCALARS, _ARRAYS, _LARGE, _ABOUT = "scalars", "arrays", "large", "about"
_FAILURE = "failure"
_NUMPY = "numpy.ndarray"  # Flower's name for NumPy's file format
_DTYPES = {  # every dtype of a number, by NumPy's name for it
    str(dtype): dtype
    for code in "?bBhHiIlLqQefd"
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}


# --- the messages of the protocol ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Scalar fields, and named arrays."""

    arrays: Arrays = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, as sent."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, kw_only=True)
class Order(Payload):
    """From the label holder to a party."""

    kind: ClassVar[str]  # Flower's message type


@dataclass(frozen=True, kw_only=True)
class DescribeOrder(Order):
    """Describe yourself, and begin anew; the model is to have this many outputs."""

    kind: ClassVar[str] = "query.describe"
    outputs: int


@dataclass(frozen=True, kw_only=True)
class Turn(Order):
    """One of a party's messages, numbered from 1, so that one that comes twice is noticed."""

    exchange: int


@dataclass(frozen=True, kw_only=True)
class TrainOrder(Turn):
    """The feedback for the last window, in ``arrays``, and the order for the next.

    ``coordinated`` says whose order of the rows counts: the one that all parties share, or the
    party's own.
    """

    kind: ClassVar[str] = "train"
    epoch: int
    first: int
    steps: int
    coordinated: bool


@dataclass(frozen=True, kw_only=True)
class EvaluateOrder(Turn):
    """The feedback for the last window, if any; upload the embeddings of the test rows."""

    kind: ClassVar[str] = "evaluate"


@dataclass(frozen=True, kw_only=True)
class EmbedOrder(Turn):
    """Upload fresh embeddings of the training rows in ``arrays["ids"]`` (bounded delay).

    The other arrays are the feedback for the last window, if there is any to come with it.
    """

    kind: ClassVar[str] = "query.embed"


@dataclass(frozen=True, kw_only=True)
class RejoinOrder(Turn):
    """Go on after a failure: count messages from this one, and forget the window before it.

    ``arrays["embedding"]`` is the label holder's copy of the party's surrogate, if there is one. A
    party that has lost all its state begins anew, as by `DescribeOrder`.
    """

    kind: ClassVar[str] = "query.rejoin"
    outputs: int


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder(Turn):
    """Learn from the feedback, if any, and keep all state on disk, as checkpoint ``number``."""

    kind: ClassVar[str] = "query.checkpoint"
    number: int


@dataclass(frozen=True, kw_only=True)
class AlignOrder(Order):
    """Say which ids you have, by a ``method`` that does not tell them (`data.alignment`).

    ``id_kind`` is what the label holder's ids are; ``arrays["ids"]`` are these, blinded.
    """

    kind: ClassVar[str] = "query.align"
    method: str
    id_kind: str


@dataclass(frozen=True, kw_only=True)
class CommonOrder(Order):
    """The rows that all have, by their ``places`` in the party's secret order, int32 [N]."""

    kind: ClassVar[str] = "query.common"


@dataclass(frozen=True, kw_only=True)
class ResumeOrder(Order):
    """Go on from checkpoint ``number`` that you kept in the Flower run ``run``."""

    kind: ClassVar[str] = "query.resume"
    run: str
    number: int


@dataclass(frozen=True, kw_only=True)
class PredictOrder(Order):
    """Embed rows with the model of that checkpoint: those just aligned, or the test rows.

    Answered by `Predicted`.
    """

    kind: ClassVar[str] = "query.predict"
    run: str
    number: int


@dataclass(frozen=True, kw_only=True)
class SessionOrder(Order):
    """Connect to the label holder's stream, and serve what it carries (`runtimes.stream`).

    ``address`` is where, ``certificate`` the only one to accept there (PEM), ``token`` what to show
    for oneself, once, and ``keep`` whether the party keeps its state in a file.
    """

    kind: ClassVar[str] = "query.session"
    address: str
    certificate: str
    token: str
    keep: bool


@dataclass(frozen=True, kw_only=True)
class Introduction(Payload):
    """Which party answers, of how many; with what arrays is said by the order."""

    party: int
    parties: int


@dataclass(frozen=True, kw_only=True)
class Aligned(Introduction):
    """A party's answer to `AlignOrder`: ``digest`` of its ids; or blinded ids, "again" and "own".

    Both arrays are uint8 [n, 32]: the label holder's ids, in their order, blinded by the party too;
    and the party's, in a secret order.
    """

    digest: str


@dataclass(frozen=True, kw_only=True)
class Description(Introduction):
    """A party's answer to orders that begin or go on with a run: what must agree before it trains.

    ``ids_digest`` is of the numbers of its rows, in their order, or with files of ids.
    """

    train_rows: int
    test_rows: int
    columns: int
    embedding_size: int
    ids_digest: str
    code_digest: str
    exchange: int  # messages that it has served


@dataclass(frozen=True, kw_only=True)
class Predicted(Introduction):
    """A party's answer to `PredictOrder`: ``arrays["embedding"]``, float32 [N, E], of which rows.

    ``exchange`` is the number of messages that the model had seen.
    """

    exchange: int
    ids_digest: str
    code_digest: str


@dataclass(frozen=True, kw_only=True)
class Upload(Payload):
    """A party's answer to every other order: embeddings, through the codec, and the rows' ids.

    With test embeddings comes a digest of the party's copies of surrogates, and its peak memory.
    """

    party: int
    exchange: int
    peak_memory_mb: float = 0.0
    surrogates: str = ""


@dataclass(frozen=True, kw_only=True)
class SessionEnd(Payload):
    """A party's answer to `SessionOrder`, when the session is over: why, if it broke."""

    connected: bool  # whether it ever was
    served: int
    cause: str


# --- messages to and from Flower ----------------------------------------------------------------


def to_message(order: Order, node_id: int, ttl: float) -> Message:
    """The Flower message that carries an order to a node."""
    return Message(_to_record(order), node_id, order.kind, ttl=ttl)


def read_order(message: Message, kind: type[P]) -> P:
    """The order in a message, at the party."""
    return _from_record(message.content, kind)


def to_reply(payload: Payload, message: Message) -> Message:
    """A party's answer to a message."""
    return Message(_to_record(payload), reply_to=message)


def to_bytes(message: Message) -> bytes:
    """A whole message in Flower's protobuf, which ends at 2 GB."""
    try:
        return bytes(message_to_proto(message).SerializeToString())
    except Exception:  # which of them depends on protobuf's version
        raise VflError("a message that is too large for protobuf") from None


def from_bytes(body: bytes) -> Message:
    """The message that `to_bytes` made these bytes of."""
    try:
        return message_from_proto(ProtoMessage.FromString(body))
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("a frame that is no Flower message") from None


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
        failure = _record(message.content, _FAILURE, ConfigRecord)
        kind_of_error = OutOfStepError if failure.get("out-of-step") is True else VflError
        raise kind_of_error(f"failed: {failure.get('cause', 'it did not say why')!s}")
    return _from_record(message.content, kind)


def _to_record(payload: Payload) -> RecordDict:
    scalars = {f.name: getattr(payload, f.name) for f in fields(payload) if f.name != "arrays"}
    return RecordDict({_SCALARS: ConfigRecord(scalars), _ARRAYS: pack(payload.arrays)})


def _from_record(record: RecordDict, kind: type[P]) -> P:
    try:
        scalars = _record(record, _SCALARS, ConfigRecord)
        values: dict[str, Any] = {"arrays": unpack(_record(record, _ARRAYS, ArrayRecord))}
        for spec in fields(kind):
            if spec.name != "arrays":
                values[spec.name] = scalars[spec.name]
                if type(values[spec.name]).__name__ != spec.type:
                    raise VflError(f"sent a {kind.__name__} whose {spec.name} is no {spec.type}.")
        return kind(**values)
    except KeyError as error:
        raise VflError(f"sent a message without the field {error} of {kind.__name__}.") from None


def checked(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, shape: tuple[int, ...]
) -> Any:
    """The array of that name, if it has just this dtype and shape, and is finite.

    Raises
    ------
    VflError
        What is wrong with it, as the end of a sentence.
    """
    if name not in arrays:
        raise VflError(f"array {name!r} is missing.")
    array = arrays[name]
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise VflError(
            f"{name!r} is {array.dtype} of shape {array.shape}, not {dtype} of shape {shape}."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise VflError(f"{name!r} has values that are not finite; lower the learning rates.")
    return array


# --- a party's state in Context.state -----------------------------------------------------------


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
        name: array.live if isinstance(array, _LiveArray) else _unpack(name, array).copy()
        for name, array in _record(state, _LARGE, ArrayRecord).items()
    }


class _LiveArray(Array):
    """An Array over NumPy memory that goes on changing."""

    def __init__(self, live: NDArray[Any]) -> None:
        self.dtype, self.shape, self.stype = str(live.dtype), live.shape, _NUMPY
        self.live = live

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Its bytes as it is now, in NumPy's file format."""
        return _to_bytes(self.live)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def state_to_bytes(state: RecordDict) -> bytes:
    """All of a node's ``Context.state``, in Flower's protobuf."""
    return bytes(recorddict_to_proto(state).SerializeToString())


def state_from_bytes(body: bytes) -> RecordDict:
    """What `state_to_bytes` made these bytes of."""
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(body))
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("no state of a party") from None


def load_about(state: RecordDict) -> str:
    """The text kept by `save_state`; empty in a new node."""
    return str(_record(state, _ABOUT, ConfigRecord)[_ABOUT]) if _ABOUT in state else ""


def load_scalars(state: RecordDict) -> Mapping[str, Any]:
    """The scalars kept by `save_state`; empty in a new node."""
    return _record(state, _SCALARS, ConfigRecord) if _SCALARS in state else {}


def save_arrays(state: RecordDict, group: str, arrays: Arrays) -> None:
    """Keep a group of arrays, beside those of `save_state`."""
    state[group] = pack(arrays)


def load_arrays(state: RecordDict, group: str) -> Arrays:
    """A group of arrays kept by `save_state`, read-only."""
    return unpack(_record(state, group, ArrayRecord))


def _record(record: RecordDict, name: str, kind: type[R]) -> R:
    found = record[name]
    if not isinstance(found, kind):
        raise VflError(f"sent {name!r} as another kind of record than {kind.__name__}.")
    return found


# --- arrays to and from bytes -------------------------------------------------------------------


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays as an ArrayRecord."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = _pack(array)
    return record


def unpack(record: ArrayRecord) -> Arrays:
    """The arrays of an ArrayRecord, read-only and without a copy.

    Raises
    ------
    VflError
        If an array is not numeric, or its bytes are not what its dtype and shape say.
    """
    return {name: _unpack(name, array) for name, array in record.items()}


def _pack(array: NDArray[Any]) -> Array:
    return Array(str(array.dtype), array.shape, _NUMPY, _to_bytes(array))


def _to_bytes(array: NDArray[Any]) -> bytes:
    header = _header(array.dtype.str, array.shape)
    return b"".join((header, np.ascontiguousarray(array).data))


def _unpack(name: str, array: Array) -> NDArray[Any]:
    try:
        dtype = _DTYPES[array.dtype]  # NumPy would parse, and so evaluate, any text
        if array.stype != _NUMPY:
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
