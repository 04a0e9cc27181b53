"""Flower's SuperLink and SuperNode, closed to strangers.

    python -m vfl_flower.transport.nodes.superlink superlink OPTIONS
    python -m vfl_flower.transport.nodes.superlink supernode OPTIONS

with the options of `flower-superlink` and `flower-supernode`. As Flower starts them, anyone who
reaches their ports can start runs and register keys (Control API). Anyone can also take a task with
its message and state, and answer it (Runtime API). A SuperNode runs the code that a SuperLink
sends. This module closes them:

- The Control API asks for a token, fresh at each start. `flwr` commands with the same FLWR_HOME
  find it in their credentials.yaml.
- The Runtime API asks for Flower's SuperExec secret, fresh too. The SuperExec is a separate
  process, and forks one that is warm for each task (`transport.nodes.warm`). So no task's token
  stands among the arguments of a process, which every user of a machine can read.
- A SuperNode runs the installed ClientApp of this package, whatever a SuperLink sends.

The Fleet API asks for registered keys by Flower's own ``--enable-supernode-auth``, and before it
reads a call's body (`transport.nodes.gate`).
"""

import argparse
import logging
import os
import secrets
import subprocess
import sys
import traceback
from contextlib import AbstractContextManager
from importlib.metadata import entry_points

from vfl_flower.config import logs
from vfl_flower.config.checks import direct_to_loopback
from vfl_flower.config.files import make_folder, write_whole
from vfl_flower.config.run_config import pairs
from vfl_flower.transport import flower_processes
from vfl_flower.transport.flower_internals import (
    flower_home,
)
from vfl_flower.transport.nodes.gate import Gate, LogBudget
from vfl_flower.transport.nodes.warm import WarmTasks

_OF_BOTH = ["torch._dynamo", "sklearn.datasets", "pandas"]  # the first for any optimiser of torch
NEEDED = {
    "superlink": ["vfl_flower.server_app", "flwr.superlink.cli", *_OF_BOTH],
    "supernode": ["vfl_flower.client_app", "flwr.supernode.cli", *_OF_BOTH],
}
"""Modules that a task of a SuperLink or a SuperNode needs in most runs."""


def superlink(options: list[str]) -> None:
    """Start a SuperLink in this process."""
    address = _address(options, 8000)
    token = secrets.token_urlsafe(32)
    flower_processes.keep_token(address, token)
    flower_processes.demand_token(token)
    flower_processes.guard_fleet(Gate)
    flower_processes.hold_for_tasks()
    budget = LogBudget()
    for name in ("flwr", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).addFilter(budget)
    _be("flower-superlink", [*options, *_with_secret(options, address, "superlink")])


def supernode(options: list[str]) -> None:
    """Start a SuperNode in this process."""
    flower_processes.run_installed_code_only()
    flower_processes.ask_each_second()
    flower_processes.hold_for_tasks()
    flower_processes.serve_runs_at_once()
    try:
        with _described(options):
            address = _address(options, 9094)
            _be("flower-supernode", [*options, *_with_secret(options, address, "supernode")])
    except Exception:
        traceback.print_exc()
    finally:  # the thread that serves the Runtime API would keep a node that has given up
        os._exit(1)


def superexec(options: list[str]) -> None:
    """Start a SuperExec in this process, for a SuperLink or a SuperNode: the first option."""
    whose, *options = options
    # `flwr run` may send another version of the ServerApp. A SuperNode runs what is installed.
    fresh = ["vfl_flower", "strategies"] if whose == "superlink" else []
    flower_processes.start_tasks_by(WarmTasks(NEEDED[whose], fresh).start)
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")  # its questions are held
    _be("flower-superexec", options)


def _described(options: list[str]) -> AbstractContextManager[None]:
    """Write a SuperNode's log records in the format that its node configuration names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-config", default="")
    text = parser.parse_known_args(options)[0].node_config
    node = pairs([text], "--node-config") if text else {}
    return logs.described(
        node.get("log-format"), lasting=True, role="party", party=node.get("partition-id")
    )


def _be(command: str, options: list[str]) -> None:
    """Run this command of Flower in this process."""
    [script] = entry_points(group="console_scripts", name=command)
    sys.argv = [command, *options]
    script.load()()


def _address(options: list[str], port: int) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    given, _ = parser.parse_known_args(options)
    return f"{given.host}:{given.port}"


def _with_secret(options: list[str], address: str, whose: str) -> list[str]:
    """Start the SuperExec with a secret; return the options that demand the secret."""
    file = flower_home() / f"superexec-{address.rpartition(':')[2]}.secret"
    make_folder(file.parent)
    write_whole(file, secrets.token_bytes(32))
    secret = ["--superexec-auth-secret-file", str(file)]
    tls = ["--insecure"]
    if "--ssl-ca-certfile" in options:
        tls = ["--root-certificates", options[options.index("--ssl-ca-certfile") + 1]]
    command = [
        sys.executable,
        "-P",
        "-m",
        "vfl_flower.transport.nodes.superlink",
        "superexec",
        whose,
    ]
    command += [*tls, "--runtime-api-address", address]
    subprocess.Popen([*command, "--parent-pid", str(os.getpid()), *secret])
    return ["--isolation", "process", *secret]


if __name__ == "__main__":
    os.environ.update(direct_to_loopback(os.environ))  # for all that it starts, too
    logs.without_colours()
    {each.__name__: each for each in (superlink, supernode, superexec)}[sys.argv[1]](sys.argv[2:])
