"""CIFAR-10 at two parties, with the left and the right halves of the images: a ResNet-20 each.

A linear top model on both embeddings of 64, batch 128, momentum 0.9, weight decay
5e-4, one cycle up to 0.2. The plain loop is ordinary PyTorch on joined data, the same modules and
torch's own optimizer and schedule. Every way includes one evaluation on the test rows. `ef-vfl`
keeps 10 % of the entries up, with error feedback, and 15 % down. `cascaded` and `dpzv` pass once
over the rows, at rates for an estimate by differences. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import ALL_ROWS, check_there, local_epoch, report
from vfl_flower.config.plugins import load_place
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_partition
from vfl_flower.protocol.systems import resolve

TOWERS = Path(__file__).parents[1] / "examples/images/towers.py"
PARTIES, CPU = 2, torch.device("cpu")
ONCE = {"optimizer": "sgd", "epochs": 1, "eval-every": 1}


def keys_of(cifar: str, epochs: int) -> dict[str, Any]:
    """The run configuration that all systems share."""
    return {
        **ALL_ROWS,
        **{"dataset": f"hf:{cifar}", "image-split": "columns"},
        **{"bottom-model": f"{TOWERS}:ResNet20", "embedding-size": 64, "top-model": "linear"},
        **{"batch-size": 128, "epochs": epochs, "eval-every": epochs},
        **{"optimizer": "momentum", "weight-decay": 5e-4, "party-lr": 0.2, "server-lr": 0.2},
        "lr-schedule": "one-cycle",
    }


@contextmanager
def cifar_of(folder: str, rows: int | None) -> Iterator[str]:
    """The folder of CIFAR-10, or of its first rows."""
    if rows is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as part:
        for name in ("train.parquet", "test.parquet"):
            whole = parquet.ParquetFile(Path(folder, name))
            batch = next(whole.iter_batches(rows))
            parquet.write_table(pa.Table.from_batches([batch]), Path(part, name))
        yield part


def plain(keys: dict[str, Any]) -> dict[str, float]:
    """Seconds and test accuracy of a plain PyTorch loop, on the halves as parties read them."""
    config = resolve({"strategy": "split-nn", **keys})
    blocks = [load_partition(config, party, PARTIES) for party in range(PARTIES)]
    labels = load_labels(config)
    train_labels, test_labels = (torch.from_numpy(each) for each in (labels.train, labels.test))
    tower = load_place(f"{TOWERS}:ResNet20")
    torch.manual_seed(0)
    parts = [tower(samples.first(block.train), 64) for block in blocks]
    top = nn.Linear(64 * PARTIES, len(labels.classes))
    model = nn.ModuleList([*parts, top])
    rate, epochs = keys["party-lr"], keys["epochs"]
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    steps = epochs * -(-len(train_labels) // keys["batch-size"])
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, cycle_momentum=False)

    def outputs(rows: Any, part: str) -> torch.Tensor:
        read = [samples.tensors(getattr(block, part)[rows], CPU) for block in blocks]
        scores: torch.Tensor = top(torch.cat([f(x) for f, x in zip(parts, read, strict=True)], 1))
        return scores

    start = time.perf_counter()
    for _ in range(epochs):
        for ids in torch.randperm(len(train_labels)).split(keys["batch-size"]):
            loss = functional.cross_entropy(outputs(ids.numpy(), "train"), train_labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
    model.eval()
    with torch.no_grad():
        chunks = torch.arange(len(test_labels)).split(1000)
        scores = torch.cat([outputs(ids.numpy(), "test") for ids in chunks])
    seconds = time.perf_counter() - start
    return {
        "test_accuracy": float((scores.argmax(1) == test_labels).float().mean()),
        "seconds": seconds,
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cifar", default="../shared/data/cifar10", metavar="FOLDER")
    made.add_argument("--epochs", type=int, default=6)
    made.add_argument("--rows", type=int, help="the first of each part, to try it out")
    made.add_argument("--ways", nargs="*", help="some of plain, split-nn, ef-vfl, cascaded, dpzv")
    made.add_argument("--times", type=int, default=1, help="each, one after the other in turns")
    options = made.parse_args()
    check_there("--cifar", options.cifar)
    # A row's gradient has little to do with that of an epoch ago, which a surrogate would hold.
    down = {"downlink-codec": "top-k", "downlink-keep": 0.15}
    ways: dict[str, dict[str, Any]] = {
        "split-nn": {},
        "ef-vfl": {"codec": "top-k", "compression": "error-feedback", **down},
        "cascaded": {**ONCE, "party-lr": 1e-4, "server-lr": 0.05},
        "dpzv": {**ONCE, "party-lr": 1e-4, "server-lr": 1e-3},
    }
    figures: dict[str, list[dict[str, float]]] = {}
    with cifar_of(options.cifar, options.rows) as folder:
        keys = keys_of(folder, options.epochs)
        for name in options.times * (options.ways or ["plain", *ways]):
            if name == "plain":
                found = plain(keys)
            else:
                last = local_epoch(PARTIES, {"strategy": name, **keys, **ways[name]})
                found = {each: last[each] for each in ("test_accuracy", "seconds")}
                found["megabytes"] = (last["bytes_up"] + last["bytes_down"]) / 1e6
            figures.setdefault(name, []).append(found)
            print(name, found, flush=True)
    report(
        "images", {name: each if options.times > 1 else each[0] for name, each in figures.items()}
    )


if __name__ == "__main__":
    main()
