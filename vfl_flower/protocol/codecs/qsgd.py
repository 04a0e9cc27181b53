"""Codec that quantizes entries at random to levels of a vector's norm."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.batches import secret_generator
from vfl_flower.protocol.codecs.bits import (
    BitReader,
    low_bits,
    number_bits,
    place_bits,
    read_places,
)
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes, flat_if_finite, padded
from vfl_flower.transport.messages import Arrays, checked

_BITS = 4  # default of bits


class QSGD:
    """Quantize entries at random to s = 2^bits levels of the vector's norm.

    This operator is qsgd_s (EF-VFL, section 5). Entry v_i becomes
    sign(v_i) ||v|| / (s tau) * floor(s |v_i| / ||v|| + xi) with xi uniform on [0, 1) and
    tau = 1 + min(d / s^2, sqrt(d) / s). It is contractive in expectation with alpha = 1 / tau.

    A message has the norm of each vector, and bits. Most entries of a long vector are at level 0,
    and most others at level 1. So the bits say which entries are above level 0, which of these are
    above 1, and so on. If levels are high, only the higher bits of a level are coded like this. Its
    ``lower`` bits are sent unchanged. Signs are sent only if an entry is negative.
    """

    uses: ClassVar[tuple[str, ...]] = ("bits",)

    def __init__(self, config: CodecConfig) -> None:
        bits = _BITS if config.bits is None else config.bits
        if not 1 <= bits <= 16:
            raise ConfigError(f"bits = {bits} is not possible for qsgd: choose 1 to 16.")
        self.levels = 2**bits  # s

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of norms, counts and bits."""
        return f"{name}.norms", f"{name}.counts", f"{name}.bits"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return norms, counts of entries at or above each level, and bits."""
        v = flat_if_finite(name, rows)
        vectors, held = padded(v, sizes, 0.0)
        squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
        norms = np.minimum(np.sqrt(squares), np.finfo(np.float32).max).astype(np.float32)
        scale = np.divide(self.levels, norms, out=np.zeros_like(norms), where=norms > 1e-30)
        scaled = np.abs(vectors) * scale[:, None]
        flat = scaled.reshape(-1) if held is None else scaled[held]
        flat = flat + _uniform(f"{name}|{key}", rows.shape, of_row)
        places = np.flatnonzero(flat >= 1)
        above = np.minimum(flat[places], self.levels).astype(np.int64) - 1  # rounds down
        lower = _lower_bits(above)
        negative = v[places] < 0
        signed = bool(negative.any())
        bits = [number_bits(np.array([lower, signed]), 5), place_bits(places, len(v))]
        counts, height = [len(places)], above >> lower
        while counts[-1]:
            higher = np.flatnonzero(height)
            bits.append(place_bits(higher, len(height)))
            counts.append(len(higher))
            height = height[higher] - 1
        bits.append(number_bits(above & ((1 << lower) - 1), lower))
        bits.append(negative[: signed * len(places)].view(np.uint8))
        return {
            f"{name}.norms": norms,
            f"{name}.counts": np.array(counts, np.min_scalar_type(len(v))),
            f"{name}.bits": np.packbits(np.concatenate(bits)),
        }

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the quantized rows."""
        total = int(sizes.sum())
        norms = checked(arrays, f"{name}.norms", "float32", sizes.shape)
        if (norms < 0).any():
            raise VflError(f"{name!r} has a negative norm.")
        length = np.size(arrays.get(f"{name}.counts", 0))
        dtype = str(np.min_scalar_type(total))
        counts = checked(arrays, f"{name}.counts", dtype, (length,)).astype(np.int64)
        if not 0 < length <= 17 or counts[-1] or (np.diff(counts, prepend=total) > 0).any():
            raise VflError(f"{name!r} has impossible counts.")
        reader = BitReader(f"{name}.bits", arrays)
        lower, signed = reader.numbers(2, 5).tolist()
        if signed > 1:
            raise VflError(f"{name!r} does not say whether it has signs.")
        places = read_places(reader, int(counts[0]), total)
        levels = np.ones(len(places), np.int64)
        which = np.arange(len(places))
        for count in counts[1:].tolist():
            which = which[read_places(reader, count, len(which))]
            levels[which] += 1 << lower
        levels += reader.numbers(len(places), lower)
        negative = reader.take(signed * len(places)).view(bool)
        reader.finish()
        if levels.max(initial=0) > self.levels:
            raise VflError(f"{name!r} has a level above {self.levels}.")
        tau = 1 + np.minimum(sizes / self.levels**2, np.sqrt(sizes) / self.levels)
        unit = (norms / (self.levels * tau)).astype(np.float32)
        of_vector = np.diff(np.searchsorted(places, np.cumsum(sizes)), prepend=0)
        values = unit.repeat(of_vector) * levels.astype(np.float32)
        if signed:
            values[negative] *= -1
        v = np.zeros(total, np.float32)
        v[places] = values
        return v.reshape(shape)


def _lower_bits(above: NDArray[np.int64]) -> int:
    """Return how many low bits to send unchanged for the shortest code; four at most are coded."""
    widest = int(above.max(initial=0)).bit_length()
    choices = range(max(0, widest - 4), widest + 1)

    def length(lower: int) -> int:
        counts = np.bincount(above >> lower)[::-1].cumsum()[::-1].tolist()  # at each height
        bits = len(above) * lower + 16 * len(counts)
        for here, higher in pairwise(counts):
            few = min(higher, here - higher)
            low = low_bits(few, here) if few else None
            bits += 0 if few == 0 else here if low is None else few * (low + 1) + (here >> low)
        return bits

    return min(choices, key=length)


def _uniform(key: str, shape: tuple[int, ...], of_row: Names | None) -> NDArray[np.float32]:
    """Return a uniform number on [0, 1) for each entry of rows [R, E], flat."""
    generator = secret_generator(key.encode())
    if of_row is None:
        return generator.random(shape[0] * shape[1], np.float32)
    # SplitMix64 (Steele, Lea and Flood, 2014) of a counter: each entry's number is independent.
    z = of_row[:, None] * np.uint64(shape[1]) + np.arange(shape[1], dtype=np.uint64)
    z = z.reshape(-1) * np.uint64(0x9E3779B97F4A7C15) + generator.integers(0, 2**64, 1, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
