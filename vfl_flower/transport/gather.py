"""Send orders to nodes, wait for the replies, and read them.

`gather` asks known nodes, `gather_all` every node as it comes. During training, the strategy's
messenger does the same without waiting for all (`strategies.messenger`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from flwr.app import Message

from vfl_flower.config import names
from vfl_flower.config.errors import BY_NODE, ConfigError, PartyError, VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.options import RunningConfig
from vfl_flower.transport.base import POLL, Transport
from vfl_flower.transport.messages import SMALL, Introduction, Order, Payload
from vfl_flower.transport.wire import read_reply, to_message

_LOOK = 1.0  # seconds between two looks for parties without an answer
_SOON = 10.0  # seconds before the first log line about them
_TELL = 60.0  # seconds between two such lines

P = TypeVar("P", bound=Payload)
I = TypeVar("I", bound=Introduction)  # noqa: E741


class Outbox(ABC):
    """Sends orders to nodes, remembers which are out, and reads the replies.

    A subclass decides what a failure means (`failed`).
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport = transport
        self.timeout = timeout
        self.out: dict[str, tuple[int, float]] = {}  # by message id: the node, and when it was sent
        self._told: tuple[str, float] = "", 0.0  # parties of the last log line, and its time

    def post(self, messages: Iterable[Message]) -> None:
        """Send messages."""
        messages, now = list(messages), time.monotonic()
        if messages:
            for key, message in zip(self.transport.send(messages), messages, strict=True):
                self.out[key] = message.metadata.dst_node_id, now

    def receive(self, deadline: float) -> list[Message]:
        """Return replies after one is in, or none at the deadline; log the late parties."""
        while True:
            until = min(deadline, time.monotonic() + _LOOK)
            messages = self.transport.receive(self.out, until)
            now = time.monotonic()
            if messages or until == deadline or now < until:  # none will come, in one process
                return messages
            late = sorted(
                {self._called(node) for node, at in self.out.values() if now > at + _SOON}
            )
            who = ", ".join(late)
            if who and (who != self._told[0] or now > self._told[1] + _TELL):
                self._told = who, now
                longest = now - min(at for _, at in self.out.values())
                notice.info("The run waits for %s: no answer for %d s.", who, longest)

    def _called(self, node: int) -> str:
        number = self.transport.numbers.get(node)
        return f"node {node}" if number is None else f"party {number}"

    def read(self, message: Message, kind: type[P], order: str) -> P:
        """Return the answer to an order of this kind, which is out no more.

        Raise `VflError`, without its subject, if the node has failed or sent what it should not.
        """
        del self.out[message.metadata.reply_to_message_id]
        return read_reply(message, kind, self.transport.largest.get(order, SMALL))

    @abstractmethod
    def failed(self, node: int, error: VflError) -> None:
        """Decide what follows from a node's failure."""


class _Questions(Outbox):
    """Sends orders and waits for all answers, or if ``lenient`` leaves out nodes that fail.

    ``numbers`` has the party that a node must answer as.
    """

    def __init__(
        self, transport: Transport, timeout: float, lenient: bool, numbers: Mapping[int, int]
    ) -> None:
        super().__init__(transport, timeout)
        self.numbers = numbers
        self.deadline = time.monotonic() + timeout
        self.lenient = lenient
        self.asked: dict[int, Order] = {}
        self.failures = 0

    def ask(self, orders: Mapping[int, Order]) -> None:
        """Send an order to each of these nodes."""
        self.asked |= orders
        how = self.timeout, self.transport.calls, self.transport.parties
        self.post(to_message(order, node, *how) for node, order in orders.items())

    def answers(self, kind: type[P], until: float) -> dict[int, P]:
        """Return the answers that are in, after waiting for one: node id -> answer."""
        found: dict[int, P] = {}
        for message in self.receive(until) if self.out else []:
            key = message.metadata.reply_to_message_id
            if key in self.out:  # else it came twice
                node = self.out[key][0]
                try:
                    answer = self.read(message, kind, self.asked[node].kind)
                    due = self.numbers.get(node)
                    if isinstance(answer, Introduction) and due not in (None, answer.party):
                        raise VflError(f"answers as party {answer.party}, and was party {due}.")
                    found[node] = answer
                except VflError as error:
                    self.failed(node, error)
        return found

    def failed(self, node: int, error: VflError) -> None:
        """Raise the failure; or leave the node out, and say so."""
        log.info("Node %d %s", node, error)
        here = self.transport.contexts.get(node)
        who = f"Party {here.node_config['partition-id']}" if here else f"{BY_NODE}{node}"
        failure = PartyError(who, str(error))
        if not self.lenient:
            raise failure from None
        self.failures += 1
        self.leave_out(f"{failure} It is left out.")

    def leave_out(self, sentence: str) -> None:
        """Log why a party is left out, and keep the sentence for the summary."""
        self.transport.left_out = [*self.transport.left_out, sentence]
        notice.warning("%s", sentence)

    def late(self) -> None:
        """Raise an error if the deadline has passed while nodes owe an answer."""
        if self.out and time.monotonic() > self.deadline:
            raise ConfigError(
                f"{len(self.out)} nodes did not answer within {self.timeout:g} s: look at their "
                "logs."
            )


def gather(
    transport: Transport,
    orders: Mapping[int, Order],
    kind: type[P],
    timeout: float,
    lenient: bool = False,
) -> dict[int, P]:
    """Send an order to each node, and wait for the answers: node id -> answer.

    If ``lenient``, a notice names parties that fail or are late, instead of an error.
    """
    questions = _Questions(transport, timeout, lenient, transport.numbers)
    questions.ask(orders)
    answers: dict[int, P] = {}
    while questions.out:
        answers |= questions.answers(kind, questions.deadline)
        if lenient and questions.out and time.monotonic() > questions.deadline:
            questions.leave_out(f"{len(questions.out)} parties do not answer: they are left out.")
            break
        questions.late()
    return answers


class AvailableParties(NamedTuple):
    """Parties available for prediction, minus those excluded."""

    parties: int
    without: frozenset[int] = frozenset()


def gather_all(
    transport: Transport,
    order: Order,
    kind: type[I],
    running: RunningConfig,
    there: AvailableParties | None = None,
) -> dict[int, I]:
    """Send an order to every node as it comes, until all parties have answered.

    Return node id -> answer, in the order of the parties. Of the parties ``there``, one that fails
    or is late is left out, with a notice, and names too alike become numbers. Without it, as many
    parties must come as the first answers say, and no two names may be alike.
    """
    if there:
        transport.parties = there.parties
    found, total = _gather_until_all(transport, order, kind, running, there)
    if there:
        found = {node: each for node, each in found.items() if each.party not in there.without}
    else:
        few = {node: order for node, each in found.items() if each.parties < total}
        if few:  # a party was added
            transport.parties = total
            found |= gather(transport, few, kind, running.party_timeout)
        _check_numbers(found)
    return dict(sorted(found.items(), key=lambda each: each[1].party))


def _gather_until_all(
    transport: Transport,
    order: Order,
    kind: type[I],
    running: RunningConfig,
    there: AvailableParties | None,
) -> tuple[dict[int, I], int]:
    """Ask nodes as they come; return the answers by node, and the number of all parties."""
    questions = _Questions(transport, running.party_timeout, there is not None, {})
    found: dict[int, I] = {}
    waiting, told = False, time.monotonic() + _SOON - _TELL
    while True:
        new = [node for node in transport.get_node_ids() if node not in questions.asked]
        questions.ask(dict.fromkeys(new, order))
        soon = time.monotonic() + (POLL if there else _LOOK)
        answers = questions.answers(kind, min(questions.deadline, soon))
        found |= answers
        transport.numbers = {**transport.numbers, **{n: a.party for n, a in answers.items()}}
        _note_names(answers if there else found, lenient=there is not None)
        if there:
            away, total = _away(found, there) - questions.failures, there.parties
        else:
            total = max([running.parties, 1, *(each.parties for each in found.values())])
            away = total - len(found)
        if away <= 0:
            return found, total
        if time.monotonic() > told + _TELL:
            told = time.monotonic()
            notice.info("%s", _waited_for(found, total, there.without if there else frozenset()))
        if time.monotonic() > questions.deadline:
            if there:
                questions.leave_out(f"{away} parties are not there: they are left out.")
                return found, total
            questions.late()
            _refuse_few(found, away, running)
        if not questions.out:
            if not waiting and not there:
                log.info("Waiting for %d nodes; %d are here", len(found) + away, len(found))
            waiting = True
            time.sleep(POLL)


def _note_names(answers: Mapping[int, Introduction], lenient: bool) -> None:
    """Call parties by the names in their answers. Two names too alike are an error, or numbers."""
    called = {each.party: each.name for each in answers.values() if each.name}
    if lenient:
        for party in names.note_others(called):
            notice.warning(
                "Party %d has a name too like another's, %r, so it is called by its number. "
                "Rename it in its node configuration.",
                *(party, called[party]),
            )
    elif two := names.alike(called):
        raise ConfigError(
            f"Two parties have names that are too alike: {called[two[0]]!r} at partition-id "
            f"{two[0]}, and {called[two[1]]!r} at {two[1]}. Rename one in its node "
            "configuration."
        )
    else:
        names.note(called)


def _check_numbers(found: Mapping[int, Introduction]) -> None:
    """Raise `ConfigError` unless each party has one node."""
    numbers = sorted(each.party for each in found.values())
    if numbers != list(range(len(found))):
        raise ConfigError(
            f"The nodes' partition-ids are {numbers}: give each SuperNode its own, from 0 to "
            f"{len(found) - 1}."
        )


def _waited_for(found: Mapping[int, Introduction], total: int, without: frozenset[int]) -> str:
    """Say which parties have not answered."""
    if not found and total == 1:
        return "Waiting for parties: none has answered yet."
    absent = sorted(set(range(total)) - {each.party for each in found.values()} - without)
    many, numbers = "y" if len(absent) == 1 else "ies", ", ".join(map(str, absent))
    return f"Waiting for part{many} {numbers}: {len(found)} of {total} have answered."


def _away(found: Mapping[int, Introduction], there: AvailableParties) -> int:
    """Return how many parties are still to come; refuse nodes of other parties."""
    here = [each.party for each in found.values()]
    fit = all(each.parties == there.parties for each in found.values())
    if not fit or not set(here) <= set(range(there.parties)) or len(set(here)) < len(here):
        raise ConfigError(
            f"The nodes say that they are parties {sorted(here)}, where the model is of "
            f"{there.parties}: give each SuperNode its own partition-id, and num-partitions."
        )
    return there.parties - len(found) - len(there.without - set(here))


def _refuse_few(found: Mapping[int, Introduction], away: int, running: RunningConfig) -> None:
    most = max(found.values(), key=lambda each: each.parties, default=None)
    said = f" that party {most.party} counts" if most else ""
    raise ConfigError(
        f"Only {len(found)} of the {len(found) + away} nodes{said} came within "
        f"{running.party_timeout:g} s: start the others, or correct the number."
    )
