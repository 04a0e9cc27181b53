"""The label holder's end of the streams: its port, and a link to each party.

`grid.StreamGrid` asks parties to call, by Flower messages. This file serves their calls.
"""

from __future__ import annotations

import resource
import secrets
import selectors
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from threading import Event, RLock, Thread
from typing import NamedTuple

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from websockets.http11 import Request

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.config.options import RunningConfig
from vfl_flower.transport.flower_internals import from_bytes
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.nodes.certificates import self_signed
from vfl_flower.transport.nodes.strangers import Strangers
from vfl_flower.transport.stream.connections import Connection, context_of
from vfl_flower.transport.stream.frames import NAME, TOKEN
from vfl_flower.transport.stream.listen import listen

_CUTS = 3  # times that a party may send something invalid
_CONNECTIONS = 1024  # most connections at a time, strangers' included
_ACCEPTS = 16  # most connections that begin before others have their turn
_HANDSHAKE = 10.0  # seconds within which a stranger must show a token, or an ended stream close
_SWEEP = 5.0  # seconds between two looks for such strangers, and two pings of a party
_BUSY, _IDLE = 0.005, 0.05  # seconds between two turns while the run computes


class InFlight(NamedTuple):
    """The message that awaits a party's reply."""

    key: str  # its id
    frame: bytes
    message: Message


@dataclass(eq=False)
class Link:
    """The connection to one party, over all its streams."""

    node: int
    in_flight: InFlight | None = None
    # Most bytes of the reply to the message before the last, and to the last. After a stream has
    # broken, the earlier reply may come once more.
    largest: tuple[int, int] = SMALL, SMALL
    stream: Connection | None = None  # while there is one
    since: float = 0.0  # when the session began
    lost: float = 0.0  # when its last stream broke
    cuts: int = 0  # how often a stream was cut, since it carried something invalid
    # Unanswered Flower messages that open a session: id -> the session's first token. `opened` is
    # when the last was sent, and `used` the first token of the present session.
    openings: dict[str, str] = field(default_factory=dict)
    opened: float = 0.0
    used: str = ""


def _connections() -> int:
    """Return how many connections to accept: at most half of the open files.

    It raises the limit of open files as far as the system permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS names a limit that it does not keep
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else min(_CONNECTIONS, soft // 2)


class Streams:
    """Links to parties of a Flower run, and the port that serves their calls.

    The thread that waits for replies serves the connections, so a reply needs no switch of threads.
    Another thread serves them while the run computes. Raise `ConfigError` if no port is free.
    """

    def __init__(self, run_id: int, running: RunningConfig) -> None:
        self.lock = RLock()  # for all that follows: TLS may serve one thread at a time
        self.links: dict[int, Link] = {}
        self.replies: dict[str, Message] = {}  # id of the answered message -> its reply
        self.closed = False  # whether calls end at once
        self._run_id = run_id
        self._tokens: dict[str, tuple[Link, str]] = {}  # token -> link, first token of its session
        self._strangers = Strangers("Refused calls to the stream's port without a valid token")
        self._older = Strangers("Refused calls by gRPC, as parties of earlier versions make them")
        key, self.certificate = self_signed(NAME)
        self._context = context_of(key, self.certificate)
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._most = _connections()
        self._listener, self.address = listen(running, self._most)
        self._woken = False
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._swept = time.monotonic()
        self._stopped = Event()
        self._thread = Thread(target=self._attend, name="streams", daemon=True)

    def start(self) -> None:
        """Accept calls from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more calls, and release the port."""
        self._stopped.set()
        if self._thread.ident:
            self._thread.join()
        until = time.monotonic() + 1  # for parties to read that their streams have ended
        while any(each.is_ended for each in self._connections) and time.monotonic() < until:
            self._turn(_IDLE)
        for connection in [*self._connections]:
            self._drop(connection)
        self._listener.close()
        self._selector.close()
        self._strangers.tell()
        self._older.tell()

    def put(self, key: str, frame: bytes, message: Message, largest: int) -> None:
        """Send a message down its party's stream, once there is one, for a reply of ``largest``
        bytes.
        """
        node = message.metadata.dst_node_id
        with self.lock:
            link = self.links.setdefault(node, Link(node))
            link.in_flight = InFlight(key, frame, message)
            link.largest = link.largest[1], largest + SMALL  # and the rest of a frame
            if link.stream:
                self._try(link.stream, partial(link.stream.send, frame))

    def receive(self, wanted: Collection[str], wait: float) -> None:
        """Serve the connections until a wanted reply is in, the time is over, or `wake`."""
        until = time.monotonic() + wait
        with self.lock:
            while self.replies.keys().isdisjoint(wanted) and not self._woken:
                left = until - time.monotonic()
                self._turn(max(0.0, min(left, _IDLE)))
                if left <= 0:
                    break
            self._woken = False

    def wake(self) -> None:
        """End a `receive` of another thread."""
        self._woken = True

    def answer_with_error(self, link: Link, reason: str) -> None:
        """Give up a link's message: answer it with an error."""
        with self.lock:
            if not link.in_flight:
                return
            waiting, link.in_flight = link.in_flight, None
            error = Error(code=ErrorCode.NODE_UNAVAILABLE, reason=reason)
            self.replies[waiting.key] = Message(error, reply_to=waiting.message)

    # The caller holds the lock.

    def admit_by(self, token: str, link: Link) -> None:
        """Accept the calls of a new session; this is its first token."""
        self._tokens[token] = link, token

    def end(self, link: Link) -> None:
        """End the stream and the session of a party, once its messages are sent."""
        if stream := link.stream:
            link.stream = None
            self._try(stream, stream.end)
        self.revoke(link.used)

    def revoke(self, opening: str) -> None:
        """Revoke all tokens of a session."""
        self._tokens = {token: each for token, each in self._tokens.items() if each[1] != opening}

    # Connections.

    def _attend(self) -> None:
        """Serve the connections while nobody waits for a reply."""
        pause = _IDLE
        while not self._stopped.wait(pause):
            if self.lock.acquire(blocking=False):
                try:
                    pause = _BUSY if self._turn(0.0) else _IDLE
                finally:
                    self.lock.release()

    def _turn(self, wait: float) -> bool:
        """Serve what is ready, after a wait for the first; return whether anything was."""
        ready = self._selector.select(wait)
        for key, _ in ready:
            if key.data:
                self._try(key.data, partial(self._serve, key.data))
            else:
                self._accept()
        if time.monotonic() > self._swept + _SWEEP:
            self._sweep()
        return bool(ready)

    def _accept(self) -> None:
        """Accept connections. If there are too many, the oldest of a stranger makes room."""
        for _ in range(_ACCEPTS):
            try:
                accepted = self._listener.accept()[0]
                connection = Connection(accepted, self._context)
            except OSError:  # there is none, it has gone, or too many files are open
                return
            self._connections[connection] = None
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            if len(self._connections) > self._most:
                self._drop(next(each for each in self._connections if each.link is None))

    def _try(self, connection: Connection, action: Callable[[], None]) -> None:
        """Act on a connection, which may break, and wait for what its socket has to do next."""
        try:
            action()
        except Exception as error:  # whatever one has sent, the others go on
            self._drop(connection, error if isinstance(error, VflError) else None)
        if connection in self._connections:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * connection.is_full
            self._selector.modify(connection.socket, events, connection)

    def _serve(self, connection: Connection) -> None:
        with suppress(BlockingIOError):
            for event in connection.read():
                if isinstance(event, Request):
                    self._admit(connection, event)
                elif event == "h2":
                    self._older.refused()
                    raise ConnectionError("a party of an earlier version")
                elif connection.link and connection.link.in_flight:
                    self._take(connection.link, from_bytes(event))
        connection.write()

    def _sweep(self) -> None:
        """Drop strangers that take too long, and ping parties: proxies close silent connections."""
        self._swept = now = time.monotonic()
        for each in [*self._connections]:
            if each.link is None and now > each.since + _HANDSHAKE:
                self._drop(each)
            elif each.link and not each.is_full:
                each.protocol.send_ping(b"")
                self._try(each, each.write)

    def _drop(self, connection: Connection, error: VflError | None = None) -> None:
        """Close a connection; an error is what it sent, and a party has a few tries."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        link = connection.link
        if not link or link.stream is not connection:
            return
        link.stream, link.lost = None, time.monotonic()
        if error is None:
            log.warning("The stream of the party on node %d broke.", link.node)
            return
        log.warning("Cut the stream of the party on node %d: it sent %s.", link.node, error)
        link.cuts += 1
        if link.cuts > _CUTS:
            self.answer_with_error(link, f"sent {error}, again and again.")

    # Calls of parties.

    def _admit(self, connection: Connection, request: Request) -> None:
        """Accept a call as its party's stream by its token, which serves once; else refuse it."""
        protocol = connection.protocol
        response = protocol.accept(request)
        shown = request.headers.get_all(TOKEN)
        is_call = response.status_code == HTTPStatus.SWITCHING_PROTOCOLS and len(shown) == 1
        found = self._tokens.pop(shown[0], None) if is_call else None
        if found is None:
            self._strangers.refused()
            protocol.send_response(protocol.reject(HTTPStatus.UNAUTHORIZED, ""))
            return
        link, opening = found
        if link.stream:  # of two streams of one party, the later counts
            earlier, link.stream = link.stream, None
            self._drop(earlier)
        self.revoke(link.used)
        if opening != link.used:
            if link.used:  # it has lost that session; nobody will answer
                link.openings = {k: o for k, o in link.openings.items() if o != link.used}
            link.used, link.since = opening, time.monotonic()
        response.headers[TOKEN] = again = secrets.token_hex(32)
        protocol.send_response(response)
        if self.closed:  # too late: it ends at once
            connection.end()
            return
        self._tokens[again] = link, opening
        link.stream, connection.link = connection, link
        if link.in_flight:
            connection.send(link.in_flight.frame)

    def _take(self, link: Link, reply: Message) -> None:
        said = reply.metadata
        if (said.run_id, said.src_node_id) != (self._run_id, link.node):
            log.warning(
                "Refused a message of run %d, node %d, on the stream of node %d of run %d.",
                *(said.run_id, said.src_node_id, link.node, self._run_id),
            )
        elif link.in_flight and said.reply_to_message_id == link.in_flight.key:
            self.replies[link.in_flight.key] = reply
            link.in_flight = None
