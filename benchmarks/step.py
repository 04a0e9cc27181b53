"""Count the functions and files that one step crosses, in process.

A step begins where the strategy orders the parties' next turns and ends where it orders those
after. With ``--request``, count one request of `vfl serve` instead, from HTTP to the parties and
back, in all threads. Functions of this project alone count, each once. Prints one JSON object as
its last line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common import parser, report
from strategies.vertical import Vertical
from vfl_flower import client_app
from vfl_flower.launch.engines import in_process, run_local
from vfl_flower.protocol.systems import resolve

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("vfl_flower", "strategies"))
KEYS = {"dataset": "digits", "epochs": 20, "window": 1, "out": ""}
STEP = 10
"""Number of the step or request that is counted: the first ones fill caches."""

Calls = Counter[tuple[str, str]]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--parties", type=int, default=2)
    made.add_argument("--strategy", default="split-nn")
    made.add_argument("--list", action="store_true", help="print each function and its calls")
    made.add_argument("--request", action="store_true", help="count a request of `vfl serve`")
    options = made.parse_args()
    calls = of_request(options.parties) if options.request else of_step(options)
    files = Counter(file for file, _ in calls)
    if options.list:
        for (file, name), times in sorted(calls.items()):
            print(f"{times:4} {file} {name}")
    for file, functions in files.most_common():
        print(f"{functions:4} {file}")
    figures = {"functions": len(calls), "files": len(files), "calls": sum(calls.values())}
    report("request" if options.request else "step", figures)


def count(calls: Calls, frame: FrameType, event: str, argument: Any) -> None:
    """Count a call of a function of this project."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(OURS) and code.co_name[0] != "<":
        calls[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1


def of_step(options: argparse.Namespace) -> Calls:
    """Return how often a step calls each function."""
    calls, turns = Calls(), 0
    ordered = Vertical.configure_train

    def configure_train(self: Vertical, *arguments: Any) -> Any:
        nonlocal turns
        turns += 1
        sys.setprofile(partial(count, calls) if turns == STEP else None)
        return ordered(self, *arguments)

    setattr(Vertical, "configure_train", configure_train)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        keys = {**KEYS, "strategy": options.strategy, "out": str(Path(folder, "run"))}
        run_local(options.parties, keys)
    return calls


def of_request(parties: int) -> Calls:
    """Return how often a request for one score calls each function, in all threads."""
    from vfl_flower.client import Scores  # the extra "serve" is needed for these alone
    from vfl_flower.config.audit_log import AuditLog
    from vfl_flower.tasks.inference.serving.loaded import Loaded
    from vfl_flower.tasks.inference.serving.service import Service
    from vfl_flower.tasks.inference.serving.web import app_of
    from vfl_flower.transport.http.listening import listening
    from vfl_flower.transport.http.tokens import Tokens

    calls, counts = Calls(), threading.Event()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if counts.is_set():
            count(calls, frame, event, argument)

    threading.setprofile(profile)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = {**KEYS, "strategy": "split-nn", "epochs": 1, "out": str(folder / "run")}
        model = {"model": str(run_local(parties, keys).folder)}
        given = {**model, "task": "serve", "serve-address": "127.0.0.1:0", "score-timeout": 60.0}
        config = resolve(given)
        node_configs: list[dict[str, Any]] = [{}] * parties
        grid = stack.enter_context(
            in_process(parties, given, config, node_configs, folder / "run", client_app.app)
        )
        load = partial(Loaded, grid, config, given, str(grid.run_id))
        service = Service(load, grid.wake, stack.enter_context(AuditLog(folder / "audit.jsonl")))
        stack.callback(service.close)
        tokens = Tokens(folder / "serve.token")
        url = stack.enter_context(listening(app_of(service, tokens), config.serving))
        worker = threading.Thread(target=service.work)
        worker.start()
        stack.callback(worker.join)
        stack.callback(service.queue.close)
        scores = stack.enter_context(Scores(url, folder / "serve.token"))
        for _ in range(STEP):
            scores.predict([0])
        every: list[Calls] = []
        for _ in range(STEP):
            time.sleep(0.2)  # until the service waits again
            calls.clear()
            counts.set()
            scores.predict([0])
            counts.clear()
            every.append(calls.copy())
    return min(every, key=len)  # some things happen once a second


if __name__ == "__main__":
    main()
