"""Private parts of Flower that this project uses, each tested alone for Flower's next version."""

import ast
import re
import tomllib
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp.mod import message_size_mod
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.run import Run
from flwr.supercore.utils import get_flwr_home
from packaging.requirements import Requirement

from tests.conftest import Patch
from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import flower_defaults
from vfl_flower.transport import flower_processes
from vfl_flower.transport.base import FlowerTransport
from vfl_flower.transport.flower_internals import (
    CLOCK_AHEAD,
    CLOCK_BEHIND,
    begin_task,
    config_record,
    flower_home,
    from_bytes,
    in_ray,
    new_message,
    new_reply,
    set_message_id,
    set_replied_to,
    signature,
    state_from_bytes,
    state_to_bytes,
    to_bytes,
)
from vfl_flower.transport.nodes.certificates import supernode_keys

CHECKOUT = Path(__file__).parents[2]


def message() -> Message:
    begin_task()
    return Message(RecordDict({"a": ConfigRecord({"b": 1})}), 7, "train", ttl=5.0)


def test_flowers_mod_that_measures_messages_still_fails_on_an_empty_text() -> None:
    """If this fails, remove the warning from CONTRIBUTING.md."""
    empty, full = message(), message()
    empty.content, full.content = (
        RecordDict({"a": ConfigRecord({"b": text})}) for text in ("", "text")
    )
    state: Any = None
    assert message_size_mod(full, state, lambda given, _: given) is full  # the control
    with pytest.raises(ValueError, match="must be either"):
        message_size_mod(empty, state, lambda given, _: given)


def test_a_record_made_at_once_is_one_whose_values_were_set_one_by_one() -> None:
    scalars: dict[str, Any] = {"a": 1, "b": [2, 3], "c": b"", "d": "text"}
    assert config_record(scalars) == ConfigRecord(scalars)
    state = RecordDict({"scalars": config_record(scalars)})
    assert state_from_bytes(state_to_bytes(state)) == state


def test_a_message_made_without_checks_is_one_that_flower_makes() -> None:
    def said(message: Message) -> dict[str, Any]:
        return {name: each for name, each in vars(message.metadata).items() if "ttl" not in name}

    begin_task()
    pairs = [(Message(RecordDict(), 7, "train", ttl=5.0), new_message(Message, 7, "train", 5.0))]
    set_message_id(pairs[0][0], "m-1")
    pairs.append((Message(RecordDict(), reply_to=pairs[0][0]), new_reply(Message, pairs[0][0])))
    set_message_id(pairs[0][1], "m-1")
    for of_flower, ours in pairs:
        assert vars(ours).keys() == vars(of_flower).keys()
        assert ours.content == of_flower.content == RecordDict()
        assert not ours.has_error() and not of_flower.has_error()
        now, then = said(ours).pop("_created_at"), said(of_flower).pop("_created_at")
        assert {**said(ours), "_created_at": 0} == {**said(of_flower), "_created_at": 0}
        assert abs(now - then) < 5
        assert abs(ours.metadata.ttl - of_flower.metadata.ttl) < 5
    assert from_bytes(to_bytes(pairs[1][1])).metadata.reply_to_message_id == "m-1"


def test_the_flower_that_is_installed_is_within_the_bound_that_is_declared() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (flower,) = (r for text in project["dependencies"] if (r := Requirement(text)).name == "flwr")
    assert version("flwr") in flower.specifier
    assert any(each.operator == "<" for each in flower.specifier)


def test_messages_and_states_become_bytes_and_come_back_with_their_names() -> None:
    order = message()
    set_message_id(order, "m-1")
    assert order.metadata.message_id == "m-1"
    reply = Message(RecordDict(), reply_to=order)
    assert reply.metadata.reply_to_message_id == "m-1"
    set_replied_to(reply, "m-2")
    assert reply.metadata.reply_to_message_id == "m-2"
    again = from_bytes(to_bytes(order))
    assert again.metadata == order.metadata and again.content == order.content
    state = RecordDict({"s": ConfigRecord({"n": 2.5})})
    assert state_from_bytes(state_to_bytes(state)) == state
    for body in (b"\xff", b"\x0a\xff\xff", b"no message at all"):
        for read in (from_bytes, state_from_bytes):
            with pytest.raises(VflError):
                read(body)


def test_flowers_home_is_where_its_variable_says(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert flower_home() == get_flwr_home() == tmp_path
    monkeypatch.delenv("FLWR_HOME")
    assert flower_home() == get_flwr_home()


def test_this_process_is_no_actor_of_ray() -> None:
    assert not in_ray()


def test_nothing_else_touches_what_flower_keeps_to_itself() -> None:
    for folder in ("vfl_flower", "strategies", "vfl_attacks"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            if path.name not in ("flower_internals.py", "flower_processes.py"):
                assert not any(private(node) for node in ast.walk(ast.parse(path.read_text()))), (
                    path
                )
    for touching in ("import a, flwr.proto", "from flwr.server import x", "f(x).__dict__"):
        assert any(private(node) for node in ast.walk(ast.parse(touching)))  # the control


def private(node: ast.AST) -> bool:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Import):
        modules = [each.name for each in node.names]
    parts = r"flwr\.(supercore|proto|server|client|simulation|supernode|superlink)\b"
    of_object = isinstance(node, ast.Attribute) and node.attr == "__dict__"
    return of_object or any(re.match(parts, module) for module in modules)


def test_a_superlink_asks_its_control_api_for_the_token(tmp_path: Path, monkeypatch: Patch) -> None:
    superlink = import_module("flwr.superlink.cli.flower_superlink")
    monkeypatch.setattr(superlink, "load_control_authn_plugin", None)
    flower_processes.demand_token("secret")
    plugin = superlink.load_control_authn_plugin()
    assert plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, "secret")])[0]
    for wrong in ([], [(ACCESS_TOKEN_KEY, "Secret")], [(ACCESS_TOKEN_KEY, "ü")], [("x", "secret")]):
        assert plugin.validate_tokens_in_metadata(wrong) == (False, None)
    assert plugin.get_login_details() is None
    assert plugin.refresh_tokens([]) == (None, None)


def test_a_supernode_fetches_no_app_and_takes_no_word_of_it(monkeypatch: Patch) -> None:
    node = import_module("flwr.supernode.start_client_internal")
    sent = replace(
        Run.create_empty(7),
        fab_id="../evil",
        fab_version="../..",
        fab_hash="x",
        override_config={"epochs": 3, "unknown": 1},
        primary_task_type="agentapp",
    )

    @contextmanager
    def connect(*arguments: object) -> Iterator[tuple[object, ...]]:
        def never(*arguments: object) -> None:
            raise AssertionError("it asked for the code")

        yield 1, None, None, lambda run: sent, never, "pull", "push", "confirm"

    monkeypatch.setattr(node, "http_request_response", connect)
    flower_processes.run_installed_code_only()
    with node.http_request_response("address", False) as (
        *_,
        get_run,
        get_fab,
        pull,
        push,
        confirm,
    ):
        run = get_run(7)
        fab = get_fab(run.fab_hash, 7)
    assert (pull, push, confirm) == ("pull", "push", "confirm")
    assert (run.run_id, run.override_config, run.primary_task_type) == (7, {"epochs": 3}, "")
    assert (run.fab_id, run.fab_version) == ("vfl-flower/vfl-app", "1.0.0")
    assert run.fab_hash == fab.hash_str == sha256(fab.content).hexdigest()
    with ZipFile(BytesIO(fab.content)) as archive:
        assert set(archive.namelist()) == {"pyproject.toml", ".info/CONTENT"}
    assert get_fused_config_from_fab(fab.content, run) == {**flower_defaults(), "epochs": 3}


def test_nobody_can_guess_the_id_of_a_message_and_answer_it_in_anothers_place() -> None:
    pushed: list[Message] = []
    grid: Any = SimpleNamespace(push_messages=pushed.extend)
    original = message()
    copies = [deepcopy(original), deepcopy(original)]
    assert len({each.object_id for each in [original, *copies]}) == 1
    FlowerTransport(grid).push_messages(copies)
    assert len({each.object_id for each in [original, *pushed]}) == 3


def test_a_superexec_starts_tasks_by_the_function_that_it_is_given(monkeypatch: Patch) -> None:
    executor = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    types = import_module("flwr.supercore.superexec.executor.types")
    monkeypatch.setattr(executor, "subprocess", executor.subprocess)
    started: list[tuple[str, bool]] = []
    flower_processes.start_tasks_by(lambda arguments, quiet: started.append((arguments[0], quiet)))
    given: dict[str, Any] = dict.fromkeys(types.ExecutionSpec.__dataclass_fields__)
    given |= {"token": "secret", "runtime_api_address": "here:1", "task_id": 1}
    for kind, quiet in (("flwr-clientapp", False), ("flwr-serverapp", True)):
        spec = types.ExecutionSpec(**{**given, "task_type": kind, "suppress_output": quiet})
        executor.SubprocessExecutor().launch(spec)
    assert started == [("flwr-clientapp", False), ("flwr-serverapp", True)]


@pytest.fixture
def clock(monkeypatch: Patch) -> Any:
    """Time by Flower's processes: ``now``, and what they ``slept``."""
    made = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds: float) -> None:
        made.slept.append(seconds)
        made.now += seconds

    told = SimpleNamespace(monotonic=lambda: made.now, sleep=sleep)
    monkeypatch.setattr(flower_processes, "time", told)
    return made


def test_a_supernode_that_has_no_message_asks_each_second_also_where_questions_are_held(
    monkeypatch: Patch, clock: Any
) -> None:
    supernode: Any = import_module("flwr.supernode.start_client_internal")
    monkeypatch.setattr(supernode, "time", supernode.time)
    flower_processes.ask_each_second()
    for took in (0.0, 0.05, 1.0, 0.3, 0.05):  # the third and the fourth were held
        clock.now += took
        supernode.time.sleep(3)
    assert clock.slept == [1, 1, 0.05, 0.05, 1]


def test_a_task_is_there_at_once_for_a_superexec_that_has_asked_before(
    monkeypatch: Patch, clock: Any
) -> None:
    runtime: Any = import_module("flwr.supercore.servicer.runtime.runtime_handlers")
    begins = clock.now + 0.4

    def acquire(request: Any, state: Any) -> AcquireTaskResponse:
        return AcquireTaskResponse(task=Task(task_id=1) if clock.now > begins else None)

    monkeypatch.setattr(runtime, "acquire_task", acquire)
    assert not runtime.acquire_task(None, None).HasField("task")  # the control: Flower's own
    flower_processes.hold_for_tasks()
    for whose in ("superlink", "supernode"):
        handlers: Any = import_module(f"flwr.{whose}.servicer.runtime.runtime_handlers")
        assert handlers.core_runtime_handlers is runtime, whose
    assert runtime.acquire_task(None, None).HasField("task") and clock.now < begins + 0.1
    begins = clock.now + 60
    assert not runtime.acquire_task(None, None).HasField("task") and clock.now > begins - 59.1


def test_a_superlink_accepts_signatures_within_these_seconds(monkeypatch: Patch) -> None:
    of_flower: Any = import_module("flwr.superlink.routers.fleet.node_auth")
    private, public = supernode_keys()
    now = of_flower.now
    for ahead, accepted in {
        **{0: True, CLOCK_AHEAD - 1: True, CLOCK_AHEAD + 1: False},
        **{1 - CLOCK_BEHIND: True, -1 - CLOCK_BEHIND: False},
    }.items():
        headers, there = signature(private), now() - timedelta(seconds=ahead)
        monkeypatch.setattr(of_flower, "now", lambda there=there: there)
        shown = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER])
        assert load_pem_public_key(shown) == load_ssh_public_key(public)
        claimed = SimpleNamespace(protobuf_request=of_flower.ActivateNodeRequest(public_key=shown))
        call = SimpleNamespace(headers=headers, state=claimed)
        with nullcontext() if accepted else pytest.raises(of_flower.HTTPException):
            of_flower.authenticate_node(call)
