"""Golden runs: what configurations across all axes give, to hold a refactoring against.

    python -m tests.golden record FILE    before the first move
    python -m tests.golden check FILE     after every move: bit for bit, on the same machine

Compared are parameters, history, summary and predictions, and of most runs in this process the
arrays of each message, by party.

Another processor rounds otherwise, so `tests/golden.json` holds of the small ones what survives
that, and `tests/repository/test_golden.py` compares with it; ``figures`` writes it anew.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # another number of threads rounds otherwise

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message

from tests.conftest import ALL_ROWS
from tests.golden_runs import (
    CANCER,
    CUT_SHORT,
    GROWN,
    LARGE,
    MANY_PARTIES,
    NEW,
    OF_FILES,
    RATED,
    SMALL,
    VAFL,
)
from tests.organisations import cancer, cut
from vfl_flower import client_app
from vfl_flower.config.run_config import KEYS
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import predict_local, run_local, run_ray, run_supernodes
from vfl_flower.transport.wire import Call, record_of, unpack

FIGURES = Path(__file__).parent / "golden.json"


class _Cut(BaseException):
    """Somebody stops the run."""


class _Failing:
    """The ClientApp, which at some of the messages of party 0 fails, or cuts the run short."""

    def __init__(self, at: range, error: type[BaseException]) -> None:
        self.at = at
        self.error = error
        self.messages = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            self.messages += 1
            if self.messages in self.at:
                raise self.error
        return client_app.app(message, context)


class _Listening:
    """The ClientApp, and a digest of all messages to and from each party.

    ``random``: whether numbers differ from run to run, as masks and blinded ids do; then names,
    dtypes and shapes are compared alone.
    """

    def __init__(self, random: bool = False) -> None:
        self.random = random
        self.heard: dict[int, Any] = {}
        self.messages: dict[int, int] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        party, kind = int(context.node_config["partition-id"]), message.metadata.message_type
        self._hear(party, kind, message)
        reply: Message = client_app.app(message, context)
        self._hear(party, kind, reply)
        return reply

    def _hear(self, party: int, kind: str, message: Message) -> None:
        if isinstance(message, Call) and message.payload is not None:
            arrays = message.payload.arrays
        else:
            arrays = unpack(record_of(message.content, "arrays", ArrayRecord))
        hashed = self.heard.setdefault(party, hashlib.sha256())
        self.messages[party] = self.messages.get(party, 0) + 1
        hashed.update(kind.encode())
        for name, array in sorted(arrays.items()):
            hashed.update(f"{name} {array.dtype} {array.shape}".encode())
            if not self.random and kind in ("train", "evaluate", "query.embed"):
                hashed.update(np.ascontiguousarray(array).data)

    def digests(self) -> dict[str, str]:
        """How many messages, and their digest, by party."""
        return {
            f"party-{party}": f"{self.messages[party]} {hashed.hexdigest()[:16]}"
            for party, hashed in sorted(self.heard.items())
        }


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_TIMES = (
    *("seconds", "reply_seconds", "began", "ended", "written"),
    *("peak_memory_mb", "versions", "code", "config"),
)


def _figures(entry: Any) -> Any:
    """A summary or history entry, without what differs from run to run."""
    if isinstance(entry, Mapping):
        return {key: _figures(each) for key, each in entry.items() if key not in _TIMES}
    return [_figures(each) for each in entry] if isinstance(entry, list) else entry


_AROUND = {  # which have no part in what is computed
    *("out", "resume", "observer", "log-format"),
    *(key.name for key in KEYS.values() if key.section == "serving"),
}


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _AROUND}


def outcome(run: Run) -> dict[str, Any]:
    """All that a run has left."""
    parameters: dict[str, dict[str, str]] = {}
    norms: dict[str, float] = {}
    for path in sorted(run.folder.glob("*.npz")):
        if path.name != "checkpoint.npz":
            arrays = run.parameters(path.stem)
            parameters[path.stem] = {name: digest(each.tobytes()) for name, each in arrays.items()}
            norms[path.stem] = float(sum(np.square(each).sum() for each in arrays.values()) ** 0.5)
    return {
        "parameters": parameters,
        "norms": norms,
        "history": [_figures(entry) for entry in run.history],
        "summary": _figures(run.summary),
        "config": digest(json.dumps(_lasting(run.summary["config"]), sort_keys=True).encode()),
    }


def on_cancer(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run on breast-cancer."""
    own = keys.get("strategy") in RATED
    return {**CANCER, **({} if own else {"party-lr": 0.2, "server-lr": 0.2}), **keys}


def small(name: str, folder: Path) -> dict[str, Any]:
    """A run of three parties on breast-cancer."""
    keys = {**SMALL, **NEW}[name]
    client: Any = _Listening(random=keys.get("aggregation") == "secure")
    run = run_local(3, {**on_cancer(keys), "out": str(folder)}, client)
    return {**outcome(run), "messages": client.digests()}


def _large(name: str, folder: Path) -> dict[str, Any]:
    client: Any = _Listening()
    keys = {**ALL_ROWS, "epochs": 2, "noise-seed": 0, **LARGE[name]}
    run = run_local(4, {**keys, "out": str(folder)}, client)
    return {**outcome(run), "messages": client.digests()}


def _cut_short(name: str, folder: Path) -> dict[str, Any]:
    """A run that is cut short, gone on with, and predicts."""
    keys = {**on_cancer(CUT_SHORT[name]), "checkpoint-every": 8}
    at = 9 if "window" in keys else 21
    client: Any = _Failing(range(at, at + 1), _Cut)
    try:
        run_local(3, {**keys, "out": str(folder)}, client)
        raise AssertionError("it was not cut short")
    except _Cut:
        pass

    run = run_local(3, {"resume": str(folder)})

    return {
        **outcome(run),
        "predictions": digest(predict_local({"model": str(folder)}).read_bytes()),
    }


def _of_files(name: str, folder: Path) -> dict[str, Any]:
    """Two parties and a bank with files, aligned by private set intersection; predictions."""
    table = cancer()
    organisations = cut(folder, table, own=3)
    keys = {key: CANCER[key] for key in CANCER if key != "dataset"}
    run = organisations.run("run", {**keys, **OF_FILES[name]})
    found = outcome(run)
    found["summary"].pop("dataset")
    found["config"] = ""  # it has the folder in it
    if (run.folder / "checkpoint.npz").exists():
        organisations.predict("run", **{k: v for k, v in OF_FILES[name].items() if k == "label"})
        found["predictions"] = digest((run.folder / "predictions.csv").read_bytes())
    return found


def _failure(name: str, folder: Path) -> dict[str, Any]:
    """A party that fails for a while, or for good, where the others go on."""
    client: Any = _Failing(range(8, 20 if name == "for good" else 9), RuntimeError)
    keys = {**CANCER, **VAFL, "quorum": 1, "on-party-failure": "continue", "window": 2}
    return outcome(run_local(3, {**keys, "out": str(folder)}, client))


def _grown(name: str, folder: Path) -> dict[str, Any]:
    """Two parties and a bank train a model of any rows, and a third party joins it."""
    organisations = cut(folder, cancer(), parties=3, known=0.6)
    files = organisations.files
    keys = {**CANCER, "align": "any", "epochs": 2, "subsets": "sampled"}
    keys.pop("dataset")
    organisations.files = files[:2]
    organisations.run("two", keys)
    organisations.files = files
    run = organisations.run("three", {**keys, "grow": str(folder / "two"), **GROWN[name]})
    found = outcome(run)
    for key in ("dataset", "grown_from"):
        found["summary"].pop(key, None)
    found["config"] = ""  # it has the folder in it
    organisations.predict("three")
    found["predictions"] = digest((run.folder / "predictions.csv").read_bytes())
    return found


def _elsewhere(name: str, folder: Path) -> dict[str, Any]:
    """Runs on Ray and on SuperNodes over streams, and of parties that are computed together."""
    keys = {**on_cancer({}), "epochs": 2, "window": 4, "out": str(folder)}
    if name == "a stack of parties":
        return outcome(run_local(MANY_PARTIES, keys))
    start: Any = run_ray if name == "Ray" else run_supernodes
    found = outcome(start(3, keys))
    for entry in found["history"]:  # messages in flight at an evaluation depend on the clock
        entry.update(exchanges=0, bytes_up=0, bytes_down=0)
    return found


KINDS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "small": (small, {**SMALL, **NEW}),
    "large": (_large, LARGE),
    "cut short": (_cut_short, CUT_SHORT),
    "of files": (_of_files, OF_FILES),
    "grown": (_grown, GROWN),
    "failure": (_failure, {"for a while": 0, "for good": 0}),
    "elsewhere": (_elsewhere, {"a stack of parties": 0, "Ray": 0, "SuperNodes": 0}),
}


def everything() -> dict[str, Any]:
    """The outcome of every golden run, by name."""
    found = {}
    for kind, (function, names) in KINDS.items():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found[f"{kind}: {name}"] = function(name, Path(folder, "run"))
    return found


def compare(then: Any, now: Any, where: str = "") -> list[str]:
    """Where two outcomes differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        return [
            line
            for key in keys
            for line in compare(then.get(key, "-"), now.get(key, "-"), f"{where} / {key}")
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [line for n, (a, b) in pairs for line in compare(a, b, f"{where} / {n}")]
    return [] if then == now else [f"{where}: {then} became {now}"]


def robust(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an outcome that another processor nearly reproduces."""
    summary = found["summary"]
    names = ("steps", "exchanges", "bytes_up", "bytes_down", "virtual_seconds", "epsilon")
    figures = {name: summary[name] for name in (*names, "test_loss", "test_accuracy")}
    losses = [entry["test_loss"] for entry in found["history"]]
    return {**figures, "test_losses": losses, "norms": found["norms"]}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("task", choices=("record", "check", "figures"))
    made.add_argument("file", type=Path, nargs="?", help="of the outcomes; not for figures")
    options = made.parse_args()
    task, file = options.task, options.file
    if (task == "figures") != (file is None):
        made.error("record and check need a file, figures none")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if task == "figures":
        with tempfile.TemporaryDirectory() as folder:
            figures = {
                name: robust(small(name, Path(folder, str(n)))) for n, name in enumerate(SMALL)
            }
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        return
    found = json.loads(json.dumps(everything()))
    if task == "record":
        file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} golden runs")
        return
    then = json.loads(file.read_text())
    for name in then:
        differences = compare(then[name], found.get(name, "-"))
        if differences:
            print(name, *differences[:6], sep="\n    ")
    equal = sum(then[name] == found.get(name) for name in then)
    print(f"{equal} of {len(then)} golden runs are equal")
    sys.exit(equal < len(then))


if __name__ == "__main__":
    main()
