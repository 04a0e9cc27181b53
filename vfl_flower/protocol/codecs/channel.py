"""One end of one direction of a party's link: a codec, and the surrogate that both ends keep.

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
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.config.plugins import CODECS
from vfl_flower.config.provenance import free_memory
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.training import as_tensor
from vfl_flower.protocol.batches import Window, put, take
from vfl_flower.transport.messages import Arrays, bounded

Rows = NDArray[np.float32]
Sizes = NDArray[np.int64]
Names = NDArray[np.uint64]


class Codec(Protocol):
    """An operator on vectors, and its wire format; made of the direction's `CodecConfig`.

    Rows [R, E] hold vectors of these sizes, one after the other.
    """

    uses: ClassVar[tuple[str, ...]]
    """Which of the keys ``keep`` and ``bits`` are for it."""

    def __init__(self, config: CodecConfig) -> None: ...

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


class Channel:
    """One end of one direction of a party's link.

    Parameters
    ----------
    config : of this direction.
    table : [N, E], where this end keeps the surrogates of all rows that the link may speak of, if
        there are any.
    by_row : whether a row is a vector of its own, and its rounding too. Under scalar privacy one
        record could else change how others decode, and with them more differences than its own,
        which is all that the noise accounts for.
    """

    def __init__(self, config: CodecConfig, table: Tensor | None, by_row: bool) -> None:
        self.codec = _codec(config)(config)
        self.surrogate = table if config.surrogates else None
        self.by_row = by_row

    def send(self, name: str, rows: Tensor, window: Window, key: str) -> Arrays:
        """The arrays that say what these rows [R, E] of a window are."""
        sizes, sent = self._sizes(window, rows.shape[1]), rows.detach().cpu()
        of_row = _names(window) if self.by_row else None
        if self.surrogate is None:
            return self.codec.encode(name, sent.numpy(), sizes, key, of_row)
        known = take(self.surrogate, window)
        arrays = self.codec.encode(name, (sent - known).numpy(), sizes, key, of_row)
        change = self.codec.decode(name, arrays, (len(known), known.shape[1]), sizes)
        put(self.surrogate, window, known + torch.from_numpy(change))
        return arrays

    def receive(self, name: str, arrays: Arrays, window: Window, width: int) -> Tensor:
        """The rows [R, width] as this end now knows them.

        Raises
        ------
        VflError
            If they do not decode, or are not `bounded`; as the end of a sentence. The surrogate is
            then as it was.
        """
        rows = as_tensor(self.decoded(name, arrays, window, width))
        if self.surrogate is None:
            bounded(name, rows)
            return rows
        rows = take(self.surrogate, window) + rows.to(self.surrogate.device)
        bounded(name, rows)
        put(self.surrogate, window, rows)
        return rows

    def decoded(self, name: str, arrays: Arrays, window: Window, width: int) -> Rows:
        """What has come for rows [R, width]; `VflError` if it does not decode."""
        sizes, shape = self._sizes(window, width), (len(window.ids), width)
        return self.codec.decode(name, arrays, shape, sizes)

    def _sizes(self, window: Window, width: int) -> Sizes:
        if self.by_row:
            return np.full(len(window.ids), width, np.int64)
        return window.lengths.astype(np.int64) * width


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if keys of the codecs contradict each other."""
    for prefix, of in (("", config.uplink), ("downlink-", config.downlink)):
        if of.keep is not None and not 0 < of.keep <= 1:
            raise ConfigError(
                f"{prefix}keep = {of.keep} is no share: give one above 0, and at most 1."
            )
        if of.bits is not None and not 1 <= of.bits <= 16:
            raise ConfigError(f"{prefix}bits = {of.bits} must lie between 1 and 16.")
        for name, value, codec in (("keep", of.keep, "top-k"), ("bits", of.bits, "qsgd")):
            if value is not None and name not in _codec(of).uses:
                raise ConfigError(
                    f"{prefix}{name} is for {prefix}codec = {codec!r}, and not for {of.codec!r}: "
                    "leave it out, or choose that codec."
                )


def _codec(config: CodecConfig) -> type[Codec]:
    found: type[Codec] = CODECS.load(config.codec)
    return found


def zeros(shape: tuple[int, int]) -> Tensor:
    """A table of zeros on the CPU, which takes memory as it is written to."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def digest(channels: Iterable[Channel]) -> str:
    """What must be equal at both ends: a digest of the surrogates; empty if there are none."""
    digests = hashlib.blake2b(digest_size=16)
    tables = [channel.surrogate for channel in channels if channel.surrogate is not None]
    for table in tables:
        digests.update(np.ascontiguousarray(table.cpu().numpy()).data)
    return digests.hexdigest() if tables else ""


def check_memory(whose: str, needed: float) -> None:
    """Raise `ConfigError` if so many bytes of surrogates cannot be had."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"Error feedback needs {needed / 1e9:.1f} GB for {whose} surrogates, where "
            f"{free / 1e9:.1f} GB are free: choose compression = 'direct', a smaller "
            "embedding-size, or fewer rows."
        )


def flat_if_finite(name: str, rows: Rows) -> NDArray[np.float32]:
    """The vectors of rows, one after the other; `VflError` if a number is not finite."""
    if not np.isfinite(rows).all():
        raise VflError(f"{name!r} has values that are not finite; lower the learning rates.")
    return rows.reshape(-1)


def padded(
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


def _names(window: Window) -> Names:
    """A number for each row of a window, from its step and id."""
    step = np.arange(len(window.lengths), dtype=np.uint64).repeat(window.lengths)
    return (step << np.uint64(32)) + window.ids.astype(np.uint64)
