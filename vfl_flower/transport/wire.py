"""Convert messages to Flower records and back, checked, and without pickle.

The scalars of a message travel in a ConfigRecord, its arrays in an ArrayRecord, in NumPy's own file
format. Over streams and in process, the records are made only if somebody asks for them.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache, partial
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from vfl_flower.config.checks import InvalidError, fields_check_of
from vfl_flower.config.errors import OutOfStepError, VflError
from vfl_flower.config.provenance import running
from vfl_flower.transport import flower_internals
from vfl_flower.transport.flower_internals import ARRAYS, SCALARS, Parts
from vfl_flower.transport.messages import MOST, Arrays, Order, Payload, Received, Turn

P = TypeVar("P", bound=Payload)
R = TypeVar("R", ArrayRecord, ConfigRecord)

_FAILURE = "failure"
NUMPY = "numpy.ndarray"  # flower's name for NumPy's file format
_MOST_ARRAYS = 1024  # with shared labels, a message has three arrays of each party and a few more
_LONGEST = 128  # letters of a text or a name
_AXES = 8  # most axes of an array
DIGEST = 12  # bytes of a digest
_OF_NO_RESULT = {"arrays", "version", "of_parties", "nonce"}  # fields that no digest covers
_SAID = 300  # most letters shown of a sentence from the other side
SAME_VERSION = "Install the same version at both, and restart SuperNode and SuperLink."
_OLDER = re.compile(r"There is no option '[^']*'\.|was sent a \w+ that has an unknown field")
"""Begin the answers of versions that do not compare versions."""
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b]*|\x1b.?", re.DOTALL)
_check = cache(partial(fields_check_of, without={"arrays"}))  # by the kind of a message
_DTYPES = {  # NumPy's name of a dtype -> the dtype, for all numeric dtypes
    str(dtype): dtype
    for code in "?bBhHiIlLqQefd"
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}


# --- messages -----------------------------------------------------------------------------------


class Call(flower_internals.Framed):
    """A message that carries its payload.

    payload : the payload; None once somebody has asked for the records, which may then change.
    kind : the type of the payload that the records come from.
    """

    kind: type[Payload] | None = None

    def to_parts(self) -> Parts:
        """Return the payload in two parts, for Flower's records."""
        return _to_parts(self.payload)

    def pieces(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the scalars, and bytes of the arrays without a copy, as a frame has them."""
        scalars, found = {**vars(self.payload)}, list[Any]()
        for name, array in scalars.pop("arrays").items():
            about = array.dtype, array.shape
            header = _header(array.dtype.str, array.shape)
            found.append(flower_internals.before_array(name, *about, NUMPY, header))
            found.append(np.ascontiguousarray(array).data)
        return scalars, found


def to_message(
    order: Order, node_id: int, ttl: float, call: bool = False, of_parties: int = 0
) -> Message:
    """Return the Flower message with an order to a node; with ``call``, a `Call`.

    It tells the number of parties, if ``of_parties`` is above 0.
    """
    if of_parties:
        order = replace(order, of_parties=of_parties)
    if not call:
        return Message(flower_internals.to_records(_to_parts(order)), node_id, order.kind, ttl=ttl)
    content = {"payload": order, "kind": type(order)}
    return flower_internals.new_message(Call, node_id, order.kind, ttl, **content)


def read_order(message: Message, kind: type[P], largest: float = MOST) -> P:
    """Return the order in a message, at the party; errors lack their subject, the party."""
    try:
        return _read(message, kind, largest)
    except VflError as error:
        raise VflError(f"was {error}") from None


def to_reply(payload: Payload, message: Message) -> Message:
    """Return a party's answer to a message; a `Call`, unless it came by Flower's records."""
    if not isinstance(message, flower_internals.Framed):
        return Message(flower_internals.to_records(_to_parts(payload)), reply_to=message)
    return flower_internals.new_reply(Call, message, payload=payload, kind=type(payload))


def to_failure(sentence: str, message: Message, out_of_step: bool = False) -> Message:
    """Return a party's answer to a message that it could not serve, without data."""
    failure = ConfigRecord({"cause": sentence, "out-of-step": out_of_step})
    return Message(RecordDict({_FAILURE: failure}), reply_to=message)


def read_reply(message: Message, kind: type[P], largest: float = MOST) -> P:
    """Return the answer of a party, at the label holder; errors lack their subject, the party.

    Raise `OutOfStepError` if the party failed because its state is missing or too old.
    """
    if message.has_error():
        raise VflError(
            f"failed: {said(message.error.reason) or f'Flower error {message.error.code}'}"
        )
    known = isinstance(message, flower_internals.Framed) and message.payload is not None
    if not known and _FAILURE in message.content:
        failure = record_of(message.content, _FAILURE, ConfigRecord)
        kind_of_error = OutOfStepError if failure.get("out-of-step") is True else VflError
        cause = said(failure.get("cause")) or "it did not say why"
        if _OLDER.match(cause):  # it compares no versions
            raise VflError(
                f"runs an older version, and the label holder runs {running()}. {SAME_VERSION}"
            )
        raise kind_of_error(f"failed: {cause}")
    return _read(message, kind, largest)


def said(text: Any) -> str:
    """Return a text from the other side as one short line without escape sequences.

    Empty if it is not a text.
    """
    if not isinstance(text, str):
        return ""
    plain = _ESCAPES.sub(" ", text[: 10 * _SAID])
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    return line if len(line) <= _SAID else f"{line[:_SAID]} ..."


def version_in(message: Message) -> str:
    """Return the label holder's version in an order of any version; empty without one."""
    known = message.payload if isinstance(message, flower_internals.Framed) else None
    if isinstance(known, Payload):
        return known.version if isinstance(known, Order) else ""
    try:
        found = known.scalars if known else record_of(message.content, SCALARS, ConfigRecord)
    except (KeyError, VflError):
        return ""
    return said(found.get("version"))


def _read(message: Message, kind: type[P], largest: float) -> P:
    """Return the payload of a message, if each field and array is as its kind declares."""
    known: Any = message.payload if isinstance(message, flower_internals.Framed) else None
    called = type(known) is kind
    if called:
        scalars: Any = {**vars(known)}
        blocks, size = scalars.pop("arrays"), known.nbytes
    else:
        is_read = isinstance(known, Parts)
        scalars, blocks = known if is_read else _parts_of(message.content, kind)
        size = sum(len(block.data) for block in blocks.values())
    try:
        values = _check(kind)(scalars)  # type: ignore[arg-type]
    except InvalidError as error:
        what = f"whose {error.name}" if error.name else "that"
        raise VflError(f"sent a {kind.__name__} {what} {error}.") from None
    if size > largest:
        raise VflError(
            f"sent a {kind.__name__} of {size:,} bytes, more than the {largest:,.0f} that "
            "it may have."
        )
    if len(blocks) > _MOST_ARRAYS or max(map(len, blocks), default=0) > _LONGEST:
        raise VflError(f"sent a {kind.__name__} with too many arrays, or too long names.")
    if kind.names is not None and (unknown := blocks.keys() - kind.names):
        raise VflError(f"sent a {kind.__name__} with an unknown array {min(unknown)!r}.")
    if not called:
        arrays = unpack(blocks)
    else:
        arrays = {name: np.asarray(array).view() for name, array in blocks.items()}
        for array in arrays.values():
            array.flags.writeable = False  # as arrays over a message's bytes
    return kind(**values, arrays=Received(arrays))


def _scalars(kind: type[Payload]) -> list[str]:
    """Return the names of its fields that are scalars."""
    return [spec.name for spec in fields(kind) if spec.name != "arrays"]


def _to_parts(payload: Payload) -> Parts:
    scalars = {**vars(payload)}
    return Parts(scalars, pack(scalars.pop("arrays")))


def _parts_of(record: RecordDict, kind: type[Payload]) -> Parts:
    """Return the content of Flower's records."""
    try:
        scalars = record_of(record, SCALARS, ConfigRecord)
        arrays = record_of(record, ARRAYS, ArrayRecord)
    except KeyError as error:
        raise VflError(f"sent a message without the field {error} of {kind.__name__}.") from None
    if len(record) > 2:
        raise VflError(f"sent a {kind.__name__} with unknown records.")
    return Parts(dict(scalars), arrays)


def record_of(record: RecordDict, name: str, kind: type[R]) -> R:
    """Return the record of that name, if it is of that kind."""
    found = flower_internals.contents(record)[name]
    if not isinstance(found, kind):
        raise VflError(f"sent {name!r} as another kind of record than {kind.__name__}.")
    return found


# --- digests: both sides compare a rerun with the run that it repeats -----------------------------


def digest_of(secret: bytes, arrays: Arrays, order: Turn | None = None) -> bytes:
    """Return a digest of arrays with names, types and shapes, and of an order's scalars.

    It is a Poly1305 tag, ten times as fast as a hash. Nobody can find two messages with one digest,
    since both the secret and the digest stay at the side that computes it.
    """
    digest = Poly1305(hashlib.sha256(secret).digest())
    named = sorted(arrays.items())
    about = [f"{name}|{array.dtype.str}|{array.shape}" for name, array in named]
    if order is not None:
        scalars = [f"{name}={of}" for name, of in vars(order).items() if name not in _OF_NO_RESULT]
        about = [*scalars, order.kind, *about]
    digest.update("|".join(about).encode())
    for _, array in named:
        digest.update(array.tobytes())
    return digest.finalize()[:DIGEST]


# --- many at once --------------------------------------------------------------------------------


def pack_many(messages: Sequence[Message]) -> NDArray[np.uint8]:
    """Pack calls, answers and failures, with their receivers, as uint8 [n]."""
    heads: list[dict[str, Any]] = []
    parts: list[NDArray[Any]] = []
    for message in messages:
        head: dict[str, Any] = {"node": message.metadata.dst_node_id}
        payload = message.payload if isinstance(message, Call) else None
        if payload is None and isinstance(message, Call) and message.kind:  # was looked at
            payload = _read(message, message.kind, math.inf)
        if payload is not None:
            kind = type(payload)
            head["kind"] = kind.__name__
            head["scalars"] = [getattr(payload, name) for name in _scalars(kind)]
            arrays = payload.arrays
            head["arrays"] = [[n, str(a.dtype), a.shape] for n, a in arrays.items()]
            parts += [np.ascontiguousarray(array).reshape(-1) for array in arrays.values()]
        elif message.has_error():
            head["failure"] = [message.error.reason or "it did not say why", False]
        elif _FAILURE in message.content:
            failure = record_of(message.content, _FAILURE, ConfigRecord)
            head["failure"] = [failure["cause"], failure["out-of-step"]]
        else:
            cause = "a mod made a new message. Change the content of the answer instead."
            head["failure"] = [cause, False]
        heads.append(head)
    said = json.dumps(heads).encode()
    blocks = [np.frombuffer(len(said).to_bytes(8, "big") + said, np.uint8)]
    return np.concatenate([*blocks, *(part.view(np.uint8) for part in parts)])


def unpack_many(packed: NDArray[np.uint8]) -> list[tuple[int, Payload | VflError]]:
    """Unpack pairs of a receiver and a payload, or its failure, from `pack_many`.

    The payloads are unchecked: `read_order` and `read_reply` check them. An error ends a sentence.
    """
    try:
        end = 8 + int.from_bytes(packed[:8].tobytes(), "big")
        found: list[tuple[int, Payload | VflError]] = []
        for head in json.loads(packed[8:end].tobytes()):
            node = int(head["node"])
            if "failure" in head:
                cause, out_of_step = head["failure"]
                found.append((node, (OutOfStepError if out_of_step is True else VflError)(cause)))
                continue
            arrays: Arrays = {}
            for name, dtype, shape in head["arrays"]:
                start, end = end, end + math.prod(shape) * _DTYPES[dtype].itemsize
                arrays[name] = packed[start:end].view(_DTYPES[dtype]).reshape(shape)
            kind = _kinds()[head["kind"]]
            values = dict(zip(_scalars(kind), head["scalars"], strict=True))
            found.append((node, kind(**values, arrays=arrays)))
        return found
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise VflError("sent messages that do not decode.") from None


@lru_cache(maxsize=1)
def _kinds() -> dict[str, type[Payload]]:
    """Return every payload type by its name."""
    found, kinds = {}, [Payload]
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found


# --- arrays -------------------------------------------------------------------------------------


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as an ArrayRecord."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = Array(str(array.dtype), array.shape, NUMPY, to_numpy_format(array))
    return record


def unpack(record: Mapping[str, Array | flower_internals.Block]) -> Arrays:
    """Return the arrays of an ArrayRecord or a frame, read-only and without a copy.

    Raise `VflError` if an array is not numeric, or its bytes do not match its dtype and shape.
    """
    return {name: unpack_one(name, array) for name, array in record.items()}


def to_numpy_format(array: NDArray[Any]) -> bytes:
    """Return an array's bytes in NumPy's file format."""
    header = _header(array.dtype.str, array.shape)
    return b"".join((header, np.ascontiguousarray(array).data))


def unpack_one(name: str, array: Array | flower_internals.Block) -> NDArray[Any]:
    """Return the array in a Flower Array or a frame, read-only and without a copy."""
    try:
        dtype = _DTYPES[array.dtype]  # NumPy would parse, and so evaluate, any text
        if array.stype != NUMPY or len(array.shape) > _AXES:
            raise ValueError
        header = _header(dtype.str, tuple(array.shape))
        if not array.data.startswith(header):
            raise ValueError
        return np.frombuffer(array.data, dtype, offset=len(header)).reshape(array.shape)
    except (KeyError, TypeError, ValueError):
        raise VflError(f"sent an array {name!r} whose bytes do not decode.") from None


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of NumPy's file format (version 1.0, row-major)."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()
