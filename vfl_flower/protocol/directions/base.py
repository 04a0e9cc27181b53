"""Sets of directions: ``gaussian`` with standard normal entries, the base, and spheres."""

import numpy as np
from numpy.typing import NDArray


class DirectionSet:
    """Distribution of directions u for d parameters.

    phi : factor of a difference times u in the gradient estimate.
    length : Euclidean length of each direction after scaling; ``None`` for no scaling.

    Parameters
    ----------
    size : number of parameters d.
    """

    phi: float = 1
    length: float | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def fill(self, generator: np.random.Generator, entries: NDArray[np.float32]) -> None:
        """Draw the next entries of a direction.

        The result must not depend on how a direction is cut into parts. So draw entries in order,
        with the same number of the generator's draws for each entry.
        """
        generator.standard_normal(out=entries, dtype=np.float32)


class Sphere(DirectionSet):
    """Uniform on the unit sphere, with the factor phi = d."""

    length = 1.0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.phi = size


class ScaledSphere(DirectionSet):
    """Uniform on the sphere of radius sqrt(d)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.length = size**0.5
