"""Flower's own processes, by its private parts: a SuperLink, a SuperExec and a SuperNode.

`tests/transport/test_flower_internals.py` tests each assumption.
"""

from __future__ import annotations

import subprocess
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from hmac import compare_digest
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import tomli_w
from flwr.supercore.fab import Fab

from vfl_flower.config.logs import log
from vfl_flower.config.run_config import flower_defaults


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
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    superlink: Any = import_module("flwr.superlink.cli.flower_superlink")

    class ByToken(NoOpControlAuthnPlugin):
        """Grants Flower's only account to callers with the token."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, Any]:
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

            def run_of_own_app(run_id: int) -> Any:
                run = get_run(run_id)
                config = {
                    key: run.override_config[key] for key in run.override_config if key in known
                }
                return replace(run, **own, override_config=config, primary_task_type="")

            yield node, receive, send, run_of_own_app, lambda *_: fab, *objects

    supernode.http_request_response = connected


def ask_each_second() -> None:
    """Have this process's SuperNode ask each second, even if its SuperLink holds a question."""
    supernode: Any = import_module("flwr.supernode.start_client_internal")
    asked = time.monotonic()

    def sleep(seconds: float) -> None:
        nonlocal asked
        held = time.monotonic() > asked + 0.1
        time.sleep(min(seconds, 0.05 if held else 1.0))
        asked = time.monotonic()

    supernode.time = SimpleNamespace(sleep=sleep)


def hold_for_tasks() -> None:
    """Have this process hold a question for a task until there is one, at most a second."""
    runtime: Any = import_module("flwr.supercore.servicer.runtime.runtime_handlers")
    acquire = runtime.acquire_task

    def acquired(request: Any, state: Any) -> Any:
        until = time.monotonic() + 1.0
        while not (found := acquire(request, state)).HasField("task") and time.monotonic() < until:
            time.sleep(0.05)
        return found

    runtime.acquire_task = acquired


RUNS_AT_ONCE = 4
"""Runs that a SuperNode serves at once: for example a service, a training and a prediction."""
_MOST_HELD = 16  # messages that wait at a SuperNode for a run


def serve_runs_at_once() -> None:
    """Have this process's SuperNode serve several runs at once, and one message of each.

    Flower's waits for the answer to each message before it asks for the next one. A session is one
    message, and a service's session lasts as long as the service.
    """
    from flwr.common.constant import Status

    supernode: Any = import_module("flwr.supernode.start_client_internal")
    pull = supernode._pull_and_store_message
    unfinished = [Status.PENDING, Status.STARTING, Status.RUNNING]
    held: list[tuple[Any, Any]] = []  # messages with their trees, in the order in which they came
    told: set[int] = set()

    def pulled(*, state: Any, receive: Callable[[], Any], **more: Any) -> int | None:
        """Take a message, if one can be served. Return a run if there are answers to send."""

        def entries() -> list[Any]:
            with state.lock_msg_store:
                return [each.message.metadata for each in state.msg_store.values()]

        # A message stays until its answer is sent. A task may end a little later.
        busy = {each.run_id for each in entries()}
        busy |= {task.run_id for task in state.get_tasks(statuses=unfinished)}

        def next_message() -> Any:
            if len(held) < _MOST_HELD and (found := receive()):
                held.append(found)
            for each in held:
                run = each[0].metadata.run_id
                if run not in busy and len(busy) < RUNS_AT_ONCE:
                    held.remove(each)
                    return each
                if run not in busy | told:
                    told.add(run)
                    log.warning(
                        "Run %d waits: this SuperNode serves runs %s, and no more at once. It "
                        "serves run %d when one of them ends. `flwr stop RUN` ends one.",
                        *(run, ", ".join(map(str, sorted(busy))), run),
                    )
            return None

        pull(state=state, receive=next_message, **more)
        return next((each.run_id for each in entries() if each.reply_to_message_id), None)

    supernode._pull_and_store_message = pulled
