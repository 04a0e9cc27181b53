"""Private set intersection: which ids the label holder and a party have in common.

Diffie-Hellman in ristretto255 (RFC 9496), a group of prime order; libsodium computes in it, in
constant time. An id is hashed to an element H(id) of the group, and blinded by a secret scalar of
each side; ids that are blinded by the party can be compared by who cannot read them.

1. The label holder sends ids blinded by its secret a, in a secret order: ``a.of_ids``, H(id)^a.
2. A party sends these blinded again, H(id)^ab in the order in which they came, ``b.again``; and of
   its own ids F(id) in a secret order of its own: ``outputs``, a hash of the id and of H(id)^b.
3. The label holder takes its own secret away, ``a.undone``, makes F(id) of each H(id)^b too, and
   compares these: ``match``.
4. It sends every party the places in that party's order which are common to all parties, in one
   order for all; a party maps them back to its rows.
5. The party asks whether the label holder knows the ids of these rows: ``question``. By step 3
   alone it could name rows of strangers.

The label holder learns how many ids the party has, which of its own are among them, and their
places in an order that says nothing. The party learns how many ids the label holder has and, by
step 4, which of its own are common to all. Of an id that it lacks, neither learns anything; who
reads the messages learns sizes.

Both may keep what is blinded by b, and later ask and answer about new ids alone
(`alignment.blinded_ids`). So b lasts, and by step 2 whoever may ask has any element raised to it:
also sums of points of step 2, and a question. That is why a question is about other elements of the
same ids, H'(id), which are never raised to b; and why its answer says nothing of ids that the asker
has not put into it. And that is why a party sends F(id): by its points H(id)^b, one sum of points
would tell whether it has several ids.

The label holder keeps a too, so that a party counts an id once (`alignment.asked_ids`). A party
that is sent a point again learns that it is the same id, and not which.

That holds if both sides keep to the protocol, SHA-512 is as good as a random function, and, with as
many answers of b as `max-ids` lets be asked for, an answer more cannot be computed (the one-more
Diffie-Hellman assumption in ristretto255, as for the oblivious functions of RFC 9497). No such
protocol can stop a side from making up ids and learning which of them the other has; a party's
question may be about one more.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError

Points = NDArray[np.uint8]
"""Encoded elements of ristretto255, [n, 32]."""

Places = NDArray[np.int64]


# --- ids, and a secret order of them ------------------------------------------------------------


def shuffled(n: int, secret: bytes) -> Places:
    """A permutation [n] that follows from a secret."""
    stream = hashlib.shake_256(b"vfl-flower psi order|" + secret).digest(8 * n)
    return np.argsort(np.frombuffer(stream, np.uint64), kind="stable")


# --- blinding -----------------------------------------------------------------------------------

_CHUNK = 10_000  # rows that a thread blinds at a time
MANY = 20_000
"""Ids from which on progress is shown."""
_NO_ELEMENT = "blinded ids that cannot be used: one is no element of ristretto255, or the identity."


class Blinding:
    """One side's secret scalar, which is fresh unless it is given as 32 bytes."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret

    def of_ids(self, encoded: Sequence[bytes], order: Places | None = None) -> Points:
        """H(id)^secret of the ids, [n, 32]; in another order, if one is given."""
        order = np.arange(len(encoded)) if order is None else order
        hash_to_group, multiply, _ = _libsodium()

        def blind(rows: slice, to: int) -> None:
            point = ctypes.create_string_buffer(32)
            for row in order[rows].tolist():
                hash_to_group(point, _digest(encoded[row]))
                multiply(to, self.secret, point)
                to += 32

        return _blinded_rows(blind, len(order))

    def again(self, points: Points) -> Points:
        """Each element of the other side blinded by this secret too, [n, 32].

        Raises
        ------
        VflError
            As the end of a sentence that says who sent them, if they are no elements of the group,
            or one is the identity.
        """
        check_points(points)
        points = np.ascontiguousarray(points)
        first, (_, multiply) = points.ctypes.data, _libsodium()[:2]

        def blind(rows: slice, to: int) -> None:
            refused = int(points[rows, 31].max() > 127)  # which libsodium 1.0.18 passes over
            for point in range(first + 32 * rows.start, first + 32 * rows.stop, 32):
                refused |= multiply(to, self.secret, point)
                to += 32
            if refused:
                raise VflError(_NO_ELEMENT)

        return _blinded_rows(blind, len(points))

    def undone(self, points: Points) -> Points:
        """Each element that was blinded by this secret as it would be without, [n, 32].

        Raises
        ------
        VflError
            As `again`.
        """
        _libsodium()
        import rbcl

        inverse = ctypes.create_string_buffer(32)
        scalar = self.secret[:31] + bytes([self.secret[31] & 127])  # which multiplying goes by
        rbcl._sodium["crypto_core_ristretto255_scalar_invert"](inverse, scalar)
        return Blinding(inverse.raw).again(points)


def outputs(ids: Sequence[bytes], points: Points) -> Points:
    """Return F(id) of each id [n, 32], of which H(id)^b is the point."""
    data, name, hashed = points.tobytes(), b"vfl-flower psi output|", hashlib.blake2b
    each = (data[at : at + 32] for at in range(0, len(data), 32))
    made = [
        hashed(name + one + point, digest_size=32).digest()
        for one, point in zip(ids, each, strict=True)
    ]
    return np.frombuffer(b"".join(made), np.uint8).reshape(-1, 32)


def question(ids: Sequence[bytes]) -> tuple[Points, bytes]:
    """A question whether the other side knows these ids, [1, 32], and the secret it is judged by.

    The question is the sum of H'(id), blinded by a secret that is used once.
    """
    blinding = Blinding()
    return blinding.again(_sum(ids)), blinding.secret


def answer(ids: Sequence[bytes], asked: Points) -> Points:
    """The answer of who knows these ids: their sum, and the question, by one secret, [2, 32].

    Who does not know all ids would need a power of their sum, and the same of the question. To who
    has asked about other ids the answer is two elements at random.

    Raises
    ------
    VflError
        As `Blinding.again`, if what is asked is no element.
    """
    blinding = Blinding()
    return np.concatenate([blinding.again(_sum(ids)), blinding.again(asked)])


def is_answer(secret: bytes, given: NDArray[Any]) -> bool:
    """Whether this is the answer of who knows the ids of the question."""
    try:
        known, asked = given[:1], given[1:]
        return np.array_equal(Blinding(secret).again(known), asked)
    except (VflError, IndexError):
        return False


def _sum(ids: Sequence[bytes]) -> Points:
    """The sum of H'(id), [1, 32]."""
    hash_to_group, _, add = _libsodium()
    total = np.zeros((1, 32), np.uint8)  # the identity
    hashed = ctypes.create_string_buffer(32)
    for one in ids:
        hash_to_group(hashed, _digest(one, b"question"))
        add(total.ctypes.data, total.ctypes.data, hashed)
    return total


def challenge(ids: Sequence[bytes], points: Points) -> tuple[Points, Points]:
    """A question, and the answer of who knows these ids: one point each, [1, 32].

    ``points`` are what the other side has sent for the ids. The question is the sum of H(id),
    blinded by a secret that is used once, and the answer that of the points; a side that has sent
    H(id)^a for each makes one of the other by a. One that does not know all ids would have to
    know the logarithm of one sum by the other.

    Raises
    ------
    VflError
        As the end of a sentence that says who sent the points, if their sum is the identity.
    """
    hash_to_group, _, add = _libsodium()
    sums = np.zeros((2, 1, 32), np.uint8)  # the identity, twice
    of_ids, of_points = (each.ctypes.data for each in sums)
    hashed = ctypes.create_string_buffer(32)
    for one, point in zip(ids, points, strict=True):
        hash_to_group(hashed, _digest(one))
        add(of_ids, of_ids, hashed)
        add(of_points, of_points, point.tobytes())
    blinding = Blinding()
    return blinding.again(sums[0]), blinding.again(sums[1])


def check_points(points: NDArray[Any]) -> None:
    """Refuse what cannot be points by its dtype or shape, as `Blinding.again`."""
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != 32:
        raise VflError(
            f"blinded ids that cannot be used: they are {points.dtype} of shape {points.shape}, "
            "not uint8 of shape (n, 32)."
        )


def check_distinct(points: Points) -> None:
    """Refuse, as `Blinding.again`, a point that is there twice."""
    if len(np.unique(np.ascontiguousarray(points).view("S32"))) < len(points):
        raise VflError("a blinded id more than once.")


def _digest(encoded: bytes, of: bytes = b"id") -> bytes:
    """What H, or H' of a question, takes to the group."""
    return hashlib.sha512(b"vfl-flower psi " + of + b"|" + encoded).digest()


def _blinded_rows(blind: Callable[[slice, int], None], n: int) -> Points:
    """Points [n, 32], of which ``blind`` writes a slice of rows to a place in memory.

    A thread for each core: libsodium is called without Python's lock.
    """
    from tqdm import tqdm

    blinded = np.empty((n, 32), np.uint8)
    first = blinded.ctypes.data
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    chunks = [slice(start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK)]
    with (
        ThreadPoolExecutor(cores) as pool,
        tqdm(
            total=n,
            unit="id",
            unit_scale=True,
            desc="blinding",
            disable=None if n >= MANY else True,
            leave=False,
        ) as bar,
    ):
        done = pool.map(lambda rows: blind(rows, first + 32 * rows.start), chunks)
        for rows, _ in zip(chunks, done, strict=True):
            bar.update(rows.stop - rows.start)
    return blinded


# --- matching -----------------------------------------------------------------------------------

_BLOCK = 100_000  # points that are compared at a time


def match(mine: Points, theirs: Points) -> tuple[Places, Places]:
    """Where in ``mine`` and in ``theirs`` the points are that both have; in the points' order.

    Raises
    ------
    VflError
        As the end of a sentence that says who sent them, if they are no points or one is there
        twice.
    """
    check_points(mine)
    check_points(theirs)
    points = np.concatenate([mine, theirs]).view("S32")[:, 0]
    order = np.argsort(points, kind="stable")
    same = np.zeros(max(len(order) - 1, 0), bool)
    for start in range(0, len(same), _BLOCK):
        near = points[order[start : start + _BLOCK + 1]]
        same[start : start + _BLOCK] = near[1:] == near[:-1]
    in_mine, in_theirs = order[:-1][same], order[1:][same] - len(mine)
    if (in_mine >= len(mine)).any() or (in_theirs < 0).any():
        raise VflError("a blinded id more than once.")
    return in_mine, in_theirs


# --- the group ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _libsodium() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """Hashing 64 bytes to the group, multiplying by a scalar, adding; results come first.

    Multiplying gives -1, if what it is given is no element or the result is the identity.

    Raises
    ------
    ConfigError
        If it cannot be loaded.
    """
    try:
        import rbcl
    except OSError as error:
        raise ConfigError(
            "libsodium cannot be loaded from this machine's temporary folder, into which rbcl "
            f"writes it ({error.strerror or 'it may hold no programs'}): name another by TMPDIR."
        ) from None
    with suppress(OSError):  # what is loaded stays; Windows keeps the file
        os.unlink(sys.modules["rbcl._sodium"].lib_path)
    hash_to_group = rbcl._sodium["crypto_core_ristretto255_from_hash"]  # not rbcl's own object
    multiply = rbcl._sodium["crypto_scalarmult_ristretto255"]
    add = rbcl._sodium["crypto_core_ristretto255_add"]
    hash_to_group.argtypes = [ctypes.c_void_p] * 2
    multiply.argtypes = add.argtypes = [ctypes.c_void_p] * 3
    return hash_to_group, multiply, add
