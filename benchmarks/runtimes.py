"""Milliseconds of a step in each runtime: in process, Ray and SuperNodes, by streams and messages.

MNIST, four quadrant parties 196-128, top model 512-128-10, batch 64, `split-nn`. Times run from the
first evaluation to the last, so they leave out the start and include evaluations. SuperNodes use
TLS and authenticate themselves, all on this machine. Over streams, as in process, an epoch has all
60,000 rows. Over Flower's messages it has as many as take some two minutes. Engine "supernodes"
runs by streams, and "supernodes-messages" by messages. Prints one JSON object as its last line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CASCADED_MODEL, PARTIES, mnist_of, parser, quiet_run, report

ENGINES = ("local", "ray", "supernodes", "ray-messages", "supernodes-messages")
ROWS = {  # of an epoch over messages, by engine and window
    ("ray", 1): 64 * 200,
    ("ray", 8): 64 * 400,
    ("ray", 32): 64 * 800,
    ("supernodes", 1): 64 * 6,
    ("supernodes", 8): 64 * 48,
    ("supernodes", 32): 64 * 192,
}


def per_step(history: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the time of a step, from the first evaluation to the last."""
    first, last = history[0], history[-1]
    seconds = last["seconds"] - first["seconds"]
    steps = last["steps"] - first["steps"]
    exchanges = (last["exchanges"] - first["exchanges"]) / PARTIES
    return {
        "ms_a_step": round(1000 * seconds / steps, 2),
        "seconds_of_an_epoch": round(seconds / (steps * 64) * 60_000, 1),
        "ms_an_exchange": round(1000 * seconds / exchanges, 1),
        "steps_an_exchange": round(steps / exchanges, 1),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    made.add_argument("--windows", nargs="+", type=int, choices=(1, 8, 32), default=[1, 8])
    made.add_argument("--epochs", type=int, default=3, help="over streams; the first warms up")
    options = made.parse_args()
    if options.epochs < 2:
        made.error("--epochs: time is taken from the end of the first to that of the last")
    figures: dict[str, Any] = {}
    for named in options.engines:
        engine, _, messages = named.partition("-")
        for window in options.windows:
            keys = {
                **CASCADED_MODEL,
                "epochs": 2 if messages else options.epochs,
                "window": window,
                "transport": messages or "stream",
            }
            rows = ROWS[engine, window] if messages else None
            with mnist_of(options, rows) as mnist:
                keys["dataset"] = f"npz:{Path(mnist).absolute()}"
                summary, history = quiet_run(PARTIES, keys, engine)
            first, last = history[0], history[-1]
            name = f"{engine}, {summary['transport']}, window {window}"
            figures[name] = {
                **per_step(history),
                "first_evaluation_after": first["seconds"],
                "test_accuracy": round(last["test_accuracy"], 4),
            }
            print(f"{name:32}", figures[name], flush=True)
    report("runtimes", figures)


if __name__ == "__main__":
    main()
