"""Steps of a top model by the server updates of ours, for tests that take them one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.server_update.base import TopBatches
from vfl_flower.protocol.server_update.gradient import ByDifferences, ByGradient

Optimizer = torch.optim.Optimizer | None


def by_gradient(
    top: TopModel,
    optimizer: Optimizer,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    rows_wanted: bool = True,
    **more: Any,
) -> tuple[Any, Tensor]:
    batches = TopBatches(top, optimizer, h, labels, lengths, divisors, **more)
    return ByGradient(RunConfig()).step(batches, rows_wanted)


def by_differences(
    directions: Directions,
    top: TopModel,
    optimizer: Optimizer,
    h: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    divisors: Sequence[int],
    **more: Any,
) -> Tensor:
    batches = TopBatches(
        *(top, optimizer, h, labels, lengths, divisors), draw_directions=lambda: directions, **more
    )
    return ByDifferences(RunConfig()).step(batches, gradients=False)[1]
