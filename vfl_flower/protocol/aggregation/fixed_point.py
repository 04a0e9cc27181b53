"""Numbers in fixed point, as integers modulo 2^32, of which many can be added."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import SumError, VflError

Ints = NDArray[np.int32]
"""Numbers modulo 2^32, which NumPy adds and subtracts as such."""

BOUND = 1024.0
"""What a number of an embedding can be, up and down: what models that learn hardly reach."""


def places(parties: int) -> int:
    """Binary places after the point, f: of a sum no number is off by more than M / 2^(f + 1).

    One of 32 bits stays free, so that what is no sum of embeddings is found to be none.
    """
    return 20 - (parties - 1).bit_length()


def to_fixed(rows: NDArray[np.float32], parties: int) -> Ints:
    """Numbers to the nearest multiple of 2^-f, as such multiples.

    Raises
    ------
    VflError
        If one is not within `BOUND`, as the end of a sentence; it does not say which.
    """
    if rows.size and not max(rows.max(), -rows.min()) < BOUND:  # what is no number, too
        raise VflError(
            f"has embeddings beyond {BOUND:g}, where masked numbers end: lower the learning rates, "
            "or give embedding-activation."
        )
    fixed: Ints = np.rint(rows * np.float32(2 ** places(parties))).astype(np.int32)
    return fixed


def from_fixed(total: Ints, parties: int) -> NDArray[np.float32]:
    """Numbers of which a sum over parties consists.

    Raises
    ------
    SumError
        If that is no sum of so many embeddings.
    """
    scale = 2 ** places(parties)
    most = int(parties * BOUND * scale)
    if total.size and not (total.max() <= most and total.min() >= -most):
        raise SumError
    rows: NDArray[np.float32] = total.astype(np.float32) / np.float32(scale)
    return rows
