"""The model and the rows of all peers. Each peer's environment has torch and NumPy for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PARTIES, EMBEDDING, CLASSES, BATCH, RATE = 4, 128, 10, 64, 0.1


def epochs() -> int:
    """How many epochs to train."""
    return int(os.environ["PEERS_EPOCHS"])


def array(name: str) -> NDArray[Any]:
    """One array of the rows: ``train-0``, ``test-0``, ..., ``labels`` and ``test-labels``."""
    with np.load(os.environ["PEERS_ROWS"], allow_pickle=False) as file:
        found: NDArray[Any] = file[name]
    return found


def columns(party: int) -> tuple[Tensor, Tensor]:
    """A party's training rows [N, 196] and test rows [M, 196]."""
    return torch.from_numpy(array(f"train-{party}")), torch.from_numpy(array(f"test-{party}"))


def labels() -> tuple[Tensor, Tensor]:
    """The labels of the training rows [N] and of the test rows [M]."""
    return torch.from_numpy(array("labels")), torch.from_numpy(array("test-labels"))


def bottom() -> nn.Module:
    """A party's model, 196 to 128."""
    return nn.Sequential(nn.Linear(196, EMBEDDING), nn.ReLU())


def top() -> nn.Module:
    """The label holder's model, 512 to 10."""
    hidden = nn.Linear(PARTIES * EMBEDDING, 128)
    return nn.Sequential(hidden, nn.ReLU(), nn.Linear(128, CLASSES))


def epoch_done(outputs: Tensor, truth: Tensor) -> None:
    """Append the test accuracy of an epoch to the file of progress."""
    accuracy = (outputs.argmax(1) == truth).float().mean().item()
    with Path(os.environ["PEERS_PROGRESS"]).open("a") as file:
        file.write(json.dumps({"test_accuracy": accuracy}) + "\n")
