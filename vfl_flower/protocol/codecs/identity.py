"""Numbers as they are."""

from __future__ import annotations

from typing import ClassVar

from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes
from vfl_flower.transport.messages import Arrays, checked


class Identity:
    """float32 numbers, as they are."""

    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: CodecConfig) -> None:
        """It has no settings."""

    def names(self, name: str) -> tuple[str, ...]:
        """One array."""
        return (name,)

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """The rows themselves."""
        return {name: rows}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rows themselves."""
        rows: Rows = checked(arrays, name, "float32", shape)
        return rows
