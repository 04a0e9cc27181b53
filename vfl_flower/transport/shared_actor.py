"""Shared actors: many parties on few nodes of a Ray simulation.

`SharedActors` is the label holder's end. It presents every party as a node. It sends the orders
for the parties of one actor as one message, over a stream or as a Flower message. `serve` is the
actor's end: the ClientApp serves each order, and similar turns together. The actor's own state
holds the states of its parties; the name of each record begins with its party.

Only a simulation has shared actors: on real nodes, each party is a node.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vfl_flower.config.errors import OutOfStepError, VflError
from vfl_flower.transport import wire
from vfl_flower.transport.base import Cost, Transport
from vfl_flower.transport.flower_internals import SERVER_NODE, begin_task, set_message_id
from vfl_flower.transport.local import serve_messages
from vfl_flower.transport.messages import SMALL, Order, Payload, Positive

_FIRST = SERVER_NODE + 1  # node id of the first party
_HEAD = 1000  # most bytes of a message besides its arrays


# --- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedActorOrder(Order):
    """Serve orders to some of the ``parties``. The answer is `SharedActorAnswer`.

    ``arrays["packed"]`` are the orders (`wire.pack_many`).
    """

    kind: ClassVar[str] = "query.host"
    names: ClassVar = ("packed",)
    parties: Positive


@dataclass(frozen=True, kw_only=True)
class SharedActorAnswer(Payload):
    """Answer to `SharedActorOrder`: the answers to its orders, in the same sequence."""

    names: ClassVar = ("packed",)


# --- the label holder ---------------------------------------------------------------------------


class SharedActors(Transport):
    """Transport to parties that share the nodes of another transport.

    At most one message is in flight to an actor. Further orders wait for the next message.
    """

    calls = True

    def __init__(self, transport: Transport, parties: int) -> None:
        self.engine, self.parties = transport.engine, parties
        self._transport = transport
        self._actors = list(transport.get_node_ids())
        self._waiting: dict[int, list[Message]] = {actor: [] for actor in self._actors}
        # Message to an actor -> the actor, the orders in it, and the most bytes of answers.
        self._in_flight: dict[str, tuple[int, list[Message], int]] = {}
        self._replies: dict[str, Message] = {}
        self._pushed = 0

    @property
    def medium(self) -> str:  # type: ignore[override]
        """Medium of the other transport."""
        return self._transport.medium

    @property
    def cost(self) -> Cost:  # type: ignore[override]
        """Cost of an exchange over the other transport."""
        return self._transport.cost

    def get_node_ids(self) -> list[int]:
        """Return the node ids of the parties, in their order."""
        return [_FIRST + party for party in range(self.parties)]

    @property
    def run(self) -> Any:
        """Flower's run of the other transport."""
        return self._transport.run

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send orders to each actor that is idle; keep the others until it has answered."""
        keys = []
        for message in messages:
            self._pushed += 1
            keys.append(f"actor-{self._pushed}")
            set_message_id(message, keys[-1])
            party = message.metadata.dst_node_id - _FIRST
            actor = self._actors[party * len(self._actors) // self.parties]
            self._waiting[actor].append(message)
        self._send()
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived."""
        for reply in self._transport.pull_messages(list(self._in_flight)):
            _, messages, most = self._in_flight.pop(reply.metadata.reply_to_message_id)
            for message, answer in zip(messages, self._read(reply, messages, most), strict=True):
                self._replies[message.metadata.message_id] = answer
        self._send()
        wanted = self._replies.keys() & set(message_ids)
        return [self._replies.pop(key) for key in sorted(wanted, key=_number)]

    def _send(self) -> None:
        busy = {actor for actor, *_ in self._in_flight.values()}
        batches = {at: each for at, each in self._waiting.items() if each and at not in busy}
        kinds = [m.metadata.message_type for each in batches.values() for m in each]
        if not kinds:
            return
        most = SMALL + sum(self.largest.get(kind, SMALL) + _HEAD for kind in kinds)
        self._transport.expect({SharedActorOrder.kind: most})
        orders = []
        for actor, messages in batches.items():
            order = SharedActorOrder(
                parties=self.parties, arrays={"packed": wire.pack_many(messages)}
            )
            ttl = messages[0].metadata.ttl
            orders.append(wire.to_message(order, actor, ttl, self._transport.calls))
        for key, (actor, messages) in zip(
            self._transport.send(orders), batches.items(), strict=True
        ):
            self._in_flight[key] = actor, messages, most
            self._waiting[actor] = []

    def _read(self, reply: Message, messages: Sequence[Message], most: int) -> Iterator[Message]:
        """Yield the answer of each party; if the actor failed, all its parties failed."""
        try:
            found = wire.unpack_many(
                wire.read_reply(reply, SharedActorAnswer, most).arrays["packed"]
            )
            if len(found) != len(messages):
                raise VflError("answered other messages than it was sent.")
        except VflError as error:
            found = [(0, VflError(str(error).removeprefix("failed: ")))] * len(messages)
        for message, (_, said) in zip(messages, found, strict=True):
            if isinstance(said, VflError):
                yield wire.to_failure(str(said), message, isinstance(said, OutOfStepError))
            else:
                yield wire.to_reply(said, message)


def _number(key: str) -> int:
    return int(key.removeprefix("actor-"))


# --- the actor ----------------------------------------------------------------------------------


def serve(
    app: ClientApp,
    context: Context,
    order: SharedActorOrder,
    hand_over: Callable[[Context], None],
) -> SharedActorAnswer:
    """Serve each order by its own party, with the state that the actor holds.

    ``hand_over`` writes the state of a party into its Context.
    """
    begin_task()  # messages of this process name a sender
    messages, contexts = [], []
    for number, (node, payload) in enumerate(wire.unpack_many(order.arrays["packed"])):
        if not isinstance(payload, Order):
            raise VflError("was sent a payload that is not an order.")
        message = wire.to_message(payload, node, 3600.0, call=True)
        set_message_id(message, str(number))
        messages.append(message)
        contexts.append(_context_of(node - _FIRST, order.parties, context))
    replies = list(serve_messages(app, messages, contexts))
    for each in contexts:
        hand_over(each)
        _keep(each, context)
    if any(message.metadata.message_type != "train" for message in messages):
        _forget(contexts, context)
    return SharedActorAnswer(arrays={"packed": wire.pack_many(replies)})


_served: dict[tuple[int, int], Context] = {}
"""(run, party) -> the Context of each party that this process has served."""


def _context_of(party: int, parties: int, actor: Context) -> Context:
    """Return the Context of a party, with the state that its actor holds."""
    found = _served.get((actor.run_id, party))
    prefix = f"{party}/"
    if found and found.state.get("scalars") is actor.state.get(f"{prefix}scalars"):
        return found
    state = RecordDict(
        {
            name.removeprefix(prefix): record
            for name, record in actor.state.items()
            if name.startswith(prefix)
        }
    )
    own: Mapping[str, Any] = {"partition-id": party, "num-partitions": parties}
    found = Context(
        run_id=actor.run_id,
        node_id=_FIRST + party,
        node_config={**actor.node_config, **own},
        state=state,
        run_config=actor.run_config,
    )
    _served[actor.run_id, party] = found
    return found


def _keep(context: Context, actor: Context) -> None:
    """Copy the records of a party's state into the state of its actor."""
    prefix = f"{context.node_config['partition-id']}/"
    for name, record in context.state.items():
        if actor.state.get(prefix + name) is not record:
            actor.state[prefix + name] = record


def _forget(contexts: Sequence[Context], actor: Context) -> None:
    """Delete the actor's records that are no longer in the states of these parties."""
    states = {str(each.node_config["partition-id"]): each.state for each in contexts}
    for name in list(actor.state):
        party, _, record = name.partition("/")
        if party in states and record not in states[party]:
            del actor.state[name]
