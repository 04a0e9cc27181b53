"""All code that uses Flower's private parts; they bound flwr's version.

`tests/test_flower_internals.py` tests each assumption.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from hmac import compare_digest
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
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
from flwr.proto.recorddict_pb2 import ConfigRecordValue
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.utils import get_flwr_home

from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import flower_defaults

SERVER_NODE = 1
"""Node id of the ServerApp, as on a SuperLink."""


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
    record.__dict__["_data"].update(scalars)
    return record


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


CLOCK_AHEAD = SYSTEM_TIME_TOLERANCE
CLOCK_BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
"""Seconds that a SuperNode's clock may be ahead of its SuperLink's, or behind: 5 and 305.

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


STATES = "VFL_STATES"
"""Environment variable with the folder of states, for actors of a Ray cluster."""


def flower_home() -> Path:
    """Return Flower's folder of the user."""
    return Path(get_flwr_home())


def lasting_home() -> Path:
    """Return the folder that outlives a run, also if the run has its own FLWR_HOME."""
    named = os.environ.get("VFL_HOME")
    return Path(named) if named else flower_home() / "vfl-flower"


# --- messages as bytes ---------------------------------------------------------------------------

SCALARS, ARRAYS = "scalars", "arrays"
"""Names of the two records of a message of this package."""


class Block(NamedTuple):
    """An array in a message, as Flower's ``Array`` has it: bytes in the format ``stype``."""

    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


class Parts(NamedTuple):
    """The content of a message of this package: scalars, and arrays by name."""

    scalars: Mapping[str, Any]
    arrays: Mapping[str, Block | Array]


class Framed(Message):
    """A message that makes Flower's records on demand: a mod may ask for them.

    Flower's records take most of the time of a message, and nobody else needs them.
    """

    _parts: Parts | None = None

    @classmethod
    def of(cls, metadata: Any, parts: Parts) -> Framed:
        """Return the message with this metadata and content."""
        made: Framed = cls(RecordDict(), metadata=metadata)  # type: ignore[call-overload]
        made._parts = parts
        return made

    @property
    def parts(self) -> Parts | None:
        """The content; None once somebody has asked for the records, which may then change."""
        return self._parts

    def forget_parts(self) -> None:
        """Let the records be the content from now on."""
        self._parts = None

    @property
    def content(self) -> RecordDict:
        """Flower's records of the content."""
        parts = self.parts
        if parts is not None:
            self.content = to_records(parts)
        return super().content

    @content.setter
    def content(self, value: RecordDict) -> None:
        self.forget_parts()
        super(Framed, type(self)).content.__set__(self, value)  # type: ignore[attr-defined]


def to_records(parts: Parts) -> RecordDict:
    """Return Flower's records of the content of a message."""
    arrays = ArrayRecord()
    for name, each in parts.arrays.items():
        arrays[name] = Array(each.dtype, each.shape, each.stype, each.data)
    return RecordDict({SCALARS: ConfigRecord(dict(parts.scalars)), ARRAYS: arrays})


def with_records(message: Message) -> Message:
    """Return a message as Flower's own Grids take it."""
    if isinstance(message, Framed):
        return make_message(message.metadata, message.content)
    return message


def to_bytes(message: Message) -> bytes:
    """Return a whole message in Flower's protobuf, which ends at 2 GB."""
    try:
        parts = message.parts if isinstance(message, Framed) else None
        proto = message_to_proto(message) if parts is None else _parts_to_proto(message, parts)
        return bytes(proto.SerializeToString())
    except Exception:  # its type depends on protobuf's version
        raise VflError("a message that is too large for protobuf") from None


def from_bytes(body: bytes) -> Message:
    """Return the message from which `to_bytes` made these bytes."""
    try:
        proto = ProtoMessage.FromString(body)
        parts = _parts_from_proto(proto)
        if parts is None:
            return message_from_proto(proto)
        return Framed.of(metadata_from_proto(proto.metadata), parts)
    except Exception:  # whatever protobuf and Flower say of bytes from elsewhere
        raise VflError("a frame that is no Flower message") from None


def _parts_to_proto(message: Message, parts: Parts) -> ProtoMessage:
    """Return what Flower makes of a message with these records, without a copy of each array."""
    proto = ProtoMessage(metadata=metadata_to_proto(message.metadata))
    scalars = proto.content.items.add(key=SCALARS).config_record
    arrays = proto.content.items.add(key=ARRAYS).array_record
    for record in (scalars, arrays):
        record.SetInParent()  # also if it is empty
    types = [bool, int, float, str, bytes]
    found: Any = parts.scalars
    for name, value in record_value_dict_to_proto(found, types, ConfigRecordValue).items():
        scalars.items.add(key=name, value=value)
    for name, each in parts.arrays.items():
        array = arrays.items.add(key=name).value
        array.dtype, array.stype, array.data = each.dtype, each.stype, each.data
        array.shape.extend(each.shape)
    return proto


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


# --- Flower's own processes ---------------------------------------------------------------------


def app_of_this_package() -> str:
    """Return the pyproject.toml of a Flower App that names this installed package."""
    parts = {"serverapp": "vfl_flower.server_app:app", "clientapp": "vfl_flower.client_app:app"}
    about = {"publisher": "vfl-flower", "components": parts, "config": flower_defaults()}
    project = {"name": "vfl-app", "version": "1.0.0", "license": "Apache-2.0"}
    project["description"] = "The components of the vfl-flower that is installed"
    return tomli_w.dumps({"project": project, "tool": {"flwr": {"app": about}}})


def keep_token(address: str, token: str) -> None:
    """Have `flwr` commands with this FLWR_HOME show the token at an address."""
    from flwr.cli.constant import (
        ACCESS_TOKEN_STORE_KEY,
        AUTHN_TYPE_STORE_KEY,
        REFRESH_TOKEN_STORE_KEY,
    )
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store import get_credential_store

    store = get_credential_store()
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


def demand_token(token: str) -> None:
    """Have this process's SuperLink serve only Control calls with this token."""
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    superlink: Any = import_module("flwr.superlink.cli.flower_superlink")

    class ByToken(NoOpControlAuthnPlugin):
        """Grants Flower's only account to callers with the token."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            shown = dict(metadata).get(ACCESS_TOKEN_KEY, "")
            shown = shown.encode() if isinstance(shown, str) else shown
            if compare_digest(shown, token.encode()):
                return super().validate_tokens_in_metadata(metadata)
            return False, None

        def get_login_details(self) -> None:
            return None

        def refresh_tokens(self, metadata: Any) -> tuple[None, None]:
            return None, None

    superlink.load_control_authn_plugin = ByToken


def guard_fleet(gate: type) -> None:
    """Put an ASGI middleware before all others of this process's SuperLink.

    It gets the application and a function. The function returns the registered public key that has
    signed a call, or None. A SuperNode signs only the time, so the headers are enough. Flower's own
    function checks them.
    """
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    extensions: Any = import_module("flwr.superlink.extensions")
    of_flower: Any = import_module("flwr.superlink.routers.fleet.node_auth")

    def caller(scope: Any) -> bytes | None:
        request = of_flower.Request(scope)
        try:
            key = b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            if of_flower.get_linkstate(request).get_node_id_by_public_key(key) is None:
                return None
            claimed = SimpleNamespace(
                protobuf_request=of_flower.ActivateNodeRequest(public_key=key)
            )
            of_flower.authenticate_node(SimpleNamespace(headers=request.headers, state=claimed))
        except (KeyError, ValueError, of_flower.HTTPException):
            return None
        return key

    extensions.get_middleware = lambda: (extensions.Middleware(gate, caller=caller),)


def start_tasks_by(start: Callable[[list[str], bool], None]) -> None:
    """Have a SuperExec that runs in this process start tasks by this function.

    It gets a task's command with its arguments, and whether to discard the task's output.
    """
    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")

    def popen(arguments: list[str], stdout: int | None = None, stderr: int | None = None) -> None:
        start(arguments, stdout == subprocess.DEVNULL)

    executor.subprocess = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


def run_installed_code_only() -> None:
    """Have this process's SuperNode run the installed ClientApp of this package.

    It neither fetches nor uses the App that its SuperLink names. It leaves out options of the run
    configuration that this package does not know, since a SuperNode would end at them.
    """
    from flwr.cli.build import build_fab_from_files
    from flwr.cli.config_utils import get_fab_metadata

    supernode: Any = import_module("flwr.supernode.start_client_internal")
    content, _ = build_fab_from_files({"pyproject.toml": app_of_this_package().encode()})
    fab = Fab(sha256(content).hexdigest(), content, {})
    name, version = get_fab_metadata(content)
    own: dict[str, Any] = {"fab_id": name, "fab_version": version, "fab_hash": fab.hash_str}
    known = flower_defaults()
    connect = supernode.http_request_response

    @contextmanager
    def connected(*arguments: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*arguments) as (node, receive, send, get_run, _, *objects):

            def run_of_own_app(run_id: int) -> Run:
                run: Run = get_run(run_id)
                config = {
                    key: run.override_config[key] for key in run.override_config if key in known
                }
                return replace(run, **own, override_config=config, primary_task_type="")

            yield node, receive, send, run_of_own_app, lambda *_: fab, *objects

    supernode.http_request_response = connected


def ask_each_second() -> None:
    """Have this process's SuperNode ask for messages each second; Flower's asks each third."""
    supernode: Any = import_module("flwr.supernode.start_client_internal")
    supernode.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 1.0)))
