"""Codec axis: how a block of rows becomes arrays in a message, and rows again at the other end."""

from __future__ import annotations

from torch import Tensor

from vfl_flower.models import as_tensor
from vfl_flower.records import Arrays, checked


class Identity:
    """float32 rows, as they are."""

    def encode(self, name: str, rows: Tensor) -> Arrays:
        """The arrays to send for rows [R, E]."""
        return {name: rows.detach().cpu().numpy()}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int]) -> Tensor:
        """The rows [R, E] in a message; `VflError` if they are not what was asked for."""
        return as_tensor(checked(arrays, name, "float32", shape))
