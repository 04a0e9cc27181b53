"""Codec that sends numbers unchanged."""

from __future__ import annotations

from typing import ClassVar

from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes
from vfl_flower.transport.messages import Arrays, checked


class Identity:
    """Send float32 numbers unchanged."""

    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: CodecConfig) -> None:
        """Ignore the configuration: this codec has no settings."""

    def names(self, name: str) -> tuple[str, ...]:
        """Return the name of the one array."""
        return (name,)

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return the rows, unchanged."""
        return {name: rows}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the rows, after a check of dtype and shape."""
        rows: Rows = checked(arrays, name, "float32", shape)
        return rows
