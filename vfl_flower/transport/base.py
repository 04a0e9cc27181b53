"""What carries messages between label holder and parties.

A `Transport` is a Flower Grid that says what it is. Ours are `local.LocalGrid` and
`stream.grid.StreamGrid`; `transport_of` makes one of any other Grid.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from vfl_flower.config.errors import ConfigError
from vfl_flower.transport.flower_internals import is_simulation

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too


_FIRST_POLL = 0.001  # seconds between the first two looks for replies
POLL = 0.05
"""Seconds between two looks for replies, at most."""

Cost = Literal["free", "cheap", "dear"]


class Transport(Grid):
    """A Flower Grid, and what a strategy must know of it.

    A subclass has `get_node_ids`, `push_messages` and `pull_messages`, as any Grid.

    engine : the runtime, by the word for ``--engine``.
    medium : what carries messages: "none" (they are calls), "stream", or Flower's "messages".
    cost : of an exchange: nothing, less than a step, or seconds. It decides the default window.
    measures : whether what an exchange takes is not known, and decides windows that are not given.
    simulated : whether all parties are on this machine, so that its memory is theirs, and a
        baseline may join their columns.
    contexts : of the parties, by node, if they are in this process; else empty.
    calls : whether messages need not be records, since it takes their payloads
        (`transport.wire.Call`).
    clock : virtual seconds, where there are such.
    largest : bytes of the arrays of an answer, at most, by the kind of its order; `SMALL` for those
        that are not in it. It is set by who knows: rows and sizes follow from the run.
    """

    engine: str
    medium: str
    cost: Cost
    measures: bool = False
    simulated: bool = True
    contexts: Mapping[int, Context] = MappingProxyType({})
    calls: bool = False
    clock: float = 0.0
    largest: Mapping[str, int] = MappingProxyType({})

    def state_dict(self) -> list[Any] | None:
        """Return where the virtual clock stands, in JSON, if there is one; no message is out."""
        return None

    def load_state_dict(self, state: list[Any]) -> None:
        """Set the virtual clock to what `state_dict` said."""

    def expect(self, largest: Mapping[str, int]) -> None:
        """Take answers of so many bytes from now on, by the kind of their order."""
        self.largest = {**self.largest, **largest}

    def send(self, messages: Iterable[Message]) -> list[str]:
        """Push messages; their ids.

        Raises
        ------
        ConfigError
            If Flower refuses one.
        """
        messages = list(messages)
        keys = list(self.push_messages(messages))
        if len(keys) < len(messages) or None in keys:
            raise ConfigError(
                "Flower did not take a message, most likely for its size: use a smaller window."
            )
        return keys

    def receive(self, keys: Iterable[str], deadline: float) -> list[Message]:
        """At least one of the replies, or none at the deadline (in monotonic seconds)."""
        pause = _FIRST_POLL
        while True:
            messages = list(self.pull_messages(list(keys)))
            if messages or time.monotonic() > deadline:
                return messages
            time.sleep(pause)
            pause = min(1.5 * pause, POLL)

    # The rest of Flower's interface, which strategies do not use.

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, and pull every reply, for ``timeout`` seconds at most."""
        waiting = set(self.send(messages))
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        replies: list[Message] = []
        while waiting and time.monotonic() < deadline:
            replies += self.receive(waiting, deadline)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
        return replies

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message, by Flower's older interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @abstractmethod
    def get_node_ids(self) -> Iterable[int]:
        """Ids of the parties' nodes that are there."""


class FlowerTransport(Transport):
    """Flower's own messages: in its Ray simulation, or to SuperNodes."""

    medium = "messages"

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.simulated = is_simulation(grid)
        self.engine = "ray" if self.simulated else "supernodes"
        self.cost = "cheap" if self.simulated else "dear"

    def get_node_ids(self) -> Iterable[int]:
        """Node ids, by Flower."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """By Flower, each with an id that nobody can guess.

        An id is a digest of the message, and a SuperLink takes a reply to it from any registered
        node that names its receiver as the sender.
        """
        messages = list(messages)
        for message in messages:
            message.metadata.group_id = secrets.token_hex(16)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """By Flower."""
        return self.grid.pull_messages(message_ids)

    def set_run(self, run: Any) -> None:
        """Tell the Grid of its run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run, by Flower."""
        return self.grid.run


def transport_of(grid: Grid) -> Transport:
    """What carries the messages of a Grid: itself, or if it is Flower's, one around it."""
    return grid if isinstance(grid, Transport) else FlowerTransport(grid)
