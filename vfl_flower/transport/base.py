"""What carries messages between label holder and parties, and asking parties over it.

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
from typing import Any, Literal, NamedTuple, TypeVar

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from vfl_flower.config.errors import BY_NODE, ConfigError, PartyError, VflError
from vfl_flower.config.options import RunningConfig
from vfl_flower.transport.flower_internals import is_simulation
from vfl_flower.transport.messages import SMALL, Introduction, Order, Payload
from vfl_flower.transport.wire import read_reply, to_message

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

P = TypeVar("P", bound=Payload)
I = TypeVar("I", bound=Introduction)  # noqa: E741

_SLEEPS = (0.001, 0.05)  # seconds between two looks for replies: the first, and the longest

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

    @property
    def timing(self) -> list[Any] | None:
        """Where the virtual clock stands, when no message is in flight."""
        return None

    def go_on_from(self, timing: list[Any]) -> None:
        """Set the virtual clock to what `timing` said."""

    def expect(self, largest: Mapping[str, int]) -> None:
        """Take answers of so many bytes from now on, by the kind of their order."""
        self.largest = {**self.largest, **largest}

    def most_bytes(self, kind: str) -> int:
        """Bytes of the arrays of an answer to this kind of order, at most."""
        return self.largest.get(kind, SMALL)

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
        pause, longest = _SLEEPS
        while True:
            messages = list(self.pull_messages(list(keys)))
            if messages or time.monotonic() > deadline:
                return messages
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

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


# --- asking parties -----------------------------------------------------------------------------


def ask(
    transport: Transport,
    orders: Mapping[int, Order],
    kind: type[P],
    timeout: float,
    lenient: bool = False,
    deadline: float = 0.0,
) -> dict[int, P]:
    """Send an order to each node, and wait for the answers: node id -> answer.

    Raises
    ------
    PartyError, ConfigError
        If a party fails, or some do not answer within ``timeout`` seconds; unless that is
        ``lenient``, and a notice says who is left out.
    """
    deadline = deadline or time.monotonic() + timeout
    messages = [to_message(order, node, timeout, transport.calls) for node, order in orders.items()]
    keys = transport.send(messages)
    pending = dict(zip(keys, orders, strict=True))
    answers: dict[int, P] = {}
    while pending:
        messages = transport.receive(pending, deadline)
        if not messages and lenient:
            notice.warning("%d parties do not answer: they are left out.", len(pending))
            break
        if not messages:
            raise ConfigError(
                f"{len(pending)} nodes did not answer within {timeout:g} s: look at their logs."
            )
        for message in messages:
            node = pending.pop(message.metadata.reply_to_message_id, None)
            if node is None:  # it came twice
                continue
            most = transport.most_bytes(orders[node].kind)
            try:
                answers[node] = read_reply(message, kind, most)
            except VflError as error:
                log.info("Node %d %s", node, error)
                here = transport.contexts.get(node)
                who = f"Party {here.node_config['partition-id']}" if here else f"{BY_NODE}{node}"
                failed = PartyError(who, str(error))
                if not lenient:
                    raise failed from None
                notice.warning("%s It is left out.", failed)
    return answers


def ask_all(
    transport: Transport, order: Order, kind: type[I], running: RunningConfig
) -> dict[int, I]:
    """Send an order to every node as it comes, until there are as many as the first ones say.

    Returns node id -> answer, in the order of the parties.

    Raises
    ------
    PartyError, ConfigError
        If a party fails, too few nodes come, or they do not have the numbers 0 to M - 1.
    """
    found: dict[int, I] = {}
    wanted = max(1, running.parties)
    deadline = time.monotonic() + running.party_timeout
    waiting = False
    while len(found) < wanted:
        new = {node: order for node in transport.get_node_ids() if node not in found}
        found.update(ask(transport, new, kind, running.party_timeout, deadline=deadline))
        most = max(found.values(), key=lambda each: each.parties, default=None)
        wanted = max(wanted, most.parties if most else 0)
        if len(found) < wanted:
            if time.monotonic() > deadline:
                said = f", of which party {most.party} speaks" if most else ""
                raise ConfigError(
                    f"Only {len(found)} of the {wanted} nodes{said} came within "
                    f"{running.party_timeout:g} s: start the others, or correct the number."
                )
            if not waiting:
                log.info("Waiting for %d nodes; %d are here", wanted, len(found))
            waiting = True
            time.sleep(_SLEEPS[1])
    numbers = sorted(each.party for each in found.values())
    if numbers != list(range(len(found))):
        raise ConfigError(
            f"The nodes' partition-ids are {numbers}: give each SuperNode its own, from 0 to "
            f"{len(found) - 1}."
        )
    return dict(sorted(found.items(), key=lambda each: each[1].party))


class AvailableParties(NamedTuple):
    """Parties available for prediction by a model of so many parties, minus those excluded."""

    parties: int
    without: frozenset[int] = frozenset()


def ask_present(
    transport: Transport,
    order: Order,
    kind: type[I],
    running: RunningConfig,
    there: AvailableParties,
) -> dict[int, I]:
    """As `ask_all`, of the parties that are there, which may be none.

    Of one that fails, or does not come within the time-out, a notice says that it is left out.

    Raises
    ------
    ConfigError
        If a node is none of those parties.
    """
    asked: dict[int, str] = {}  # by node, its message's id
    found: dict[int, I] = {}
    failed = 0
    deadline = time.monotonic() + running.party_timeout
    while True:
        new = [node for node in transport.get_node_ids() if node not in asked]
        messages = [to_message(order, n, running.party_timeout, transport.calls) for n in new]
        asked.update(zip(new, transport.send(messages), strict=True))
        pending = {key: node for node, key in asked.items() if key}
        pause = min(deadline, time.monotonic() + _SLEEPS[1])
        for message in transport.receive(pending, pause) if pending else ():
            node = pending.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                continue
            asked[node] = ""  # answered
            try:
                found[node] = read_reply(message, kind, transport.most_bytes(order.kind))
            except VflError as error:
                failed += 1
                failure = PartyError(f"{BY_NODE}{node}", str(error))
                notice.warning("%s It is left out.", failure)
        here = [each.party for each in found.values()]
        if any(each.parties != there.parties for each in found.values()) or (
            not set(here) <= set(range(there.parties)) or len(set(here)) < len(here)
        ):
            raise ConfigError(
                f"The nodes say that they are parties {sorted(here)}, where the model is of "
                f"{there.parties}: give each SuperNode its own partition-id, and num-partitions."
            )
        away = there.parties - len(found) - failed - len(there.without - set(here))
        if away <= 0:
            break
        if time.monotonic() > deadline:
            notice.warning("%d parties are not there: they are left out.", away)
            break
        if not pending:
            time.sleep(_SLEEPS[1])
    found = {node: each for node, each in found.items() if each.party not in there.without}
    return dict(sorted(found.items(), key=lambda each: each[1].party))
