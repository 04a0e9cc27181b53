"""The top model of a checkpoint, ready to predict from embeddings."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.models.tops import load_top
from vfl_flower.protocol.aggregation import aggregation_of


class Predictor:
    """The top model of a run, and the layout of the embeddings that it reads.

    Parameters
    ----------
    own_columns : number of the label holder's own columns.

    Attributes
    ----------
    sizes : embedding size of each party.
    columns : party -> its columns in `outputs`' blocks.
    width : number of these columns.
    """

    def __init__(self, found: Checkpoint, own_columns: int) -> None:
        self.found = found
        self.aggregation = aggregation_of(found.config)
        self.sizes: list[int] = found.strategy["holder"]["sizes"]
        self.columns = self.aggregation.columns(dict(enumerate(self.sizes)))
        self.width = max((each.stop for each in self.columns.values()), default=0)
        classes = len(found.about_labels["classes"])
        outputs = 1 if classes in (0, 2) else classes
        self.top = self.aggregation.build_top(self.sizes, outputs, own_columns).eval()
        load_top(found.config, self.top, of_group("top", found.arrays))

    @torch.no_grad()
    def outputs(
        self, blocks: Tensor, own: NDArray[np.float32], present: NDArray[np.bool_]
    ) -> Tensor:
        """Return the outputs [R, C] of rows.

        A row that no participant knows gets the prior: the class shares of training, or the mean.

        Parameters
        ----------
        blocks : embeddings, float32 [R, width]; zeros where a party lacks a row.
        own : the label holder's own columns, [R, F].
        present : whether a party has a row, [R, M].
        """
        h = self.aggregation.rows(blocks, torch.from_numpy(own), torch.from_numpy(present))
        said: Tensor = self.top(h)
        prior: list[float] | None = self.found.strategy["holder"]["prior"]
        nobody = torch.from_numpy(~self.knows(own, present))
        if prior and nobody.any():
            said = torch.where(nobody[:, None], torch.tensor(prior), said)
        return said

    @staticmethod
    def knows(own: NDArray[np.float32], present: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows a party or the label holder knows, [R]."""
        known: NDArray[np.bool_] = present.sum(1) + own.shape[1] > 0
        return known
