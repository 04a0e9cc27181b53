"""A process that runs trials: a job or an answer a line comes in, an event a line goes out."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import torch

from vfl_flower.tools.sweep.trial import Event, run_trial


def main() -> None:
    """Serve until there is nobody to be told, or SIGTERM; a trial's folder is then removed."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a model of one's own prints goes where errors go
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)

    def say(event: Event) -> None:
        try:
            out.write(json.dumps(event) + "\n")
            out.flush()
        except BrokenPipeError:
            sys.exit(1)

    def tell(event: Event) -> bool:
        say(event)
        answer = sys.stdin.readline()
        if not answer:
            sys.exit(1)
        return bool(json.loads(answer))

    while line := sys.stdin.readline():
        say(run_trial(json.loads(line), tell))


if __name__ == "__main__":
    main()
