"""A Grid of streams, which parties open when a Flower message asks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from flwr.app import Message

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.transport.base import Transport
from vfl_flower.transport.flower_internals import (
    ray_actors,
    set_message_id,
    set_replied_to,
    to_bytes,
)
from vfl_flower.transport.messages import SMALL
from vfl_flower.transport.stream.frames import POLL
from vfl_flower.transport.stream.links import Link, Streams
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder
from vfl_flower.transport.wire import read_reply, said, to_message

_STARTING = 30.0  # seconds after which to send another Flower message, if no session has begun
_GRACE = 5.0  # seconds after a broken stream, in which the party may reconnect by itself
_WAIT = 0.2  # seconds that `pull_messages` waits for a reply
_CLOSING = 15.0  # seconds that the end of a run waits for the parties to save their states


class StreamGrid(Transport):
    """Carries messages over streams, and uses another transport, of Flower's, to open them.

    With ``transport="auto"``, a party may fail to reach the label holder. All messages then travel
    over the other transport, and a notice says so. Streams exist within the ``with`` block.
    """

    def __init__(self, transport: Transport, config: RunConfig, nonce: str = "") -> None:
        self.engine = transport.engine
        self.simulated = transport.simulated
        self.medium, self.cost = "stream", "cheap"
        self.measures = not self.simulated  # a simulation must be repeatable
        self.calls = True  # a frame is made from the payload itself
        self._transport = transport
        self._running = config.running
        self._nonce = nonce
        self._sent_by_flower: dict[str, str] = {}  # id of the other transport -> id of this one
        self._keys = map("stream-{}".format, count(1))
        self._looked = 0.0

    @property
    def silent(self) -> bool:  # type: ignore[override]
        """Whether Flower's SuperLink has not answered for some seconds."""
        return self._transport.silent

    def __enter__(self) -> StreamGrid:
        """Listen."""
        self._streams = Streams(self._transport.run.run_id, self._running)
        self._streams.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        with self._streams.lock:
            self._streams.closed = True
            for link in self._links:
                self._streams.end(link)
        # A run that a signal has ended has little time.
        waits = raised[1] is None or isinstance(raised[1], Exception)
        deadline = time.monotonic() + _CLOSING * waits
        try:
            while any(link.used for link in self._links) and time.monotonic() < deadline:
                if self.silent:
                    break
                self._ended_sessions()
                time.sleep(POLL / 2)
        except Exception as failure:  # after `flwr stop`, Flower refuses all calls
            log.warning("Parties were not seen to end their sessions: %s.", type(failure).__name__)
        finally:
            self._streams.stop()

    @property
    def _links(self) -> list[Link]:
        return list(self._streams.links.values())

    # The other transport answers these.

    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's node ids."""
        return self._transport.get_node_ids()

    def set_run(self, run: Any) -> None:
        """Set the run of the other transport."""
        self._transport.set_run(run)

    @property
    def run(self) -> Any:
        """Flower's run."""
        return self._transport.run

    # Messages.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message down its party's stream, and open missing streams.

        Returns an id for each message; fewer, if one is too large.
        """
        if self.medium == "messages":
            return self._transport.push_messages(messages)
        ids = []
        for message, key in zip(messages, self._keys, strict=False):
            set_message_id(message, key)
            try:
                body = to_bytes(message)
            except VflError:
                break
            ids.append(key)
            self._end_old_sessions(message.metadata.dst_node_id)
            most = self.largest.get(message.metadata.message_type, SMALL)
            self._streams.put(key, body, message, most)
        self._look(at_once=True)
        return ids

    def _end_old_sessions(self, node: int) -> None:
        """If this node's session is over, end all idle sessions, so that pauses coincide."""
        with self._streams.lock:
            link = self._streams.links.get(node)
            since = link.since if link else 0.0
            if time.monotonic() > since + self._running.session_seconds:
                for idle in self._links:
                    if not idle.in_flight:
                        self._streams.end(idle)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are in, after a short wait for one."""
        wanted = set(message_ids)
        if self.medium == "stream" or not wanted.isdisjoint(self._streams.replies):
            return self.wait(wanted, _WAIT)
        return self._pull_over_flower(wanted)

    # A service.

    def reaches(self, node: int) -> bool:
        """Return whether this node's party has a stream now."""
        link = self._streams.links.get(node)
        return link is not None and link.stream is not None

    def wait(self, keys: Collection[str], seconds: float) -> list[Message]:
        """Return the replies that are in, after a wait for one, or for `wake`."""
        wanted, replies = set(keys), self._streams.replies
        if wanted.isdisjoint(replies):
            self._streams.receive(wanted, seconds)
            self._look()
        return [replies.pop(key) for key in wanted & replies.keys()]

    def wake(self) -> None:
        """End a `wait` of another thread."""
        self._streams.wake()

    # Sessions.

    def _look(self, at_once: bool = False) -> None:
        """For each message that waits for a stream, look at its session, and open another."""
        with self._streams.lock:
            waiting = [link for link in self._links if link.in_flight and not link.stream]
        if not waiting or (not at_once and time.monotonic() < self._looked + POLL):
            return
        if self.silent:  # a call would wait without end
            return
        self._looked = time.monotonic()
        for link, reply in self._ended_sessions():
            try:
                end = read_reply(reply, SessionEnd, SMALL)
            except VflError as error:  # of Flower, or of a party that runs something else
                if link.since:  # it did connect before: its node may come back
                    link.lost = time.monotonic()
                else:
                    self._streams.answer_with_error(link, str(error).removeprefix("failed: "))
                continue
            if link.since:  # the stream broke early in the session, or for too long
                link.lost = time.monotonic() if end.cause else link.lost
            elif not end.connected and self._cannot_connect(link, said(end.cause)):
                return
        if self.engine == "ray" and len(waiting) < len(self._links) and not at_once:
            actors = ray_actors()
            cause = f"waits for one of {actors} Ray actors, and {len(self._links)} would be needed"
            if actors < len(self._links) and self._cannot_connect(waiting[0], cause):
                return
        self._open([link for link in waiting if self._needs_session(link)])

    def _needs_session(self, link: Link) -> bool:
        """Return whether a link's message waits for a session that nobody begins."""
        now = time.monotonic()
        with self._streams.lock:
            # Another session is under way, unless the node that took it has died since.
            begins = set(link.openings.values()) - {link.used}
            begins = begins if now < link.opened + _STARTING else set()
            needed = link.in_flight and not link.stream and not begins
        # A party whose stream has just broken may yet reconnect by itself.
        return bool(needed) and now > link.lost + _GRACE

    def _cannot_connect(self, link: Link, cause: str) -> bool:
        """Fall back on the other transport, or else give the message up; say which."""
        if self._running.transport == "auto":
            self._fall_back(cause)
            return True
        self._streams.answer_with_error(link, cause)
        return False

    def _ended_sessions(self) -> list[tuple[Link, Message]]:
        """Return links whose Flower message has been answered, with the answers."""
        with self._streams.lock:
            links = [link for link in self._links if not link.stream]
            owners = {key: link for link in links for key in link.openings}
        replies = list(self._transport.pull_messages(list(owners))) if owners else []
        with self._streams.lock:
            for reply in replies:
                link = owners[reply.metadata.reply_to_message_id]
                ended = link.openings.pop(reply.metadata.reply_to_message_id, "")
                link.used = "" if link.used == ended else link.used
                self._streams.revoke(ended)
        return [(owners[reply.metadata.reply_to_message_id], reply) for reply in replies]

    def _open(self, links: Sequence[Link]) -> None:
        """Ask parties to begin a session, all in one call."""
        order = partial(
            SessionOrder,
            address=self._streams.address,
            certificate=self._streams.certificate.decode(),
            keep=self.engine == "supernodes",
            nonce=self._nonce,
        )
        ttl = 2 * (self._running.session_seconds + self._running.party_timeout)
        tokens = {link: secrets.token_hex(32) for link in links}
        with self._streams.lock:  # a party may be quick to show its token
            for link, token in tokens.items():
                self._streams.admit_by(token, link)
        messages = [to_message(order(token=tokens[each]), each.node, ttl=ttl) for each in links]
        keys = self._transport.send(messages)
        with self._streams.lock:
            for key, link in zip(keys, links, strict=True):
                link.openings[key], link.opened = tokens[link], time.monotonic()

    def _fall_back(self, cause: str) -> None:
        """Hand all unanswered messages over to the other transport."""
        self._streams.receive((), 0)
        notice.warning("A party %s. Messages travel over Flower now, not over streams.", cause)
        with self._streams.lock:
            self.medium, self.cost = "messages", self._transport.cost
            self.measures, self.calls, self._streams.closed = False, False, True
            for link in self._links:
                self._streams.end(link)
            waiting = [link.in_flight for link in self._links if link.in_flight]
        sent = self._transport.send([each.message for each in waiting])
        self._sent_by_flower = {
            theirs: each.key for theirs, each in zip(sent, waiting, strict=True)
        }

    def _pull_over_flower(self, wanted: set[str]) -> list[Message]:
        other = {mine: theirs for theirs, mine in self._sent_by_flower.items()}
        replies = list(self._transport.pull_messages([other.get(key, key) for key in wanted]))
        for reply in replies:
            if mine := self._sent_by_flower.pop(reply.metadata.reply_to_message_id, ""):
                set_replied_to(reply, mine)
        return replies
