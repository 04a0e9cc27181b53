"""Base of server updates: how the top model learns from the rows of a window.

The S steps of a window run in order. Each step has separate rows, and the rows of step 0 come
first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.losses import Loss
from vfl_flower.models.top_layers import TopModel
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.subsets import Copies


@dataclass(frozen=True)
class TopBatches:
    """S mini-batches, and the top model that steps on them."""

    top: TopModel
    optimizer: torch.optim.Optimizer | None  # None if the model does not learn
    h: Tensor  # rows as `TopModel` reads them: embeddings side by side, [R, M * E], own features
    labels: Tensor  # [R]
    lengths: Sequence[int]  # number of rows in each step; they add up to R
    divisors: Sequence[int]  # divisor of each step's sum of row losses
    loss: Loss = Loss()  # noqa: RUF009  (it is frozen)
    noise: ScalarNoise | None = None  # hides labels
    key: bytes = b""  # decides the random draws of the top model
    first: int = 0  # number of the first step, as in `step_along`
    copies: Copies | None = None  # a row's loss is the weighted mean over its copies
    draw_directions: Callable[[], Directions] | None = None  # new ones of the top model, each step


class ServerUpdate(ABC):
    """Base class of server updates: rules for how the top model learns.

    by_differences : whether it learns from differences of losses. It then needs no gradient, not
        even of the label holder's bottom model. If one difference serves all (perturbs = 'all'), it
        steps by the parties' difference.
    """

    by_differences: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def step(self, batches: TopBatches, gradients: bool) -> tuple[Tensor | None, Tensor]:
        """Step the top model once for each mini-batch.

        Parameters
        ----------
        gradients : whether to compute gradient rows.

        Returns
        -------
        Gradient rows [R, M * E] at the parameters before each step, or None, and losses [S].
        """
