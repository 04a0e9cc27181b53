"""Code of a user may write to its arguments: nobody else sees that."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vfl_flower
from tests.conftest import nightly
from tests.pairwise import pairwise
from vfl_flower.data.source import Moments, scaling

GIVEN: dict[str, Any] = {
    **{"dataset": "breast-cancer", "parties": 2, "seed": 3, "expert": {"noise-seed": 3}},
    **{"progress": False, "batch_size": 128},
}


class Copies(nn.Module):
    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        self.last = nn.Linear(len(sample), size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * 2 + 1)


class Writes(Copies):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.mul_(2).add_(1))


class Top(nn.Module):
    writes = False

    def __init__(self, sizes: list[int], outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(sum(sizes), outputs)

    def forward(self, h: Tensor) -> Tensor:
        return self.last(h.mul_(2) if self.writes else h * 2)


class WritesTop(Top):
    writes = True


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        outputs[:, 0], labels.float(), reduction="none"
    )


def writing_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    found = loss(outputs.clone(), labels)
    labels.fill_(0)
    outputs.detach().fill_(0)
    return found


def figures(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    labels.fill_(1)
    outputs.fill_(0)
    return {"first": 0.5}


def trained(**more: Any) -> tuple[list[Any], float]:
    """Return losses and AUC of a short run, by the model's own evaluation too."""
    model = vfl_flower.train(**{**GIVEN, "epochs": 2, **more})
    said = [each["test_loss"] for each in model.history]
    return [*said, model.evaluate()["loss"]], model.summary["test_auc"]


@pytest.mark.parametrize("strategy", ["split-nn", nightly("cascaded")])
def test_code_that_writes_to_its_arguments_learns_as_code_that_does_not(strategy: str) -> None:
    plain = {"bottom_model": Copies, "top_model": Top, "loss": loss}
    writes = {"bottom_model": Writes, "top_model": WritesTop, "loss": writing_loss}
    expected, before = trained(strategy=strategy, **plain), trained()
    assert trained(strategy=strategy, **writes, metrics=figures) == expected
    assert trained() == before  # data and labels of the process are as they were


@pairwise(spread=[1.0, 100.0], far=[0.0, 1e6, 4_006_000_000_000.0], rows=[600, 200_000])
def test_an_offset_does_not_change_the_scale(spread: float, far: float, rows: int) -> None:
    apart = np.round(np.random.default_rng(0).normal(size=(rows, 2)) * spread, 3)
    column = apart + far
    (mean, deviation), expected = scaling(column, True), (column - far).std(0)
    np.testing.assert_allclose(deviation, expected, rtol=1e-6)
    assert (np.abs((column - mean).mean(0)) < 1e-6 * expected + 2 * np.spacing(far)).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 1e15 + 0.1, 4_006_000_000_001.0])
@pytest.mark.parametrize("rows", [3, 99_999])
def test_a_constant_column_has_deviation_one(value: float, rows: int) -> None:
    column = np.full((rows, 1), value)
    assert [each.tolist() for each in scaling(column, True)] == [[value], [1.0]]
    moments = Moments()
    moments.add(column)
    assert moments.result()[1] == [1.0]


def test_torch_scales_no_constant_image() -> None:
    mean, deviation = scaling(np.full((4, 2, 2), 3.0), False)
    assert torch.tensor(mean) == 3 and torch.tensor(deviation) == 1
