"""All that touches what Flower keeps to itself; the bound on flwr in pyproject.toml is for this.

`tests/test_flower_internals.py` says of each what is relied on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.utils import get_flwr_home

from vfl_flower.errors import VflError

SERVER_NODE = 1
"""Node id of the ServerApp, as on a SuperLink."""


def begin_task() -> None:
    """Say that this process is the ServerApp of a run, as messages name their sender."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SERVER_NODE


def set_message_id(message: Message, key: str) -> None:
    """Name a message, as a Grid does when it takes one."""
    message.metadata.__dict__["_message_id"] = key


def set_replied_to(message: Message, key: str) -> None:
    """Say to which message this one is a reply."""
    message.metadata.__dict__["_reply_to_message_id"] = key


def is_simulation(grid: Grid) -> bool:
    """Whether a Grid of Flower's carries the messages of its Ray simulation."""
    return type(grid).__name__ == "InMemoryGrid"  # its module has moved before


def in_ray() -> bool:
    """Whether this process serves a node of Flower's Ray simulation."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def flower_home() -> Path:
    """The folder in which Flower keeps what is the user's."""
    return Path(get_flwr_home())


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


def state_to_bytes(state: RecordDict) -> bytes:
    """All of a node's ``Context.state``, in Flower's protobuf."""
    return bytes(recorddict_to_proto(state).SerializeToString())


def state_from_bytes(body: bytes) -> RecordDict:
    """What `state_to_bytes` made these bytes of."""
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(body))
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("no state of a party") from None
