"""Start a service on this machine with SuperNodes."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch import submission
from vfl_flower.launch.engines import with_model
from vfl_flower.launch.processes import SuperLink
from vfl_flower.tasks.inference.serving.serve import ENDED, PROCESS

_SERVED = re.compile(r"(The model in .* is served at .*|The tokens of its callers are in .*)")
_ENDING = 20.0  # seconds that the service's process may take to end


def serve_supernodes(
    run_config: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]]
) -> None:
    """Serve a model on nodes of this machine until this process, or `PROCESS`, gets a signal."""
    node_configs = [submission.of_node_from_anywhere(each) for each in node_configs]
    run_config = {**run_config, "task": "serve"}
    config, parties, node_configs = with_model(run_config, node_configs)
    folder = Path(config.model).expanduser().absolute()
    log, process_file = folder / "serve.log", folder / PROCESS
    found = checkpoint.load(folder).config.data
    file = {"dataset": found.dataset} if found.own_data else {}  # perhaps relative to this folder
    submitted = {**submission.from_anywhere({**file, **run_config}), "model": str(folder)}
    permitted = {"align": "ids" if found.align == "ids" else "psi"} if found.own_data else {}
    with ExitStack() as stack:
        superlink = stack.enter_context(SuperLink(simulation=False))
        (superlink.home / "vfl-flower").symlink_to(folder)  # parties' states are in the folder
        for party, own in enumerate(node_configs or [{}] * parties):
            stack.enter_context(superlink.supernode(party, parties, {**permitted, **own}))
        started, read = time.time(), log.stat().st_size if log.exists() else 0
        process = superlink.submit(submitted, parties, log)
        stack.callback(_end, process_file, started, process)
        told = False
        while process.poll() is None:
            time.sleep(0.2)
            if not told and len(said := _SERVED.findall(submission.said_in(log, read))) > 1:
                print(*said, sep="\n", flush=True)
                told = True
        said_at_end = submission.said_in(log, read)
        if cause := submission.sentence_of(said_at_end):
            raise VflError(cause)
        if ENDED not in said_at_end:
            raise VflError(f"The service ended without an order. {log} says why.")
        print(ENDED)


def _end(process_file: Path, started: float, run: subprocess.Popen[bytes]) -> None:
    """End the service's own process, so that parties give back what they have counted ahead."""
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        if process_file.stat().st_mtime >= started:
            os.kill(int(process_file.read_text()), signal.SIGTERM)
            run.wait(_ENDING)
