"""A process that runs trials: it reads jobs and answers, and writes events, one a line."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import torch

from vfl_flower.tools.sweep.trial import Event, run_trial


def main() -> None:
    """Serve until the sweep ends, or SIGTERM; both remove the trial's folder."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of a user's model go to standard error
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
