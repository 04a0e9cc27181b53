"""Codec that sends the largest entries of a vector, and their positions."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.bits import BitReader, Places, place_bits, read_places
from vfl_flower.protocol.codecs.channel import Names, Rows, Sizes, flat_if_finite, padded
from vfl_flower.protocol.codecs.halves import of_halves, to_halves
from vfl_flower.transport.messages import Arrays, checked

_KEEP = 0.1  # default of keep


class TopK:
    """Keep the k = ceil(keep * d) largest magnitudes of a vector of d entries.

    This operator, top_k, is contractive with alpha = k / d. By 16 bits, values are float16 over a
    power of two for each vector. By 32 bits, they are sent as they are.
    """

    uses: ClassVar[tuple[str, ...]] = ("keep", "bits")

    def __init__(self, config: CodecConfig) -> None:
        self.keep = config.keep or _KEEP
        if config.bits not in (None, 16, 32):
            raise ConfigError(f"bits = {config.bits} is not possible for top-k: choose 16 or 32.")
        self.exact = config.bits == 32

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of values, positions, and exponents of rounded values."""
        exponents = () if self.exact else (f"{name}.exponents",)
        return f"{name}.values", *exponents, f"{name}.bits"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return the values, their positions, and exponents of rounded values."""
        v = flat_if_finite(name, rows)
        kept = self._kept(sizes)
        magnitudes = np.abs(v)
        places = _largest(magnitudes, sizes, kept)
        positions = {f"{name}.bits": np.packbits(place_bits(places, len(v)))}
        if self.exact:
            return {f"{name}.values": v[places], **positions}
        values, exponents = to_halves(v[places], kept)
        return {f"{name}.values": values, f"{name}.exponents": exponents, **positions}

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the rows, with zeros for all entries that were not sent."""
        kept = self._kept(sizes)
        total, ends = int(sizes.sum()), np.cumsum(sizes)
        if self.exact:
            values = checked(arrays, f"{name}.values", "float32", (int(kept.sum()),))
            flat_if_finite(f"{name}.values", values)
        else:
            values = of_halves(name, arrays, kept)
        reader = BitReader(f"{name}.bits", arrays)
        places = read_places(reader, len(values), total)
        reader.finish()
        if (np.searchsorted(places, ends) != np.cumsum(kept)).any():
            raise VflError(f"{name!r} keeps a wrong number of entries. Use the same keep.")
        v = np.zeros(total, np.float32)
        v[places] = values
        return v.reshape(shape)

    def _kept(self, sizes: Sizes) -> Sizes:
        """Return k of each vector; rounding must not add an entry."""
        return np.ceil(self.keep * sizes * (1 - 1e-12)).astype(np.int64)


def _largest(magnitudes: NDArray[np.float32], sizes: Sizes, kept: Sizes) -> Places:
    """Return the positions of each vector's ``kept`` largest entries, of equals the first."""
    vectors, held = padded(magnitudes, sizes, -1.0)
    longest = vectors.shape[1]
    nth = np.minimum(longest - kept, longest - 1)  # in increasing order
    least = np.partition(vectors, np.unique(nth), axis=1)[np.arange(len(vectors)), nth]
    chosen = vectors > least[:, None]
    equal = vectors == least[:, None]
    missing = kept - chosen.sum(1)
    if (equal.sum(1) != missing).any():
        equal &= np.cumsum(equal, axis=1) <= missing[:, None]
    chosen |= equal
    return np.flatnonzero(chosen if held is None else chosen[held])
