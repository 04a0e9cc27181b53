"""Private set intersection: which ids the label holder and a party have in common.

Diffie-Hellman on X25519. An id is hashed to a point H(id) of the curve, and blinded by a secret
scalar of each side; blinding twice gives the same point in either order, and so ids can be compared
by those who cannot read them. Secrets and orders are drawn afresh for every run.

1. The label holder sends its ids blinded by its secret a, in a secret order: ``a.of_ids``, H(id)^a.
2. A party sends these blinded again, H(id)^ab in the order in which they came, ``b.again``; and its
   own ids blinded by its secret b, in a secret order of its own: ``b.of_ids``, H(id)^b.
3. The label holder blinds the party's again, ``a.again``, H(id)^ba, and compares: ``match``.
4. It sends every party the places in that party's order which are common to all parties, in one
   order for all; a party maps them back to its rows.

The label holder learns how many ids the party has, which of its own are among them, and their
places in an order that says nothing. The party learns how many ids the label holder has and, by
step 4, which of its own are common to all. Of an id that it lacks, neither learns anything; who
reads the messages learns sizes.

That holds if both sides keep to the protocol, SHA-512 is as good as a random function, and the
decisional Diffie-Hellman problem is hard on curve25519. No such protocol can stop a side from
making up ids and learning which of them the other has.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray

from vfl_flower.errors import ConfigError, VflError

Points = NDArray[np.uint8]
"""u coordinates of points of curve25519, [n, 32], in X25519's byte order."""

Places = NDArray[np.int64]


# --- ids, and a secret order of them ------------------------------------------------------------


def id_kind(column: Any) -> str:
    """``whole numbers`` or ``texts``; else pandas' word for what `encode_ids` refuses."""
    from pandas.api.types import infer_dtype  # here, since worker processes need none

    kind: str = infer_dtype(np.asarray(column), skipna=True)
    return {"integer": "whole numbers", "string": "texts"}.get(kind, kind)


def encode_ids(column: Any, whose: str) -> list[bytes]:
    """Ids of a NumPy or pandas column [n] as bytes: ``i:`` and decimals, or ``t:`` and UTF-8.

    Whole numbers of any width agree; texts agree if they are the same to the letter.

    Parameters
    ----------
    whose : what errors say of the column: "The label holder's file".

    Raises
    ------
    ConfigError
        If there are none, or some are missing, neither whole numbers nor texts, or there twice;
        it says how many, and never which.
    """
    from pandas import isna

    values, kind = np.asarray(column), id_kind(column)
    if len(values) == 0:
        raise ConfigError(f"{whose} has no ids.")
    missing = int(isna(values).sum())
    if missing:
        raise ConfigError(
            f"{whose} has {missing} missing ids in {len(values)} rows: drop those rows."
        )
    if kind == "whole numbers":
        encoded = [b"i:%d" % number for number in values.tolist()]
    elif kind == "texts":
        encoded = [b"t:" + text.encode("utf-8", "surrogatepass") for text in values.tolist()]
    else:
        raise ConfigError(
            f"{whose} has ids that are neither whole numbers nor texts but {kind}: "
            "store them as one of the two, the same in every file."
        )
    repeated = len(encoded) - len(set(encoded))
    if repeated:
        raise ConfigError(
            f"{whose} has {repeated} rows whose id is already that of an earlier row: "
            "keep one row of each id."
        )
    return encoded


def shuffled(n: int, secret: bytes) -> Places:
    """A permutation [n] that follows from a secret; `Blinding.secret` will do."""
    stream = hashlib.shake_256(b"vfl-flower psi order|" + secret).digest(8 * n)
    return np.argsort(np.frombuffer(stream, np.uint64), kind="stable")


# --- blinding -----------------------------------------------------------------------------------


class Blinding:
    """One side's secret scalar, which is fresh unless it is given as 32 bytes."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret

    def of_ids(self, encoded: list[bytes]) -> Points:
        """H(id)^secret of each id, [n, 32]."""

        def elements(rows: slice) -> bytes:
            return b"".join(_field_element(one) for one in encoded[rows])

        return _blinded_rows("elements", self.secret, elements, len(encoded))

    def again(self, points: Points) -> Points:
        """Each point of the other side blinded by this secret too, [n, 32].

        Raises
        ------
        VflError
            As the end of a sentence, if they are no points or one of them is of small order.
        """
        _check(points)
        blinded = _blinded_rows(
            "points", self.secret, lambda rows: points[rows].tobytes(), len(points)
        )
        if not blinded.any(axis=1).all():
            raise VflError("sent blinded ids that cannot be used: one is of small order.")
        return blinded


def _check(points: Points) -> None:
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != 32:
        raise VflError(
            f"sent blinded ids that cannot be used: they are {points.dtype} of shape "
            f"{points.shape}, not uint8 of shape (n, 32)."
        )


# --- matching -----------------------------------------------------------------------------------


def match(mine: Points, theirs: Points) -> tuple[Places, Places]:
    """Where in ``mine`` and in ``theirs`` the points are that both have; in the points' order.

    Raises
    ------
    VflError
        As the end of a sentence, if they are no points or one is there twice.
    """
    _check(mine)
    _check(theirs)
    points = np.concatenate([mine, theirs]).view("S32")[:, 0]
    order = np.argsort(points, kind="stable")
    points = points[order]
    same = points[1:] == points[:-1]
    in_mine, in_theirs = order[:-1][same], order[1:][same] - len(mine)
    if (in_mine >= len(mine)).any() or (in_theirs < 0).any():
        raise VflError("sent a blinded id more than once.")
    return in_mine, in_theirs


# --- the curve ----------------------------------------------------------------------------------

_P = 2**255 - 19
_A = 486662  # curve25519 is v^2 = u^3 + A u^2 + u


def _field_element(encoded: bytes) -> bytes:
    digest = hashlib.sha512(b"vfl-flower psi id|" + encoded).digest()
    return (int.from_bytes(digest) % _P).to_bytes(32, "little")


def _on_curve(element: int) -> int:
    """The u coordinate of Elligator 2 (RFC 9380, section 6.7.1; encode_to_curve).

    It is always on the curve. A hash that is taken for a coordinate as it is may be on the twist,
    X25519 leaves it there, and so a blinded id would show one bit of the id. That only about half
    of the curve is reached does no harm, since blinding spreads points over all of the group.
    """
    u = -_A * pow(1 + 2 * element * element, -1, _P) % _P  # not 1 / 0, since -1 / 2 is no square
    return u if _is_square(u * (u * (u + _A) + 1) % _P) else (-u - _A) % _P


def _is_square(number: int) -> bool:
    """By the Jacobi symbol of number and p, which takes a third of Euler's power or less."""
    below, square = _P, True
    while number:
        twos = (number & -number).bit_length() - 1
        number >>= twos
        if twos % 2 and below % 8 in (3, 5):
            square = not square
        if number % 4 == below % 4 == 3:
            square = not square
        number, below = below % number, number
    return square


def _blinded(task: str, secret: bytes, items: bytes) -> bytes:
    """Blinded ``points``, or ``elements`` that `_on_curve` makes points first; 32 bytes each."""
    key = X25519PrivateKey.from_private_bytes(secret)
    blinded = []
    for start in range(0, len(items), 32):
        point = items[start : start + 32]
        if task == "elements":
            point = _on_curve(int.from_bytes(point, "little")).to_bytes(32, "little")
        try:
            blinded.append(key.exchange(X25519PublicKey.from_public_bytes(point)))
        except ValueError:
            blinded.append(bytes(32))  # what X25519 gives for a point of small order
    return b"".join(blinded)


# --- worker processes ---------------------------------------------------------------------------

_ALONE = 20_000  # rows that this process blinds itself
_CHUNK = 100_000


def _blinded_rows(task: str, secret: bytes, items: Callable[[slice], bytes], n: int) -> Points:
    """`_blinded` of n items [n, 32]; if they are many, by a process for each core.

    A worker is this module as a program, which gets a chunk by its standard input. Processes of
    `multiprocessing` would import the caller's main module too, and with it often torch.
    """
    if n <= _ALONE:
        done = _blinded(task, secret, items(slice(0, n)))
        return np.frombuffer(done, np.uint8).reshape(n, 32)

    from tqdm import tqdm

    def work(rows: slice) -> bytes:
        command = [sys.executable, "-P", "-m", "vfl_flower.data.psi", task]
        done = subprocess.run(
            command, input=secret + items(rows), stdout=subprocess.PIPE, env=environment
        )
        if done.returncode:
            raise VflError(
                f"A process that blinds ids ended with exit code {done.returncode}: "
                "its error output says why."
            )
        return done.stdout

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    size = min(_CHUNK, -(-n // workers))
    chunks = [slice(start, min(start + size, n)) for start in range(0, n, size)]
    blinded = np.empty((n, 32), np.uint8)
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=n, unit="id", desc="blinding", disable=None, leave=False) as bar,
    ):
        for rows, done in zip(chunks, pool.map(work, chunks), strict=True):
            blinded[rows] = np.frombuffer(done, np.uint8).reshape(-1, 32)
            bar.update(rows.stop - rows.start)
    return blinded


if __name__ == "__main__":
    key_of_caller, chunk = sys.stdin.buffer.read(32), sys.stdin.buffer.read()
    sys.stdout.buffer.write(_blinded(sys.argv[1], key_of_caller, chunk))
