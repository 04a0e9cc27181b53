"""Train the top model on random subsets of each row's parties.

``sampled``: a row's loss is the mean of two losses. One uses all parties that have the row. The
other uses a random subset of these parties, of uniform size. ``laser``: a row's loss is the mean
over all subsets. One subset of each size estimates it, weighted by the number of subsets of that
size (LASER-VFL; Valdeira, Wang and Chi, 2025, section 3.2). In both cases a row has several copies
in a mini-batch, and one pass evaluates all copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """Copies of the R rows of a window, each with a subset of the row's parties."""

    rows: Tensor  # position in the window of each copy's row, [R'], in order of steps
    h: Tensor  # copies as the top model reads them, [R', ...]
    weights: Tensor  # weight of each copy's loss, [R']; a row's weights add up to 1
    lengths: list[int]  # number of copies in each step
    of: int  # number of rows R

    def mean(self, values: Tensor) -> Tensor:
        """Return weighted means over each row's copies, [R, ...], of values [R', ...]."""
        weights = self.weights.view(-1, *[1] * (values.dim() - 1))
        return self.total(values * weights)

    def total(self, values: Tensor) -> Tensor:
        """Return sums over each row's copies, [R, ...], of values [R', ...]."""
        return values.new_zeros(self.of, *values.shape[1:]).index_add_(0, self.rows, values)


def copies(
    kind: str, h: Tensor, lengths: Sequence[int], parties: int, least: int, key: Sequence[int]
) -> Copies:
    """Return copies of a window's rows, with random subsets of their parties.

    The last ``parties`` columns of h are the row mask. ``least`` is the smallest subset.
    """
    columns = slice(h.shape[1] - parties, None)
    present = h[:, columns].cpu().numpy() > 0
    generator = np.random.default_rng(key)
    order = np.where(present, generator.random(present.shape), 2.0).argsort(1).argsort(1)
    counts = present.sum(1)
    if kind == "sampled":
        drawn = generator.integers(np.minimum(least, counts), counts + 1)
        sizes, weights = np.stack([counts, drawn], 1), np.full((len(h), 2), 0.5, np.float32)
    else:
        each = np.arange(least, parties + 1)
        sizes = np.broadcast_to(each, (len(h), len(each)))
        weights = _laser_weights(parties, least)[counts]
    row, copy = np.nonzero(weights)  # by rows, so that steps stay in order
    subset = order[row] < sizes[row, copy][:, None]
    step = np.repeat(np.arange(len(lengths)), lengths)[row]
    rows = torch.from_numpy(row).to(h.device, non_blocking=True)
    chosen = h[rows]
    chosen[:, columns] = torch.from_numpy(subset).to(h, non_blocking=True)
    return Copies(
        rows,
        chosen,
        torch.from_numpy(weights[row, copy]).to(h, non_blocking=True),
        np.bincount(step, minlength=len(lengths)).tolist(),
        len(h),
    )


@lru_cache(maxsize=4)
def _laser_weights(parties: int, least: int) -> NDArray[np.float32]:
    """Return the share of subsets of n parties that have size k, [n, k - least]."""
    from scipy.special import comb

    n, k = np.ogrid[: parties + 1, least : parties + 1]
    many = comb(n, k)
    many[0, 0] = 1  # a row without parties has the empty subset, even if least is 1
    return (many / many.sum(1, keepdims=True)).astype(np.float32)
