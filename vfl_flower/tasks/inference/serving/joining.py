"""Records of a service's parties, and parties that come while it answers.

A thread asks such a party to align and to load its model, as the service's start does. Only the
service's own thread uses the transport: it sends this thread's messages, and hands it the replies.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from vfl_flower.alignment.at_label_holder import align
from vfl_flower.alignment.psi import Places
from vfl_flower.alignment.reuse import proof_of
from vfl_flower.alignment.seeking import Seeker
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.split import Alignment
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.rows import RowsToPredict
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import ReuseOrder
from vfl_flower.transport.gather import AvailableParties, gather
from vfl_flower.transport.messages import Order, ServeOrder, Serving

READY, ASKED, LATE, LOADING, DOWN = "ready", "asked", "late", "loading", "down"
_FIRST, _MOST = 2.0, 60.0  # seconds between two tries, which double while a party fails


@dataclass
class PartyRecord:
    """The label holder's knowledge of one party.

    key, order, sent : the message that is out to it, what it asks, and when it was sent.
    why : the reason of the party's last refusal.
    alignment, shown : the alignment of its rows, and the label holder's answer in it.
    failed : when it last failed a whole order, instead of some rows.
    """

    number: int
    node: int | None
    state: str = DOWN
    key: str = ""
    order: Order | None = None
    sent: float = 0.0
    why: str = ""
    alignment: str = ""
    shown: NDArray[np.uint8] | None = None
    failed: float = -math.inf

    @classmethod
    def of_all(cls, parties: int, rows: RowsToPredict) -> list[PartyRecord]:
        """Return a record of each party, with the alignment of these rows."""
        found = [cls(number, None, alignment=rows.alignment) for number in range(parties)]
        if rows.shown is not None:
            who = range(parties) if rows.nodes is None else sorted(rows.nodes)
            for number, shown in zip(who, rows.shown, strict=True):
                found[number].shown = shown
        return found

    def reuse(self, every: Sequence[PartyRecord], run: str, config: RunConfig) -> ReuseOrder:
        """Return the order to use the rows of its alignment again, with all proofs of it."""
        proofs = np.zeros((len(every), 32), np.uint8)
        for each in every:
            if each.shown is not None and each.alignment == self.alignment:
                proof = proof_of(each.shown, each.alignment, run)
                proofs[each.number] = np.frombuffer(proof, np.uint8)
        about = json.dumps(config.values())
        return ReuseOrder(alignment=self.alignment, config=about, arrays={"proofs": proofs})


class Joined(NamedTuple):
    """A party that has loaded its model; ``common`` is None for a partitioned data set."""

    node: int
    answer: Serving
    common: Alignment | None
    seeker: Seeker | None


class _Carried(Transport):
    """A transport whose messages another thread carries."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        for name in ("engine", "medium", "cost", "simulated", "contexts", "calls", "parties"):
            setattr(self, name, getattr(transport, name))
        self._outbox: SimpleQueue[tuple[list[Message], Future[list[str]]]] = SimpleQueue()
        self._inbox: dict[str, Message] = {}
        self.closed = Event()
        self.out: set[str] = set()  # messages that wait for their replies

    def get_node_ids(self) -> Iterable[int]:
        return self._transport.get_node_ids()

    def expect(self, largest: Mapping[str, int]) -> None:
        self._transport.expect(largest)
        self.largest = self._transport.largest

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = Future[list[str]]()
        self._outbox.put((list(messages), sent))
        self._transport.wake()
        while True:
            try:
                return sent.result(1.0)
            except TimeoutError:
                self._check_open()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._check_open()
        return [self._inbox.pop(each) for each in list(message_ids) if each in self._inbox]

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise VflError("The service takes no further party.")

    # The service's thread calls these.

    def carry(self) -> None:
        """Send what waits to be sent."""
        while True:
            try:
                messages, sent = self._outbox.get_nowait()
            except Empty:
                return
            try:
                keys = self._transport.send(messages)
            except Exception as error:  # the other thread's
                sent.set_exception(error)
            else:
                self.out |= set(keys)
                sent.set_result(keys)

    def take(self, message: Message) -> None:
        """Take a reply for this thread."""
        key = message.metadata.reply_to_message_id
        self.out.discard(key)
        self._inbox[key] = message


class Joining:
    """Looks for parties that a service lacks, in a thread.

    model : its row mask gets the rows of parties that join.
    parties : the service's records. It lacks those without a node, but for excluded parties.
    load, opens : what a party is asked to load, and whether it is asked to find ids.
    """

    def __init__(
        self, model: TrainedModel, parties: Sequence[PartyRecord], load: ServeOrder, opens: bool
    ) -> None:
        assert model.there is not None
        self.carried = _Carried(model.transport)
        self._model, self._load, self._opens = model, load, opens
        self._joined: SimpleQueue[Joined] = SimpleQueue()
        self._parties, self._without = parties, model.there.without
        self._rows, self._timeout = model.rows, model.config.running.party_timeout
        Thread(target=self._run, name="joining", daemon=True).start()

    def arrived(self) -> Iterator[tuple[PartyRecord, Joined]]:
        """Yield the parties that have loaded their models since, with their rows."""
        while not self._joined.empty():
            found = self._joined.get()
            party, common = self._parties[found.answer.party], found.common
            if party.node is not None:
                continue
            if common is not None:
                party.alignment, party.shown = common.name, common.answers[0]
                if self._rows.present is not None and common.present is not None:
                    self._rows.present[:, party.number] = common.present[:, party.number]
            yield party, found

    def close(self) -> None:
        """Take no further party."""
        self.carried.closed.set()

    def _run(self) -> None:
        pauses: dict[int, tuple[float, float]] = {}  # by node: its next try, and the pause after
        while not self.carried.closed.wait(_FIRST):
            nodes = {each.number: each.node for each in self._parties}
            lacking = {each for each, node in nodes.items() if node is None} - self._without
            if not self._joined.empty():  # the service has not taken the last one yet
                continue
            try:
                there = set(self.carried.get_node_ids()) if lacking else set()
                for node in there - set(nodes.values()):
                    due, pause = pauses.get(node, (0.0, _FIRST))
                    if time.monotonic() < due:
                        continue
                    pauses[node] = time.monotonic() + pause, min(2 * pause, _MOST)
                    if found := self._ask(node, lacking):
                        self._joined.put(found)
            except Exception as error:  # the service goes on without it
                log.warning("No party joins the service now: %s", error)

    def _ask(self, node: int, lacking: set[int]) -> Joined | None:
        """Align a party and have it load its model; None if it fails, or is not lacking."""
        rows, common, carried = self._rows, None, self.carried
        if rows.nodes is not None:  # each party is aligned apart from the others
            assert rows.table is not None and rows.words is not None
            others = frozenset(range(len(self._parties))) - lacking
            there = AvailableParties(len(self._parties), others)
            lasting = not rows.words.data.dataset.startswith("memory:")
            given = rows.words, rows.table, self._model.run, there, lasting, self._order
            common = align(carried, *given, node)
            if not common.nodes:
                return None
        answers = gather(carried, {node: self._load}, Serving, self._timeout, lenient=True)
        if node not in answers or answers[node].party not in lacking:
            return None
        seeker = rows.seeker(self._model.run) if self._opens else None
        if seeker:
            asked = {node: answers[node].party}
            seeker.open(carried, asked, self._model.about, self._timeout, lax=True)
        return Joined(node, answers[node], common, seeker)

    def _order(self, rows: Places) -> Places:
        """Return the order that puts rows as the service has them."""
        wanted, sorter = self._rows.places, np.argsort(rows)
        if wanted is None or len(wanted) != len(rows):
            raise VflError("the rows of the label holder's file have changed.")
        return sorter[np.searchsorted(rows, wanted, sorter=sorter)]
