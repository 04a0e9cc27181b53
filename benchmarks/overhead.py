"""What federation costs in one process: an epoch of MNIST as a plain loop, and on a LocalGrid.

Four quadrant parties 196-128, top model 512-128-10, batch 64, plain SGD. The plain loop is
ordinary PyTorch on joined data. Each repeat times all three ways, one after the other; each
includes one evaluation on the test rows. Prints one JSON object as its last line.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import CASCADED_MODEL, PARTIES, local_epoch, parser, report
from vfl_flower.data.blocks import load_features, load_labels
from vfl_flower.systems import resolve


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


def plain_epoch(mnist: str) -> tuple[float, float]:
    """Seconds and test accuracy of a plain PyTorch epoch."""
    config = resolve(run_config(mnist, 1))
    labels = load_labels(config)
    features = [load_features(config, party, PARTIES) for party in range(PARTIES)]
    train = [torch.from_numpy(block.train).flatten(1) for block in features]
    test = [torch.from_numpy(block.test).flatten(1) for block in features]
    train_labels, test_labels = torch.from_numpy(labels.train), torch.from_numpy(labels.test)
    torch.manual_seed(0)
    model = Joined()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.perf_counter()
    for ids in torch.randperm(len(train_labels)).split(64):
        loss = functional.cross_entropy(model([x[ids] for x in train]), train_labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(test).argmax(1) == test_labels).float().mean().item()
    return time.perf_counter() - start, accuracy


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    ways = {
        "plain": lambda: plain_epoch(options.mnist),
        "window_1": lambda: local_epoch(PARTIES, run_config(options.mnist, 1)),
        "window_8": lambda: local_epoch(PARTIES, run_config(options.mnist, 8)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    accuracy: dict[str, float] = {}
    for repeat in range(options.repeats + 1):  # the first warms caches up and is not counted
        for way, epoch in ways.items():
            took, accuracy[way] = epoch()
            if repeat:
                seconds[way].append(took)
        print(
            f"repeat {repeat}:", {way: round(each[-1], 3) for way, each in seconds.items() if each}
        )
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
