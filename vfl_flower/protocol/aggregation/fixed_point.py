"""Numbers in fixed point: integers modulo 2^32, for sums over many parties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import SumError, VflError

Ints = NDArray[np.int32]
"""Numbers modulo 2^32. NumPy adds and subtracts them modulo 2^32."""

BOUND = 1024.0
"""Bound of the absolute value of each number in an embedding. Models that learn rarely reach it."""


def places(parties: int) -> int:
    """Return f, the number of binary places after the point.

    The error of a sum of M numbers is at most M / 2^(f + 1). One of 32 bits stays free, so that
    `from_fixed` can detect numbers that are not a sum of embeddings.
    """
    return 20 - (parties - 1).bit_length()


def to_fixed(rows: NDArray[np.float32], parties: int) -> Ints:
    """Round numbers within `BOUND` to multiples of 2^-f; return the multiples."""
    if rows.size and not max(rows.max(), -rows.min()) < BOUND:  # NaN fails too
        raise VflError(
            f"has embeddings beyond {BOUND:g}, the bound of masked numbers. Lower the learning "
            "rates, or set embedding-activation."
        )
    fixed: Ints = np.rint(rows * np.float32(2 ** places(parties))).astype(np.int32)
    return fixed


def from_fixed(total: Ints, parties: int) -> NDArray[np.float32]:
    """Return the numbers of a sum, or raise `SumError` if so many embeddings have no such sum."""
    scale = 2 ** places(parties)
    most = int(parties * BOUND * scale)
    if total.size and not (total.max() <= most and total.min() >= -most):
        raise SumError
    rows: NDArray[np.float32] = total.astype(np.float32) / np.float32(scale)
    return rows
