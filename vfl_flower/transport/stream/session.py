"""A party's end of the stream: a session, over as many calls as it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue

import grpc
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from vfl_flower.config.checks import is_loopback
from vfl_flower.config.errors import VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.transport.flower_internals import from_bytes, to_bytes
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.node import simulated
from vfl_flower.transport.stream.frames import METHOD, NAME, OPTIONS, POLL, TOKEN, chunks, frames
from vfl_flower.transport.stream.listen import host_and_port
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder

log = logging.getLogger("flwr")

_FIRST_SECONDS = 10.0  # within which a party must first reach the label holder
_REFUSED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
_PATIENCE = 60.0  # seconds within which it must reach it again, after a stream has broken


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
    session = StreamEnd(app, context, order.token, largest)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", NAME)]
    # The minimum is also how long gRPC tries to connect.
    options += [("grpc.min_reconnect_backoff_ms", 5000), ("grpc.max_reconnect_backoff_ms", 5000)]
    options += [("grpc.initial_reconnect_backoff_ms", 500)]
    if is_loopback(host_and_port(order.address)[0]):
        options.append(("grpc.enable_http_proxy", 0))
    credentials = grpc.ssl_channel_credentials(order.certificate.encode())
    with grpc.secure_channel(order.address, credentials, options) as channel:
        cause = session.run(channel, order.address)
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
        self, app: ClientApp, context: Context, token: str, largest: Callable[[], int]
    ) -> None:
        self.app = app
        self.context = context
        self.token = token
        self.largest = largest
        self.connected = False  # whether any call has reached the label holder
        self.reached = False  # whether the last call has
        self.served = 0
        self.last: tuple[str, bytes] = "", b""  # id of the last message served, and its reply

    def run(self, channel: grpc.Channel, address: str) -> str:
        """Call, and again whenever a call breaks; return why it ended, if it failed."""
        deadline = time.monotonic() + _FIRST_SECONDS
        said = ""
        while True:
            self.reached = False
            try:
                if self._call(channel):
                    return ""
            except grpc.RpcError as error:
                cause = (
                    f"could not reach {address}, where stream-address and stream-ports send it: "
                    f"{' '.join((error.details() or '').split())}"
                )
                if error.code() in _REFUSED:
                    log.warning("The label holder at %s refused the stream.", address)
                    return f"was refused at {address}"
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

    def _call(self, channel: grpc.Channel) -> bool:
        """Make one call until it ends; return whether the label holder ended it."""
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        sent = (chunk for body in iter(outbox.get, None) for chunk in chunks(body))
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = method(sent, metadata=((TOKEN, self.token),))
        try:
            answer = dict(call.initial_metadata() or ())
            if TOKEN in answer:
                self.token = str(answer[TOKEN])
                self.reached = self.connected = True
            for body in frames(call, lambda: self.largest() + SMALL):
                message = from_bytes(body)
                if self._is_mine(message):
                    outbox.put(self._serve(message))
            return True
        finally:
            outbox.put(None)
            call.cancel()

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
            try:
                reply = self.app(message, self.context)
            except Exception as error:  # as Flower does: an error reply, not a crash
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                reply = Message(Error(code=code, reason=type(error).__name__), reply_to=message)
            self.served += 1
            try:
                body = to_bytes(reply)
            except VflError as error:
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                body = to_bytes(Message(Error(code=code, reason=str(error)), reply_to=message))
            self.last = message.metadata.message_id, body
        return self.last[1]
