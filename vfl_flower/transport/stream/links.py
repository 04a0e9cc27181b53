"""The label holder's end of the streams: a gRPC server, and a link to each party.

`grid.StreamGrid` asks parties to call, by Flower messages. This file serves their calls.
"""

from __future__ import annotations

import logging
import resource
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

import grpc
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from vfl_flower.config.errors import VflError
from vfl_flower.config.options import RunningConfig
from vfl_flower.transport.flower_internals import from_bytes
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.nodes.certificates import self_signed
from vfl_flower.transport.nodes.strangers import Strangers
from vfl_flower.transport.stream.frames import METHOD, NAME, OPTIONS, TOKEN, chunks, frames
from vfl_flower.transport.stream.listen import listen

log = logging.getLogger("flwr")

_PARTIES = 256  # most streams at a time
_CUTS = 3  # times that a party may send something invalid
_CONNECTIONS = 1024  # most connections at a time, strangers' included
_OPTIONS = [
    *OPTIONS,
    ("grpc.max_concurrent_streams", 8),  # of a connection; a party needs one
    ("grpc.server_handshake_timeout_ms", 10_000),  # for strangers that connect and say nothing
    ("grpc.max_connection_idle_ms", 30_000),  # for strangers that connect and do not call
]


class InFlight(NamedTuple):
    """The message that awaits a party's reply."""

    key: str  # its id
    frame: bytes
    message: Message


class Stream(NamedTuple):
    """One call of a party, and the queue of frames for it; None ends the call."""

    link: Link
    call: grpc.ServicerContext
    outbox: SimpleQueue[bytes | None]


@dataclass(eq=False)
class Link:
    """The connection to one party, over all its streams."""

    node: int
    in_flight: InFlight | None = None
    # Most bytes of the reply to the message before the last, and to the last. After a stream has
    # broken, the earlier reply may come once more.
    largest: tuple[int, int] = SMALL, SMALL
    stream: Stream | None = None  # while there is one
    answered: bool = False  # whether the reply has come, and waits in the inbox
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


class Streams(grpc.GenericRpcHandler):
    """Links to parties of a Flower run, and the gRPC server that serves their calls.

    Raise `ConfigError` if no port of ``stream-ports`` is free.
    """

    def __init__(self, run_id: int, running: RunningConfig) -> None:
        self.lock = Lock()  # for links and tokens: calls change them from their own threads
        self.links: dict[int, Link] = {}
        self.replies: dict[str, Message] = {}  # id of the answered message -> its reply
        self.closed = False  # whether calls end at once
        self._run_id = run_id
        self._tokens: dict[str, tuple[Link, str]] = {}  # token -> link, first token of its session
        self._inbox: SimpleQueue[tuple[Stream, bytes] | None] = SimpleQueue()
        self._strangers = Strangers("Refused calls to the stream's port without a valid token")
        key, self.certificate = self_signed(NAME)
        self._calls = ThreadPoolExecutor(_PARTIES)
        connections = "grpc.max_allowed_incoming_connections", _connections()
        self._server = grpc.server(
            self._calls,
            handlers=[self],
            options=[*_OPTIONS, connections],
            maximum_concurrent_rpcs=_PARTIES,
        )
        credentials = grpc.ssl_server_credentials([(key, self.certificate)])
        self.address = listen(self._server, credentials, running)

    def start(self) -> None:
        """Accept calls from now on."""
        self._server.start()

    def stop(self) -> None:
        """Accept no more calls, and release the port."""
        self._server.stop(grace=1).wait()
        self._strangers.tell()
        self._calls.shutdown(wait=False)

    def put(self, key: str, frame: bytes, message: Message, largest: int) -> None:
        """Send a message down its party's stream, once there is one, for a reply of ``largest``
        bytes.
        """
        node = message.metadata.dst_node_id
        with self.lock:
            link = self.links.setdefault(node, Link(node))
            link.in_flight, link.answered = InFlight(key, frame, message), False
            link.largest = link.largest[1], largest + SMALL  # and the rest of a frame
            if link.stream:
                link.stream.outbox.put(frame)

    def receive(self, wait: float) -> None:
        """Read the frames that are in, after a short wait for one."""
        try:
            found = self._inbox.get(timeout=wait)
            while True:
                if found:
                    self._read_frame(*found)
                found = self._inbox.get_nowait()
        except Empty:
            return

    def wake(self) -> None:
        """End a `receive` of another thread."""
        self._inbox.put(None)

    def _read_frame(self, stream: Stream, body: bytes) -> None:
        stream.link.answered = False
        try:
            self._take(stream.link, from_bytes(body))
        except VflError as error:
            self._cut(stream, error)

    def _take(self, link: Link, reply: Message) -> None:
        said = reply.metadata
        if (said.run_id, said.src_node_id) != (self._run_id, link.node):
            log.warning(
                "Refused a message of run %d, node %d, on the stream of node %d of run %d.",
                *(said.run_id, said.src_node_id, link.node, self._run_id),
            )
        elif link.in_flight and said.reply_to_message_id == link.in_flight.key:
            self.replies[link.in_flight.key] = reply
            with self.lock:
                link.in_flight = None

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
        """End the stream and the session of a party, once its queue is sent."""
        if link.stream:
            link.stream.outbox.put(None)
            link.stream = None
        self.revoke(link.used)

    def revoke(self, opening: str) -> None:
        """Revoke all tokens of a session."""
        self._tokens = {token: each for token, each in self._tokens.items() if each[1] != opening}

    # Threads of the gRPC server run these.

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a call; None without a valid token, to save a thread.

        gRPC then answers that the method does not exist.
        """
        shown = dict(call.invocation_metadata).get(TOKEN)
        with self.lock:
            if call.method == METHOD and shown in self._tokens:
                return grpc.stream_stream_rpc_method_handler(self._exchange)
        self._strangers.refused()
        return None

    def _exchange(self, received: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve one call: yield frames, while another thread reads the party's frames."""
        stream = self._admit(call)
        Thread(target=self._read, args=(stream, received), daemon=True).start()
        while (body := stream.outbox.get()) is not None:
            yield from chunks(body)

    def _admit(self, call: grpc.ServicerContext) -> Stream:
        """Return the stream of a call by its token, which serves once; else refuse it."""
        shown = dict(call.invocation_metadata()).get(TOKEN)
        with self.lock:
            found = self._tokens.pop(shown, None) if isinstance(shown, str) else None
            if found is None:  # another call has just shown it
                self._strangers.refused()
                call.abort(grpc.StatusCode.UNAUTHENTICATED, "this token does not serve")
            assert found is not None  # `abort` raises
            link, opening = found
            stream = Stream(link, call, SimpleQueue())
            self.end(link)  # of two streams of one party, the later counts
            if opening != link.used:
                if link.used:  # it has lost that session; nobody will answer
                    link.openings = {k: o for k, o in link.openings.items() if o != link.used}
                link.used, link.since = opening, time.monotonic()
            if self.closed:  # too late: it ends at once
                stream.outbox.put(None)
                return stream
            again = secrets.token_hex(32)
            self._tokens[again] = link, opening
            link.stream = stream
            if link.in_flight:
                stream.outbox.put(link.in_flight.frame)
        if not call.add_callback(lambda: stream.outbox.put(None)):
            stream.outbox.put(None)
        call.send_initial_metadata(((TOKEN, again),))
        return stream

    def _read(self, stream: Stream, received: Iterator[bytes]) -> None:
        """Queue the party's frames, one for each message, until the stream ends."""
        link = stream.link
        try:
            for body in frames(received, lambda: max(link.largest)):
                with self.lock:
                    wanted = link.stream is stream and link.in_flight and not link.answered
                    link.answered = link.answered or bool(wanted)
                if wanted:
                    self._inbox.put((stream, body))
        except VflError as error:
            self._cut(stream, error)
        except Exception as error:  # as gRPC ends the iterator of a call that is over
            log.debug("%s", error)
        finally:
            stream.outbox.put(None)
            stream.call.cancel()
        with self.lock:
            if link.stream is not stream:
                return  # it was ended here
            link.stream, link.lost = None, time.monotonic()
        log.warning("The stream of the party on node %d broke.", link.node)

    def _cut(self, stream: Stream, error: VflError) -> None:
        """Cut a stream that carried something invalid; the party has a few tries."""
        link = stream.link
        log.warning("Cut the stream of the party on node %d: it sent %s.", link.node, error)
        with self.lock:
            if link.stream is stream:
                link.stream, link.lost = None, time.monotonic()
            link.cuts += 1
        stream.call.cancel()
        if link.cuts > _CUTS:
            self.answer_with_error(link, f"sent {error}, again and again.")
