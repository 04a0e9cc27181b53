"""Two parties train their own convolutional towers, with BatchNorm, on halves of digits.

    python examples/own_tower.py

The label holder also has its own top model, loss and metric. See docs/how-to/own-models.md.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import vfl_flower

HERE = str(Path(__file__).absolute())


class Tower(nn.Module):
    """Two convolutions with BatchNorm on a party's part of an image, [R, H, W] to [R, size]."""

    def __init__(self, sample: Tensor, size: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(width * sample.numel(), size)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings."""
        embeddings: Tensor = self.layers(x[:, None])
        return embeddings


class Top(nn.Module):
    """A linear layer on normalised embeddings, [R, sum(sizes)] to [R, outputs]."""

    def __init__(self, sizes: list[int], outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sum(sizes))
        self.last = nn.Linear(sum(sizes), outputs)

    def forward(self, h: Tensor) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.last(self.norm(h))
        return logits


def smooth(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each row, [R], with smoothed labels."""
    return functional.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.05)


def top_3(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """How often the class is among the three likeliest."""
    likeliest = outputs.topk(3).indices
    return {"top_3": float((likeliest == labels[:, None]).any(1).float().mean())}


def main(epochs: int = 10) -> vfl_flower.Model:
    """Train, and say what was reached."""
    torch.set_num_threads(1)
    model = vfl_flower.train(
        {
            "dataset": "digits",
            "bottom-model": f"{HERE}:Tower",
            "model-args": "width=8",
            "top-model": f"{HERE}:Top",
            "loss": f"{HERE}:smooth",
            "metrics": f"{HERE}:top_3",
            "embedding-size": 16,
            "optimizer": "momentum",
            "party-lr": 0.02,
            "server-lr": 0.02,
            "epochs": epochs,
        },
        parties=2,
    )
    summary = model.summary
    print(f"accuracy {summary['test_accuracy']:.3f}, among the first 3 {summary['test_top_3']:.3f}")
    return model


if __name__ == "__main__":
    main()
