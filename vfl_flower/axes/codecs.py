"""Codec axis: how a block of rows becomes arrays in a message, and rows again at the other end.

A codec is an operator C on vectors (EF-VFL, section 5) and its wire format. C1 keeps the rows of a
mini-batch, C2 compresses their B x E numbers as one vector: so the rows of each step of a window
are a vector of their own. A `Channel` sends C(v) itself (``direct``; CVFL), or the compressed
change C(v - g) against a surrogate g of which both ends hold a copy (``error-feedback``; EF21,
EF-VFL Eq. 3). Both ends step their copy by the message as it decodes, so that they never drift.

Surrogates start at zero, and so a row's first upload makes its surrogate C(H), as in EF-VFL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.axes.batches import Window, put, secret_generator, take
from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.models import as_tensor
from vfl_flower.provenance import free_memory
from vfl_flower.records import Arrays, checked

Rows = NDArray[np.float32]
Sizes = NDArray[np.int64]
Places = NDArray[np.int64]
Bits = NDArray[np.uint8]
Names = NDArray[np.uint64]


_KEEP, _BITS = 0.1, 4  # where they are not given


class Codec(Protocol):
    """An operator on vectors, and its wire format.

    Rows [R, E] hold vectors of these sizes, one after the other.
    """

    def names(self, name: str) -> tuple[str, ...]:
        """Names of the arrays that say the rows of this name."""

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """The arrays to send.

        ``key`` decides what is drawn by chance; together with each row's name ``of_row`` [R], if
        they are given, and then with nothing else.
        """

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rows in a message; `VflError`, as the end of a sentence, if they do not decode."""


class Identity:
    """float32 numbers, as they are."""

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


class TopK:
    """top_k: the k = ceil(keep * d) entries of largest magnitude of a vector of d entries.

    Contractive with alpha = k / d. Sent are float16 values over a power of two for each vector,
    and where they are.
    """

    def __init__(self, keep: float) -> None:
        self.keep = keep

    def names(self, name: str) -> tuple[str, ...]:
        """Values, their exponents, and their places."""
        return f"{name}.values", f"{name}.exponents", f"{name}.bits"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Values, their exponents, and their places."""
        v = _checked_flat(name, rows)
        kept = self._kept(sizes)
        magnitudes = np.abs(v)
        places = _largest(magnitudes, sizes, kept)
        exponents = np.zeros(len(sizes), np.int8)
        full = kept > 0
        if full.any():
            peaks = np.maximum.reduceat(magnitudes[places], (np.cumsum(kept) - kept)[full])
            exponents[full] = np.clip(np.frexp(peaks)[1], -126, 127)
        values = np.ldexp(v[places], -exponents.astype(np.int32).repeat(kept)).clip(-1, 1)
        return {
            f"{name}.values": values.astype(np.float16),
            f"{name}.exponents": exponents,
            f"{name}.bits": np.packbits(place_bits(places, len(v))),
        }

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rows, zero where nothing was kept."""
        kept = self._kept(sizes)
        total, ends = int(sizes.sum()), np.cumsum(sizes)
        values = checked(arrays, f"{name}.values", "float16", (int(kept.sum()),))
        exponents = checked(arrays, f"{name}.exponents", "int8", sizes.shape)
        if (np.abs(values) > 1).any():
            raise VflError(f"{name!r} has values above the peak that it names.")
        reader = BitReader(f"{name}.bits", arrays)
        places = read_places(reader, len(values), total)
        reader.finish()
        if (np.searchsorted(places, ends) != np.cumsum(kept)).any():
            raise VflError(f"{name!r} keeps another number of entries than it should.")
        v = np.zeros(total, np.float32)
        v[places] = np.ldexp(values.astype(np.float32), exponents.astype(np.int32).repeat(kept))
        return v.reshape(shape)

    def _kept(self, sizes: Sizes) -> Sizes:
        """k of each vector; rounding must not add an entry."""
        kept: Sizes = np.ceil(self.keep * sizes * (1 - 1e-12)).astype(np.int64)
        return kept


class QSGD:
    """qsgd_s: stochastic quantization to s = 2^bits levels of a vector's norm (EF-VFL, section 5).

    Entry v_i becomes sign(v_i) ||v|| / (s tau) * floor(s |v_i| / ||v|| + xi) with xi uniform on
    [0, 1) and tau = 1 + min(d / s^2, sqrt(d) / s). Contractive in expectation with alpha = 1 / tau.

    Sent are the norm of each vector, and bits. Most entries of a long vector are at level 0, and
    most others at the lowest: so the bits say which are above 0, which of those are above 1, and so
    on; if there are high levels, of the higher bits of a level, its ``lower`` ones being sent as
    they are. Signs are sent if there are any.
    """

    def __init__(self, bits: int) -> None:
        self.levels = 2**bits  # s

    def names(self, name: str) -> tuple[str, ...]:
        """Norms, counts of entries at each level or above it, and bits."""
        return f"{name}.norms", f"{name}.counts", f"{name}.bits"

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Norms, counts of entries at each level or above it, and bits."""
        v = _checked_flat(name, rows)
        vectors, held = _padded(v, sizes, 0.0)
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
        """The quantized rows."""
        total = int(sizes.sum())
        norms = checked(arrays, f"{name}.norms", "float32", sizes.shape)
        if (norms < 0).any():
            raise VflError(f"{name!r} has a negative norm.")
        length = np.size(arrays.get(f"{name}.counts", 0))
        dtype = str(np.min_scalar_type(total))
        counts = checked(arrays, f"{name}.counts", dtype, (length,)).astype(np.int64)
        if not 0 < length <= 17 or counts[-1] or (np.diff(counts, prepend=total) > 0).any():
            raise VflError(f"{name!r} has counts that cannot be.")
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


class Channel:
    """One end of one direction of a party's link: a codec, and this end's copy of the surrogate.

    Parameters
    ----------
    surrogate : [N, E], of all rows that the link may speak of; none without error feedback.
    """

    def __init__(self, config: RunConfig, codec: Codec, surrogate: Tensor | None = None) -> None:
        self.config = config
        self.codec = codec
        self.surrogate = surrogate
        # Under scalar privacy a row is a vector of its own, and its rounding too: else one record
        # could change how others decode, and with them more differences than its own, which is all
        # that the noise accounts for.
        self.by_row = config.privacy == "scalar"

    def send(self, name: str, rows: Tensor, window: Window, key: str) -> Arrays:
        """The arrays that say what these rows [R, E] of a window are."""
        sizes, sent = self._sizes(window, rows.shape[1]), rows.detach().cpu()
        of_row = _names(window) if self.by_row else None
        if self.surrogate is None:
            return self.codec.encode(name, sent.numpy(), sizes, key, of_row)
        known = take(self.surrogate, window)
        arrays = self.codec.encode(name, (sent - known).numpy(), sizes, key, of_row)
        change = self.codec.decode(name, arrays, (len(known), known.shape[1]), sizes)
        put(self.config, self.surrogate, window, known + torch.from_numpy(change))
        return arrays

    def receive(self, name: str, arrays: Arrays, window: Window, width: int) -> Tensor:
        """The rows [R, width] as this end now knows them; `VflError` if they do not decode."""
        sizes, shape = self._sizes(window, width), (len(window.ids), width)
        rows = as_tensor(self.codec.decode(name, arrays, shape, sizes))
        if self.surrogate is None:
            return rows
        rows = take(self.surrogate, window) + rows.to(self.surrogate.device)
        if not torch.isfinite(rows).all():
            raise VflError(f"{name!r} takes surrogates to values that are not finite.")
        put(self.config, self.surrogate, window, rows)
        return rows

    def _sizes(self, window: Window, width: int) -> Sizes:
        if self.by_row:
            return np.full(len(window.ids), width, np.int64)
        return window.lengths.astype(np.int64) * width


def _names(window: Window) -> Names:
    """A number for each row of a window, from its step and id."""
    step = np.arange(len(window.lengths), dtype=np.uint64).repeat(window.lengths)
    return (step << np.uint64(32)) + window.ids.astype(np.uint64)


def uplink(config: RunConfig, table: Tensor) -> Channel:
    """A link of embeddings; ``table`` is where this end keeps surrogates, if there are any."""
    codec = _codec(config.codec, config.keep, config.bits)
    return Channel(config, codec, table if config.uplink_surrogates else None)


def changes(config: RunConfig) -> Channel:
    """A link of zeroth-order differences, which are new each time and so have no surrogates."""
    return Channel(config, _codec(config.codec, config.keep, config.bits))


def downlink(config: RunConfig, table: Tensor) -> Channel:
    """A link of gradient rows; or, with shared labels, of the top model as one row."""
    codec = _codec(config.downlink_codec, config.downlink_keep, config.downlink_bits)
    return Channel(config, codec, table if config.downlink_surrogates else None)


def party_channels(
    config: RunConfig, index: int, parties: int, shape: tuple[int, int], top_size: int
) -> dict[str, Channel]:
    """A party's ends of its links, by name.

    Parameters
    ----------
    shape : training rows N, and embedding size E.
    top_size : numbers of the top model.
    """
    channels = {"uplink": uplink(config, zeros(shape)), "changes": changes(config)}
    if config.labels == "private":
        return {**channels, "gradient": downlink(config, zeros(shape))}
    for other in range(parties):
        if other != index:
            channels[f"other-{other}"] = uplink(config, zeros(shape))
    return {**channels, "top": downlink(config, zeros((1, top_size)))}


def zeros(shape: tuple[int, int]) -> Tensor:
    """A table of zeros on the CPU, which takes memory as it is written to."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def top_window(steps: int) -> Window:
    """The top model of each step, as the one row of a table, each time anew."""
    return Window(np.zeros(steps, np.int32), np.ones(steps, np.int32))


def for_party(party: int, arrays: Arrays) -> Arrays:
    """A party's upload, named so that it can be sent on to the others."""
    return {f"party-{party}/{name}": array for name, array in arrays.items()}


def of_party(party: int, arrays: Arrays) -> Arrays:
    """A party's upload, among what was sent on."""
    prefix = f"party-{party}/"
    return {name[len(prefix) :]: each for name, each in arrays.items() if name.startswith(prefix)}


def digest(channels: Iterable[Channel]) -> str:
    """What must be equal at both ends: a digest of the surrogates; empty if there are none."""
    digests = hashlib.blake2b(digest_size=16)
    tables = [channel.surrogate for channel in channels if channel.surrogate is not None]
    for table in tables:
        digests.update(np.ascontiguousarray(table.cpu().numpy()).data)
    return digests.hexdigest() if tables else ""


def party_bytes(config: RunConfig, parties: int, shape: tuple[int, int]) -> int:
    """Memory of the surrogates that a party keeps: N x E floats each."""
    shared = config.labels == "shared"
    tables = (parties if shared else 1) * config.uplink_surrogates
    tables += (not shared) * config.downlink_surrogates
    return 4 * shape[0] * shape[1] * tables


def check_memory(whose: str, needed: float) -> None:
    """Raise `ConfigError` if so many bytes of surrogates cannot be had."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"Error feedback needs {needed / 1e9:.1f} GB for {whose} surrogates, where "
            f"{free / 1e9:.1f} GB are free: choose compression = 'direct', a smaller "
            "embedding-size, or fewer rows."
        )


def _codec(name: str, keep: float | None, bits: int | None) -> Codec:
    if name == "identity":
        return Identity()
    return TopK(keep or _KEEP) if name == "top-k" else QSGD(bits or _BITS)


# --- places and numbers in few bits -------------------------------------------------------------


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
    low = _low_bits(few, total)
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
    low = _low_bits(few, total)
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


def _low_bits(few: int, total: int) -> int | None:
    """Low bits of a place that are sent as they are; none where a bit for each entry is less."""
    low = max(0, (total // few).bit_length() - 1)
    return low if few * low + few + (total >> low) < total else None


def _lower_bits(above: NDArray[np.int64]) -> int:
    """How many bits of these numbers are best sent as they are, at least all but four."""
    widest = int(above.max(initial=0)).bit_length()
    choices = range(max(0, widest - 4), widest + 1)

    def length(lower: int) -> int:
        counts = np.bincount(above >> lower)[::-1].cumsum()[::-1].tolist()  # at each height
        bits = len(above) * lower + 16 * len(counts)
        for here, higher in pairwise(counts):
            few = min(higher, here - higher)
            low = _low_bits(few, here) if few else None
            bits += 0 if few == 0 else here if low is None else few * (low + 1) + (here >> low)
        return bits

    return min(choices, key=length)


def _largest(magnitudes: NDArray[np.float32], sizes: Sizes, kept: Sizes) -> Places:
    """Where the largest entries are, so many of each vector, in order; of equals the first."""
    vectors, held = _padded(magnitudes, sizes, -1.0)
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


def _uniform(key: str, shape: tuple[int, ...], of_row: Names | None) -> NDArray[np.float32]:
    """A number on [0, 1) for each entry of rows [R, E], flat."""
    generator = secret_generator(key.encode())
    if of_row is None:
        return generator.random(shape[0] * shape[1], np.float32)
    # SplitMix64 (Steele, Lea and Flood, 2014) of a counter: an entry's number is its own.
    z = of_row[:, None] * np.uint64(shape[1]) + np.arange(shape[1], dtype=np.uint64)
    z = z.reshape(-1) * np.uint64(0x9E3779B97F4A7C15) + generator.integers(0, 2**64, 1, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: NDArray[np.float32] = (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return numbers


def _checked_flat(name: str, rows: Rows) -> NDArray[np.float32]:
    if not np.isfinite(rows).all():
        raise VflError(f"{name!r} has values that are not finite; lower the learning rates.")
    return rows.reshape(-1)


def _padded(
    v: NDArray[np.float32], sizes: Sizes, fill: float
) -> tuple[Rows, NDArray[np.bool_] | None]:
    """Vectors as rows of a matrix [S, longest]; which of its entries are real, unless all are."""
    longest = max(1, int(sizes.max(initial=0)))
    if len(sizes) * longest == len(v):
        return v.reshape(-1, longest), None
    held = np.arange(longest) < sizes[:, None]
    vectors = np.full(held.shape, fill, np.float32)
    vectors[held] = v
    return vectors, held
