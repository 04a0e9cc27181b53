"""A party's transcript of a run, for a rerun: the secret and the answer of each message.

Noise, directions and secret mini-batches of a message follow from its secret, which is random and
never leaves the party. The first model follows from the secret of message 0. A rerun takes the
secrets of the earlier run. It compares each order with that run's before it serves it, and each
answer before it sends it. So the label holder gets the messages that it has, and nothing new: a
rerun costs no epsilon. Two different answers with one secret would have the same noise, and their
difference would show embeddings. A refusal of an order depends on no data.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.provenance import changed, environment
from vfl_flower.transport.messages import Arrays, Turn
from vfl_flower.transport.wire import DIGEST, digest_of

_SECRET, _ENTRY = 16, 44  # bytes


class Transcript:
    """Secrets of messages, and digests of their answers, of a run and of the run that it repeats.

    ``entries`` has 44 bytes for each message: its number, its secret, its digest and its answer's
    digest. ``again`` has the entries to repeat. ``here`` and ``then`` are their environments.
    """

    def __init__(
        self, entries: bytes = b"", again: bytes = b"", here: bytes = b"", then: bytes = b""
    ) -> None:
        self.entries, self.again = bytearray(entries), again
        self.here, self.then = here or environment().encode(), then
        self.repeats = bool(again)  # whether the run repeats an earlier run
        self._then = {
            int.from_bytes(each[:4], "little"): each
            for each in (again[at : at + _ENTRY] for at in range(0, len(again), _ENTRY))
        }

    def secret(self, order: Turn | None = None) -> bytes:
        """Return the secret of an order, or of the first model: new, or the earlier run's."""
        exchange, secret = order.exchange if order else 0, secrets.token_bytes(_SECRET)
        then = self._of_then(exchange) if self.repeats else b""
        secret = then[4:20] or secret
        digest = digest_of(secret, order.arrays, order) if order else bytes(DIGEST)
        if then and then[20:32] != digest:
            raise VflError(
                f"was sent another message {exchange} than in the run to repeat. The label "
                "holder's data or environment has changed."
            )
        self.entries += exchange.to_bytes(4, "little") + secret + digest + bytes(DIGEST)
        return secret

    def answered(self, exchange: int, arrays: Arrays) -> None:
        """Note the answer to the last message, without masks, which are new in each run."""
        digest = digest_of(bytes(self.entries[4 - _ENTRY : 20 - _ENTRY]), arrays)
        if self.repeats and digest != self._of_then(exchange)[32:]:
            same = "Its versions and processor are the same, so its data have probably changed"
            raise VflError(
                f"would answer message {exchange} otherwise than in the run to repeat, and sends "
                f"nothing. {changed(self.then.decode()) or same}."
            )
        self.entries[-DIGEST:] = digest

    def _of_then(self, exchange: int) -> bytes:
        if exchange not in self._then:
            raise VflError(f"was asked for message {exchange}, which the run to repeat lacks.")
        return self._then[exchange]

    def state_dict(self) -> dict[str, NDArray[np.uint8]]:
        """Return the entries, as arrays."""
        parts = {"entries": bytes(self.entries), "again": self.again}
        parts |= {"here": self.here, "then": self.then}
        return {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}

    @classmethod
    def of(cls, state: Mapping[str, NDArray[np.uint8]]) -> Transcript:
        """Return what `state_dict` returned; an empty transcript for states of older versions."""
        return cls(**{name: array.tobytes() for name, array in state.items()})
