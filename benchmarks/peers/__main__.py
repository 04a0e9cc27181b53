"""vfl-flower beside peers: seconds of an epoch, bytes on the wire and lines of user code.

MNIST, four quadrant parties 196-128, top model 512-128-10, batch 64, plain SGD: the same rows and
model for all. Peers are NVFlare's split learning, Flower's example of vertical learning, and a
loop of `torch.distributed.rpc`. Each is a separate program in ``benchmarks/peers``. Each peer has
an environment in ``--environments``, which this command makes and `pip` fills from the registry.
Torch comes from this command's environment, so that no other build of it is fetched.

Seconds are the time from one test of the model to the next: training and one test. They leave out
the start and the first epoch. Each program runs in a separate network (``unshare``). All bytes on
its loopback count, in both directions and with all headers. Messages that go through shared
memory are not among them. Lines are those with code: no comments, docstrings or empty lines. A
peer's lines include the model and rows that all peers share. Prints one JSON object as its last
line. A peer that cannot be installed is "not run", with a sentence that says why.
"""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tokenize
import venv
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import PARTIES, mnist_of, parser, plain_mnist, report
from vfl_flower.launch.processes import stop

HERE = Path(__file__).parent
PEERS: dict[str, tuple[str, list[str]]] = {  # the program, and what pip installs for it
    "torch.distributed.rpc": ("with_rpc", []),
    "NVFlare, two sites": ("with_nvflare", ["nvflare>=2.9,<2.10"]),
    "Flower's example": ("with_flower", ["flwr[simulation]>=1.42,<1.43"]),
}
OURS = [("local", 1), ("local", 8), ("supernodes", 1), ("supernodes", 8)]
LOOPBACK = 'ip link set lo up && exec "$@"'
EMPTY = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def environment(folder: Path, program: str, packages: list[str]) -> Path:
    """Return the Python of a peer's environment, which is made if it is not there.

    Raises
    ------
    subprocess.CalledProcessError
        If pip cannot install the packages.
    """
    home = folder / program
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        if packages:
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", *packages]
            subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages_of_peer = home / "lib" / version / "site-packages"
        # A path here comes after the peer's own packages.
        (packages_of_peer / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (home / "ready").touch()
    return python


def lines_of_code(*names: str) -> int:
    """Count the lines that hold code: no comments, docstrings or empty lines."""
    total = 0
    for name in names:
        text = (HERE / f"{name}.py").read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines = {
            line
            for token in tokens
            if token.type not in EMPTY
            for line in range(token.start[0], token.end[0] + 1)
        }
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        total += len(lines)
    return total


def wire(process: int) -> int:
    """Bytes so far on the loopback of this process's network."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


def measure(command: list[str], variables: dict[str, str], progress: Path) -> dict[str, Any]:
    """Run a program, which adds a line to the file of progress after each epoch."""
    whole = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    whole |= {"PYTHONPATH": str(HERE.parents[1]), "PYTHONWARNINGS": "ignore"}
    apart = ["unshare", "--net", "--map-root-user", "sh", "-c", LOOPBACK, "sh"]
    ends: list[tuple[float, int]] = []
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*apart, *command], env=whole, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None:
                lines = progress.read_text().count("\n") if progress.exists() else 0
                if lines > len(ends):
                    ends += [(time.perf_counter(), wire(process.pid))] * (lines - len(ends))
                time.sleep(0.005)
        finally:
            stop(process)
        if process.returncode or len(ends) < 2:
            log.seek(0)
            raise SystemExit(f"{command} has failed. It said:\n{log.read()[-3000:]}")
    last = json.loads(progress.read_text().splitlines()[-1])
    epochs = list(pairwise(ends))
    return {
        "seconds_an_epoch": round(median(b[0] - a[0] for a, b in epochs), 2),
        "wire_mb_an_epoch": round(median(b[1] - a[1] for a, b in epochs) / 1e6, 1),
        "seconds_to_first_test": round(ends[0][0] - start, 1),
        "test_accuracy": round(last["test_accuracy"], 4),
    }


def write_rows(mnist: str, path: Path) -> float:
    """Write the peers' rows; return the MB of tensors that an epoch with a test sends."""
    train, test, *labels = plain_mnist(mnist)
    arrays = {f"train-{party}": block for party, block in enumerate(train)}
    arrays |= {f"test-{party}": block for party, block in enumerate(test)}
    arrays |= dict(zip(("labels", "test-labels"), labels, strict=True))
    np.savez(path, **arrays)  # type: ignore[arg-type]
    sent = 2 * len(labels[0]) + len(labels[1])  # rows of all embeddings: there, back, and to test
    return round(PARTIES * 128 * 4 * sent / 1e6, 1)


def ours(engine: str, window: int, mnist: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Measure vfl-flower; the folder gets its results."""
    program = [sys.executable, str(HERE / "with_vfl.py"), engine, str(window), mnist, str(epochs)]
    found = measure([*program, str(folder)], {}, folder / "history.jsonl")
    return {**found, "lines": lines_of_code("with_vfl")}


def theirs(python: Path, module: str, rows: Path, epochs: int, folder: Path) -> dict[str, Any]:
    """Measure a peer by the Python of its environment; the folder gets all that it writes."""
    folder.mkdir()
    variables = {"PEERS_ROWS": str(rows), "PEERS_EPOCHS": str(epochs), "HOME": str(folder)}
    variables |= {"PEERS_PROGRESS": str(folder / "progress")}
    program = [str(python), "-m", f"benchmarks.peers.{module}", str(folder / "work")]
    found = measure(program, variables, folder / "progress")
    return {**found, "lines": lines_of_code(module, "shared")}


def main() -> None:
    made = parser(__doc__)
    made.prog = "python -m benchmarks.peers"
    made.add_argument("--environments", type=Path, default=Path("peers"), metavar="FOLDER")
    made.add_argument("--epochs", type=int, default=3, help="the first is not timed")
    made.add_argument("--only", nargs="+", choices=["ours", *PEERS], default=["ours", *PEERS])
    options = made.parse_args()
    if options.epochs < 2:
        made.error("--epochs: time is taken from the end of the first to that of the last")
    if not all(map(shutil.which, ("unshare", "ip"))):
        made.error("this command needs Linux with `unshare` and `ip`")
    figures: dict[str, Any] = {}
    with mnist_of(options) as mnist, tempfile.TemporaryDirectory() as temporary:
        folder, place = Path(temporary), str(Path(mnist).absolute())
        figures["tensor_mb_an_epoch"] = write_rows(mnist, folder / "rows.npz")
        for engine, window in OURS if "ours" in options.only else ():
            name = f"vfl-flower, {engine}, window {window}"
            out = folder / f"{engine}-{window}"
            figures[name] = ours(engine, window, place, options.epochs, out)
            print(f"{name:32}", figures[name], flush=True)
        for name, (module, packages) in PEERS.items():
            if name not in options.only:
                continue
            try:
                python = environment(options.environments.absolute(), module, packages)
            except subprocess.CalledProcessError as error:
                said = str(error.stderr).strip().splitlines()[-1:]
                print(f"{name} cannot be installed here; pip said: {' '.join(said)}", flush=True)
                figures[name] = "not run"
            else:
                own = folder / module
                figures[name] = theirs(python, module, folder / "rows.npz", options.epochs, own)
            print(f"{name:32}", figures[name], flush=True)
    report("peers", figures)


if __name__ == "__main__":
    main()
