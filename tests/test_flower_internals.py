"""What is relied on of Flower that is not public: each on its own, for Flower's next version."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from packaging.requirements import Requirement

from vfl_flower.errors import VflError
from vfl_flower.flower_internals import (
    begin_task,
    flower_home,
    from_bytes,
    in_ray,
    set_message_id,
    set_replied_to,
    state_from_bytes,
    state_to_bytes,
    to_bytes,
)

CHECKOUT = Path(__file__).parent.parent


def message() -> Message:
    begin_task()
    return Message(RecordDict({"a": ConfigRecord({"b": 1})}), 7, "train", ttl=5.0)


def test_the_flower_that_is_installed_is_within_the_bound_that_is_declared() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (flower,) = (r for text in project["dependencies"] if (r := Requirement(text)).name == "flwr")
    assert version("flwr") in flower.specifier
    assert any(each.operator == "<" for each in flower.specifier)


def test_a_message_can_be_named_and_say_what_it_answers() -> None:
    order = message()
    set_message_id(order, "m-1")
    assert order.metadata.message_id == "m-1"
    reply = Message(RecordDict(), reply_to=order)
    assert reply.metadata.reply_to_message_id == "m-1"
    set_replied_to(reply, "m-2")
    assert reply.metadata.reply_to_message_id == "m-2"


def test_messages_and_states_become_bytes_and_come_back() -> None:
    order = message()
    set_message_id(order, "m-1")
    again = from_bytes(to_bytes(order))
    assert again.metadata == order.metadata and again.content == order.content
    state = RecordDict({"s": ConfigRecord({"n": 2.5})})
    assert state_from_bytes(state_to_bytes(state)) == state


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff\xff", b"no message at all"])
def test_bytes_of_no_message_are_refused(body: bytes) -> None:
    for read in (from_bytes, state_from_bytes):
        with pytest.raises(VflError):
            read(body)


def test_flowers_home_is_where_its_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert flower_home() == tmp_path


def test_this_process_is_no_actor_of_ray() -> None:
    assert not in_ray()


def test_nothing_else_touches_what_flower_keeps_to_itself() -> None:
    private = re.compile(r"flwr\.(supercore|proto|server|client|simulation|supernode|superlink)\b")
    for folder in ("vfl_flower", "strategies"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            if path.name == "flower_internals.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if isinstance(node, ast.Import):
                    modules = [each.name for each in node.names]
                assert not any(private.match(module) for module in modules), path
                if isinstance(node, ast.Attribute) and node.attr == "__dict__":
                    raise AssertionError(f"{path} looks into an object")
