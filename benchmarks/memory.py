"""Memory to train a large party: peak memory over the size of its model.

For each system and optimizer, one party trains in a new process: it answers training messages, and
learns from made-up feedback. The model is an mlp of 20 million parameters, unless --hidden says
otherwise. With --text it is DistilBERT's configuration (66 million parameters, 16 rows of 32
tokens). The ClientApp serves messages as in a session, and keeps the party's state after each. From
each figure, the memory of a process with a tiny model is subtracted. Measured are the peak during
the steps, the memory between two messages, and the peak while the test rows are embedded. Prints
one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from benchmarks.common import report
from vfl_flower import client_app
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.models.training import count
from vfl_flower.party import session as between
from vfl_flower.party.party import Party
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.messages import EvaluateOrder, Order, TrainOrder, Upload
from vfl_flower.transport.wire import read_reply, to_message

PARTIES, OUTPUTS = 4, 10
STEPS = 3
KEYS: dict[str, Any] = {
    "batch-size": 16,
    "window": 1,
    "epochs": 1,
    "noise-seed": 0,
    "party-lr": 1e-4,
}
KINDS: dict[str, dict[str, Any]] = {
    "cascaded": {"strategy": "cascaded"},
    "dpzv": {"strategy": "dpzv"},
    "split-nn": {"strategy": "split-nn"},
    "split-nn momentum": {"strategy": "split-nn", "optimizer": "momentum"},
    "split-nn adam": {"strategy": "split-nn", "optimizer": "adam"},
}


class Texts:
    """Rows of random tokens."""

    def __init__(self, rows: int, words: int, length: int = 32) -> None:
        random = np.random.default_rng(0)
        self.ids = random.integers(0, words, (rows, length))
        self.shape = self.ids.shape

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        ids = self.ids[rows]
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def party_of(kind: str, hidden: int, text: str, small: bool) -> Party:
    """A party with the large model, or one of a few parameters."""
    keys = {**KEYS, **KINDS[kind]}
    if not text:
        shape = {"bottom-model": "mlp", "embedding-size": 1000}
        shape["bottom-hidden"] = 4 if small else hidden
        return Party(resolve({**keys, **shape}), 0, PARTIES, OUTPUTS)
    folder = Path(text, "small" if small else "large")
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    train, test = Texts(400, words), Texts(100, words)
    names = np.arange(400), np.arange(400, 500)
    block = FeatureBlock(train, test, "", None, "", *names)  # type: ignore[arg-type]
    return Party(resolve({**keys, "bottom-model": f"hf:{folder}"}), 0, PARTIES, OUTPUTS, block)


def configurations(folder: Path, hidden: int) -> None:
    """DistilBERT as it is, or with fewer units if ``hidden`` is small, and one that is tiny."""
    from transformers import DistilBertConfig

    large = {} if hidden >= 1000 else {"dim": 12, "hidden_dim": hidden, "n_heads": 2}
    tiny = {"dim": 4, "hidden_dim": 4, "n_heads": 2, "n_layers": 1, "vocab_size": 100}
    for name, keys in (("large", large), ("small", tiny)):
        # Without dropout, so that both embeddings of a pair are of the same model.
        of: Any = {**keys, "dropout": 0.0, "attention_dropout": 0.0}
        DistilBertConfig(**of).save_pretrained(folder / name)


def measure(kind: str, hidden: int, text: str) -> dict[str, Any]:
    """Peaks over the size of the model, in this process."""
    torch.set_num_threads(1)
    begin_task()
    session(party_of(kind, hidden, text, small=True))  # libraries load parts at first use
    gc.collect()
    before = resident("VmRSS")
    party = party_of(kind, hidden, text, small=False)
    size = count(party.learner.model)
    step, left, evaluation = (each - before for each in session(party))
    model = 4 * size / 2**20
    return {
        "parameters": size,
        "model_mb": round(model, 1),
        "step_over_model": round(step / model, 3),
        "between_over_model": round(left / model, 3),
        "evaluation_over_model": round(evaluation / model, 3),
    }


def session(party: Party) -> tuple[float, float, float]:
    """Uploads, and updates by their feedback; peak, what is left, and peak of an evaluation."""
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": PARTIES, "simulated": True}
    context = Context(1, 2, node, RecordDict(), {})
    between.Session(context, party).write()
    coordinated = party.config.strategy == "split-nn"
    forget_peak()
    feedback: dict[str, Any] = {}
    for exchange in range(1, STEPS + 1):
        order = TrainOrder(
            exchange=exchange,
            epoch=0,
            first=exchange - 1,
            steps=1,
            coordinated=coordinated,
            arrays=feedback,
        )
        upload = asked(context, order)
        feedback = {"difference": np.ones(1, np.float32)}
        if not party.estimator.answers_by_scalars:
            feedback = {"gradient": np.full_like(upload.arrays["embedding"], 1e-3)}
    asked(context, EvaluateOrder(exchange=STEPS + 1, arrays=feedback))
    peak, left = resident("VmHWM"), resident("VmRSS")
    forget_peak()
    asked(context, EvaluateOrder(exchange=STEPS + 2))
    between.live.clear()
    return peak, left, resident("VmHWM")


def asked(context: Context, order: Order) -> Upload:
    return read_reply(client_app.app(to_message(order, 2, 60), context), Upload)


def resident(key: str) -> float:
    """Resident memory of this process in MB: VmRSS is now, VmHWM the peak."""
    status = Path("/proc/self/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return float(values[key].split()[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", choices=KINDS, help="measure one, in this process")
    made.add_argument("--hidden", type=int, default=20_000, help="units of the hidden layer")
    made.add_argument("--text", action="store_true", help="DistilBERT in place of the mlp")
    made.add_argument("--folder", default="", help=argparse.SUPPRESS)  # of its configurations
    options = made.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.hidden, options.folder)))
        return
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.text:
            configurations(Path(folder), options.hidden)
        for name in KINDS:
            command = [sys.executable, "-m", "benchmarks.memory", "--only", name]
            command += ["--hidden", str(options.hidden)]
            command += ["--folder", folder] * options.text
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:18s}", figures[name], flush=True)
    report("memory", figures)


if __name__ == "__main__":
    main()
