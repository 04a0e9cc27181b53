"""A Flower Grid in one process: it calls the ClientApp, and has a virtual clock.

The grid serves a message when it is pushed, and delivers the reply when it is due on the virtual
clock. An activation of a party (a train message, or a query for fresh embeddings) takes a random
delay, as in VAFL's appendix G. Evaluations take no virtual time, so that measuring disturbs
nothing. Replies come in the order of virtual time, and equal seeds give equal runs.
"""

import gc
import heapq
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from vfl_flower.config.run_config import RunConfig
from vfl_flower.transport.base import Transport
from vfl_flower.transport.flower_internals import SERVER_NODE, begin_task, set_message_id

_TAKES_TIME = ("train", "query.embed")
_OBJECTS = 100  # new objects of each party, of many, for garbage collection to begin


class ServesTurns(Protocol):
    """A ClientApp that serves turns of many parties together, with equal results.

    fewest_turns : fewest messages that are faster together.
    """

    fewest_turns: float

    def serve_turns(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message]:
        """Return the answers to orders of one kind, in the order of the messages."""


def serve_messages(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    before_many: Callable[[], None] = lambda: None,
) -> Iterator[Message]:
    """Yield the answers of parties here. Call ``before_many`` before turns served together."""
    if len(messages) >= getattr(app, "fewest_turns", math.inf):
        nodes = {message.metadata.dst_node_id for message in messages}
        kinds = {message.metadata.message_type for message in messages}
        if kinds in ({"train"}, {"evaluate"}) and len(nodes) == len(messages):
            before_many()
            served = cast(ServesTurns, app)
            yield from served.serve_turns(messages, contexts)
            return
    for message, context in zip(messages, contexts, strict=True):
        try:
            reply = app(message, context)
        except Exception as error:  # as Flower's runtimes do: an error reply, not a crash
            reason = f"{type(error).__name__}: {error}"
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reply = Message(Error(code=code, reason=reason), reply_to=message)
        yield reply


def delay_seconds(config: RunConfig, party: int, parties: int, activation: int) -> float:
    """Return the virtual seconds of an activation; the paper's m is ``party + 1``.

    poisson : Poisson(2 m) / (2 M), App. G.2; the slowest party's mean is one second.
    exponential : mean m, App. G.3 (section 3.1 makes a party's parameter its mean waiting time).
    straggler : one second; the last party 20 to 60 % more (AsyREVEL, section 5.3).
    """
    if config.schedule.delay == "none":
        return 0.0
    generator = np.random.default_rng([config.training.seed, 2, party, activation])
    if config.schedule.delay == "poisson":
        return float(generator.poisson(2 * (party + 1)) / (2 * parties))
    if config.schedule.delay == "straggler":
        return 1.0 + (float(generator.uniform(0.2, 0.6)) if party == parties - 1 else 0.0)
    return float(generator.exponential(party + 1))


class LocalGrid(Transport):
    """The in-process engine: one virtual node for each party.

    client_app : the ClientApp that every node runs.
    parties : number of nodes; node m has ``partition-id`` m in its node configuration.
    run_config : run configuration of the user.
    config : the resolved configuration, which has the kind of delay.
    node_configs : further node configuration of each node, such as the party's file.
    """

    engine = "local"
    medium = "none"
    cost = "free"
    calls = True

    contexts: dict[int, Context]

    def __init__(
        self,
        client_app: ClientApp,
        parties: int,
        run_config: Mapping[str, Any],
        config: RunConfig,
        node_configs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        begin_task()
        self.run_id = secrets.randbits(62)  # as a SuperLink names runs
        self.contexts = {
            SERVER_NODE + 1 + party: Context(
                run_id=self.run_id,
                node_id=SERVER_NODE + 1 + party,
                node_config={
                    **(node_configs[party] if node_configs else {}),
                    "partition-id": party,
                    "num-partitions": parties,
                    "simulated": True,
                },
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for party in range(parties)
        }
        self._client_app = client_app
        self._config = config
        self._free_at = dict.fromkeys(self.contexts, 0.0)
        self._activations = dict.fromkeys(self.contexts, 0)
        self._replies: list[tuple[float, int, Message]] = []
        self._pushed = 0
        self._thresholds: tuple[int, int, int] | None = None  # of garbage collection before
        self._froze = False  # whether this grid exempted objects from it

    def state_dict(self) -> list[Any]:
        """Return the virtual clock in JSON, while no message is out."""
        return [self.clock, list(self._free_at.values()), list(self._activations.values())]

    def load_state_dict(self, state: list[Any]) -> None:
        """Set the virtual clock to what `state_dict` returned."""
        self.clock = state[0]
        self._free_at = dict(zip(self.contexts, state[1], strict=True))
        self._activations = dict(zip(self.contexts, state[2], strict=True))

    def get_node_ids(self) -> list[int]:
        """Return the node ids, in the order of the parties."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Serve each message now. Its reply becomes due after the party's delay."""
        messages, keys = list(messages), []
        for message in messages:
            self._pushed += 1
            keys.append(str(self._pushed))
            set_message_id(message, keys[-1])
        nodes = [message.metadata.dst_node_id for message in messages]
        contexts = [self.contexts[node] for node in nodes]
        replies = serve_messages(self._client_app, messages, contexts, self._freeze)
        for key, node, message, reply in zip(keys, nodes, messages, replies, strict=True):
            due = max(self.clock, self._free_at[node])
            if message.metadata.message_type in _TAKES_TIME:
                self._activations[node] += 1
                if self._config.schedule.delay != "none":
                    about = node - SERVER_NODE - 1, len(self.contexts), self._activations[node]
                    due += delay_seconds(self._config, *about)
            self._free_at[node] = due
            heapq.heappush(self._replies, (due, int(key), reply))
        return keys

    def _freeze(self) -> None:
        """Exempt the objects of the first turns from garbage collection, until `forget`.

        The messages of a thousand parties would start it at each step, for a fifth of the time.
        """
        if not self._thresholds:
            self._froze = not gc.get_freeze_count()  # the program's own would not outlast `forget`
            if self._froze:
                gc.freeze()
            self._thresholds = gc.get_threshold()
            gc.set_threshold(_OBJECTS * len(self.contexts), *self._thresholds[1:])

    def forget(self) -> None:
        """Let garbage collection look at the parties' objects again."""
        if self._thresholds:
            if self._froze:
                gc.unfreeze()
            gc.set_threshold(*self._thresholds)
        self._thresholds = None

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Advance the clock to the next reply, and return all replies due by then."""
        wanted = set(message_ids)
        due: list[Message] = []
        later: list[tuple[float, int, Message]] = []
        while self._replies and (not due or self._replies[0][0] <= self.clock):
            entry = heapq.heappop(self._replies)
            if str(entry[1]) in wanted:
                self.clock = max(self.clock, entry[0])
                due.append(entry[2])
            else:
                later.append(entry)
        for entry in later:
            heapq.heappush(self._replies, entry)
        return due
