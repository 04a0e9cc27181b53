"""What a server update is: how the top model learns from the rows of a window.

The S steps of a window run in order, each on rows of its own: those of step 0 first.
"""

from __future__ import annotations

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
    """S mini-batches, and the top model that steps on them.

    top : the model.
    optimizer : of its parameters; ``None`` if it stays as it is.
    h : rows as `TopModel` reads them: embeddings of all parties side by side, [R, M * E], and
        features of the label holder's own.
    labels : [R].
    lengths : rows of each step; they add up to R.
    divisors : what each step's sum of row losses is divided by.
    loss : of a row.
    noise : what hides labels, if anything does.
    key : decides what is random in the top model.
    first : number of the first step, as in `step_along`.
    copies : of the rows, by whose weighted mean loss each row counts; ``None``: it counts as it is.
    draw_directions : draws new directions of the top model, for all steps.
    """

    top: TopModel
    optimizer: torch.optim.Optimizer | None
    h: Tensor
    labels: Tensor
    lengths: Sequence[int]
    divisors: Sequence[int]
    loss: Loss = Loss()  # noqa: RUF009  (it is frozen)
    noise: ScalarNoise | None = None
    key: bytes = b""
    first: int = 0
    copies: Copies | None = None
    draw_directions: Callable[[], Directions] | None = None


class ServerUpdate(ABC):
    """How the top model learns.

    by_differences : whether it learns from differences of losses. Then it needs no gradient, not
        even of the label holder's own bottom model, and steps by the parties' difference where one
        difference is for all (perturbs = 'all').
    """

    by_differences: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def step(self, batches: TopBatches, gradients: bool) -> tuple[Tensor | None, Tensor]:
        """Step the top model once for each mini-batch.

        Parameters
        ----------
        gradients : whether gradient rows are wanted.

        Returns
        -------
        Gradient rows [R, M * E] at the parameters that each step met, if they are wanted, and
        losses [S].
        """
