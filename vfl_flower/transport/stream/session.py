"""A party's end of the stream: a session, over as many calls as it takes."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidProxy, WebSocketException
from websockets.http11 import Response
from websockets.proxy import parse_proxy
from websockets.sync.client import connect_http_proxy
from websockets.sync.utils import Deadline
from websockets.uri import parse_uri

from vfl_flower.config.checks import is_loopback, proxy_of
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.transport.flower_internals import from_bytes, to_bytes
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.node import simulated
from vfl_flower.transport.stream.frames import (
    CHUNK,
    FRAME,
    MUTE,
    NAME,
    POLL,
    SILENT,
    TOKEN,
    Sealed,
    with_protocols,
)
from vfl_flower.transport.stream.listen import host_and_port
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder

_FIRST_SECONDS = 10.0  # within which a party must first reach the label holder
_CALL_SECONDS = 5.0  # within which a call must begin
_PATIENCE = 60.0  # seconds within which it must reach it again, after a stream has broken


class _RefusedError(VflError):
    """The label holder serves no call of this session."""


def serve(
    app: ClientApp, order: SessionOrder, context: Context, largest: Callable[[], int]
) -> SessionEnd:
    """Serve a session by the ClientApp, until the label holder ends it.

    The party's state is then in its Context, as after any message. A party connects only to hosts
    that its own node configuration permits.
    """
    if not simulated(context) and not _allowed(order.address, context):
        cause = _refusal(order.address, context)
        log.warning("The party %s.", cause)
        return SessionEnd(connected=False, served=0, cause=cause)
    session = StreamEnd(app, context, order, largest)
    cause = session.run()
    return SessionEnd(connected=session.connected, served=session.served, cause=cause)


def _refusal(address: str, context: Context) -> str:
    """Say where a party may not connect to, and which side can change that."""
    host = host_and_port(address)[0]
    if is_loopback(host) and not any(is_loopback(each) for each, _ in _permitted(context)):
        return (
            f"may not connect to {host}, which is its own machine: set stream-address in the run "
            "configuration to the label holder's host"
        )
    party = context.node_config.get("partition-id")
    return (
        f"may not connect to {host}: if the label holder is there, add stream-address='{host}' to "
        f"party {party}'s node configuration"
    )


def _allowed(address: str, context: Context) -> bool:
    """Return whether ``stream-address`` in the node configuration permits this.

    Without ``stream-address``, it permits only this machine.
    """
    host, port = host_and_port(address)
    every = _permitted(context)
    if not every:
        return is_loopback(host)
    return any(host.lower() == h.lower() and p in (None, port) for h, p in every)


def _permitted(context: Context) -> list[tuple[str, int | None]]:
    """Return the hosts and ports of ``stream-address`` in the node configuration."""
    named = Rules.of(context.node_config).stream_address
    return [host_and_port(each.strip()) for each in named.split(",")] if named else []


class StreamEnd:
    """A party's end of one session, over as many calls as it takes."""

    def __init__(
        self, app: ClientApp, context: Context, order: SessionOrder, largest: Callable[[], int]
    ) -> None:
        self.app = app
        self.context = context
        self.address, self.token = order.address, order.token
        self.largest = largest
        self.connected = False  # whether any call has reached the label holder
        self.reached = False  # whether the last call has
        self.served = 0
        self.last: tuple[str, bytes] = "", b""  # id of the last message served, and its reply
        self._trust = with_protocols(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self._trust.load_verify_locations(cadata=order.certificate)
        self._socket: Any = None  # of the present call
        self._sealed: Any = None

    def run(self) -> str:
        """Call, and again whenever a call breaks; return why it ended, if it failed."""
        deadline = time.monotonic() + _FIRST_SECONDS
        said = ""
        while True:
            self.reached = False
            try:
                self._call()
                return ""
            except _RefusedError as error:
                log.warning("The party %s.", error)
                return str(error)
            except (OSError, WebSocketException) as error:
                text = "" if isinstance(error, InvalidProxy) else str(error)  # has its password
                cause = (
                    f"could not reach {self.address}, where stream-address and stream-ports send "
                    f"it: {' '.join(text.split()) or type(error).__name__}"
                )
            except VflError as error:
                cause = f"was sent {error}"
            if self.reached:
                deadline, said = time.monotonic() + _PATIENCE, ""
            if cause != said:
                log.warning("The party %s. It tries again for a while.", cause)
            said = cause
            if time.monotonic() > deadline:
                return cause
            time.sleep(POLL)

    def _call(self) -> None:
        """Make one call, and serve its messages until the label holder ends it.

        The party waits here for its next message, also while others are late.
        """
        uri, proxy = parse_uri(f"wss://{self.address}/"), proxy_of(host_and_port(self.address)[0])
        deadline = Deadline(_CALL_SECONDS)
        if proxy:
            plain = connect_http_proxy(parse_proxy(proxy), uri, deadline)
        else:
            plain = socket.create_connection((uri.host, uri.port), _CALL_SECONDS)
        protocol = ClientProtocol(uri, max_size=(SMALL, FRAME), logger=MUTE)
        largest = lambda: self.largest() + SMALL  # noqa: E731
        self._sealed = Sealed(protocol, self._trust, largest, server_hostname=NAME)
        with plain:
            plain.settimeout(_CALL_SECONDS)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket, data, deadline = plain, b"", Deadline(_CALL_SECONDS)
            while True:
                for event in self._sealed.opened(data):
                    if isinstance(event, Response):
                        self._accepted(event)
                    elif event is None or isinstance(event, str):
                        self._begin(event)
                    elif self._is_mine(message := from_bytes(event)):
                        for _ in self._sealed.frames(self._serve(message)):
                            self._flush()
                self._flush()
                if not self.reached:  # TLS and the answer take no longer in all
                    plain.settimeout(deadline.timeout())
                if protocol.close_rcvd or not (data := plain.recv(CHUNK)):
                    break
            if not protocol.close_rcvd or protocol.close_rcvd.code != 1000:
                raise ConnectionError("the connection broke")

    def _begin(self, spoken: str | None) -> None:
        if spoken == "h2":
            raise _RefusedError(
                f"called {self.address}, where the label holder's earlier version speaks gRPC: "
                "streams need the same version at both"
            )
        protocol = self._sealed.protocol
        request = protocol.connect()
        request.headers[TOKEN] = self.token
        protocol.send_request(request)

    def _accepted(self, response: Response) -> None:
        """Read the answer to a call: it has the token of the next one."""
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise _RefusedError(f"was refused at {self.address}")
        if self._sealed.protocol.handshake_exc:
            raise self._sealed.protocol.handshake_exc
        self._socket.settimeout(SILENT)
        self.token = [self.token, *response.headers.get_all(TOKEN)][-1]
        self.reached = self.connected = True

    def _flush(self) -> None:
        left = memoryview(self._sealed.to_send())
        while left:
            left = left[self._socket.send(left) :]

    def _is_mine(self, message: Message) -> bool:
        said = message.metadata
        mine = self.context.run_id, self.context.node_id
        if (said.run_id, said.dst_node_id) == mine:
            return True
        log.warning(
            "Refused a message to node %d of run %d, on the stream to node %d of run %d.",
            *(said.dst_node_id, said.run_id, mine[1], mine[0]),
        )
        return False

    def _serve(self, message: Message) -> bytes:
        """Return the reply to a message; the same reply, if the message comes again."""
        if message.metadata.message_id != self.last[0]:
            self.served += 1
            try:
                body = to_bytes(self.app(message, self.context))
            except Exception as error:  # as Flower does: an error reply, not a crash
                reason = error.outside if isinstance(error, VflError) else type(error).__name__
                failed = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)
                body = to_bytes(Message(failed, reply_to=message))
            self.last = message.metadata.message_id, body
        return self.last[1]
