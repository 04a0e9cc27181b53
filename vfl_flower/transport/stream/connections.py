"""A connection to the label holder's port: TLS and a WebSocket, without blocking.

`websockets.sync` reads a TLS socket in one thread while it writes it in another. Python 3.11 does
not make that safe. It also takes three threads a party, and 1.8 times the processor time.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from cryptography.hazmat.primitives import serialization
from websockets.protocol import State
from websockets.server import ServerProtocol

from vfl_flower.config.errors import VflError
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.stream.frames import CHUNK, FRAME, MUTE, SILENT, Sealed, with_protocols

_TURN = 16  # most chunks that are read before others have their turn
_HEAD = 2**14  # most bytes before a valid token
_BACKLOG = FRAME + 2**17  # most bytes that wait to be sent: a frame, and answers to pings


def context_of(key: bytes, certificate: bytes) -> ssl.SSLContext:
    """Return the TLS context of a server. OpenSSL reads files alone: there the key is encrypted."""
    context = with_protocols(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # a party does not resume TLS
    password = secrets.token_bytes(32)
    encrypted = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(encrypted + certificate)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


class Connection:
    """A connection: a stranger's until it shows a valid token, and then that of a ``link``.

    ``since`` is when it began, or began to end.
    """

    def __init__(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # macOS has its own, of minutes
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT))
        self.socket = accepted
        self.protocol = ServerProtocol(max_size=(SMALL, FRAME), logger=MUTE)
        self._sealed = Sealed(self.protocol, context, self._largest, server_side=True)
        self.since = time.monotonic()
        self.link: Any = None
        self.is_ended = self.is_full = False  # by this side; so that it takes no more bytes now
        self._head = _HEAD
        self._frames: Iterator[None] = iter(())  # of messages, as they are sent
        self._out: deque[memoryview] = deque()

    def _largest(self) -> int:
        if self.is_ended:  # the party sends its reply before it reads that all is over
            return 0
        return max(self.link.largest) if self.link else SMALL

    def read(self) -> Iterator[Any]:
        """Yield what is in, as `Sealed.opened` does."""
        for _ in range(_TURN):
            data = self.socket.recv(CHUNK)
            self._head -= len(data)
            if not data or not (self.link or self.is_ended or self._head >= 0):
                raise ConnectionError("the other side ended it, or sent much without a token")
            yield from self._sealed.opened(data)
            if len(data) < CHUNK:  # most likely the last for now
                return

    def send(self, frame: bytes) -> None:
        """Send a message after all earlier ones, as fast as the other side reads."""
        self._frames = chain(self._frames, self._sealed.frames(frame))
        self.write()

    def end(self) -> None:
        """End the WebSocket, after all messages are sent."""
        self.is_ended, self.link, self.since = True, None, time.monotonic()
        self.write()

    def write(self) -> None:
        """Send what the socket takes. The rest waits for the next call."""
        self._gather()
        if sum(map(len, self._out)) > _BACKLOG:
            raise VflError("pings, and read no answers")
        self.is_full = False
        while self._out or self._more():
            try:
                self._out[0] = self._out[0][self.socket.send(self._out[0]) :]
            except BlockingIOError:
                self.is_full = True
                return
            if not self._out[0]:
                self._out.popleft()
        if self.protocol.eof_sent:
            raise ConnectionError("this side has ended it")

    def _more(self) -> bool:
        """Gather the next frame, or the last, if there is one."""
        is_open = self.protocol.state is State.OPEN
        if is_open and next(self._frames, self) is self and self.is_ended:
            self.protocol.send_close(1000)
        self._gather()
        return bool(self._out)

    def _gather(self) -> None:
        if data := self._sealed.to_send():
            self._out.append(memoryview(data))
