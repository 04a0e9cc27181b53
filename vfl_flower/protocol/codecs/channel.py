"""Links between a party and the label holder: codecs, and surrogates at both ends.

An estimator returns and takes tensors, called blocks. Only `Links` converts blocks to arrays at one
end, and arrays to blocks at the other end. A codec is an operator C on vectors (EF-VFL, section 5)
and its wire format. C1 keeps the rows of a mini-batch. C2 compresses their B x E numbers as one
vector. So the rows of each step of a window form one vector.

With ``direct`` compression (CVFL) a `Channel` sends C(v). With ``error-feedback`` (EF21, EF-VFL
Eq. 3) it sends the compressed change C(v - g) against a surrogate g. Both ends hold a copy of g.
Both ends add the decoded message to their copy, so that the copies stay equal.

Surrogates start at zero. So a row's first upload makes its surrogate C(H), as in EF-VFL. With
``initial-surrogates='embeddings'``, all rows have this upload before the first step.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.config.plugins import CODECS
from vfl_flower.config.provenance import free_memory
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Window, put, take
from vfl_flower.transport.messages import LARGEST, Arrays, bounded, checked

Blocks = dict[str, Tensor]
"""Tensors by name in messages: rows [R, E] of a window, or one number for each step."""
Rows = NDArray[np.float32]
Sizes = NDArray[np.int64]
Names = NDArray[np.uint64]


class Codec(Protocol):
    """An operator on vectors, and its wire format, built from a `CodecConfig`.

    Rows [R, E] hold vectors of ``sizes`` numbers, one after the other.
    """

    uses: ClassVar[tuple[str, ...]]
    """The options, of ``keep`` and ``bits``, that the codec reads."""

    def __init__(self, config: CodecConfig) -> None: ...

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the arrays that encode rows of this name."""

    def encode(
        self, name: str, rows: Rows, sizes: Sizes, key: str, of_row: Names | None = None
    ) -> Arrays:
        """Return the arrays to send.

        ``key`` decides random draws. If ``of_row`` [R] names each row, the draws of a row depend
        only on ``key`` and the row's name.
        """

    def decode(self, name: str, arrays: Arrays, shape: tuple[int, int], sizes: Sizes) -> Rows:
        """Return the rows of a message; raise `VflError` if they do not decode.

        The text of the error lacks its subject, the party.
        """


class Channel:
    """One end of the link that carries blocks of one name.

    ``table`` [N, E] has this end's surrogates of all rows that the link may carry; a vector of
    numbers without rows has none. ``saved`` names it in states, if not empty. With ``by_step``, a
    block has one row for each step of a window.

    ``by_row`` draws random numbers for each row apart. Scalar privacy needs this. Otherwise one
    record changes how other rows decode, and so several differences; the noise covers only one.
    """

    def __init__(
        self,
        config: CodecConfig,
        table: Tensor,
        by_row: bool = False,
        *,
        saved: str = "",
        by_step: bool = False,
        dtype: str = "float32",
    ) -> None:
        self.codec: Codec = CODECS.load(config.codec)(config)
        self.plain = config.codec == "identity"
        self.surrogate = table if config.surrogates and saved else None
        self.shape = tuple(table.shape[1:])  # of a row
        self.by_row, self.by_step = by_row, by_step
        self.saved, self.dtype = saved, dtype
        self.peak = 0.0  # largest magnitude in the last block that a codec has decoded

    def send(self, name: str, rows: Tensor, window: Window, key: str) -> Arrays:
        """Encode rows [R, E] of a window; ``key`` decides the codec's random draws."""
        window = _of_steps(window) if self.by_step else window
        sizes, sent = self._sizes(window), rows.detach().cpu().float()
        of_row = _names(window) if self.by_row else None
        if self.surrogate is None:
            return self.codec.encode(name, sent.numpy(), sizes, key, of_row)
        known = take(self.surrogate, window)
        arrays = self.codec.encode(name, (sent - known).numpy(), sizes, key, of_row)
        change = self.codec.decode(name, arrays, (len(known), known.shape[1]), sizes)
        put(self.surrogate, window, known + torch.from_numpy(change))
        return arrays

    def receive(self, name: str, arrays: Arrays, window: Window) -> Tensor:
        """Decode rows [R, E] of a window, and update the surrogates, unless they exceed bounds."""
        window = _of_steps(window) if self.by_step else window
        shape = len(window.ids), self.shape[0]
        rows = torch.from_numpy(self.codec.decode(name, arrays, shape, self._sizes(window)))
        if self.surrogate is not None:
            rows = take(self.surrogate, window) + rows.to(self.surrogate.device, non_blocking=True)
        self.peak = bounded(name, rows)
        if self.surrogate is not None:
            put(self.surrogate, window, rows)
        return rows

    def _sizes(self, window: Window) -> Sizes:
        if self.by_row:
            return np.full(len(window.ids), self.shape[0], np.int64)
        return window.lengths.astype(np.int64) * self.shape[0]


class Links(dict[str, Channel]):
    """One end of the links of a kind of message, by the names of its blocks.

    peak : largest magnitude in the last decoded message.
    """

    peak = 0.0

    def encode(self, blocks: Blocks, window: Window, key: str) -> Arrays:
        """Make the arrays of a message from blocks; ``key`` is as in `Channel.send`."""
        arrays: Arrays = {}
        for name, rows in blocks.items():
            if self[name].plain:
                arrays[name] = rows.numpy(force=True)
            else:
                arrays.update(self[name].send(name, rows, window, key))
        return arrays

    def decode(self, arrays: Arrays, window: Window) -> Blocks:
        """Make the blocks of a message from its arrays, which must be complete."""
        blocks: Blocks = {}
        peaks: dict[str, float] = {}
        for name, link in self.items():
            if link.plain:
                shape = len(window.lengths if link.by_step else window.ids), *link.shape
                rows = checked(arrays, name, link.dtype, shape, LARGEST, peaks)
                blocks[name] = torch.from_numpy(rows)
            else:
                blocks[name] = link.receive(name, arrays, window)
                peaks[name] = link.peak
        self.peak = max(peaks.values(), default=0.0)
        return blocks

    def select(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a message that encode its blocks."""
        names = [each for name, link in self.items() for each in link.codec.names(name)]
        return {name: arrays[name] for name in names}

    def with_surrogates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the surrogates of these links, by the names under which they are saved."""
        for link in self.values():
            if link.surrogate is not None:
                yield link.saved, link.surrogate


def decode_many(
    ends: Sequence[Links], messages: Sequence[Arrays], windows: Sequence[Window]
) -> Blocks:
    """Make the blocks of similar parties' messages, stacked in dimension 1.

    Numbers without a codec are checked for all parties at once: `Links.decode` names the party.
    """
    blocks: Blocks = {}
    for name, link in ends[0].items():
        if link.plain:
            shape = len(windows[0].lengths if link.by_step else windows[0].ids), *link.shape
            sent = [arrays.get(name) for arrays in messages]
            form = np.dtype(link.dtype), shape
            if not all(each is not None and (each.dtype, each.shape) == form for each in sent):
                raise VflError(f"{name!r} is missing, or has another form.")
            rows = np.stack(cast(list[Rows], sent)).swapaxes(0, 1)  # a party's rows stay together
            checked({name: rows}, name, link.dtype, rows.shape, LARGEST)
            blocks[name] = torch.from_numpy(rows)
        else:
            received = [
                end[name].receive(name, arrays, window)
                for end, arrays, window in zip(ends, messages, windows, strict=True)
            ]
            blocks[name] = torch.stack(received, dim=1)
    return blocks


def of_steps(*shape: int, dtype: str = "float32") -> Channel:
    """Make an end of a link without a codec, for numbers of each step, [S, *shape]."""
    return Channel(CodecConfig(), torch.zeros(0, *shape), by_step=True, dtype=dtype)


def _of_steps(window: Window) -> Window:
    """Return a window with row 0 of a table in each step of ``window``."""
    steps = len(window.lengths)
    return Window(np.zeros(steps, np.int32), np.ones(steps, np.int32))


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if options of the codecs contradict each other."""
    if config.estimator.initial_surrogates != "zero" and not config.uplink.surrogates:
        raise ConfigError(
            f"initial-surrogates = {config.estimator.initial_surrogates!r} needs error feedback, "
            f"and codec = {config.uplink.codec!r} with compression = "
            f"{config.uplink.compression!r} has none. Choose a codec such as 'top-k' with "
            "compression = 'error-feedback', or leave `initial-surrogates` out."
        )
    for prefix, of in (("", config.uplink), ("downlink-", config.downlink)):
        if of.keep is not None and not 0 < of.keep <= 1:
            raise ConfigError(
                f"{prefix}keep = {of.keep} is not a share. Give a number above 0, and at most 1."
            )
        kind = CODECS.load(of.codec)
        of_codecs = (("keep", of.keep, "'top-k'"), ("bits", of.bits, "'qsgd' or 'top-k'"))
        for name, value, codecs in of_codecs:
            if value is not None and name not in kind.uses:
                raise ConfigError(
                    f"{prefix}{name} is for {prefix}codec = {codecs}, and not for {of.codec!r}. "
                    "Leave it out, or choose another codec."
                )
        try:
            kind(of)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from None


def zeros(shape: tuple[int, int]) -> Tensor:
    """Return a table of zeros on the CPU, which takes memory only for written rows."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def digest(surrogates: Iterable[Tensor]) -> str:
    """Return a digest of surrogates, equal at both ends; empty if there are none."""
    digests, found = hashlib.blake2b(digest_size=16), False
    for table in surrogates:
        digests.update(np.ascontiguousarray(table.cpu().numpy()).data)
        found = True
    return digests.hexdigest() if found else ""


def check_memory(whose: str, needed: float) -> None:
    """Raise `ConfigError` if surrogates need more bytes than the free memory."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"Error feedback needs {needed / 1e9:.1f} GB for {whose} surrogates, but "
            f"{free / 1e9:.1f} GB are free. Choose compression = 'direct', a smaller "
            "embedding-size, or fewer rows."
        )


def flat_if_finite(name: str, rows: Rows) -> NDArray[np.float32]:
    """Return the vectors of rows, flat; raise `VflError` if a number is not finite."""
    if not np.isfinite(rows).all():
        raise VflError(f"{name!r} has values that are not finite. Lower the learning rates.")
    return rows.reshape(-1)


def padded(
    v: NDArray[np.float32], sizes: Sizes, fill: float
) -> tuple[Rows, NDArray[np.bool_] | None]:
    """Return vectors as rows [S, longest], and a mask of their entries, None for equal sizes."""
    longest = max(1, int(sizes.max(initial=0)))
    if len(sizes) * longest == len(v):
        return v.reshape(-1, longest), None
    held = np.arange(longest) < sizes[:, None]
    vectors = np.full(held.shape, fill, np.float32)
    vectors[held] = v
    return vectors, held


def _names(window: Window) -> Names:
    """Return a number for each row of a window, from its step and id, [R]."""
    step = np.arange(len(window.lengths), dtype=np.uint64).repeat(window.lengths)
    return (step << np.uint64(32)) + window.ids.astype(np.uint64)
