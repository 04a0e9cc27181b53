"""Time to an accuracy by the line's delay: with windows 1 and 8, and with the run's own choice.

Three models on 9,600 rows of MNIST, four quadrant parties, three seeds; an evaluation each eighth
of an epoch. Seconds count from the first evaluation, and are of a virtual clock. An exchange of w
steps lasts 2 ms, twice the delay, and 2 ms for each step: about as long as between SuperNodes. With
``--nodes``, seconds are real. SuperNodes use TLS, and reach the label holder through a relay that
delays every byte. Prints one JSON object as its last line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from tqdm.auto import tqdm

from benchmarks.common import (
    CASCADED_MODEL,
    PARTIES,
    SIGMOID_MODEL,
    mnist_of,
    parser,
    quiet_run,
    report,
)
from strategies.adaptive_window import AdaptiveWindow
from strategies.turns import PartyRecord
from tests.relay import Relay
from vfl_flower.launch.processes import reserved_port
from vfl_flower.transport.local import LocalGrid

TASKS: dict[str, tuple[float, dict[str, Any]]] = {  # the accuracy, and the options
    "two layers, SGD": (0.9, CASCADED_MODEL),
    "one layer with sigmoid, SGD": (0.85, SIGMOID_MODEL),
    "default model, Adam": (0.92, {"strategy": "split-nn", "optimizer": "adam"}),
}
MESSAGE, STEP = 0.002, 0.002  # seconds of an exchange without steps, and of a step
AUTO = 0


def virtual(exchanges: float, steps: float, delay: float) -> float:
    """Return the virtual seconds of a party's exchanges and steps."""
    return exchanges * (MESSAGE + 2 * delay) + steps * STEP


def window_by(delay: float) -> Callable[..., AdaptiveWindow]:
    """Return what makes an `AdaptiveWindow` that measures virtual seconds."""

    def made(schedule: Any, records: Sequence[PartyRecord], **own: Any) -> AdaptiveWindow:
        def clock() -> float:
            served = [each for each in records if not each.in_flight]
            first = (served or records)[0]
            return virtual(first.exchange - first.in_flight, first.steps, delay)

        return AdaptiveWindow(schedule, records, **own, clock=clock)

    return made


def in_process(keys: dict[str, Any], delay: float) -> list[dict[str, Any]]:
    """Return the history of a run, with virtual seconds."""
    with ExitStack() as patches:
        patches.enter_context(patch("strategies.run.AdaptiveWindow", window_by(delay)))
        patches.enter_context(patch.object(LocalGrid, "cost", "free"))
        patches.enter_context(patch.object(LocalGrid, "measures", True))
        _, history = quiet_run(PARTIES, keys)
    for each in history:
        each["seconds"] = virtual(each["exchanges"] / PARTIES, each["steps"], delay)
    return history


def on_nodes(keys: dict[str, Any], delay: float) -> list[dict[str, Any]]:
    """Return the history of a run on SuperNodes behind a slow line."""
    with reserved_port() as port, Relay(lambda number: port, delay) as relay:
        through = {"stream-address": f"127.0.0.1:{relay.port}", "stream-ports": str(port)}
        return quiet_run(PARTIES, {**keys, **through}, "supernodes")[1]


def seconds_to(accuracy: float, history: Sequence[dict[str, Any]]) -> float:
    """Return the seconds from the first evaluation to one with this accuracy; all, if none has."""
    for each in history:
        if each["test_accuracy"] >= accuracy:
            break
    return float(each["seconds"] - history[0]["seconds"])


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(rows=9600)
    made.add_argument("--delays", nargs="+", type=float, default=[0, 5, 50], metavar="MS")
    made.add_argument("--windows", nargs="+", type=int, default=[1, 8, AUTO], help="0: its own")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--nodes", action="store_true", help="on SuperNodes, in real seconds")
    options = made.parse_args()
    run = on_nodes if options.nodes else in_process
    figures: dict[str, Any] = {"seeds": options.seeds, "nodes": options.nodes}
    with mnist_of(options) as mnist:
        place = f"npz:{Path(mnist).absolute()}"
        jobs = [(task, delay) for task in TASKS for delay in options.delays]
        for task, delay in tqdm(jobs, disable=None, leave=False):
            accuracy, own = TASKS[task]
            times: dict[str, list[float]] = {}
            for window in options.windows:
                keys = {**own, "dataset": place, "epochs": options.epochs, "eval-every": 0.125}
                keys |= {"window": window} if window else {}
                times[str(window or "auto")] = [
                    round(seconds_to(accuracy, run({**keys, "seed": seed}, delay / 1000)), 2)
                    for seed in range(options.seeds)
                ]
            medians = {name: round(median(each), 2) for name, each in times.items()}
            fixed = [each for name, each in medians.items() if name != "auto"]
            found: dict[str, Any] = {"seconds": medians, "by_seed": times}
            if "auto" in medians and fixed and min(fixed):
                found["auto_over_best"] = round(medians["auto"] / min(fixed), 2)
            name = f"{task}, {accuracy}, {delay:g} ms"
            figures[name] = found
            print(f"{name:40}", found, flush=True)
    report("delays", figures)


if __name__ == "__main__":
    main()
