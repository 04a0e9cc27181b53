"""Encode positions and numbers in few bits."""

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.transport.messages import Arrays, checked

Places = NDArray[np.int64]
Bits = NDArray[np.uint8]


class BitReader:
    """Read an array of packed bits from its start; raise `VflError` if they are too few or many."""

    def __init__(self, name: str, arrays: Arrays) -> None:
        self.name = name
        self._packed = checked(arrays, name, "uint8", (np.size(arrays.get(name, 0)),))
        self._at = 0

    def take(self, count: int) -> Bits:
        """Return the next bits."""
        first, skipped = divmod(self._at, 8)
        self._at += count
        if self._at > 8 * len(self._packed):
            raise VflError(f"{self.name!r} is too short. Use the same codec options.")
        return np.unpackbits(self._packed[first : -(-self._at // 8)])[skipped : skipped + count]

    def numbers(self, count: int, width: int) -> NDArray[np.int64]:
        """Return the next numbers, ``width`` bits each."""
        bits = self.take(count * width).reshape(count, width)
        return bits @ (1 << np.arange(width - 1, -1, -1))

    def finish(self) -> None:
        """Raise `VflError` if bits are left beyond the padding of the last byte."""
        if 8 * len(self._packed) - self._at >= 8:
            raise VflError(f"{self.name!r} is too long. Use the same codec options.")


def number_bits(numbers: NDArray[np.int64], width: int) -> Bits:
    """Return the bits of numbers below 2^width, ``width`` bits each."""
    return ((numbers[:, None] >> np.arange(width - 1, -1, -1)) & 1).astype(np.uint8).reshape(-1)


def place_bits(places: Places, total: int) -> Bits:
    """Encode increasing positions below ``total``; the reader must know their number.

    The code lists either the given or the missing positions, whichever are fewer, as an Elias-Fano
    code. It has the low bits of each position unchanged. The high bits are in unary: for each
    position as many 0s as they have grown, then a 1. This takes about 2 + log2(total / count) bits
    for each position, half a bit above the minimum. If one bit for each entry is shorter, the code
    is that bit mask.
    """
    few = min(len(places), total - len(places))
    if few == 0:
        return np.zeros(0, np.uint8)
    present = np.zeros(total, np.uint8)
    present[places] = 1
    low = low_bits(few, total)
    if low is None:
        return present
    listed = places if len(places) == few else np.flatnonzero(present == 0)
    growth = np.zeros(few + (total >> low), np.uint8)
    growth[(listed >> low) + np.arange(few)] = 1
    return np.concatenate([growth, number_bits(listed & ((1 << low) - 1), low)])


def read_places(reader: BitReader, count: int, total: int) -> Places:
    """Return ``count`` increasing positions below ``total``, from `place_bits`."""
    few = min(count, total - count)
    if few == 0:
        return np.arange(count)
    low = low_bits(few, total)
    if low is None:
        places = np.flatnonzero(reader.take(total).view(bool))
        few = count
    else:
        ones = np.flatnonzero(reader.take(few + (total >> low)).view(bool))
        if len(ones) == few:
            places = ((ones - np.arange(few)) << low) | reader.numbers(few, low)
        else:
            places = ones
    if len(places) != few or places[-1] >= total or (np.diff(places) <= 0).any():
        raise VflError(f"{reader.name!r} does not hold {count} increasing places below {total}.")
    if few == count:
        return places
    present = np.ones(total, bool)
    present[places] = False
    return np.flatnonzero(present)


def low_bits(few: int, total: int) -> int | None:
    """Return how many low bits of a position are sent unchanged; None if a bit mask is shorter."""
    low = max(0, (total // few).bit_length() - 1)
    return low if few * low + few + (total >> low) < total else None
