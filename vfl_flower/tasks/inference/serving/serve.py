"""Serve a model until SIGTERM or Ctrl-C: the task "serve" of a run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.errors import TERMINATING, ConfigError
from vfl_flower.config.files import write_whole
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.results import in_use
from vfl_flower.tasks.inference.model import check_model, check_streams
from vfl_flower.transport.base import Transport
from vfl_flower.transport.http.tokens import tokens_of

PROCESS = "serve.pid"
"""File in the run's results folder, with the number of the service's process."""
AUDIT_LOG = "audit.jsonl"
"""File in the run's results folder, with a line for each request."""
ENDED = "The service has ended."
"""The last record of a service that has ended by a signal."""
_LOCK = "serve.lock"
_SESSION = 86400.0 * 365
_TURN = 0.0005  # seconds that a thread with many ids may hold up a thread with few
_FINISHING = 15.0  # seconds that requests under way may take after a signal


def serve(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Answer requests for scores until SIGTERM or Ctrl-C."""
    check_model(config, "serve")
    check_streams(transport, "A service needs")
    try:
        from vfl_flower.tasks.inference.serving.loaded import Loaded
        from vfl_flower.tasks.inference.serving.service import Service
        from vfl_flower.tasks.inference.serving.web import app_of
        from vfl_flower.transport.http.listening import listening
    except ImportError as error:
        raise ConfigError(
            f"The service needs {error.name}. Install it by `pip install 'vfl-flower[serve]'`."
        ) from None
    folder = Path(config.model).expanduser().absolute()
    tokens = tokens_of(config.serving, folder)
    with ExitStack() as exits:
        exits.enter_context(in_use(folder, _LOCK))
        load = partial(Loaded, transport, config, given, run)
        audit = exits.enter_context(AuditLog(folder / AUDIT_LOG))
        exits.callback(gc.unfreeze)
        exits.callback(sys.setswitchinterval, sys.getswitchinterval())
        gc.freeze()  # else a collection within a request goes through all objects of torch, too
        service = Service(load, transport.wake, audit)
        exits.callback(service.close)
        torch.set_num_threads(1)  # a batch is too small for more
        sys.setswitchinterval(_TURN)
        write_whole(folder / PROCESS, f"{os.getpid()}\n".encode())
        exits.callback((folder / PROCESS).unlink, missing_ok=True)
        with (
            _ended_by_signal(service.queue.close),
            listening(app_of(service, tokens), config.serving) as url,
        ):
            notice.info("The model in %s is served at %s/docs", config.model, url)
            notice.info("The tokens of its callers are in %s", tokens.path)
            service.work()
        notice.info(ENDED)


def lasting(config: RunConfig) -> RunConfig:
    """Return the configuration with streams and sessions that outlast the service.

    Sessions end so that parties save their states, and a service changes none.
    """
    values: dict[str, Any] = {"session-seconds": _SESSION}
    if config.running.transport == "auto":
        values["transport"] = "stream"  # never fall back on Flower's messages
    return config.with_values(values)


@contextmanager
def _ended_by_signal(end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` at the first signal; a second, or some seconds, end the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, *TERMINATING)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup
        del before[signal.SIGHUP]
    ended = threading.Event()

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def finish(number: int) -> None:
        end()
        if not ended.wait(_FINISHING):  # Flower waits without end for a SuperLink that has gone
            os.kill(os.getpid(), number)

    def came(number: int, frame: FrameType | None) -> None:
        restore()
        # In a thread: the signal may have interrupted code that holds the queue's lock.
        threading.Thread(target=finish, args=(number,), daemon=True).start()

    for each in before:
        signal.signal(each, came)
    try:
        yield
    finally:
        ended.set()
        restore()
