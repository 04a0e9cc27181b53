"""Gain of batching a window: an epoch of MNIST, in process and as a plain loop.

The plain loop is the same algorithm in ordinary PyTorch on joined data, without messages, one step
after another. In a step a party draws its direction, both embeddings are evaluated, and top model
and party step. Ours runs on a LocalGrid with its messages, at window 64. Each repeat times both
ways, one after the other; each includes one evaluation on the test rows. Prints one JSON object as
its last line.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import (
    CASCADED_MODEL,
    PARTIES,
    SIGMOID_MODEL,
    local_epoch,
    mnist_of,
    parser,
    plain_mnist,
    report,
)

MODELS = {"196-16": SIGMOID_MODEL, "196-128": CASCADED_MODEL}
SYSTEMS = ("cascaded", "asyrevel")
WINDOW, MU, BATCH = 64, 1e-3, 64


def plain_epoch(mnist: str, model: str, system: str, lr: float) -> tuple[float, float]:
    """Seconds and test accuracy of an epoch, one step after another."""
    known, new, *labels = plain_mnist(mnist)
    train, test = ([torch.from_numpy(block) for block in blocks] for blocks in (known, new))
    y, test_labels = map(torch.from_numpy, labels)
    torch.manual_seed(0)
    size = 16 if model == "196-16" else 128
    bottoms = [nn.Linear(196, size) for _ in range(PARTIES)]
    activation = torch.sigmoid if model == "196-16" else torch.relu
    wide = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
    top: nn.Module = nn.Linear(16, 10) if model == "196-16" else wide
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    table = torch.zeros(PARTIES, len(y), size)

    def outputs(h: Tensor) -> Tensor:
        read = h.mean(0) if model == "196-16" else h.permute(1, 0, 2).flatten(1)
        result: Tensor = top(read)
        return result

    start = time.perf_counter()
    orders = [torch.randperm(len(y)).split(BATCH) for _ in range(PARTIES)]
    for turn in zip(*orders, strict=True):
        for party, ids in enumerate(turn):
            weight, bias = bottoms[party].weight.data, bottoms[party].bias.data
            x, labels_step = train[party][ids], y[ids]
            u_weight, u_bias = torch.randn_like(weight), torch.randn_like(bias)
            table[party, ids] = activation(functional.linear(x, weight, bias))
            h = table[:, ids]
            perturbed = h.clone()
            perturbed[party] = activation(
                functional.linear(x, weight + MU * u_weight, bias + MU * u_bias)
            )
            with torch.set_grad_enabled(system == "cascaded"):
                loss = functional.cross_entropy(outputs(h), labels_step)
            with torch.no_grad():
                difference = functional.cross_entropy(outputs(perturbed), labels_step) - loss
            if system == "cascaded":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                with torch.no_grad():
                    directions = [torch.randn_like(p) for p in top.parameters()]
                    for p, u in zip(top.parameters(), directions, strict=True):
                        p.add_(u, alpha=MU)
                    of_top = functional.cross_entropy(outputs(h), labels_step) - loss
                    for p, u in zip(top.parameters(), directions, strict=True):
                        p.add_(u, alpha=-MU - lr * of_top.item() / MU)
            step = lr * difference.item() / MU
            weight.sub_(u_weight, alpha=step)
            bias.sub_(u_bias, alpha=step)
    with torch.no_grad():
        h = torch.stack([activation(b(x)) for b, x in zip(bottoms, test, strict=True)])
        accuracy = (outputs(h).argmax(1) == test_labels).float().mean().item()
    return time.perf_counter() - start, accuracy


def figures_of(mnist: str, model: str, system: str, repeats: int) -> dict[str, float]:
    """Both ways, one after the other in each repeat: medians, and the last accuracies."""
    lr = 0.01 if model == "196-16" else 0.001
    keys = {
        **MODELS[model],
        "dataset": f"npz:{mnist}",
        "strategy": system,
        "window": WINDOW,
        "epochs": 1,
        "party-lr": lr,
        "server-lr": 0.1 if system == "cascaded" else lr,
        "optimizer": "sgd",
        "noise-seed": 0,
    }
    pairs = []
    for repeat in range(repeats + 1):  # the first warms caches up
        plain, plain_accuracy = plain_epoch(mnist, model, system, lr)
        ours = local_epoch(PARTIES, keys)
        if repeat:
            pairs.append((plain, ours["seconds"]))
    return {
        "plain_seconds": round(statistics.median(plain for plain, _ in pairs), 3),
        "seconds": round(statistics.median(seconds for _, seconds in pairs), 3),
        "ratio": round(statistics.median(seconds / plain for plain, seconds in pairs), 3),
        "plain_accuracy": round(plain_accuracy, 4),
        "test_accuracy": round(ours["test_accuracy"], 4),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "window": WINDOW}
    with mnist_of(options) as mnist:
        for model in MODELS:
            for system in SYSTEMS:
                name = f"{system} {model}"
                result[name] = figures_of(mnist, model, system, options.repeats)
                print(name, result[name], flush=True)
    report("zeroth_order", result)


if __name__ == "__main__":
    main()
