"""Messages over a WebSocket: Flower messages in Flower's own protobuf, in frames of 1 MiB at most.

Also the names and settings that both ends of a stream share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from ssl import MemoryBIO, SSLContext, SSLWantReadError, TLSVersion
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
CHUNK = 2**16
"""Most bytes that are read from a socket at once."""
_RECORD = 2**14  # most bytes of a TLS record, which OpenSSL reads at once
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
        self.protocol = protocol
        self._begun = bytearray()  # a message without its last frame

    def received(self, data: bytes, largest: int) -> Iterator[Any]:
        """Yield handshakes and messages that end in these bytes.

        Refuse an invalid frame, and by its announced length one that makes a message too large.
        """
        protocol = self.protocol
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
        send: Any = self.protocol.send_binary
        for start in range(0, len(view), FRAME):
            send(view[start : start + FRAME], start + FRAME >= len(view))
            send = self.protocol.send_continuation
            yield


class Sealed(Messages):
    """Messages of a WebSocket within TLS, from a socket's bytes, and to bytes for it.

    OpenSSL never reads the socket: it would go on for as long as one sends updates of keys. Nor
    does it write there: it would take a call for each record. ``largest`` returns the most bytes
    of a message that may come now, or 0 to ignore all that comes.
    """

    def __init__(
        self, protocol: Protocol, context: SSLContext, largest: Callable[[], int], **side: Any
    ) -> None:
        super().__init__(protocol)
        self.is_secret = False  # whether TLS has begun
        self._in, self._out = MemoryBIO(), MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, **side)
        self._largest = largest

    def opened(self, data: bytes) -> Iterator[Any]:
        """Yield TLS's protocol, the handshake of the WebSocket, and messages, as far as in."""
        self._in.write(data)
        with suppress(SSLWantReadError):
            if not self.is_secret:
                self._tls.do_handshake()
                self.is_secret = True
                yield self._tls.selected_alpn_protocol()
            while plain := self._tls.read(_RECORD):
                if largest := self._largest():
                    yield from self.received(plain, largest)
            raise ConnectionError("the other side has ended TLS")  # OpenSSL reads no more of it

    def to_send(self) -> bytes:
        """Return the bytes that the socket has to send."""
        for data in filter(None, self.protocol.data_to_send()):
            self._tls.write(data)
        return self._out.read()
