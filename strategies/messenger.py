"""Messages to parties and their answers: at most one is ever in flight to a party."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Message

from strategies.party_record import Seat
from vfl_flower.config.errors import VflError
from vfl_flower.protocol.privacy.ledger import Ledger
from vfl_flower.transport.base import Carrier
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


class Mailbox:
    """Sends turns, takes answers, and counts both.

    Parameters
    ----------
    ledger : is told of every order before it is sent.
    timeout : seconds that a party may stay silent.
    steps : the label holder's steps so far.
    """

    def __init__(
        self,
        carrier: Carrier,
        seats: Sequence[Seat],
        ledger: Ledger,
        timeout: float,
        steps: Callable[[], int],
    ) -> None:
        self.carrier = carrier
        self.seats = seats
        self.party_memory_mb = 0.0  # the most that a party has told
        self._ledger = ledger
        self._timeout = timeout
        self._steps = steps
        self._by_node = {seat.node_id: seat for seat in seats}
        self._waiting: dict[str, Seat] = {}  # message id -> its receiver

    def message(self, seat: Seat, order: Turn) -> Message:
        """The message of a party's turn; from now on it is in flight."""
        seat.send(order)
        seat.sent_at, seat.sent_at_clock = time.monotonic(), self.carrier.clock
        if isinstance(order, TrainOrder):
            seat.ordered_at_step = self._steps()
        seat.feedback = {}  # it goes with every order
        seat.traffic.bytes_down += order.nbytes
        self._ledger.ordered(seat.party, order)
        return to_message(order, seat.node_id, self._timeout, self.carrier.calls)

    def post(self, messages: Iterable[Message]) -> None:
        """Send messages that `message` made."""
        messages = list(messages)
        if messages:
            for message, key in zip(messages, self.carrier.send(messages), strict=True):
                self._waiting[key] = self._by_node[message.metadata.dst_node_id]

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self._waiting

    def replies(self) -> list[Message]:
        """The replies that are in, after waiting for one; none if a party has stayed silent."""
        if self.empty:
            return []
        first_sent = min(seat.sent_at for seat in self._waiting.values())
        return self.carrier.receive(self._waiting, first_sent + self._timeout)

    def longest_silent(self) -> Seat:
        """Who has been silent for the longest time."""
        return min(self._waiting.values(), key=lambda seat: seat.sent_at)

    def answers_to(
        self, kind: type[O], replies: Iterable[Message]
    ) -> Iterator[tuple[Seat, O, Message]]:
        """Those replies that answer an order of this kind, with their sender and that order."""
        for message in replies:
            seat = self._waiting.get(message.metadata.reply_to_message_id)
            if seat is not None and isinstance(seat.order, kind):
                del self._waiting[message.metadata.reply_to_message_id]
                yield seat, seat.order, message

    def take(self, seat: Seat, message: Message, use: Callable[[Upload], T]) -> T:
        """What ``use`` makes of a party's upload; it is counted, and no longer in flight.

        Raises
        ------
        VflError
            If the party has failed, or its upload is not an answer to its last message.
        """
        assert seat.order  # it is what the message answers
        upload = read_reply(message, Upload, self.carrier.most_bytes(seat.order.kind))
        if (upload.party, upload.exchange) != (seat.party, seat.exchange):
            raise VflError(
                f"answered as party {upload.party} to message {upload.exchange}, when message "
                f"{seat.exchange} of party {seat.party} was due."
            )
        used = use(upload)
        refuse_unused(upload.arrays)
        self.party_memory_mb = max(self.party_memory_mb, upload.peak_memory_mb)
        if isinstance(seat.order, EvaluateOrder | CheckpointOrder | RestoreOrder):
            seat.traffic.evaluation_bytes += upload.nbytes
        else:
            seat.traffic.exchanges += 1
            seat.traffic.bytes_up += upload.nbytes
            seat.reply_seconds.add(time.monotonic() - seat.sent_at)
            seat.reply_virtual_seconds.add(self.carrier.clock - seat.sent_at_clock)
        seat.rest()
        seat.unserved, seat.out_of_step = None, 0
        return used

    def forget(self, seat: Seat) -> None:
        """Wait for no answer of this party any more."""
        self._waiting = {key: other for key, other in self._waiting.items() if other is not seat}
