"""Private set intersection: the ids that the label holder and a party share.

The protocol is Diffie-Hellman in ristretto255 (RFC 9496), a group of prime order. libsodium does
the arithmetic in constant time. An id is hashed to an element H(id) of the group, and each side
blinds it with a secret scalar. A side can compare ids that the party has blinded, and cannot read
them.

`at_label_holder` and `at_party` number their steps alike. Ids travel in `pieces`:

0. The label holder asks whether the party keeps the blinded ids of an earlier alignment
   (`SetOrder`, `SetKept`). If so, steps 1 to 3 are only about new ids (`blinded_ids`).
1. The label holder blinds its ids with its secret a, in a secret order: ``a.of_ids``, H(id)^a. It
   sends the points (`AlignOrder`).
2. The party blinds these points again, H(id)^ab, in the order in which they came: ``b.again``. It
   adds F(id) of each own id, in another secret order: ``outputs``, a hash of the id and of H(id)^b.
   Its answer has both (`Aligned`).
3. The label holder removes its own secret, ``a.undone``. It makes F(id) from each H(id)^b, and
   compares: ``match``.
4. The label holder tells each party which rows to use, as places in that party's order
   (`CommonOrder`). All parties get the rows in the same order. They map the places to their rows.
5. The party asks whether the label holder knows the ids of these rows: ``question``. Without the
   question, the label holder could name rows of strangers after step 3.
6. The label holder answers: ``answer`` (`ConfirmOrder`). The party checks the answer,
   ``is_answer``, and uses the rows.

The label holder learns how many ids the party has, and which of the label holder's ids are among
them. It also learns the places of these ids, in an order that reveals nothing. The party learns how
many ids the label holder has. By step 4 it learns which ids are common to all. Neither side learns
anything about an id that it lacks. A listener learns sizes.

Both sides may keep the ids that b has blinded, and later ask and answer only about new ids. So b
lasts. In step 2 the label holder can get any element raised to b, including sums of points, and a
question. Two measures follow from this:

- A question is about other elements of the same ids, H'(id), which are never raised to b. Its
  answer reveals nothing about ids that the asker has not put into it.
- A party sends F(id), not the points H(id)^b. With the points, one sum of points would tell whether
  the party has several ids.

The label holder keeps a too, so that a party counts an id once (`asked_ids`). A party that gets a
point again learns that it stands for the same id, but not which id.

All this holds if both sides follow the protocol, and if SHA-512 behaves as a random function. It
also needs the one-more Diffie-Hellman assumption in ristretto255, as the oblivious functions of
RFC 9497 do. From the answers of b that `max-ids` allows, nobody can compute one more answer. No
such protocol stops a side from making up ids and learning which of them the other side has. A
party's question may be about one more id.
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
from vfl_flower.data.ids import by_id, chosen, cut, digests, in_pieces

Points = NDArray[np.uint8]  # encoded elements of ristretto255, [n, 32]

Places = NDArray[np.int64]


# --- orders of ids ------------------------------------------------------------------------------


def shuffled(n: int, secret: bytes) -> Places:
    """Return the permutation [n] that follows from a secret."""
    stream = hashlib.shake_256(b"vfl-flower psi order|" + secret).digest(8 * n)
    return np.argsort(np.frombuffer(stream, np.uint64), kind="stable")


def digest_of_all(ids: Sequence[bytes]) -> bytes:
    """Return a digest of all ids, whatever their order. It is only sent blinded."""
    digest = hashlib.sha256()
    for some in in_pieces(ids, by_id(ids)):
        digest.update(b"\n".join(some) + b"\n")
    return b"all:" + digest.digest()


# --- blinding -----------------------------------------------------------------------------------

_CHUNK = 10_000  # number of rows to blind or hash at a time
_FEW = 50  # ids that take less time than starting threads
_MANY = 20_000  # smallest number of ids for which to show progress
MOST = 10**8
"""Most ids of a party. They take 10 GB at the label holder."""
_NO_ELEMENT = (
    "blinded ids that cannot be used: one is not an element of ristretto255, or is the identity."
)


class Blinding:
    """One side's secret scalar of 32 bytes. Without ``secret``, it is fresh."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret

    def of_ids(self, encoded: Sequence[bytes], order: Places | None = None) -> Points:
        """Return H(id)^secret of the ids, [n, 32], in ``order`` if it is given."""
        order = np.arange(len(encoded)) if order is None else order
        hash_to_group, multiply, _ = _libsodium()

        def blind(rows: slice, to: int) -> None:
            point = ctypes.create_string_buffer(32)
            for one in chosen(encoded, order[rows]):
                hash_to_group(point, _digest(one))
                multiply(to, self.secret, point)
                to += 32

        return _blinded_rows(blind, len(order))

    def again(self, points: Points) -> Points:
        """Return the other side's elements, blinded with this secret too, [n, 32].

        The message of a `VflError` continues a sentence that names the sender.
        """
        check_points(points)
        points = np.ascontiguousarray(points)
        first, (_, multiply) = points.ctypes.data, _libsodium()[:2]

        def blind(rows: slice, to: int) -> None:
            refused = int(points[rows, 31].max() > 127)  # libsodium 1.0.18 ignores this bit
            for point in range(first + 32 * rows.start, first + 32 * rows.stop, 32):
                refused |= multiply(to, self.secret, point)
                to += 32
            if refused:
                raise VflError(_NO_ELEMENT)

        return _blinded_rows(blind, len(points))

    def undone(self, points: Points) -> Points:
        """Return the elements without this secret, which blinded them, [n, 32]."""
        _libsodium()
        import rbcl

        inverse = ctypes.create_string_buffer(32)
        scalar = self.secret[:31] + bytes([self.secret[31] & 127])  # as multiplication ignores it
        rbcl._sodium["crypto_core_ristretto255_scalar_invert"](inverse, scalar)
        return Blinding(inverse.raw).again(points)


def outputs(
    ids: Sequence[bytes], points: Points, name: bytes = b"vfl-flower psi output|"
) -> Points:
    """Return F(id) of each id [n, 32], from the points H(id)^b; another function by its name."""
    made = np.empty_like(points)
    if len(ids) != len(points):
        raise ValueError(f"{len(points)} points of {len(ids)} ids")
    for start in range(0, len(points), _CHUNK):
        part = slice(start, start + _CHUNK)
        each = zip(ids[part], cut(points[part].tobytes(), 32), strict=True)
        made[part] = digests((name + one + point for one, point in each), 32)
    return made


def question(ids: Sequence[bytes]) -> tuple[Points, bytes]:
    """Return the sum of H'(id) blinded by a secret that is used once, [1, 32], and that secret."""
    blinding = Blinding()
    return blinding.again(_sum(ids, b"question")), blinding.secret


def answer(ids: Sequence[bytes], asked: Points) -> Points:
    """Return the sum of H'(id), and the question, both raised to one secret, [2, 32].

    A side that does not know all ids would need a power of their sum, and the same power of the
    question. To a party that asked about other ids, the answer is two random elements.
    """
    blinding = Blinding()
    return np.concatenate([blinding.again(_sum(ids, b"question")), blinding.again(asked)])


def is_answer(secret: bytes, given: NDArray[Any]) -> bool:
    """Return whether ``given`` answers the question with this secret."""
    try:
        known, asked = given[:1], given[1:]
        return np.array_equal(Blinding(secret).again(known), asked)
    except (VflError, IndexError):
        return False


def challenge(ids: Sequence[bytes], points: Points) -> tuple[Points, Points]:
    """Return a question about ids, and its answer: one point each, [1, 32].

    ``points`` are H(id)^a, from the other side. The question is the sum of H(id), raised to a
    secret that is used once, and the answer is the sum of the points, raised to the same secret.
    A side with a computes the answer. A side that lacks an id would need a logarithm.
    """
    blinding, total = Blinding(), np.zeros((1, 32), np.uint8)  # the identity
    add, at = _libsodium()[2], total.ctypes.data
    for _, point in zip(ids, points, strict=True):
        add(at, at, point.tobytes())
    return blinding.again(_sum(ids, b"id")), blinding.again(total)


def _sum(ids: Sequence[bytes], of: bytes) -> Points:
    """Return the sum of H(id), or of H'(id) for a question, [1, 32]."""
    hash_to_group, _, add = _libsodium()
    total, hashed = np.zeros((1, 32), np.uint8), ctypes.create_string_buffer(32)
    at = total.ctypes.data
    for one in ids:
        hash_to_group(hashed, _digest(one, of))
        add(at, at, hashed)
    return total


def check_points(points: NDArray[Any]) -> None:
    """Refuse, as `Blinding.again`, an array that is not uint8 [n, 32]."""
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != 32:
        raise VflError(
            f"blinded ids that cannot be used: they are {points.dtype} of shape {points.shape}, "
            "not uint8 of shape (n, 32)."
        )


def check_distinct(points: Points) -> None:
    """Refuse, as `Blinding.again`, points that contain a point twice."""
    if len(np.unique(np.ascontiguousarray(points).view("S32"))) < len(points):
        raise VflError("a blinded id more than once. Remove repeated ids.")


def _digest(encoded: bytes, of: bytes = b"id") -> bytes:
    """Return the 64 bytes that H, or H' of a question, maps to the group."""
    return hashlib.sha512(b"vfl-flower psi " + of + b"|" + encoded).digest()


def _blinded_rows(blind: Callable[[slice, int], None], n: int) -> Points:
    """Return points [n, 32] that ``blind`` writes in threads: ctypes takes no lock."""
    from tqdm import tqdm

    blinded = np.empty((n, 32), np.uint8)
    first = blinded.ctypes.data
    if 0 < n < _FEW:
        blind(slice(0, n), first)
        return blinded
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    chunks = [slice(start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK)]
    shown: dict[str, Any] = {"unit": "id", "unit_scale": True, "desc": "blinding", "leave": False}
    disable = None if n >= _MANY else True
    with ThreadPoolExecutor(cores) as pool, tqdm(total=n, disable=disable, **shown) as bar:
        done = pool.map(lambda rows: blind(rows, first + 32 * rows.start), chunks)
        for rows, _ in zip(chunks, done, strict=True):
            bar.update(rows.stop - rows.start)
    return blinded


# --- matching -----------------------------------------------------------------------------------

_BLOCK = 100_000  # number of points to compare at a time


def match(mine: Points, theirs: Points) -> tuple[Places, Places]:
    """Return positions of common points in both, sorted by point, or raise `VflError`."""
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
        raise VflError("a blinded id more than once. Remove repeated ids.")
    return in_mine, in_theirs


# --- the group ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _libsodium() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """Return functions that hash 64 bytes to the group, multiply by a scalar, and add.

    The multiplication returns -1 if its input is no element, or its result is the identity.
    """
    try:
        import rbcl
    except OSError as error:
        raise ConfigError(
            "libsodium cannot be loaded: rbcl writes it to this machine's temporary folder "
            f"({error.strerror or 'it may hold no programs'}). Name another folder in TMPDIR."
        ) from None
    with suppress(OSError):  # the loaded library needs no file; Windows refuses to remove it
        os.unlink(sys.modules["rbcl._sodium"].lib_path)
    hash_to_group = rbcl._sodium["crypto_core_ristretto255_from_hash"]  # not rbcl's own object
    multiply = rbcl._sodium["crypto_scalarmult_ristretto255"]
    add = rbcl._sodium["crypto_core_ristretto255_add"]
    hash_to_group.argtypes = [ctypes.c_void_p] * 2
    multiply.argtypes = add.argtypes = [ctypes.c_void_p] * 3
    return hash_to_group, multiply, add
