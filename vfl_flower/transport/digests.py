"""Digests of messages, by which both sides compare a rerun with the run that it repeats."""

from __future__ import annotations

import hashlib

from vfl_flower.transport.messages import Arrays, Turn

_OF_NO_RESULT = {"arrays", "version", "of_parties", "nonce"}


def digest_of(arrays: Arrays, about: str = "") -> bytes:
    """Return a digest of arrays with names, types and shapes, and of a text, 12 bytes."""
    digest = hashlib.blake2b(about.encode(), digest_size=12)
    for name, array in sorted(arrays.items()):  # `Received` does not count them as used
        digest.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update((array if array.flags.c_contiguous else array.copy()).data)
    return digest.digest()


def digest_of_turn(order: Turn) -> bytes:
    """Return a digest of all that decides how a party serves an order, 12 bytes."""
    about = [f"{name}={of}" for name, of in vars(order).items() if name not in _OF_NO_RESULT]
    return digest_of(order.arrays, " ".join([order.kind, *sorted(about)]))
