"""A connection to the label holder's port: TLS and a WebSocket, without blocking.

`websockets.sync` reads a TLS socket in one thread while it writes it in another. Python 3.11 does
not make that safe. It also takes three threads a party, and 1.8 times the processor time.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from websockets.protocol import State
from websockets.server import ServerProtocol

from vfl_flower.config.errors import VflError
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.stream.frames import (
    FRAME,
    MUTE,
    RECORD,
    SILENT,
    Messages,
    with_protocols,
)

_TURN = 64  # most records that are read before others have their turn
_HEAD = 2**14  # most bytes before a valid token
_BACKLOG = 100  # most answers to pings that wait to be sent


def context_of(key: bytes, certificate: bytes) -> ssl.SSLContext:
    """Return the TLS context of a server. The key stays in memory."""
    context = with_protocols(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # a party does not resume TLS
    file = os.memfd_create("certificate")
    os.write(file, key + certificate)
    context.load_cert_chain(f"/proc/self/fd/{file}")
    os.close(file)
    return context


class Connection:
    """A connection: a stranger's until it shows a valid token, and then that of a ``link``.

    ``since`` is when it began, or began to end.
    """

    def __init__(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT))
        self.socket = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        self.protocol = ServerProtocol(max_size=(SMALL, FRAME), logger=MUTE)
        self.since = time.monotonic()
        self.link: Any = None
        self.is_secret = self.is_ended = False  # whether TLS has begun; whether this side ended it
        self.is_full = False  # whether the socket takes no more bytes now
        self._head = _HEAD
        self._messages = Messages(self.protocol)
        self._frames: Iterator[None] = iter(())  # of messages, as they are sent
        self._out: deque[memoryview] = deque()

    def read(self) -> Iterator[Any]:
        """Yield the request for a WebSocket, and then messages, as far as they are in."""
        for _ in range(_TURN):
            data = self.socket.recv(RECORD)
            self._head -= len(data)
            if not data or (self.link is None and self._head < 0):
                raise ConnectionError("the other side ended it, or sent much without a token")
            most = max(self.link.largest) if self.link else SMALL
            yield from self._messages.received(data, most)
            if len(data) < RECORD:  # most likely the last for now
                return

    def send(self, frame: bytes) -> None:
        """Send a message after all earlier ones, as fast as the other side reads."""
        self._frames = chain(self._frames, self._messages.frames(frame))
        self.write()

    def end(self) -> None:
        """End the WebSocket, after all messages are sent."""
        self.is_ended, self.link, self.since = True, None, time.monotonic()
        self.write()

    def write(self) -> None:
        """Send what the socket takes. The rest waits for the next call."""
        self._gather()
        if len(self._out) > _BACKLOG:
            raise VflError("pings, and read no answers")
        self.is_full = False
        while self._out or self._more():
            if not self._out[0]:
                raise ConnectionError("this side has ended it")
            try:
                self._out[0] = self._out[0][self.socket.send(self._out[0]) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.is_full = True
                return
            if not self._out[0]:
                self._out.popleft()

    def _more(self) -> bool:
        """Gather the next frame, or the last, if there is one."""
        is_open = self.protocol.state is State.OPEN
        if is_open and next(self._frames, self) is self and self.is_ended:
            self.protocol.send_close(1000)
        self._gather()
        return bool(self._out)

    def _gather(self) -> None:
        self._out += map(memoryview, self.protocol.data_to_send())
