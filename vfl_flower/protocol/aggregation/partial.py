"""Partial aggregation: the top model reads any subset of the embeddings.

The last M columns of the label holder's table are the row mask. It is 1 for each party that has the
row, and 0 for each party that lacks it. `protocol.subsets` draws the subsets for training.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.models.layers import applied
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.tops import OwnTop
from vfl_flower.protocol.aggregation.base import Aggregation, Masks


class PartialTop(TopModel):
    """A top model of any subset of the embeddings; the last M columns of rows h are the row mask.

    A mean or sum leaves out absent parties. Side by side, the first layer learns one column for
    each.
    """

    @classmethod
    def placeholders(cls, parties: int) -> int:
        """Return the number of columns that the first layer reads besides the blocks."""
        return parties

    @classmethod
    def whole(cls, blocks: Tensor, parties: int) -> Tensor:
        """Return rows h of embeddings [R, ...] for rows that every party has."""
        return torch.cat([blocks, blocks.new_ones(len(blocks), parties)], dim=1)

    def present(self, h: Tensor) -> Tensor:
        """Return the row mask of rows h, [R, M]; [R, 0] for no parties."""
        return h[:, h.shape[1] - self.parties :]

    def embedded(self, h: Tensor) -> Tensor:
        """Return the embeddings of all blocks in rows h, [R, B * E]."""
        return super().embedded(h) if self.own is not None else h[:, : self.received]

    def features(self, h: Tensor) -> Tensor:
        """Return the label holder's own features of rows h, [R, F]."""
        return h[:, self.received : h.shape[1] - self.parties]

    def combined(self, blocks: Tensor, h: Tensor) -> Tensor:
        """Return the first layer's inputs from the embeddings [R, B * E] of rows h."""
        if self.combine == "concat":
            return torch.cat([self._masked(blocks, h), 1 - self.present(h)], dim=1)
        blocks = self._masked(blocks, h)
        x = blocks.view(len(blocks), self.blocks, blocks.shape[1] // self.blocks).sum(1)
        return x / self._count(h) if self.combine == "mean" else x

    def first_change(self, columns: slice, change: Tensor, h: Tensor) -> Tensor:
        """Return the change of `first` when one party's ``columns`` of h change, [R, E]."""
        party = self.starts.index(columns.start)
        change = change * self.present(h)[:, party, None]
        change = change / self._count(h) if self.combine == "mean" else change
        if not len(self.layers):
            return change
        weight = applied(self.layers[0])
        return change @ (weight[:, columns] if self.combine == "concat" else weight).T

    def spread(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows [R, M * E]; zero where a party lacks the row."""
        if self.combine == "concat":
            return self._masked(rows[:, : self.received], h)
        rows = rows / self._count(h) if self.combine == "mean" else rows
        return self._masked(rows.repeat(1, self.parties), h)

    def spread_to(self, columns: slice, rows: Tensor, h: Tensor) -> Tensor:
        """Return gradient rows of the label holder's own block, [R, E]."""
        if self.combine == "concat":
            return rows[:, columns.start : rows.shape[1] - self.parties]  # placeholders are last
        return rows / self._count(h) if self.combine == "mean" else rows

    def _masked(self, blocks: Tensor, h: Tensor) -> Tensor:
        """Return blocks [R, ...] with zeros for absent parties."""
        sizes = torch.tensor(self.starts).diff().to(h.device, non_blocking=True)
        held = self.present(h).repeat_interleave(sizes, 1, output_size=self.received)
        if blocks.shape[1] == self.received:
            return blocks * held
        return torch.cat([blocks[:, : self.received] * held, blocks[:, self.received :]], dim=1)

    def _count(self, h: Tensor) -> Tensor:
        """Return the number of blocks that each row has, [R, 1]; at least one."""
        own = int(self.own is not None)
        return (self.present(h).sum(1, keepdim=True) + own).clamp_min(1)


class PartialOwnTop(OwnTop, PartialTop):
    """A user's module that reads any subset of the embeddings."""

    def given(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return the embeddings, and a mask of the blocks that are present."""
        embeddings, absent = z.tensor_split([z.shape[1] - self.parties], dim=1)
        present = 1 - absent
        if self.own is not None:
            present = torch.cat([present, present.new_ones(len(z), 1)], dim=1)
        return embeddings.clone(), present.clone()


class Partial(Aggregation):
    """The embeddings of the present parties, with a row mask."""

    tops: ClassVar = (PartialTop, PartialOwnTop)
    any_subset = True

    @staticmethod
    def is_for(config: RunConfig) -> bool:
        """Return whether parties may lack rows, or the top model learns from subsets."""
        return config.data.partial or config.subsets != "off"

    def check(self, answers_by_scalars: bool, baseline: bool) -> None:
        """Raise `ConfigError` if other options contradict the aggregation."""
        if self.config.estimator.labels == "shared":
            raise ConfigError(
                "labels = 'shared' has parties use the top model, so they would have to know which "
                "rows other parties lack. Leave it out, or leave out partial rows and subsets."
            )

    def row_masks(self, labels: Labels, parties: Sequence[int]) -> tuple[Masks, Masks]:
        """Return row masks of the training and test rows, [N, M]."""
        if labels.present is None:
            train, test = (
                np.ones((len(part), len(parties)), bool) for part in (labels.train, labels.test)
            )
        else:
            train, test = (part[:, list(parties)] for part in labels.present)
        return train, test

    def rows(self, blocks: Tensor, own: Tensor, present: Tensor) -> Tensor:
        """Return rows of a table as the top model reads them."""
        return torch.cat([blocks, own, present.to(blocks)], dim=1)


def check_rows(config: RunConfig) -> None:
    """Raise `ConfigError` if options about partial rows contradict each other."""
    data = config.data
    if config.without and config.task not in ("predict", "explain"):
        raise ConfigError("without is only for task = 'predict' or 'explain'. Leave it out.")
    if data.presence > 1:
        raise ConfigError(f"presence = {data.presence} is too large. Set it to at most 1.")
    if data.presence < 1 and data.own_data:
        raise ConfigError(
            "presence is only for partitioned data sets, and these parties have their own files. "
            "Leave it out, and set align = 'any'."
        )
    if data.align == "any" and not data.own_data:
        raise ConfigError(
            "align = 'any' is only for parties with their own files. For partial rows of a "
            "partitioned data set, set presence."
        )
    if data.min_parties != 1 and data.align != "any":
        raise ConfigError(
            "min-parties is only for align = 'any'. Set that, or leave min-parties out."
        )
