"""Sets of directions that are uniform on a sphere."""

from __future__ import annotations

from vfl_flower.protocol.directions.base import DirectionSet


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
