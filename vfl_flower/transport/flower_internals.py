"""Code that uses Flower's private parts, with `flower_processes`; they bound flwr's version.

`tests/transport/test_flower_internals.py` tests each assumption.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.common.serde_utils import (
    metadata_from_proto,
    metadata_to_proto,
    record_value_dict_from_proto,
    record_value_dict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array as ProtoArray
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from flwr.proto.recorddict_pb2 import ConfigRecordValue
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from vfl_flower.config.errors import VflError

M = TypeVar("M", bound=Message)

SERVER_NODE = 1  # node id of the ServerApp, as on a SuperLink


def begin_task() -> None:
    """Declare this process the ServerApp of a run: messages name their sender."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SERVER_NODE


def set_message_id(message: Message, key: str) -> None:
    """Set the id of a message, as a Grid does when it takes one."""
    message.metadata.__dict__["_message_id"] = key


def set_replied_to(message: Message, key: str) -> None:
    """Set the id of the message that this one answers."""
    message.metadata.__dict__["_reply_to_message_id"] = key


def config_record(scalars: dict[str, Any]) -> ConfigRecord:
    """Return a ConfigRecord of valid values, without checking each."""
    record = ConfigRecord()
    contents(record).update(scalars)
    return record


def new_message(kind: type[M], node_id: int, message_type: str, ttl: float, /, **content: Any) -> M:
    """Return a message to a node, as Flower's constructor does, without its checks."""
    task = TaskIdentity
    about = Metadata(
        *(task.run_id, "", task.node_id, node_id, "", "", time.time(), ttl, message_type),
        src_task_id=task.task_id,
    )
    return _made(kind, about, content)


def new_reply(kind: type[M], message: Message, /, **content: Any) -> M:
    """Return a reply to a message, as Flower's constructor does, without its checks."""
    order, now = message.metadata, time.time()
    about = Metadata(
        *(order.run_id, "", order.dst_node_id, order.src_node_id, order.message_id),
        *(order.group_id, now, order.created_at + order.ttl - now, order.message_type),
        src_task_id=order.dst_task_id,
        dst_task_id=order.src_task_id,
    )
    return _made(kind, about, content)


def _made(kind: type[M], about: Metadata, content: Mapping[str, Any]) -> M:
    made = kind.__new__(kind)
    about.delivered_at = ""
    vars(made).update(_metadata=about, _content=RecordDict(), _error=None, **content)
    return made


def contents(record: RecordDict | ConfigRecord) -> dict[str, Any]:
    """Return the dictionary inside a record, which checks no types and is several times as fast."""
    return record.__dict__["_data"]


def is_simulation(grid: Grid) -> bool:
    """Return whether a Grid of Flower carries the messages of its Ray simulation."""
    return type(grid).__name__ == "InMemoryGrid"  # its module has moved before


def in_ray() -> bool:
    """Return whether this process serves a node of Flower's Ray simulation."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def ray_actors() -> int:
    """Return the number of this process's Ray actors, over the whole cluster."""
    import ray
    from ray._private.state import actors  # the public one needs a dashboard

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return len(actors(job_id=job, actor_state_name="ALIVE"))


CLOCK_AHEAD, CLOCK_BEHIND = 5, 305
"""Seconds that a SuperNode's clock may be ahead of its SuperLink's, or behind.

`authenticate_node` in flwr/superlink/routers/fleet/node_auth.py refuses calls signed outside them.
"""


def signature(key: bytes) -> dict[str, str]:
    """Return the signed headers of a call that a SuperNode makes now with this private key."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(key, None)
    call: Any = SimpleNamespace(request=httpx.Request("POST", "https://superlink"))
    NodeAuthHttpInterceptor(private, private.public_key()).intercept(call, lambda _: call)
    own = call.request.headers.items()
    return {name: value for name, value in own if name.startswith("flwr-")}


STATES = "VFL_STATES"  # environment variable with the folder of states, for actors of a Ray cluster


def flower_home() -> Path:
    """Return Flower's folder of the user."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def lasting_home() -> Path:
    """Return the folder that outlives a run, also if the run has its own FLWR_HOME."""
    named = os.environ.get("VFL_HOME")
    return Path(named) if named else flower_home() / "vfl-flower"


# --- messages as bytes ---------------------------------------------------------------------------

SCALARS, ARRAYS = "scalars", "arrays"  # names of the two records of a message of this package


class Block(NamedTuple):
    """An array in a message, as Flower's ``Array`` has it: bytes in the format ``stype``."""

    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


class Parts(NamedTuple):
    """The content of a message of this package: scalars, and arrays by name."""

    scalars: Mapping[str, Any]
    arrays: ArrayRecord | Mapping[str, Block]


class Framed(Message):
    """A message that makes Flower's records on demand: a mod may ask for them.

    Flower's records take most of the time of a message, and nobody else needs them.
    """

    payload: Any = None  # `Parts`; None once somebody has the records, who may change them
    pieces: Any  # a method of `wire.Call`, which returns the content as a frame has it

    def to_parts(self) -> Parts:
        """Return the content in two parts."""
        return Parts(*self.payload)

    @property
    def content(self) -> RecordDict:
        """Flower's records of the content."""
        if self.payload is not None:
            self.content = to_records(self.to_parts())
        return super().content

    @content.setter
    def content(self, value: RecordDict) -> None:
        self.payload = None
        super(Framed, type(self)).content.__set__(self, value)  # type: ignore[attr-defined]


def to_records(parts: Parts) -> RecordDict:
    """Return Flower's records of the content of a message."""
    arrays = parts.arrays
    if not isinstance(arrays, ArrayRecord):
        arrays = ArrayRecord({name: Array(*each) for name, each in arrays.items()})
    return RecordDict({SCALARS: ConfigRecord(dict(parts.scalars)), ARRAYS: arrays})


def with_records(message: Message) -> Message:
    """Return a message as Flower's own Grids take it."""
    if isinstance(message, Framed):
        return make_message(message.metadata, message.content)
    return message


def to_bytes(message: Message) -> bytes:
    """Return a whole message in Flower's protobuf, which ends at 2 GB, with one copy of arrays."""
    try:
        if not isinstance(message, Framed) or isinstance(message.payload, Parts | None):
            return bytes(message_to_proto(message).SerializeToString())
        scalars, arrays = message.pieces()
        size = sum([memoryview(each).nbytes for each in arrays])
        if size > _LARGEST:
            raise ValueError
        head = ProtoMessage(metadata=metadata_to_proto(message.metadata)).SerializeToString()
        content = b"".join([_scalar_of(value)(name, value) for name, value in scalars.items()])
        content = _sized(b"\x0a", _SCALARS + _sized(b"\x22", content))
        content += _sized(b"\x0a", _ARRAYS + _sized(b"\x12", b"", size), size)
        return b"".join((head, _sized(b"\x12", content, size), *arrays))
    except Exception:  # its type depends on protobuf's version
        raise VflError("a message that is too large for protobuf") from None


def _sized(tag: bytes, body: bytes, more: int = 0) -> bytes:
    """Return a field of protobuf, with its length; ``more`` bytes of it follow."""
    found, size = bytearray(tag), len(body) + more
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found) + body


_LARGEST = 2**31 - 2**20  # most bytes of a message's arrays: protobuf reads fewer than 2**31
_SCALARS, _ARRAYS = (_sized(b"\x0a", name.encode()) for name in (SCALARS, ARRAYS))


@lru_cache(maxsize=1024, typed=True)
def _scalar(name: str, value: Any) -> bytes:
    """Return the bytes of a scalar in a ConfigRecord. Most have the value of the last message."""
    made: Any = ProtoConfigRecord()
    types, values = [bool, int, float, str, bytes], {name: value}
    found = record_value_dict_to_proto(values, types, ConfigRecordValue)  # type: ignore[arg-type]
    made.items.add(key=name, value=found[name])
    return bytes(made.SerializeToString())


def _scalar_of(value: Any) -> Any:
    """Return `_scalar`; without its cache for -0.0, which equals 0.0, and for lists."""
    return _scalar.__wrapped__ if isinstance(value, float | list) else _scalar


@lru_cache(maxsize=1024)
def before_array(name: str, dtype: Any, shape: tuple[int, ...], stype: str, header: bytes) -> bytes:
    """Return what comes before an array's own bytes in an ArrayRecord."""
    size = dtype.itemsize * math.prod(shape)
    about = ProtoArray(dtype=str(dtype), shape=shape, stype=stype).SerializeToString()
    value = _sized(b"\x12", about + _sized(b"\x22", header, size), size)
    return _sized(b"\x0a", _sized(b"\x0a", name.encode()) + value, size)


def from_bytes(body: bytes) -> Message:
    """Return the message from which `to_bytes` made these bytes."""
    try:
        proto = ProtoMessage.FromString(body)
        parts = _parts_from_proto(proto)
        if parts is None:
            return message_from_proto(proto)
        return _made(Framed, metadata_from_proto(proto.metadata), {"payload": parts})
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("a frame that is no Flower message") from None


def _parts_from_proto(proto: ProtoMessage) -> Parts | None:
    """Return the content of a message, if it has the two records of this package."""
    items = proto.content.items
    if proto.HasField("error") or [each.key for each in items] != [SCALARS, ARRAYS]:
        return None
    if not (items[0].HasField("config_record") and items[1].HasField("array_record")):
        return None
    values = {each.key: each.value for each in items[0].config_record.items}
    arrays = {}
    for each in items[1].array_record.items:
        array = each.value
        arrays[each.key] = Block(array.dtype, tuple(array.shape), array.stype, array.data)
    return Parts(record_value_dict_from_proto(values), arrays)


def state_to_bytes(state: RecordDict) -> bytes:
    """Return a node's whole ``Context.state`` in Flower's protobuf."""
    return bytes(recorddict_to_proto(state).SerializeToString())


def state_from_bytes(body: bytes) -> RecordDict:
    """Return the state from which `state_to_bytes` made these bytes."""
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(body))
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("no state of a party") from None
