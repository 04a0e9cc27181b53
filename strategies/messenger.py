"""Messages to parties and their answers: at most one is ever in flight to a party."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Message

from strategies.party_record import PartyRecord
from vfl_flower.config.errors import VflError
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.transport.base import Transport
from vfl_flower.transport.messages import (
    CheckpointOrder,
    EvaluateOrder,
    RestoreOrder,
    TrainOrder,
    Turn,
    Upload,
    refuse_unused,
)
from vfl_flower.transport.wire import read_reply, to_message

O = TypeVar("O", bound=Turn)  # noqa: E741
T = TypeVar("T")


class Messenger:
    """Sends turns, takes answers, and counts both.

    Parameters
    ----------
    releases : records every order before it is sent, if releases are counted.
    timeout : seconds that a party may stay silent.
    steps : the label holder's steps so far.
    """

    def __init__(
        self,
        transport: Transport,
        records: Sequence[PartyRecord],
        releases: ReleaseLog | None,
        timeout: float,
        steps: Callable[[], int],
    ) -> None:
        self.transport = transport
        self.records = records
        self.party_memory_mb = 0.0  # the most that a party has told
        self._releases = releases
        self._timeout = timeout
        self._steps = steps
        self._by_node = {record.node_id: record for record in records}
        self._waiting: dict[str, PartyRecord] = {}  # message id -> its receiver

    def message(self, record: PartyRecord, order: Turn) -> Message:
        """The message of a party's turn; from now on it is in flight."""
        record.send(order)
        record.sent_at, record.sent_at_clock = time.monotonic(), self.transport.clock
        if isinstance(order, TrainOrder):
            record.ordered_at_step = self._steps()
        record.feedback = {}  # it goes with every order
        record.traffic.bytes_down += order.nbytes
        if self._releases:
            self._releases.ordered(record.party, order)
        return to_message(order, record.node_id, self._timeout, self.transport.calls)

    def post(self, messages: Iterable[Message]) -> None:
        """Send messages that `message` made."""
        messages = list(messages)
        if messages:
            for message, key in zip(messages, self.transport.send(messages), strict=True):
                self._waiting[key] = self._by_node[message.metadata.dst_node_id]

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self._waiting

    def replies(self) -> list[Message]:
        """The replies that are in, after waiting for one; none if a party has stayed silent."""
        if self.empty:
            return []
        first_sent = min(record.sent_at for record in self._waiting.values())
        return self.transport.receive(self._waiting, first_sent + self._timeout)

    def longest_silent(self) -> PartyRecord:
        """Who has been silent for the longest time."""
        return min(self._waiting.values(), key=lambda record: record.sent_at)

    def answers_to(
        self, kind: type[O], replies: Iterable[Message]
    ) -> Iterator[tuple[PartyRecord, O, Message]]:
        """Those replies that answer an order of this kind, with their sender and that order."""
        for message in replies:
            record = self._waiting.get(message.metadata.reply_to_message_id)
            if record is not None and isinstance(record.order, kind):
                del self._waiting[message.metadata.reply_to_message_id]
                yield record, record.order, message

    def take(self, record: PartyRecord, message: Message, use: Callable[[Upload], T]) -> T:
        """What ``use`` makes of a party's upload; it is counted, and no longer in flight.

        Raises
        ------
        VflError
            If the party has failed, or its upload is not an answer to its last message.
        """
        assert record.order  # it is what the message answers
        upload = read_reply(message, Upload, self.transport.most_bytes(record.order.kind))
        if (upload.party, upload.exchange) != (record.party, record.exchange):
            raise VflError(
                f"answered as party {upload.party} to message {upload.exchange}, when message "
                f"{record.exchange} of party {record.party} was due."
            )
        used = use(upload)
        refuse_unused(upload.arrays)
        self.party_memory_mb = max(self.party_memory_mb, upload.peak_memory_mb)
        if isinstance(record.order, EvaluateOrder | CheckpointOrder | RestoreOrder):
            record.traffic.evaluation_bytes += upload.nbytes
        else:
            record.traffic.exchanges += 1
            record.traffic.bytes_up += upload.nbytes
            record.reply_seconds.add(time.monotonic() - record.sent_at)
            record.reply_virtual_seconds.add(self.transport.clock - record.sent_at_clock)
        record.rest()
        record.unserved, record.out_of_step = None, 0
        return used

    def forget(self, record: PartyRecord) -> None:
        """Wait for no answer of this party any more."""
        self._waiting = {key: other for key, other in self._waiting.items() if other is not record}
