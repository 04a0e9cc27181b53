"""Speed on a GPU, in a few minutes, on made-up rows.

"images" trains a ResNet-18 at each of four parties, on quadrants of images as large as CIFAR-10's.
It compares with a plain PyTorch loop on the same device, in float32 and bfloat16. "stacked" has a
thousand parties in stacks of two sizes. "waits" counts the places where torch says that the CPU
waits for the GPU. "transfers" copies a mini-batch to the GPU in three ways. "ray" has several
parties on the GPU, in Ray actors that share it. Utilisation is `nvidia-smi`'s mean over a part.

Without a GPU, it tries every part with tiny data on the CPU. Prints one JSON object as its last
line.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import parties as many
from benchmarks.common import ALL_ROWS, local_epoch, report
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_partition
from vfl_flower.launch.engines import run_local, run_ray
from vfl_flower.models.training import autocast
from vfl_flower.party import stacked
from vfl_flower.protocol.systems import resolve

PARTIES, SIZE, BATCH = 4, 64, 128
IMAGES = 6_400  # of them 5,120 train: 40 steps
MANY, STEPS = 1000, 12  # parties in stacks, and their steps
Figures = dict[str, Any]


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a 1x1 convolution beside a change."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or inputs != channels:
            conv = nn.Conv2d(inputs, channels, 1, stride, bias=False)
            self.beside = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Images [R, inputs, H, W] to [R, channels, H / stride, W / stride]."""
        return functional.relu(self.inner(x) + self.beside(x))


class ResNet18(nn.Module):
    """Images [R, H, W, 3] to embeddings [R, size] (He et al., 2016), its first layer 3x3."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        widths = [size, size, size, 2 * size, 2 * size, 4 * size, 4 * size, 8 * size, 8 * size]
        self.layers = nn.Sequential(
            nn.Conv2d(sample.shape[-1], size, 3, 1, 1, bias=False),
            nn.BatchNorm2d(size),
            nn.ReLU(),
            *(Block(a, b, 2 if a < b else 1) for a, b in pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * size, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings [R, size]."""
        embeddings: Tensor = self.layers(x.permute(0, 3, 1, 2))
        return embeddings


@contextmanager
def utilised(found: Figures) -> Iterator[None]:
    """Add the GPU's mean utilisation in per cent, if `nvidia-smi` is there."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen([*command, "-lms", "200"], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        values = [float(line) for line in process.communicate()[0].split() if line.isdigit()]
        if values:
            found["utilisation_percent"] = round(sum(values) / len(values), 1)


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of some work, until the GPU has done it."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def plain(keys: Figures) -> float:
    """Return the seconds of an epoch of a plain loop, on the parties' own arrays."""
    config, device = resolve(keys), keys["device"]
    blocks = [load_partition(config, party, PARTIES) for party in range(PARTIES)]
    train = [torch.from_numpy(block.train[:]) for block in blocks]
    test = [torch.from_numpy(block.test[:]) for block in blocks]
    labels = torch.from_numpy(load_labels(config).train).to(device)
    size = keys["embedding-size"]
    towers = nn.ModuleList(ResNet18(x[0], size) for x in train).to(device)
    top = nn.Linear(size * PARTIES, 10).to(device)
    parameters = [*towers.parameters(), *top.parameters()]
    optimizer = torch.optim.SGD(parameters, keys["party-lr"], momentum=0.9)

    def outputs(of_parties: list[Tensor], rows: Tensor) -> Tensor:
        parts = zip(towers, of_parties, strict=True)
        with autocast(top, keys["precision"]):
            read = [tower(x[rows].to(device, non_blocking=True)) for tower, x in parts]
            scores: Tensor = top(torch.cat(read, dim=1))
        return scores.float()

    def epoch() -> None:
        for rows in torch.randperm(len(labels)).split(keys["batch-size"]):
            loss = functional.cross_entropy(
                outputs(train, rows), labels[rows.to(device, non_blocking=True)]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        towers.eval()
        with torch.no_grad():
            for rows in torch.arange(len(test[0])).split(256):
                outputs(test, rows)

    return seconds_of(epoch)


def images(device: str, folder: Path) -> Figures:
    """Return the ratio of our seconds to a plain loop's for one epoch, for both precisions."""
    rows, size, batch = (IMAGES, SIZE, BATCH) if device == "cuda" else (160, 4, 32)
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, 32, 32, 3), np.float32)
    np.savez(folder / "images.npz", X=x, y=random.integers(0, 10, rows))
    keys: Figures = {
        **ALL_ROWS,
        **{"strategy": "split-nn", "dataset": f"npz:{folder}/images.npz", "device": device},
        **{"bottom-model": f"{__file__}:ResNet18", "embedding-size": size},
        **{"top-model": "linear", "batch-size": batch, "epochs": 1, "eval-every": 1},
        **{"optimizer": "momentum", "party-lr": 0.01, "server-lr": 0.01},
    }
    found: Figures = {}
    for precision in ("float32", "bfloat16"):
        these = {**keys, "precision": precision}
        figures: Figures = {}
        plains, ours = [], []
        with utilised(figures):
            for turn in range(4 if device == "cuda" else 2):
                pair = plain(these), local_epoch(PARTIES, these)["seconds"]
                if turn:  # the first one chooses kernels
                    plains.append(pair[0])
                    ours.append(pair[1])
        figures |= {"plain_seconds": median(plains), "seconds": median(ours)}
        figures["ratio"] = figures["seconds"] / figures["plain_seconds"]
        found[precision] = {name: round(value, 3) for name, value in figures.items()}
    return found


def plain_stack(parties: int, steps: int, device: str) -> float:
    """Return a plain loop's milliseconds of a party's step, all bottom models in one product."""
    inputs, hidden, size, batch = many.COLUMNS, 64, 32, many.BATCH
    shapes = [(parties, inputs, hidden), (parties, 1, hidden), (parties, hidden, size)]
    first, bias, second, last = (
        nn.Parameter(torch.randn(shape, device=device) / 8)
        for shape in [*shapes, (parties, 1, size)]
    )
    top = nn.Sequential(nn.Linear(parties * size, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    top.to(device)
    optimizer = torch.optim.Adam([first, bias, second, last, *top.parameters()], 0.001)
    rows = torch.randn(steps, parties, batch, inputs)
    labels = torch.randint(2, (steps, batch), device=device)

    def epoch() -> None:
        for x, y in zip(rows, labels, strict=True):
            z = torch.relu(x.to(device) @ first + bias) @ second + last
            loss = functional.cross_entropy(top(z.transpose(0, 1).flatten(1)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    epoch()  # the first one chooses kernels
    return round(1000 * seconds_of(epoch) / steps / parties, 4)


def stacks(device: str, folder: Path) -> Figures:
    """Return milliseconds of a party's step, for stacks of at most so many parties."""
    parties, steps = (MANY, STEPS) if device == "cuda" else (16, 3)
    found: Figures = {"plain loop": plain_stack(parties, steps, device)}
    before = stacked._MOST
    for most in (before, MANY) if device == "cuda" else (16,):
        stacked._MOST = most
        figures: Figures = {}
        with tempfile.TemporaryDirectory(dir=folder) as own, utilised(figures):
            figures |= many.run(parties, steps, "together", own, f"device='{device}'")
        found[f"at most {most}"] = figures
    stacked._MOST = before
    return found


def small(device: str, folder: Path, name: str) -> Figures:
    """Return the options of a short run on a table in memory."""
    return {"dataset": "breast-cancer", "device": device, "out": str(folder / name)}


def waits(device: str, folder: Path) -> Figures:
    """Return how often the CPU waits in a step of three parties, as torch itself says."""
    counts: list[Counter[str]] = []
    steps = []
    for epochs in (1, 3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                keys = {**small(device, folder, f"waits-{epochs}"), "epochs": epochs}
                keys |= {"eval-every": 10, "window": 1}  # evaluations wait too
                steps.append(run_local(3, keys).summary["steps"])
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        places = (
            f"{Path(w.filename).name}:{w.lineno}" for w in said if "synchroniz" in str(w.message)
        )
        counts.append(Counter(places))
    more = counts[1] - counts[0]
    each = {place: round(n / (steps[1] - steps[0]), 2) for place, n in more.most_common(12)}
    return {"a_step": round(sum(more.values()) / (steps[1] - steps[0]), 2), "places": each}


def transfers(device: str, folder: Path) -> Figures:
    """Return microseconds to copy a party's mini-batch to the GPU, while the GPU computes."""
    x, w = torch.randn(BATCH, 16, 16, 3), torch.randn(1024, 1024, device=device)
    ways: dict[str, Callable[[], Tensor]] = {
        "blocking": lambda: x.to(device),
        "non-blocking": lambda: x.to(device, non_blocking=True),
    }
    if device == "cuda":  # only there can memory be pinned
        ways["pinned"] = lambda: x.pin_memory().to(device, non_blocking=True)
    times = 300 if device == "cuda" else 3

    def copies(way: Callable[[], Tensor]) -> None:
        for _ in range(times):
            way()
            w @ w

    found = {}
    for name, way in ways.items():
        copies(way)
        found[name] = round(seconds_of(lambda way=way: copies(way)) / times * 1e6, 1)  # type: ignore[misc]
    return found


def ray(device: str, folder: Path) -> Figures:
    """Return milliseconds of a step of parties in Ray actors that share the device."""
    parties, epochs = (PARTIES, 20) if device == "cuda" else (2, 2)
    found: Figures = {}
    with utilised(found):
        keys = {**small(device, folder, "ray"), "epochs": epochs}
        history = run_ray(parties, keys, actors=parties).history
    first, last = history[0], history[-1]
    spent, steps = last["seconds"] - first["seconds"], last["steps"] - first["steps"]
    found |= {"actors": parties, "ms_a_step": round(1000 * spent / steps, 3)}
    return found


PARTS = {"images": images, "stacked": stacks, "waits": waits, "transfers": transfers, "ray": ray}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = made.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny data"
    found: Figures = {"device": name}
    for part in options.only:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[part] = PARTS[part](device, Path(folder))
        print(f"{part} ({time.perf_counter() - start:.0f} s):", found[part], flush=True)
    report("gpu", found)


if __name__ == "__main__":
    main()
