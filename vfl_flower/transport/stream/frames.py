"""Messages over a WebSocket: Flower messages in Flower's own protobuf, in frames of 1 MiB at most.

Also the names and settings that both ends of a stream share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ssl import SSLContext, TLSVersion
from typing import Any

from websockets.frames import DATA_OPCODES, Frame
from websockets.protocol import Protocol

from vfl_flower.config.errors import VflError

TOKEN = "vfl-token"
"""HTTP header with the token of a call, and of its answer."""
NAME = "vfl-flower"
"""Name in the certificate. A party accepts one certificate, so any name serves."""
POLL = 0.5
"""Seconds between two looks for Flower's own messages, or two calls."""
SILENT = 40.0
"""Seconds after which a connection has broken, if the other machine confirms no bytes."""
FRAME = 2**20
"""Most bytes of a frame."""
RECORD = 2**14
"""Most bytes of a TLS record, which is read at once."""
MUTE = logging.Logger("websockets", logging.CRITICAL + 1)
"""The log of `websockets`. At its level debug it would show what messages hold."""


def with_protocols(context: SSLContext) -> SSLContext:
    """Return a TLS context that serves streams, and notices gRPC, which earlier versions use."""
    context.minimum_version = TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1", "h2"])  # gRPC takes the second
    return context


class Messages:
    """Messages of a WebSocket, from bytes of its connection, and to bytes for it."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._begun = bytearray()  # a message without its last frame

    def received(self, data: bytes, largest: int) -> Iterator[Any]:
        """Yield handshakes and messages that end in these bytes.

        Refuse an invalid frame, and by its announced length one that makes a message too large.
        """
        protocol = self._protocol
        protocol.max_message_size = largest
        protocol.receive_data(data)
        for event in protocol.events_received():
            if not isinstance(event, Frame):
                yield event
            elif event.opcode in DATA_OPCODES and event.fin and not self._begun:
                yield event.data
            elif event.opcode in DATA_OPCODES:
                self._begun += event.data
                if event.fin:
                    body, self._begun = self._begun, bytearray()
                    yield body
        if protocol.parser_exc and not isinstance(protocol.parser_exc, EOFError):
            raise VflError(f"an invalid frame ({protocol.parser_exc})")

    def frames(self, body: bytes) -> Iterator[None]:
        """Hand the frames of a message to the protocol, one at a time."""
        view = memoryview(body)
        send: Any = self._protocol.send_binary
        for start in range(0, len(view), FRAME):
            send(view[start : start + FRAME], start + FRAME >= len(view))
            send = self._protocol.send_continuation
            yield
