"""Places and numbers in few bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.transport.messages import Arrays, checked

Places = NDArray[np.int64]
Bits = NDArray[np.uint8]


class BitReader:
    """Reads an array of packed bits from its start; `VflError` if there are too few or too many."""

    def __init__(self, name: str, arrays: Arrays) -> None:
        self.name = name
        self._packed = checked(arrays, name, "uint8", (np.size(arrays.get(name, 0)),))
        self._at = 0

    def take(self, count: int) -> Bits:
        """The next bits."""
        first, skipped = divmod(self._at, 8)
        self._at += count
        if self._at > 8 * len(self._packed):
            raise VflError(f"{self.name!r} is too short.")
        return np.unpackbits(self._packed[first : -(-self._at // 8)])[skipped : skipped + count]

    def numbers(self, count: int, width: int) -> NDArray[np.int64]:
        """The next numbers of so many bits each."""
        bits = self.take(count * width).reshape(count, width)
        numbers: NDArray[np.int64] = bits @ (1 << np.arange(width - 1, -1, -1))
        return numbers

    def finish(self) -> None:
        """All but the last byte's filling has been read."""
        if 8 * len(self._packed) - self._at >= 8:
            raise VflError(f"{self.name!r} is too long.")


def number_bits(numbers: NDArray[np.int64], width: int) -> Bits:
    """Numbers below 2^width, ``width`` bits each."""
    return ((numbers[:, None] >> np.arange(width - 1, -1, -1)) & 1).astype(np.uint8).reshape(-1)


def place_bits(places: Places, total: int) -> Bits:
    """Increasing places below ``total``, of which the reader knows how many there are.

    Of the places that are there or of those that are not, whichever are fewer, by Elias and Fano:
    the low bits of each as they are, and of the high ones, in a row of bits, a 1 after as many 0s
    as they have grown. These are some 2 + log2(total / count) bits a place, half a bit above the
    least. Where that is more than a bit for each entry, those are sent.
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
    """``count`` increasing places below ``total``, as `place_bits` gave them."""
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
        raise VflError(f"{reader.name!r} holds other places than {count} below {total}.")
    if few == count:
        return places
    present = np.ones(total, bool)
    present[places] = False
    return np.flatnonzero(present)


def low_bits(few: int, total: int) -> int | None:
    """Low bits of a place that are sent as they are; none where a bit for each entry is less."""
    low = max(0, (total // few).bit_length() - 1)
    return low if few * low + few + (total >> low) < total else None
