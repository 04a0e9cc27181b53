"""Transports: they carry messages between label holder and parties.

A `Transport` is a Flower Grid that describes itself. This package has `local.LocalGrid`,
`stream.grid.StreamGrid` and `shared_actor.SharedActors`. `transport_of` wraps any other Grid.
"""

import secrets
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from threading import Event
from types import MappingProxyType
from typing import Any, Literal

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from vfl_flower.config.errors import ConfigError
from vfl_flower.transport.flower_internals import is_simulation, with_records

_FIRST_POLL = 0.001  # seconds between the first two looks for replies
POLL = 0.05  # most seconds between two looks for replies

Cost = Literal["free", "cheap", "dear"]


class Transport(Grid):
    """A Flower Grid that describes itself to a strategy.

    A subclass has `get_node_ids`, `push_messages` and `pull_messages`, as any Grid.

    engine : name of the runtime, as in ``--engine``.
    medium : carrier of messages: "none" (they are calls), "stream", or Flower's "messages".
    cost : cost of an exchange: nothing, less than a step, or seconds. It decides the default
        window.
    measures : whether the run measures the cost of an exchange, to choose the window.
    simulated : whether all parties are on this machine. They then share its memory, and a baseline
        may join their columns.
    contexts : node -> Context of each party in this process; else empty.
    calls : whether messages carry payloads instead of records (`transport.wire.Call`).
    clock : virtual seconds, if there are any.
    largest : kind of an order -> most bytes of the arrays of its answer. For a kind that is not in
        it, `SMALL` holds. The run sets it (`expect`), since rows and sizes follow from the run.
    parties : number of parties, if some party may not know it, else 0.
    left_out : sentences about parties that failed, or were not there, and are left out.
    numbers : node -> number of its party, for parties that have introduced themselves.
    silent : whether Flower's SuperLink has not answered for some seconds.
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
    parties: int = 0
    left_out: Sequence[str] = ()
    numbers: Mapping[int, int] = MappingProxyType({})
    silent: bool = False

    def state_dict(self) -> list[Any] | None:
        """Return the virtual clock in JSON, if there is one, while no message is out."""
        return None

    def load_state_dict(self, state: list[Any]) -> None:
        """Set the virtual clock to what `state_dict` returned."""

    def expect(self, largest: Mapping[str, int]) -> None:
        """Accept answers of so many bytes from now on, by the kind of their order."""
        self.largest = {**self.largest, **largest}

    def send(self, messages: Iterable[Message]) -> list[str]:
        """Push messages; return their ids. Raise `ConfigError` if Flower refuses one."""
        messages = list(messages)
        keys = list(self.push_messages(messages))
        if len(keys) < len(messages) or None in keys:
            raise ConfigError(
                "Flower did not take a message, most likely for its size: use a smaller window."
            )
        return keys

    def receive(self, keys: Iterable[str], deadline: float) -> list[Message]:
        """Return the replies after one is in, or none at the monotonic deadline."""
        pause = _FIRST_POLL
        while True:
            messages = list(self.pull_messages(list(keys)))
            if messages or time.monotonic() > deadline:
                return messages
            time.sleep(pause)
            pause = min(1.5 * pause, POLL)

    # A service uses these (`tasks.inference.serving`).

    def reaches(self, node: int) -> bool:
        """Return whether a message to this node can travel at once."""
        return True

    def wait(self, keys: Collection[str], seconds: float) -> list[Message]:
        """Return the replies that are in, after a wait for one, or for `wake`."""
        found = list(self.pull_messages(keys)) if keys else []
        if not found:
            self._woken.wait(seconds)
            self._woken.clear()
        return found

    def wake(self) -> None:
        """End a `wait` of another thread."""
        self._woken.set()

    @cached_property
    def _woken(self) -> Event:
        return Event()

    # Strategies do not use the rest of Flower's interface.

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push messages, and pull every reply, for at most ``timeout`` seconds."""
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
        """Return a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Any) -> None:
        """Do nothing: Flower tells its Grid the run."""

    @property
    def run(self) -> Any:
        """Flower's run."""
        raise NotImplementedError(f"{type(self).__name__} has no information about Flower's run.")

    @abstractmethod
    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the available nodes."""


class FlowerTransport(Transport):
    """Transport by Flower's own messages: in its Ray simulation, or to SuperNodes."""

    medium = "messages"

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.simulated = is_simulation(grid)
        self.engine = "ray" if self.simulated else "supernodes"
        self.cost = "cheap" if self.simulated else "dear"

    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's node ids."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages by Flower, each with an id that nobody can guess.

        Flower's id is a digest of the message. A SuperLink accepts a reply to it from any
        registered node that names the receiver as its sender.
        """
        messages = [with_records(message) for message in messages]
        for message in messages:
            message.metadata.group_id = secrets.token_hex(16)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies by Flower."""
        return self.grid.pull_messages(message_ids)

    @property
    def run(self) -> Any:
        """Flower's run."""
        return self.grid.run


def transport_of(grid: Grid) -> Transport:
    """Return the transport of a Grid: itself, or a transport around Flower's."""
    return grid if isinstance(grid, Transport) else FlowerTransport(grid)
