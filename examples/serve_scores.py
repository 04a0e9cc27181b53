"""Train a model, serve it, and ask for 1,000 scores, one id a request.

    python examples/serve_scores.py

The parties are in the service's process: no network between organisations adds to the latencies.
See docs/how-to/serve.md.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import vfl_flower
from vfl_flower.client import Scores
from vfl_flower.config.errors import VflError

_ENDING = 30.0  # seconds that the service may take to end


def main(requests: int = 1000, epochs: int = 5) -> None:
    """Train, serve and ask, with files in a folder that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="vfl-serve-") as temporary:
        run = Path(temporary, "run")
        print(f"1. Train on handwritten digits with four parties, for {epochs} epochs (`vfl run`).")
        options = {"dataset": "digits", "epochs": epochs, "out": str(run)}
        model = vfl_flower.train(options, parties=4, progress=False)
        print(f"   test accuracy {model.summary['test_accuracy']:.3f}")
        print("2. Serve the model in another process (`vfl serve`).")
        began = time.monotonic()
        with service(run) as (url, process):
            wait_for(url, run, process)
            print(f"   {url} answers after {time.monotonic() - began:.1f} s")
            print(f"3. Ask for {requests:,} scores, one id a request (`vfl_flower.client.Scores`).")
            for name, figure in figures(ask(url, run, requests)).items():
                print(f"   {name:10} {figure}")
            print("4. Stop the service (SIGTERM), and delete the run.")


@contextmanager
def service(run: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve a run on a free port within the block; yield the address and the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "vfl_flower.tools.cli", "serve", str(run)]
    with open(run / "serve.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "-c", f"serve-address='{address}'"], stdout=log, stderr=log
        )
    try:
        yield f"http://{address}", process
    finally:
        process.terminate()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, run: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the service answers; print its answer for one id, and the contributions."""
    while True:
        try:
            with Scores(url, run / "serve.token") as scores:
                (answer,) = scores.predict([0], explain=True)
            digit = answer["prediction"]
            chance = answer["probabilities"][str(digit)]
            parties = ", ".join(map(str, answer["parties"]))
            print(f"   id 0: digit {digit}, probability {chance:.3f}, from parties {parties}")
            shares = answer["contributions"].items()
            said = ", ".join(f"party {party} {share:+.2f}" for party, share in shares)
            print(f"   contributions to its log-odds {answer['score']:.2f}: {said}")
            return
        except VflError:
            if process.poll() is not None:
                sys.exit(f"The service has ended: {(run / 'serve.log').read_text()}")
            time.sleep(0.1)


def ask(url: str, run: Path, requests: int) -> NDArray[np.float64]:
    """Ask for the score of a row at a time; return the milliseconds of each request."""
    seconds = []
    with Scores(url, run / "serve.token") as scores:
        ids = scores.model()["ids"]  # the test rows of a data set have ids 0, 1, 2, ...
        for number in range(requests):
            began = time.perf_counter()
            scores.predict([number % ids])
            seconds.append(time.perf_counter() - began)
    return 1000 * np.array(seconds)


def figures(milliseconds: NDArray[np.float64]) -> dict[str, str]:
    """Return quantiles of the latency, and the rate, as text."""
    quantiles = {"median": 50, "95 %": 95, "99 %": 99, "max": 100}
    found = {name: f"{np.percentile(milliseconds, at):.1f} ms" for name, at in quantiles.items()}
    return {**found, "rate": f"{1000 / milliseconds.mean():.0f} requests/s"}


if __name__ == "__main__":
    main()
