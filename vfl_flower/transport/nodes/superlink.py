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
  process, and gives tasks their tokens in files.
- A SuperNode runs the installed ClientApp of this package, whatever a SuperLink sends.

The Fleet API asks for registered keys by Flower's own ``--enable-supernode-auth``, and before it
reads a call's body (`transport.nodes.gate`).
"""

from __future__ import annotations

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
from vfl_flower.config.files import make_folder, write_whole
from vfl_flower.config.run_config import pairs
from vfl_flower.transport.flower_internals import (
    demand_token,
    flower_home,
    guard_fleet,
    hide_tokens,
    keep_token,
    run_installed_code_only,
)
from vfl_flower.transport.nodes.gate import Gate, LogBudget


def superlink(options: list[str]) -> None:
    """Start a SuperLink in this process."""
    address = _address(options, 8000)
    token = secrets.token_urlsafe(32)
    keep_token(address, token)
    demand_token(token)
    guard_fleet(Gate)
    budget = LogBudget()
    for name in ("flwr", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).addFilter(budget)
    _be("flower-superlink", [*options, *_with_secret(options, address)])


def supernode(options: list[str]) -> None:
    """Start a SuperNode in this process."""
    run_installed_code_only()
    try:
        with _described(options):
            _be("flower-supernode", [*options, *_with_secret(options, _address(options, 9094))])
    except Exception:
        traceback.print_exc()
    finally:  # the thread that serves the Runtime API would keep a node that has given up
        os._exit(1)


def superexec(options: list[str]) -> None:
    """Start a SuperExec in this process."""
    hide_tokens()
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
    """Return the address on which the process will listen."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    given, _ = parser.parse_known_args(options)
    return f"{given.host}:{given.port}"


def _with_secret(options: list[str], address: str) -> list[str]:
    """Start the SuperExec with a secret; return the options that demand the secret."""
    file = flower_home() / f"superexec-{address.rpartition(':')[2]}.secret"
    make_folder(file.parent)
    write_whole(file, secrets.token_bytes(32))
    secret = ["--superexec-auth-secret-file", str(file)]
    tls = ["--insecure"]
    if "--ssl-ca-certfile" in options:
        tls = ["--root-certificates", options[options.index("--ssl-ca-certfile") + 1]]
    command = [sys.executable, "-P", "-m", "vfl_flower.transport.nodes.superlink", "superexec"]
    command += [*tls, "--runtime-api-address", address]
    subprocess.Popen([*command, "--parent-pid", str(os.getpid()), *secret])
    return ["--isolation", "process", *secret]


if __name__ == "__main__":
    {each.__name__: each for each in (superlink, supernode, superexec)}[sys.argv[1]](sys.argv[2:])
