"""Cost of federation in one process: an epoch of MNIST as a plain loop, and on a LocalGrid.

Four quadrant parties 196-128, top model 512-128-10, batch 64, plain SGD. The plain loop is
ordinary PyTorch on joined data. The floor is a loop whose parties and top model have a graph and
an optimizer each, without messages, tables and checks. Each repeat times all ways, one after the
other; each includes one evaluation on the test rows. Prints one JSON object as its last line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import (
    CASCADED_MODEL,
    PARTIES,
    local_epoch,
    mnist_of,
    parser,
    plain_mnist,
    report,
)


def run_config(mnist: str, window: int) -> dict[str, Any]:
    return {**CASCADED_MODEL, "dataset": f"npz:{mnist}", "epochs": 1, "window": window}


class Joined(nn.Module):
    """The same model in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.bottoms = nn.ModuleList(
            nn.Sequential(nn.Linear(196, 128), nn.ReLU()) for _ in range(PARTIES)
        )
        self.top = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, blocks: list[Tensor]) -> Tensor:
        """Class scores [R, 10] of the parties' columns."""
        h = [bottom(x) for bottom, x in zip(self.bottoms, blocks, strict=True)]
        outputs: Tensor = self.top(torch.cat(h, dim=1))
        return outputs


def plain_epoch(mnist: str, apart: bool = False) -> tuple[float, float]:
    """Seconds and test accuracy of a plain PyTorch epoch; the floor, if all models are apart."""
    known, new, *labels = plain_mnist(mnist)
    train, test = ([torch.from_numpy(block) for block in blocks] for blocks in (known, new))
    train_labels, test_labels = map(torch.from_numpy, labels)
    torch.manual_seed(0)
    model = Joined()
    parts = [*model.bottoms, model.top] if apart else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    start = time.perf_counter()
    for ids in torch.randperm(len(train_labels)).split(64):
        h = [bottom(x[ids]) for bottom, x in zip(model.bottoms, train, strict=True)]
        received = [each.detach().requires_grad_() for each in h] if apart else h
        loss = functional.cross_entropy(model.top(torch.cat(received, dim=1)), train_labels[ids])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for mine, sent in zip(h, received, strict=True) if apart else ():
            mine.backward(sent.grad)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test).argmax(1) == test_labels).float().mean().item()
    return time.perf_counter() - start, accuracy


def in_process(mnist: str, window: int) -> tuple[float, float]:
    """Seconds and test accuracy of an epoch on a LocalGrid."""
    last = local_epoch(PARTIES, run_config(mnist, window))
    return last["seconds"], last["test_accuracy"]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    ways: dict[str, Callable[[str], tuple[float, float]]] = {
        "plain": plain_epoch,
        "floor": partial(plain_epoch, apart=True),
        "window_1": partial(in_process, window=1),
        "window_8": partial(in_process, window=8),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    accuracy: dict[str, float] = {}
    with mnist_of(options) as mnist:
        for repeat in range(options.repeats + 1):  # the first warms caches up and is not counted
            for way, epoch in ways.items():
                took, accuracy[way] = epoch(mnist)
                if repeat:
                    seconds[way].append(took)
            last = {way: round(each[-1], 3) for way, each in seconds.items() if each}
            print(f"repeat {repeat}:", last, flush=True)
    result: dict[str, Any] = {"threads": torch.get_num_threads()}
    for way, each in seconds.items():
        ratios = [a / b for a, b in zip(each, seconds["plain"], strict=True)]
        result[way] = {
            "seconds": round(statistics.median(each), 3),
            "ratio_to_plain": round(statistics.median(ratios), 3),
            "test_accuracy": round(accuracy[way], 4),
        }
    report("overhead", result)


if __name__ == "__main__":
    main()
