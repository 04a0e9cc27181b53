"""Codecs that send each number as it is, or in two bytes."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes, flat_if_finite
from vfl_flower.transport.messages import Arrays, checked

Flat = NDArray[np.float32]


def to_halves(v: Flat, sizes: Sizes) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Divide vectors by powers of two; return float16 values and the exponents.

    The power is the least one above all magnitudes of the vector. So no number overflows, and small
    gradient rows are not lost. Numbers keep 11 bits. The rounding error of a number below 2^-14 of
    the power is at most 2^-25 of the power.
    """
    exponents = np.zeros(len(sizes), np.int8)
    full = sizes > 0
    if full.any():
        peaks = np.maximum.reduceat(np.abs(v), (np.cumsum(sizes) - sizes)[full])
        exponents[full] = np.clip(np.frexp(peaks)[1], -126, 127)
    values = np.ldexp(v, -exponents.astype(np.int32).repeat(sizes)).clip(-1, 1)
    return values.astype(np.float16), exponents


def of_halves(name: str, arrays: Arrays, sizes: Sizes) -> Flat:
    """Return the vectors of `to_halves` from ``name.values`` and ``name.exponents``."""
    values = checked(arrays, f"{name}.values", "float16", (int(sizes.sum()),))
    exponents = checked(arrays, f"{name}.exponents", "int8", sizes.shape)
    if (np.abs(values) > 1).any():
        raise VflError(f"{name!r} has values above the peak of its exponent.")
    return np.ldexp(values.astype(np.float32), exponents.astype(np.int32).repeat(sizes))


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
        return checked(arrays, name, "float32", shape)


class Float16(Identity):
    """Send float16 numbers over a power of two for each vector; 11 bits are exact."""

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of values and exponents."""
        return f"{name}.values", f"{name}.exponents"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return the values and their exponents."""
        values, exponents = to_halves(flat_if_finite(name, rows), sizes)
        return {f"{name}.values": values, f"{name}.exponents": exponents}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the rounded rows."""
        return of_halves(name, arrays, sizes).reshape(shape)


class BFloat16(Identity):
    """Send bfloat16 numbers as uint16, because NumPy has no bfloat16; 8 bits are exact."""

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return the upper halves of the numbers, rounded to nearest, ties to even."""
        bits = flat_if_finite(name, rows).view(np.uint32)
        upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return {name: upper.astype(np.uint16).reshape(rows.shape)}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the rounded rows."""
        upper = checked(arrays, name, "uint16", shape).astype(np.uint32)
        rows: Rows = (upper << 16).view(np.float32)
        flat_if_finite(name, rows)
        return rows
