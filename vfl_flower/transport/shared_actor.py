"""Virtual parties that share nodes: many parties on few actors of a Ray simulation.

`Hosts` is the label holder's end: it presents so many parties, and sends what is for those of one
node as one message over another transport, a stream or Flower's messages. `serve` is the node's
end: it has each order served by the ClientApp, alike turns together. The parties' states are in the
state of the node that is their host, each record named after its party.

Only where all parties are of one owner: on real nodes a party is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from vfl_flower.config.errors import OutOfStepError, VflError
from vfl_flower.transport.base import Cost, Transport
from vfl_flower.transport.flower_internals import SERVER_NODE, begin_task, set_message_id
from vfl_flower.transport.messages import SMALL, HostAnswer, HostOrder, Order
from vfl_flower.transport.wire import (
    pack_many,
    read_reply,
    to_failure,
    to_message,
    to_reply,
    unpack_many,
)

_FIRST = SERVER_NODE + 1  # node id of the first virtual party
_HEAD = 1000  # bytes of a message besides its arrays, at most by all reason


@runtime_checkable
class ServesTurns(Protocol):
    """A ClientApp that serves train messages of many parties at once, as it would one by one.

    fewest_turns : how many are worth it.
    """

    fewest_turns: int

    def serve_turns(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message]:
        """The answers, in their order."""


def answers(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    settle: Callable[[], None] = lambda: None,
) -> Iterable[Message]:
    """What parties in this process answer, one after the other, or turns of many at once.

    ``settle`` is called before those.
    """
    many = isinstance(app, ServesTurns) and len(messages) >= app.fewest_turns
    nodes = {message.metadata.dst_node_id for message in messages}
    turns = all(message.metadata.message_type == "train" for message in messages)
    if many and turns and len(nodes) == len(messages):
        settle()
        served: Any = app
        return list(served.serve_turns(messages, contexts))
    return (_answer(app, *each) for each in zip(messages, contexts, strict=True))


def _answer(app: ClientApp, message: Message, context: Context) -> Message:
    try:
        return app(message, context)
    except Exception as error:  # as Flower's runtimes do: an error reply, not a crash
        reason = f"{type(error).__name__}: {error}"
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        return Message(Error(code=code, reason=reason), reply_to=message)


# --- the label holder ---------------------------------------------------------------------------


class Hosts(Transport):
    """So many virtual parties, on the nodes of another transport.

    At most one message is in flight to a node. What comes for its parties meanwhile waits, and goes
    with the next.
    """

    calls = True

    def __init__(self, transport: Transport, parties: int) -> None:
        self.engine, self.observers = transport.engine, transport.observers
        self.parties = parties
        self._transport = transport
        self._hosts = list(transport.get_node_ids())
        self._waiting: dict[int, list[Message]] = {host: [] for host in self._hosts}
        self._in_flight: dict[str, tuple[int, list[Message], int]] = {}  # by the message to a host
        self._replies: dict[str, Message] = {}
        self._pushed = 0

    @property
    def medium(self) -> str:  # type: ignore[override]
        """As of the other transport."""
        return self._transport.medium

    @property
    def cost(self) -> Cost:  # type: ignore[override]
        """As of the other transport."""
        return self._transport.cost

    def get_node_ids(self) -> list[int]:
        """Ids of the virtual parties, in their order."""
        return [_FIRST + party for party in range(self.parties)]

    def set_run(self, run: Any) -> None:
        """Tell the other transport of its run."""
        self._transport.set_run(run)

    @property
    def run(self) -> Any:
        """The run, by Flower."""
        return self._transport.run

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send what is for the parties of each node, as soon as it has answered the last."""
        keys = []
        for message in messages:
            self._pushed += 1
            keys.append(f"host-{self._pushed}")
            set_message_id(message, keys[-1])
            party = message.metadata.dst_node_id - _FIRST
            host = self._hosts[party * len(self._hosts) // self.parties]
            self._waiting[host].append(message)
        self._send()
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are in."""
        for reply in self._transport.pull_messages(list(self._in_flight)):
            _, messages, most = self._in_flight.pop(reply.metadata.reply_to_message_id)
            for message, answer in zip(messages, self._read(reply, messages, most), strict=True):
                self._replies[message.metadata.message_id] = answer
        self._send()
        wanted = self._replies.keys() & set(message_ids)
        return [self._replies.pop(key) for key in sorted(wanted, key=_number)]

    def _send(self) -> None:
        busy = {host for host, *_ in self._in_flight.values()}
        batches = {h: each for h, each in self._waiting.items() if each and h not in busy}
        kinds = [m.metadata.message_type for each in batches.values() for m in each]
        if not kinds:
            return
        most = SMALL + sum(self.most_bytes(kind) + _HEAD for kind in kinds)
        self._transport.expect({HostOrder.kind: most})
        orders = []
        for host, messages in batches.items():
            order = HostOrder(parties=self.parties, arrays={"packed": pack_many(messages)})
            orders.append(to_message(order, host, messages[0].metadata.ttl))
        for key, (host, messages) in zip(
            self._transport.send(orders), batches.items(), strict=True
        ):
            self._in_flight[key] = host, messages, most
            self._waiting[host] = []

    def _read(self, reply: Message, messages: Sequence[Message], most: int) -> Iterator[Message]:
        """What each party answers; if their node failed, all of them have."""
        try:
            found = unpack_many(read_reply(reply, HostAnswer, most).arrays["packed"])
            if len(found) != len(messages):
                raise VflError("answered other messages than it was sent.")
        except VflError as error:
            found = [(0, VflError(str(error).removeprefix("failed: ")))] * len(messages)
        for message, (_, said) in zip(messages, found, strict=True):
            if isinstance(said, VflError):
                yield to_failure(str(said), message, isinstance(said, OutOfStepError))
            else:
                yield to_reply(said, message)


def _number(key: str) -> int:
    return int(key.removeprefix("host-"))


# --- the node -----------------------------------------------------------------------------------


def serve(app: ClientApp, context: Context, order: HostOrder) -> HostAnswer:
    """Have orders served, each by its party with the state that it has here."""
    begin_task()  # messages of this process name a sender
    messages, contexts = [], []
    for number, (node, payload) in enumerate(unpack_many(order.arrays["packed"])):
        if not isinstance(payload, Order):
            raise VflError("was sent what is no order.")
        message = to_message(payload, node, 3600.0, call=True)
        set_message_id(message, str(number))
        messages.append(message)
        contexts.append(_context_of(node - _FIRST, order.parties, context))
    replies = list(answers(app, messages, contexts))
    for each in contexts:
        _keep(each, context)
    if any(message.metadata.message_type != "train" for message in messages):
        _forget(contexts, context)
    return HostAnswer(arrays={"packed": pack_many(replies)})


_served: dict[tuple[int, int], Context] = {}
"""By run and party, those that this process has served."""


def _context_of(party: int, parties: int, host: Context) -> Context:
    """A virtual party's Context, with the state that its host has of it."""
    found = _served.get((host.run_id, party))
    prefix = f"{party}/"
    if found and found.state.get("scalars") is host.state.get(f"{prefix}scalars"):
        return found
    state = RecordDict(
        {
            name.removeprefix(prefix): record
            for name, record in host.state.items()
            if name.startswith(prefix)
        }
    )
    own: Mapping[str, Any] = {"partition-id": party, "num-partitions": parties}
    found = Context(
        run_id=host.run_id,
        node_id=_FIRST + party,
        node_config={**host.node_config, **own},
        state=state,
        run_config=host.run_config,
    )
    _served[host.run_id, party] = found
    return found


def _keep(context: Context, host: Context) -> None:
    """Have the state of a virtual party in that of its host."""
    prefix = f"{context.node_config['partition-id']}/"
    for name, record in context.state.items():
        if host.state.get(prefix + name) is not record:
            host.state[prefix + name] = record


def _forget(contexts: Sequence[Context], host: Context) -> None:
    """Keep nothing of these virtual parties that their states have no more."""
    states = {str(each.node_config["partition-id"]): each.state for each in contexts}
    for name in list(host.state):
        party, _, record = name.partition("/")
        if party in states and record not in states[party]:
            del host.state[name]
