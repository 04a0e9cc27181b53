"""Masks: parties hide their embeddings, and the label holder learns their sum.

The file follows the order of the protocol.

1. **Agree.** For a run each party makes a fresh key (X25519). Its lasting key (Ed25519) signs the
   fresh key with the run and the party's number (`Offer`). The label holder passes the offers on.
   Each pair of parties derives a pair key (HKDF) from their fresh keys and the first transcript.
   The first transcript holds all keys and all that must be the same at all parties. This includes
   the configuration, the ids of the rows in their order, and the lineage of the models. The label
   holder compares tags of the pair keys, and so finds parties that do not agree.
2. **Bind.** A party's transcript is a hash over all orders that it has served since. The hash
   covers all content of the orders except their numbers. Honest parties of a synchronous system get
   the same orders.
3. **Mask.** Embeddings in fixed point are 32-bit integers, followed by four zeros. Each pair of
   parties has a stream (AES-CTR, from the transcript's hash with the block's name). One of the two
   adds the stream, and the other subtracts it, modulo 2^32. To anybody who lacks one of a party's
   pair keys, its upload is random.
4. **Add.** In the sum over all parties the streams cancel. The four zeros show that they did.

So no stream serves twice: each order makes another transcript. A label holder may tell parties
different things: other feedback, other rows, or models of another time. The difference of two sums
could then be one party's embeddings. But the streams do not cancel in such sums.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, SumError, VflError
from vfl_flower.config.logs import log
from vfl_flower.transport.messages import Arrays, Order, checked

_NAME = b"vfl-flower secure sum|"
_KEY, _TAG, _SIGNATURE = 32, 16, 64  # bytes
_ZEROS = 4  # numbers at the end of a block; their sum shows whether masks cancelled


# --- 1. the parties agree -----------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A party's fresh key for one run, its lasting key, and the signature."""

    key: bytes
    identity: bytes
    signature: bytes

    @classmethod
    def of(cls, private: X25519PrivateKey, lasting: Ed25519PrivateKey, place: bytes) -> Offer:
        """Return a party's own offer, for a ``place`` from `place_of`."""
        key = private.public_key().public_bytes_raw()
        identity = lasting.public_key().public_bytes_raw()
        return cls(key, identity, lasting.sign(_NAME + place + key))

    def check(self, place: bytes) -> None:
        """Raise `VflError` unless the lasting key, known to the receiver, signed this offer."""
        try:
            lasting = Ed25519PublicKey.from_public_bytes(self.identity)
            lasting.verify(self.signature, _NAME + place + self.key)
        except (InvalidSignature, ValueError):
            raise VflError(
                "was sent another party's key, which that party has not signed for this run. "
                "Start the run anew."
            ) from None

    def arrays(self) -> Arrays:
        """Return the offer as arrays of a message."""
        parts = zip(OFFERS, (self.key, self.identity, self.signature), strict=True)
        return {name: np.frombuffer(part, np.uint8)[None] for name, part in parts}


OFFERS = ("keys", "identities", "signatures")  # names of the arrays that hold `Offer`s


def place_of(run: object, party: int, parties: int) -> bytes:
    """Return the purpose of a key: the Flower run, the party, and the party count."""
    return f"{run}|{party}|{parties}|".encode()


def read_offers(arrays: Mapping[str, NDArray[Any]], count: int) -> list[Offer]:
    """Return ``count`` offers from a message's arrays. An error continues a sentence."""
    widths = _KEY, _KEY, _SIGNATURE
    parts = [
        checked(arrays, name, "uint8", (count, width))
        for name, width in zip(OFFERS, widths, strict=True)
    ]
    return [Offer(*(part[each].tobytes() for part in parts)) for each in range(count)]


def agreed(
    private: X25519PrivateKey, party: int, offers: Sequence[Offer], alike: Sequence[bytes]
) -> tuple[bytes, bytes, Arrays]:
    """Return a party's transcript, its keys with the others, and tags; all have equal ``alike``."""
    transcript = _hash(_NAME, *(o.key + o.identity for o in offers), *alike)
    keys, tags = b"", b""
    for other, offer in enumerate(offers):
        if other == party:
            tags += bytes(_TAG)
            continue
        try:
            shared = private.exchange(X25519PublicKey.from_public_bytes(offer.key))
        except ValueError:
            raise VflError(
                "was sent another party's key, which is not a valid key. Start the run anew."
            ) from None
        pair = f"{min(party, other)}|{max(party, other)}".encode()
        derived = HKDF(hashes.SHA256(), _KEY + _TAG, transcript, _NAME + pair).derive(shared)
        keys, tags = keys + derived[:_KEY], tags + derived[_KEY:]
    return transcript, keys, {"tags": np.frombuffer(tags, np.uint8).reshape(-1, _TAG)}


def check_tags(tags: Sequence[Mapping[str, NDArray[Any]]]) -> None:
    """Raise `ConfigError` if tags show that two parties have different keys."""
    count = len(tags)
    sent = [checked(each, "tags", "uint8", (count, _TAG)) for each in tags]
    for one, other in combinations(range(count), 2):
        if (sent[one][other] != sent[other][one]).any():
            raise ConfigError(
                f"Parties {one} and {other} have no key for masked sums in common. Their row ids, "
                "the order of the ids, their configurations or their models' histories differ, or "
                "somebody replaced keys on the way. Make these the same, then start the run anew."
            )


# --- 2. and 3. a party binds its orders, and masks its uploads ----------------------------------


class Masks:
    """The streams that mask a party's uploads, from a key of 32 bytes with each other party."""

    def __init__(self, party: int, keys: bytes, transcript: bytes) -> None:
        self.party = party
        self.keys = [keys[at : at + _KEY] for at in range(0, len(keys), _KEY)]
        self.parties = len(self.keys) + 1
        self.transcript = transcript
        self._used: set[str] = set()  # names of the blocks masked since the last order
        self.record: Any = None  # the record of `keys` that holds these masks

    def bind(self, order: Order) -> None:
        """Hash the next order into the transcript."""
        self.transcript = _hash(self.transcript, told(order))
        self._used = set()

    def part(self) -> None:
        """Take a random transcript. From now on, the masks cancel in no sum."""
        self.transcript = secrets.token_bytes(32)

    def hide(self, arrays: Arrays) -> Arrays:
        """Return masked blocks, int32 [n + 4]: numbers in fixed point, then zeros.

        If a number has no fixed point, masks cancel in no sum from then on. A refusal would tell
        the label holder about embeddings: it could measure them by orders of its choice.
        """
        return {name: self._masked(name, rows) for name, rows in arrays.items()}

    def _masked(self, name: str, rows: NDArray[np.float32]) -> Ints:
        if name in self._used:
            raise VflError(f"was asked to mask two blocks {name!r} alike. Start the run anew.")
        self._used.add(name)
        masked = np.zeros(rows.size + _ZEROS, np.int32)
        try:
            masked[: rows.size] = to_fixed(rows, self.parties).reshape(-1)
        except VflError as error:
            log.warning("Party %d %s", self.party, error)
            self.part()
        start, nothing = _hash(self.transcript, name.encode())[:16], bytes(masked.nbytes)
        stream = bytearray(masked.nbytes)
        for place, key in enumerate(self.keys):
            Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update_into(nothing, stream)
            add = np.subtract if place < self.party else np.add
            add(masked, np.frombuffer(stream, "<i4"), out=masked)
        return masked


def told(order: Order) -> bytes:
    """Return a hash of an order except its number, which failures may shift."""
    names = [spec.name for spec in fields(order) if spec.name not in ("arrays", "exchange")]
    parts = [f"{order.kind}|{ {name: getattr(order, name) for name in names} }".encode()]
    for name, array in sorted(order.arrays.items()):
        parts += [f"{name}|{array.dtype.str}|{array.shape}".encode(), array.tobytes()]
    return _hash(*parts)


def alike(*parts: str | bytes) -> bytes:
    """Return a hash of what must be the same at all parties."""
    return _hash(*(part.encode() if isinstance(part, str) else part for part in parts))


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


# --- 4. the label holder adds -------------------------------------------------------------------


def read(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], shape: tuple[int, int]
) -> Arrays:
    """Return a party's masked blocks of these names, each of rows [R, E]."""
    size = shape[0] * shape[1] + _ZEROS
    return {name: checked(arrays, name, "int32", (size,)) for name in names}


class Sum:
    """The sum of all parties' masked blocks. Each block is added on arrival."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._missing = set(range(parties))
        self._total: Arrays = {}

    def add(self, party: int, blocks: Arrays, shape: tuple[int, int]) -> Arrays | None:
        """Add a party's blocks of rows [R, E]; return the sums with the last party's."""
        if party not in self._missing:
            raise VflError("sent a second block for one sum. Start it anew.")
        if len(self._missing) == self.parties:
            self._total = {name: block.copy() for name, block in blocks.items()}
        else:
            for name, block in blocks.items():
                np.add(self._total[name], block, out=self._total[name])
        self._missing.discard(party)
        if self._missing:
            return None
        total, self._total = self._total, {}
        self._missing = set(range(self.parties))
        if any(block[-_ZEROS:].any() for block in total.values()):
            raise SumError
        of_rows = {name: from_fixed(block[:-_ZEROS], self.parties) for name, block in total.items()}
        return {name: rows.reshape(shape) for name, rows in of_rows.items()}


Ints = NDArray[np.int32]
"""Numbers modulo 2^32. NumPy adds and subtracts them modulo 2^32."""

BOUND = 1024.0
"""Bound of the absolute value of each number in an embedding. Models that learn rarely reach it."""


def places(parties: int) -> int:
    """Return f, the number of binary places after the point.

    The error of a sum of M numbers is at most M / 2^(f + 1). One of 32 bits stays free, so that
    `from_fixed` can detect numbers that are not a sum of embeddings.
    """
    return 20 - (parties - 1).bit_length()


def to_fixed(rows: NDArray[np.float32], parties: int) -> Ints:
    """Round numbers within `BOUND` to multiples of 2^-f; return the multiples."""
    if rows.size and not max(rows.max(), -rows.min()) < BOUND:  # NaN fails too
        raise VflError(
            f"has embeddings beyond {BOUND:g}, the bound of masked numbers. Lower the learning "
            "rates, or set embedding-activation."
        )
    return np.rint(rows * np.float32(2 ** places(parties))).astype(np.int32)


def from_fixed(total: Ints, parties: int) -> NDArray[np.float32]:
    """Return the numbers of a sum, or raise `SumError` if so many embeddings have no such sum."""
    scale = 2 ** places(parties)
    most = int(parties * BOUND * scale)
    if total.size and not (total.max() <= most and total.min() >= -most):
        raise SumError
    return total.astype(np.float32) / np.float32(scale)
