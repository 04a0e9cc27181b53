"""Numbers in two bytes each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes, flat_if_finite
from vfl_flower.transport.messages import Arrays, checked

Flat = NDArray[np.float32]


def to_halves(v: Flat, sizes: Sizes) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Vectors of these sizes as float16, each over a power of two; and the exponents of these.

    The power is the least above all of the vector, so that none of its numbers is too large, and
    its gradient rows, however small, are not lost: what is rounded is 11 bits of a number, or if
    that is below 2^-14 of the power, 2^-25 of the power.
    """
    exponents = np.zeros(len(sizes), np.int8)
    full = sizes > 0
    if full.any():
        peaks = np.maximum.reduceat(np.abs(v), (np.cumsum(sizes) - sizes)[full])
        exponents[full] = np.clip(np.frexp(peaks)[1], -126, 127)
    values = np.ldexp(v, -exponents.astype(np.int32).repeat(sizes)).clip(-1, 1)
    return values.astype(np.float16), exponents


def of_halves(name: str, arrays: Arrays, sizes: Sizes) -> Flat:
    """The vectors that `to_halves` gave, in arrays ``name.values`` and ``name.exponents``."""
    values = checked(arrays, f"{name}.values", "float16", (int(sizes.sum()),))
    exponents = checked(arrays, f"{name}.exponents", "int8", sizes.shape)
    if (np.abs(values) > 1).any():
        raise VflError(f"{name!r} has values above the peak that it names.")
    v: Flat = np.ldexp(values.astype(np.float32), exponents.astype(np.int32).repeat(sizes))
    return v


class Float16:
    """float16 numbers over a power of two for each vector, 11 bits exact: half as many bytes."""

    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: CodecConfig) -> None:
        """It has no settings."""

    def names(self, name: str) -> tuple[str, ...]:
        """Values, and their exponents."""
        return f"{name}.values", f"{name}.exponents"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Values, and their exponents."""
        values, exponents = to_halves(flat_if_finite(name, rows), sizes)
        return {f"{name}.values": values, f"{name}.exponents": exponents}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rounded rows."""
        return of_halves(name, arrays, sizes).reshape(shape)


class BFloat16:
    """bfloat16 numbers, 8 bits exact and of float32's range; NumPy has none, so as uint16."""

    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: CodecConfig) -> None:
        """It has no settings."""

    def names(self, name: str) -> tuple[str, ...]:
        """One array."""
        return (name,)

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """The upper halves of the numbers, rounded to the nearest, of two as near to the even."""
        bits = flat_if_finite(name, rows).view(np.uint32)
        upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return {name: upper.astype(np.uint16).reshape(rows.shape)}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rounded rows."""
        upper = checked(arrays, name, "uint16", shape).astype(np.uint32)
        rows: Rows = (upper << 16).view(np.float32)
        flat_if_finite(name, rows)
        return rows
