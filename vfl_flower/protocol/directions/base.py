"""What a set of directions is; as it is, ``gaussian``: entries that are standard normal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DirectionSet:
    """The set that directions u of d parameters are drawn from.

    phi : what a difference times u is multiplied by, to estimate the gradient.
    length : the Euclidean length that each direction is scaled to; ``None`` for as it is drawn.

    Parameters
    ----------
    size : d.
    """

    phi: float = 1
    length: float | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def fill(self, generator: np.random.Generator, entries: NDArray[np.float32]) -> None:
        """Draw the next entries of a direction.

        A direction may be drawn in parts, of any sizes, and must be the same: draw one entry after
        the other, with as many numbers of the generator each time.
        """
        generator.standard_normal(out=entries, dtype=np.float32)
