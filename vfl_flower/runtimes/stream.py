"""Messages over a gRPC stream for each party, which one long-lived Flower message opens.

On SuperNodes every Flower message starts a process and both ends poll, which takes seconds. Here
Flower stays what starts, authenticates and ends a run (the control plane), and the exchanges go
through a stream (the data plane):

1. `StreamGrid`, at the label holder, listens with a key and certificate made for this run. To each
   party it sends a Flower message (`SessionOrder`) with the address, the certificate and a token.
2. The party (`serve`) connects outward, accepts that certificate only, and shows its token in the
   call's metadata. A token serves once; the answer to it holds the one to reconnect with.
3. Each message of the run is then a frame down the stream, its reply a frame up. What was not
   answered when a stream broke is sent again on the next; a party that has served it sends the
   same reply again. One message at most is in flight to a party, so nothing piles up.
4. The session ends when the label holder ends the call. The party then answers its Flower message,
   and so its SuperNode keeps its ``Context.state``.

A frame is a Flower message in Flower's own protobuf, in chunks if it is long.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple

import grpc
import psutil
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.party import state_file as party_file
from vfl_flower.records import (
    SessionEnd,
    SessionOrder,
    from_bytes,
    read_order,
    read_reply,
    to_bytes,
    to_message,
    to_reply,
)
from vfl_flower.runtimes.certificates import self_signed
from vfl_flower.runtimes.local import engine_of

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_METHOD = "/vfl_flower.Stream/Exchange"
_TOKEN = "vfl-token"  # of the call's metadata, and of the answer's
_NAME = "vfl-flower"  # whom the certificate names; that it is this very one is what counts
_CHUNK = 2**20  # bytes of a gRPC message, at most
_LONG = b"\0"  # begins no Flower message
_LARGEST = 2**31  # bytes of a frame, at most, as in protobuf
_PARTIES = 256  # streams at a time, at most
_FIRST_SECONDS = 10.0  # in which a party must reach the label holder for the first time
_PATIENCE = 60.0  # seconds in which it must do so again, after a stream has broken
_STARTING = 30.0  # seconds after which another is, if its node has not begun the session
_GRACE = 5.0  # seconds after which a party whose stream broke is sent another Flower message
_CUTS = 3  # times that a party may be cut for what it sends
_POLL = 0.5  # seconds between two looks for Flower's own messages
_WAIT = 0.2  # seconds that `pull_messages` waits for a reply
_CLOSING = 15.0  # seconds that the end of a run waits for the parties' states to be kept
_OPTIONS = [
    ("grpc.max_receive_message_length", _CHUNK),
    ("grpc.so_reuseport", 0),  # else two runs could listen on one port
    ("grpc.keepalive_time_ms", 10_000),  # notices a network that drops packets silently
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.lookahead_bytes", 2**22),  # a window of embeddings at once
    ("grpc.http2.max_frame_size", 2**22),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


# --- frames -------------------------------------------------------------------------------------


def chunks(body: bytes) -> Iterator[bytes]:
    """A frame as it is sent: whole, or if it is long its length and then pieces of it."""
    if len(body) <= _CHUNK:
        yield body
        return
    yield _LONG + len(body).to_bytes(8, "big")
    for start in range(0, len(body), _CHUNK):
        yield body[start : start + _CHUNK]


def frames(received: Iterable[bytes]) -> Iterator[bytes]:
    """The frames that chunks make up.

    Raises
    ------
    VflError
        If a frame is longer than it said, or than any may be.
    """
    pieces: list[bytes] = []
    missing = 0
    for chunk in received:
        if missing:
            pieces.append(chunk)
            missing -= len(chunk)
            if missing < 0 or not chunk:
                raise VflError("a frame of another length than it said")
            if not missing:
                yield b"".join(pieces)
                pieces = []
        elif chunk.startswith(_LONG):
            if len(chunk) != 9:
                raise VflError("a frame without its length")
            missing = int.from_bytes(chunk[1:], "big")
            if missing > _LARGEST:
                raise VflError(f"a frame of {missing} bytes, above the limit of {_LARGEST}")
        else:
            yield chunk
    if missing:
        raise VflError("a frame of another length than it said")


# --- the label holder's end ---------------------------------------------------------------------


class _InFlight(NamedTuple):
    """The message that awaits a party's reply."""

    key: str  # its id
    frame: bytes
    message: Message


class _Stream(NamedTuple):
    """One call of a party, and what is to go down it; None ends it."""

    link: _Link
    call: grpc.ServicerContext
    outbox: SimpleQueue[bytes | None]


@dataclass(eq=False)
class _Link:
    """The way to one party."""

    node: int
    in_flight: _InFlight | None = None
    stream: _Stream | None = None  # while there is one
    answered: bool = False  # whether that reply has come, and waits to be taken
    since: float = 0.0  # when the session began
    lost: float = 0.0  # when its last stream broke
    cuts: int = 0  # how often it was cut for what it carried
    # Flower messages that open a session and have not been answered: id -> the session's first
    # token; when the last was sent; and which of those sessions is the present one.
    openings: dict[str, str] = field(default_factory=dict)
    opened: float = 0.0
    used: str = ""


class StreamGrid(Grid):
    """A Flower Grid whose messages travel over streams; for all else it has another Grid.

    With ``transport="auto"``, once a party cannot reach the label holder, messages travel over that
    other Grid from then on, and a notice says so.

    Parameters
    ----------
    grid : the Grid of the ServerApp.
    config : says where parties connect to, and how long a session lasts.

    Raises
    ------
    ConfigError
        If no port of ``stream-ports`` is free.
    """

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self.engine = engine_of(grid)
        self.transport = "stream"
        self._grid = grid
        self._config = config
        self._run_id = grid.run.run_id
        self._lock = Lock()  # of links and tokens, which calls change from their own threads
        self._links: dict[int, _Link] = {}
        self._tokens: dict[str, tuple[_Link, str]] = {}  # which its opening gave, or the last call
        self._inbox: SimpleQueue[tuple[_Stream, bytes]] = SimpleQueue()
        self._replies: dict[str, Message] = {}
        self._sent_by_flower: dict[str, str] = {}  # id of the other Grid -> id of this one
        self._closing = False
        self._pushed = 0
        self._looked = 0.0
        key, self._certificate = self_signed(_NAME)
        self._calls = ThreadPoolExecutor(_PARTIES)
        self._server = grpc.server(self._calls, options=_OPTIONS, maximum_concurrent_rpcs=_PARTIES)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._exchange
        )
        service, method = _METHOD[1:].split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        credentials = grpc.ssl_server_credentials([(key, self._certificate)])
        self._address = _listen(self._server, credentials, config)

    def __enter__(self) -> StreamGrid:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closing = True
            for link in self._links.values():
                self._end(link)
        deadline = time.monotonic() + _CLOSING
        try:
            while any(link.used for link in self._links.values()) and time.monotonic() < deadline:
                self._ended_sessions()
                time.sleep(_POLL / 2)
        finally:
            self._server.stop(grace=1).wait()
            self._calls.shutdown(wait=False)

    # What Flower does for this Grid.

    def get_node_ids(self) -> Iterable[int]:
        """Node ids, by Flower."""
        return self._grid.get_node_ids()

    def set_run(self, run: Any) -> None:
        """Tell the other Grid of its run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run, by Flower."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message, by Flower's older interface."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    # Messages.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message down its party's stream, which is opened if there is none.

        As many ids as messages; fewer, where one is too large.
        """
        if self.transport == "messages":
            return self._grid.push_messages(messages)
        ids = []
        for message in messages:
            self._pushed += 1
            key = f"stream-{self._pushed}"
            message.metadata.__dict__["_message_id"] = key
            try:
                body = to_bytes(message)
            except VflError:
                break
            ids.append(key)
            with self._lock:
                node = message.metadata.dst_node_id
                link = self._links.setdefault(node, _Link(node))
                if time.monotonic() > link.since + self._config.session_seconds:
                    for idle in self._links.values():  # their pauses are to coincide
                        if not idle.in_flight:
                            self._end(idle)
                link.in_flight, link.answered = _InFlight(key, body, message), False
                if link.stream:
                    link.stream.outbox.put(body)
        self._look(at_once=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are in, after waiting a little for one."""
        wanted = set(message_ids)
        if self.transport == "stream" and wanted.isdisjoint(self._replies):
            self._receive()
        found = [self._replies.pop(key) for key in wanted & self._replies.keys()]
        if found:
            return found
        if self.transport == "stream":
            self._look()
            return []
        return self._pull_over_flower(wanted)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, and pull every reply, for ``timeout`` seconds at most."""
        waiting = set(self.push_messages(messages))
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        replies: list[Message] = []
        while waiting and time.monotonic() < deadline:
            replies += self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
        return replies

    # Sessions.

    def _look(self, at_once: bool = False) -> None:
        """Where a message waits for a stream: see what became of the session, and open one."""
        with self._lock:
            waiting = [link for link in self._links.values() if link.in_flight and not link.stream]
        if not waiting or (not at_once and time.monotonic() < self._looked + _POLL):
            return
        self._looked = time.monotonic()
        for link, reply in self._ended_sessions():
            try:
                end = read_reply(reply, SessionEnd)
            except VflError as error:  # of Flower, or of a party that runs something else
                if link.since:  # it did connect before: its node may come back
                    link.lost = time.monotonic()
                else:
                    self._answer_with_error(link, str(error).removeprefix("failed: "))
                continue
            if link.since:  # a cut that met the session's beginning, or outlasted its patience
                link.lost = time.monotonic() if end.cause else link.lost
            elif not end.connected and self._cannot_connect(link, end.cause):
                return
        if self.engine == "ray" and len(waiting) < len(self._links) and not at_once:
            actors = _actors()
            cause = f"waits for one of {actors} Ray actors, and {len(self._links)} would be needed"
            if actors < len(self._links) and self._cannot_connect(waiting[0], cause):
                return
        for link in waiting:
            now = time.monotonic()
            with self._lock:
                # Another session is under way, unless the node that took it has died since.
                begins = set(link.openings.values()) - {link.used}
                begins = begins if now < link.opened + _STARTING else set()
                needed = link.in_flight and not link.stream and not begins
            # One whose stream has just broken may yet reconnect by itself.
            if needed and now > link.lost + _GRACE:
                self._open(link)

    def _cannot_connect(self, link: _Link, cause: str) -> bool:
        """Go on over the other Grid, or give that message up; whether the former."""
        if self._config.transport == "auto":
            self._fall_back(cause)
            return True
        self._answer_with_error(link, cause)
        return False

    def _ended_sessions(self) -> list[tuple[_Link, Message]]:
        """Links whose Flower message has been answered, and the answers."""
        with self._lock:
            links = [link for link in self._links.values() if not link.stream]
            owners = {key: link for link in links for key in link.openings}
        replies = list(self._grid.pull_messages(list(owners))) if owners else []
        with self._lock:
            for reply in replies:
                link = owners[reply.metadata.reply_to_message_id]
                ended = link.openings.pop(reply.metadata.reply_to_message_id, "")
                link.used = "" if link.used == ended else link.used
                self._revoke(ended)
        return [(owners[reply.metadata.reply_to_message_id], reply) for reply in replies]

    def _open(self, link: _Link) -> None:
        token = secrets.token_hex(32)
        order = SessionOrder(
            address=self._address,
            certificate=self._certificate.decode(),
            token=token,
            keep=self.engine == "supernodes",
        )
        seconds = self._config.session_seconds + self._config.party_timeout
        with self._lock:  # the party may be quick to show its token
            self._tokens[token] = link, token
        (key,) = self._push_over_flower([to_message(order, link.node, ttl=2 * seconds)])
        with self._lock:
            link.openings[key] = token
            link.opened = time.monotonic()

    def _revoke(self, opening: str) -> None:
        """No token of this session serves any more."""
        self._tokens = {token: each for token, each in self._tokens.items() if each[1] != opening}

    def _push_over_flower(self, messages: list[Message]) -> list[str]:
        keys = list(self._grid.push_messages(messages))
        if len(keys) < len(messages) or None in keys:
            raise ConfigError("Flower did not take a message; its SuperLink's log may say why.")
        return keys

    def _fall_back(self, cause: str) -> None:
        """Hand over to the other Grid, with all that has not been answered."""
        self._receive(0)
        notice.warning("A party %s. Messages travel over Flower now, not over streams.", cause)
        with self._lock:
            self.transport = "messages"
            for link in self._links.values():
                self._end(link)
            waiting = [link.in_flight for link in self._links.values() if link.in_flight]
        sent = self._push_over_flower([each.message for each in waiting])
        self._sent_by_flower = {
            theirs: each.key for theirs, each in zip(sent, waiting, strict=True)
        }

    def _pull_over_flower(self, wanted: set[str]) -> list[Message]:
        other = {mine: theirs for theirs, mine in self._sent_by_flower.items()}
        replies = list(self._grid.pull_messages([other.get(key, key) for key in wanted]))
        for reply in replies:
            theirs = reply.metadata.reply_to_message_id
            if theirs in self._sent_by_flower:
                mine = self._sent_by_flower.pop(theirs)
                reply.metadata.__dict__["_reply_to_message_id"] = mine
        return replies

    def _end(self, link: _Link) -> None:
        """End its stream, and with it the session of the party, once what is queued is sent."""
        if link.stream:
            link.stream.outbox.put(None)
            link.stream = None
        self._revoke(link.used)

    def _answer_with_error(self, link: _Link, reason: str) -> None:
        with self._lock:
            if not link.in_flight:
                return
            waiting, link.in_flight = link.in_flight, None
            error = Error(code=ErrorCode.NODE_UNAVAILABLE, reason=reason)
            self._replies[waiting.key] = Message(error, reply_to=waiting.message)

    def _receive(self, wait: float = _WAIT) -> None:
        """Take the frames that are in, after waiting a little for one."""
        try:
            stream, body = self._inbox.get(timeout=wait)
            while True:
                stream.link.answered = False
                try:
                    self._take(stream.link, from_bytes(body))
                except VflError as error:
                    self._cut(stream, error)
                stream, body = self._inbox.get_nowait()
        except Empty:
            return

    def _take(self, link: _Link, reply: Message) -> None:
        said = reply.metadata
        if (said.run_id, said.src_node_id) != (self._run_id, link.node):
            log.warning(
                "Refused a message of run %d, node %d, on the stream of node %d of run %d.",
                *(said.run_id, said.src_node_id, link.node, self._run_id),
            )
        elif link.in_flight and said.reply_to_message_id == link.in_flight.key:
            self._replies[link.in_flight.key] = reply
            with self._lock:
                link.in_flight = None

    # A stream, in threads of the gRPC server.

    def _exchange(self, received: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        """One call: frames down, while a thread of its own reads those that come up."""
        stream = self._admit(call)
        Thread(target=self._read, args=(stream, received), daemon=True).start()
        while (body := stream.outbox.get()) is not None:
            yield from chunks(body)

    def _admit(self, call: grpc.ServicerContext) -> _Stream:
        """Whose call it is, by its token, which serves this once; any other call is refused."""
        shown = dict(call.invocation_metadata()).get(_TOKEN)
        with self._lock:
            found = self._tokens.pop(shown, None) if isinstance(shown, str) else None
            if found is None:
                log.warning("Refused a stream from %s, which showed no valid token.", call.peer())
                call.abort(grpc.StatusCode.UNAUTHENTICATED, "this token does not serve")
            assert found is not None  # `abort` raises
            link, opening = found
            stream = _Stream(link, call, SimpleQueue())
            self._end(link)  # of two streams of one party, the later counts
            if opening != link.used:
                if link.used:  # it has lost that session; nobody will answer
                    link.openings = {k: o for k, o in link.openings.items() if o != link.used}
                link.used, link.since = opening, time.monotonic()
            if self.transport == "messages" or self._closing:  # too late: it ends at once
                stream.outbox.put(None)
                return stream
            again = secrets.token_hex(32)
            self._tokens[again] = link, opening
            link.stream = stream
            if link.in_flight:
                stream.outbox.put(link.in_flight.frame)
        if not call.add_callback(lambda: stream.outbox.put(None)):
            stream.outbox.put(None)
        call.send_initial_metadata(((_TOKEN, again),))
        return stream

    def _read(self, stream: _Stream, received: Iterator[bytes]) -> None:
        """Queue the frames that come up, one for each message, until the stream ends."""
        link = stream.link
        try:
            for body in frames(received):
                with self._lock:
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
        with self._lock:
            if link.stream is not stream:
                return  # it was ended here
            link.stream, link.lost = None, time.monotonic()
        log.warning("The stream of the party on node %d broke.", link.node)

    def _cut(self, stream: _Stream, error: VflError) -> None:
        """Refuse what a party sent; it may try again, a few times."""
        link = stream.link
        log.warning("Cut the stream of the party on node %d: it sent %s.", link.node, error)
        with self._lock:
            if link.stream is stream:
                link.stream, link.lost = None, time.monotonic()
            link.cuts += 1
        stream.call.cancel()
        if link.cuts > _CUTS:
            self._answer_with_error(link, f"sent {error}, again and again.")


def _actors() -> int:
    """Actors of the Ray simulation that this process runs."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += "ray::ClientAppActor" in process.name()
    return found


def _listen(server: grpc.Server, credentials: grpc.ServerCredentials, config: RunConfig) -> str:
    """Listen on the first port that is free; the address for the parties."""
    host, announced = config.stream_host_and_port
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    interface = "[::]" if ":" in host else "0.0.0.0"
    if here:
        interface = "[::1]" if ":" in host else "127.0.0.1"
    for port in config.stream_port_range:
        try:
            bound = server.add_secure_port(f"{interface}:{port}", credentials)
        except RuntimeError:
            continue
        if bound:
            return f"{f'[{host}]' if ':' in host else host}:{announced or bound}"
    raise ConfigError(
        f"No port of stream-ports = {config.stream_ports!r} is free on {interface}: name others."
    )


# --- the party's end ----------------------------------------------------------------------------


def serve(app: ClientApp, message: Message, context: Context) -> Message:
    """Serve the messages of a session, each by the ClientApp, until the label holder ends it.

    The party's state is then in its Context, as after any message, and in a file of its own.
    """
    order = read_order(message, SessionOrder)
    if order.keep:
        party_file.restore(context)
    session = _Session(app, context, order.token)
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", _NAME)]
    # The least is also how long gRPC tries to connect.
    options += [("grpc.min_reconnect_backoff_ms", 5000), ("grpc.max_reconnect_backoff_ms", 5000)]
    options += [("grpc.initial_reconnect_backoff_ms", 500)]
    credentials = grpc.ssl_channel_credentials(order.certificate.encode())
    with grpc.secure_channel(order.address, credentials, options) as channel:
        cause = session.run(channel, order.address)
    if order.keep:
        party_file.save(context)
    end = SessionEnd(connected=session.connected, served=session.served, cause=cause)
    return to_reply(end, message)


class _Session:
    """A party's end of one session, over as many calls as it takes."""

    def __init__(self, app: ClientApp, context: Context, token: str) -> None:
        self.app = app
        self.context = context
        self.token = token
        self.connected = False  # whether any call was
        self.reached = False  # whether the last call was
        self.served = 0
        self.last: tuple[str, bytes] = "", b""  # id of the last message served, and its reply

    def run(self, channel: grpc.Channel, address: str) -> str:
        """Call, and call again when the call breaks; why it ended, if not as it should."""
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
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    log.warning("The label holder at %s refused the stream.", address)
                    return f"was refused at {address}"
            except VflError as error:
                cause = f"was sent {error}"
            if self.reached:
                deadline, said = time.monotonic() + _PATIENCE, ""
            if cause != said:
                log.warning("The party %s; it tries on for a while.", cause)
            said = cause
            if time.monotonic() > deadline:
                return cause
            time.sleep(_POLL)

    def _call(self, channel: grpc.Channel) -> bool:
        """One call, until it ends; whether the label holder ended it."""
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        sent = (chunk for body in iter(outbox.get, None) for chunk in chunks(body))
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_METHOD)
        call = method(sent, metadata=((_TOKEN, self.token),))
        try:
            answer = dict(call.initial_metadata() or ())
            if _TOKEN in answer:
                self.token = str(answer[_TOKEN])
                self.reached = self.connected = True
            for body in frames(call):
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
        """The reply to a message; to one that comes again, the same."""
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
