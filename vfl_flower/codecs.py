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
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.batches import Window, put, secret_generator, take
from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.models import as_tensor
from vfl_flower.provenance import free_memory
from vfl_flower.records import Arrays, checked

Rows = NDArray[np.float32]
Sizes = NDArray[np.int64]
Places = NDArray[np.int64]

ONE = Window(np.zeros(1, np.int32), np.ones(1, np.int32), whole=True)
"""The top model as the one row of a table."""

_KEEP, _BITS = 0.1, 4  # where they are not given


class Codec(Protocol):
    """An operator on vectors, and its wire format.

    Rows [R, E] hold vectors of these sizes, one after the other.
    """

    def encode(self, name: str, rows: Rows, sizes: Sizes, key: str) -> Arrays:
        """The arrays to send; ``key`` decides what is drawn by chance."""

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rows in a message; `VflError`, as the end of a sentence, if they do not decode."""


class Identity:
    """float32 numbers, as they are."""

    def encode(self, name: str, rows: Rows, sizes: Sizes, key: str) -> Arrays:
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

    def encode(self, name: str, rows: Rows, sizes: Sizes, key: str) -> Arrays:
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
        values = np.ldexp(v[places], -exponents.astype(np.int32).repeat(kept))
        return {
            f"{name}.values": values.astype(np.float16),
            f"{name}.exponents": exponents,
            f"{name}.places": pack_places(places, len(v)),
        }

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The rows, zero where nothing was kept."""
        kept = self._kept(sizes)
        total, ends = int(sizes.sum()), np.cumsum(sizes)
        values = checked(arrays, f"{name}.values", "float16", (int(kept.sum()),))
        exponents = checked(arrays, f"{name}.exponents", "int8", sizes.shape)
        if (np.abs(values) > 1).any():
            raise VflError(f"{name!r} has values above the peak that it names.")
        places = unpack_places(arrays, f"{name}.places", len(values), total)
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
    Most entries of a long vector fall to level 0: sent are the norm, and of the others where they
    are, their signs, and their levels in as many bits as the highest needs.
    """

    def __init__(self, bits: int) -> None:
        self.levels = 2**bits  # s

    def encode(self, name: str, rows: Rows, sizes: Sizes, key: str) -> Arrays:
        """Norms, places, signs and levels."""
        v = _checked_flat(name, rows)
        vectors, held = _padded(v, sizes, 0.0)
        norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
        scale = np.divide(self.levels, norms, out=np.zeros_like(norms), where=norms > 1e-30)
        scaled = np.abs(vectors) * scale[:, None]
        flat = scaled.reshape(-1) if held is None else scaled[held]
        generator = secret_generator(f"{name}|{key}".encode())
        flat = flat + generator.random(len(flat), np.float32)
        places = np.flatnonzero(flat >= 1)
        levels = np.minimum(flat[places], self.levels).astype(np.int64)  # rounds down
        width = int(levels.max(initial=1) - 1).bit_length()
        return {
            f"{name}.norms": norms,
            f"{name}.sent": np.array([len(places), width], np.int32),
            f"{name}.places": pack_places(places, len(v)),
            f"{name}.signs": np.packbits(v[places] < 0),
            f"{name}.levels": pack_numbers(levels - 1, width),
        }

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """The quantized rows."""
        total = int(sizes.sum())
        norms = checked(arrays, f"{name}.norms", "float32", sizes.shape)
        count, width = (int(each) for each in checked(arrays, f"{name}.sent", "int32", (2,)))
        if not (0 <= count <= total and 0 <= width <= self.levels.bit_length()):
            raise VflError(f"{name!r} says that it has {count} of {total} entries.")
        if (norms < 0).any():
            raise VflError(f"{name!r} has a negative norm.")
        places = unpack_places(arrays, f"{name}.places", count, total)
        signs = checked(arrays, f"{name}.signs", "uint8", (-(-count // 8),))
        levels = 1 + unpack_numbers(arrays, f"{name}.levels", count, width)
        if levels.max(initial=0) > self.levels:
            raise VflError(f"{name!r} has a level above {self.levels}.")
        tau = 1 + np.minimum(sizes / self.levels**2, np.sqrt(sizes) / self.levels)
        unit = (norms / (self.levels * tau)).astype(np.float32)
        counts = np.diff(np.searchsorted(places, np.cumsum(sizes)), prepend=0)
        values = unit.repeat(counts) * levels.astype(np.float32)
        v = np.zeros(total, np.float32)
        v[places] = np.where(np.unpackbits(signs, count=count).view(bool), -values, values)
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

    def send(self, name: str, rows: Tensor, window: Window, key: str) -> Arrays:
        """The arrays that say what these rows [R, E] of a window are."""
        sizes, sent = self._sizes(window, rows.shape[1]), rows.detach().cpu()
        if self.surrogate is None:
            return self.codec.encode(name, sent.numpy(), sizes, key)
        known = take(self.surrogate, window)
        arrays = self.codec.encode(name, (sent - known).numpy(), sizes, key)
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
        put(self.config, self.surrogate, window, rows)
        return rows

    def _sizes(self, window: Window, width: int) -> Sizes:
        if self.config.privacy == "scalar":
            # A row is a vector of its own: else one record could change how others decode, and
            # with them more differences than its own, which is all that the noise accounts for.
            return np.full(len(window.ids), width, np.int64)
        return window.lengths.astype(np.int64) * width


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

    Raises
    ------
    ConfigError
        If its surrogates do not fit into memory.
    """
    check_memory("this party's", party_bytes(config, parties, shape))
    channels = {"uplink": uplink(config, torch.zeros(shape)), "changes": changes(config)}
    if config.labels == "private":
        return {**channels, "gradient": downlink(config, torch.zeros(shape))}
    for other in range(parties):
        if other != index:
            channels[f"other-{other}"] = uplink(config, torch.zeros(shape))
    return {**channels, "top": downlink(config, torch.zeros(1, top_size))}


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


# --- places and numbers in the fewest bits ------------------------------------------------------


def pack_places(places: Places, total: int) -> NDArray[np.uint8]:
    """Increasing places below ``total`` as bytes.

    By Elias and Fano: of each place the low bits as they are, and of the high ones, in a row of
    bits, a 1 after as many 0s as they have grown: some 2 + log2(total / count) bits a place, half a
    bit above the least. Where that is more than a bit for each of all entries, those are sent.
    """
    count = len(places)
    if count in (0, total):
        return np.zeros(0, np.uint8)
    low = _low_bits(count, total)
    if low is None:
        present = np.zeros(total, np.uint8)
        present[places] = 1
        return np.packbits(present)
    growth = np.zeros(count + (total >> low), np.uint8)
    growth[(places >> low) + np.arange(count)] = 1
    return np.concatenate([np.packbits(growth), pack_numbers(places & ((1 << low) - 1), low)])


def unpack_places(arrays: Arrays, name: str, count: int, total: int) -> Places:
    """The places that `pack_places` gave; `VflError` if there are not ``count`` below ``total``."""
    if count in (0, total):
        checked(arrays, name, "uint8", (0,))
        return np.arange(count)
    low = _low_bits(count, total)
    bits = total if low is None else count + (total >> low)
    lengths = -(-bits // 8), -(-count * (low or 0) // 8)
    packed = checked(arrays, name, "uint8", (sum(lengths),))
    ones = np.flatnonzero(np.unpackbits(packed[: lengths[0]], count=bits).view(bool))
    if len(ones) != count:
        raise VflError(f"{name!r} holds {len(ones)} places, not {count}.")
    if low is None:
        return ones
    places = ((ones - np.arange(count)) << low) | _unpack_bits(packed[lengths[0] :], count, low)
    if places[-1] >= total or (np.diff(places) <= 0).any():
        raise VflError(f"{name!r} holds places out of order or out of range.")
    return places


def _low_bits(count: int, total: int) -> int | None:
    """Low bits of a place that are sent as they are; none where a bit for each entry is less."""
    low = max(0, (total // count).bit_length() - 1)
    return low if count * low + count + (total >> low) < total else None


def pack_numbers(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Numbers below 2^width as bytes, ``width`` bits each."""
    if width == 0:
        return np.zeros(0, np.uint8)
    held = 1 if width <= 8 else 4  # bytes that a number fits into
    bits = np.unpackbits(numbers.astype(f">u{held}")[:, None].view(np.uint8), axis=1)
    return np.packbits(bits[:, 8 * held - width :])


def unpack_numbers(arrays: Arrays, name: str, count: int, width: int) -> NDArray[np.int64]:
    """The numbers that `pack_numbers` gave."""
    return _unpack_bits(checked(arrays, name, "uint8", (-(-count * width // 8),)), count, width)


def _unpack_bits(packed: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int64]:
    bits = np.unpackbits(packed, count=count * width).reshape(count, width)
    numbers: NDArray[np.int64] = bits @ (1 << np.arange(width - 1, -1, -1))
    return numbers


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
