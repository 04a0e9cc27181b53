"""Digests of messages, by which both sides compare a rerun with the run that it repeats."""

import hashlib
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.poly1305 import Poly1305

from vfl_flower.transport.messages import Arrays, Turn

SIZE = 12  # bytes of a digest
_OF_NO_RESULT = {"arrays", "version", "of_parties", "nonce"}


def digest_of(secret: bytes, arrays: Arrays, order: Turn | None = None) -> bytes:
    """Return a digest of arrays with names, types and shapes, and of an order's scalars.

    It is a Poly1305 tag, ten times as fast as a hash. Nobody can find two messages with one digest,
    since both the secret and the digest stay at the side that computes it.
    """
    named = sorted(arrays.items())
    fields = vars(order).items() if order else ()
    scalars = tuple([each for each in fields if each[0] not in _OF_NO_RESULT])
    forms = tuple([(name, array.dtype, array.shape) for name, array in named])
    about = _about(order.kind if order else "", scalars, forms)
    content = b"".join([about, *(array.tobytes() for _, array in named)])
    return Poly1305.generate_tag(hashlib.sha256(secret).digest(), content)[:SIZE]


@lru_cache(maxsize=1024)  # most messages of a step are alike
def _about(kind: str, scalars: tuple[tuple[str, Any], ...], forms: tuple[Any, ...]) -> bytes:
    """Return an order's scalars and kind, if any, and names, types and shapes of arrays."""
    told = [f"{name}={of}" for name, of in scalars] + [kind] * bool(kind)
    return "|".join(told + [f"{name}|{of.str}|{shape}" for name, of, shape in forms]).encode()
