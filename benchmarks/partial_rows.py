"""Rows that some parties lack: MNIST's quadrants, where each party has a row by chance.

Bottom models 196-64-32, a top model on the mean of the available embeddings, batch 64, Adam, the
steps of four epochs for all. Test accuracy on all test rows is measured three ways: with all
parties, with each party present by the chance of training, and with a single party (mean over
parties). `common` learns only from the rows that all have. `off` learns from all rows as they are.
`sampled` also learns from a random subset of each row's parties, and `laser` from one subset of
each size. The plain loop is ordinary PyTorch that does what `sampled` does. A step's time is given
for rows that all parties have, to compare with ordinary training. Prints one JSON object as its
last line.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import ALL_ROWS, mnist_of, parser, report, trained
from strategies.baselines.centralised import Common
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.data.split import draw_row_masks
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.training import load_model
from vfl_flower.party.state import load_arrays
from vfl_flower.protocol.systems import resolve

PARTIES, RATE = 4, 1e-3


def keys_of(mnist: str, epochs: int) -> dict[str, Any]:
    """The run configuration that all share."""
    return {
        **ALL_ROWS,
        **{"dataset": f"npz:{mnist}", "bottom-hidden": 64, "embedding-size": 32, "combine": "mean"},
        **{"batch-size": 64, "epochs": epochs, "eval-every": epochs, "optimizer": "adam"},
        **{"party-lr": RATE, "server-lr": RATE, "window": 1},
    }


Outputs = Any
"""Outputs of the test rows, by who is used: float32 [R, M]."""


def figures(outputs: Outputs, labels: Tensor, present: NDArray[np.bool_]) -> dict[str, float]:
    """Test accuracy with all parties, with those present, and with a single one."""

    def accuracy(used: NDArray[Any]) -> float:
        with torch.no_grad():
            said = outputs(torch.from_numpy(used.astype(np.float32)))
        return float((said.argmax(1) == labels).float().mean())

    alone = [np.tile(np.eye(PARTIES)[party], (len(labels), 1)) for party in range(PARTIES)]
    return {
        "all": accuracy(np.ones_like(present)),
        "partial": accuracy(present),
        "single": float(np.mean([accuracy(each) for each in alone])),
    }


def federated(keys: dict[str, Any]) -> tuple[Outputs, float]:
    """Outputs of a run's model; seconds of its training."""
    strategy, grid, seconds = trained(PARTIES, keys)
    config, holder = strategy.config, strategy.run.holder
    blocks, whole = [], config.with_values({"presence": 1.0})
    for party, context in enumerate(grid.contexts.values()):
        x = torch.from_numpy(load_features(whole, party, PARTIES).test)
        bottom = build_bottom(config, party, x[0], 32)
        load_model(bottom, load_arrays(context.state, "model"))
        with torch.no_grad():
            blocks.append(bottom(x))
    h = torch.cat(blocks, dim=1)

    def outputs(used: Tensor) -> Tensor:
        made: Tensor = holder.top(torch.cat([h, used], 1) if holder.aggregation.any_subset else h)
        return made

    return outputs, seconds


def plain(keys: dict[str, Any]) -> tuple[Outputs, float]:
    """Outputs of a model that a plain loop trained by the mean of two losses; its seconds."""
    config = resolve(keys)
    whole = config.with_values({"presence": 1.0})
    blocks = [load_features(whole, m, PARTIES) for m in range(PARTIES)]
    labels = load_labels(config)
    y = torch.from_numpy(labels.train)
    has = torch.from_numpy(draw_row_masks(config, len(y) + len(labels.test), PARTIES)[: len(y)])
    x, test = ([torch.from_numpy(getattr(b, part)) for b in blocks] for part in ("train", "test"))
    torch.manual_seed(0)
    bottoms = nn.ModuleList(
        nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        for _ in x
    )
    top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam([*bottoms.parameters(), *top.parameters()], RATE)

    def outputs(of: list[Tensor], used: Tensor) -> Tensor:
        h = torch.stack([bottom(rows) for bottom, rows in zip(bottoms, of, strict=True)], 1)
        made: Tensor = top((h * used[..., None]).sum(1) / used.sum(1, keepdim=True))
        return made

    start = time.perf_counter()
    for _ in range(keys["epochs"]):
        for ids in torch.randperm(len(y)).split(64):
            present, of = has[ids], [rows[ids] for rows in x]
            keys_of_order = torch.where(present, torch.rand(present.shape), 2.0)
            order = keys_of_order.argsort(1).argsort(1)
            counts = present.sum(1, keepdim=True)
            size = 1 + (torch.rand(counts.shape) * counts).long()
            loss = torch.zeros(())
            for used in (present, order < size):
                loss = loss + functional.cross_entropy(outputs(of, used.float()), y[ids]) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return lambda used: outputs(test, used), time.perf_counter() - start


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--presence", type=float, nargs="*", default=[0.5, 0.3])
    made.add_argument("--times", type=int, default=3, help="of a step's time, in turns")
    options = made.parse_args()
    with mnist_of(options) as mnist:
        report("partial_rows", measured(keys_of(mnist, options.epochs), options))


def measured(keys: dict[str, Any], options: Any) -> dict[str, Any]:
    """All figures."""
    found: dict[str, Any] = {}
    for share in options.presence:
        config = resolve({**keys, "presence": share})
        labels = load_labels(config)
        numbers = len(labels.train) + np.arange(len(labels.test))
        present = draw_row_masks(config, len(labels.train) + len(labels.test), PARTIES)[numbers]
        due = torch.from_numpy(labels.test)
        ways: dict[str, dict[str, Any]] = {
            "off": {"subsets": "off"},
            "sampled": {"subsets": "sampled"},
            "laser": {"subsets": "laser"},
        }
        of_share = {
            name: figures(federated({**keys, "presence": share, **more})[0], due, present)
            for name, more in ways.items()
        }
        of_share["common"] = figures(common({**keys, "presence": share}), due, present)
        by_loop, _ = plain({**keys, "presence": share})
        of_share["plain loop, sampled"] = figures(by_loop, due, present)
        found[f"presence {share:g}"] = of_share
        for name, each in of_share.items():
            print(f"{share:g} {name:20s}", {k: round(v, 4) for k, v in each.items()}, flush=True)
    all_rows = np.ones_like(present)
    seconds: dict[str, list[float]] = {"ordinary": [], "sampled": []}
    for _ in range(options.times):
        for name, more in (("ordinary", {}), ("sampled", {"subsets": "sampled"})):
            outputs, took = federated({**keys, "epochs": 1, "eval-every": 1, **more})
            seconds[name].append(took)
    for name, more in (("ordinary", {}), ("sampled", {"subsets": "sampled"})):
        outputs, _ = federated({**keys, **more})
        found[f"{name}, all rows"] = figures(outputs, due, all_rows)
        print(f"{name}, all rows", found[f"{name}, all rows"], flush=True)
    found["seconds"] = seconds
    return found


def common(keys: dict[str, Any]) -> Outputs:
    """Outputs of a model of the rows that all have."""
    strategy, _, _ = trained(PARTIES, {**keys, "strategy": "intersection-only"})
    assert isinstance(strategy, Common)
    config, holder = strategy.config, strategy.run.holder
    whole = config.with_values({"presence": 1.0})
    h = []
    for party, bottom in enumerate(strategy.bottoms):
        x = torch.from_numpy(load_features(whole, party, PARTIES).test)
        with torch.no_grad():
            h.append(bottom.eval()(x))
    joined = torch.cat(h, dim=1)
    return lambda used: holder.top(torch.cat([joined, used], 1))


if __name__ == "__main__":
    main()
