"""Numbers in fixed point: integers modulo 2^32, many of which can be added."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import SumError, VflError

Ints = NDArray[np.int32]
"""Numbers modulo 2^32, which NumPy adds and subtracts as such."""

BOUND = 1024.0
"""Bound of the numbers in an embedding, up and down. Models that learn hardly reach it."""


def places(parties: int) -> int:
    """Return the binary places after the point, f.

    A sum of M numbers is off by at most M / 2^(f + 1). One of 32 bits stays free, so that numbers
    are noticed that are no sum of embeddings.
    """
    return 20 - (parties - 1).bit_length()


def to_fixed(rows: NDArray[np.float32], parties: int) -> Ints:
    """Round numbers to multiples of 2^-f, and return the multiples.

    Raises
    ------
    VflError
        If a number is not within `BOUND`, as the end of a sentence that does not say which.
    """
    if rows.size and not max(rows.max(), -rows.min()) < BOUND:  # also if one is not a number
        raise VflError(
            f"has embeddings beyond {BOUND:g}, where masked numbers end: lower the learning rates, "
            "or give embedding-activation."
        )
    fixed: Ints = np.rint(rows * np.float32(2 ** places(parties))).astype(np.int32)
    return fixed


def from_fixed(total: Ints, parties: int) -> NDArray[np.float32]:
    """Return the numbers of a sum over so many parties.

    Raises
    ------
    SumError
        If it cannot be a sum of so many embeddings.
    """
    scale = 2 ** places(parties)
    most = int(parties * BOUND * scale)
    if total.size and not (total.max() <= most and total.min() >= -most):
        raise SumError
    rows: NDArray[np.float32] = total.astype(np.float32) / np.float32(scale)
    return rows
