"""Send turns to parties, take and count the answers, and handle failures.

At most one message is out to a party. A failed party ends the run. Or the run goes on with its last
embeddings, and asks it back once an evaluation. A party whose state is too old gets the label
holder's copy of its surrogates, and then its last message again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeVar

from flwr.app import Message

from strategies.history import History
from strategies.transcript import Transcript
from strategies.turns import PartyRecord, State, StepBudget, UnansweredUploads
from vfl_flower.config import errors
from vfl_flower.config.logs import log, notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol.ends import Arrival
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import Outbox
from vfl_flower.transport.messages import (
    Arrays,
    CheckpointOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    RejoinOrder,
    RestoreOrder,
    TrainOrder,
    Turn,
    Upload,
    refuse_unused,
)
from vfl_flower.transport.wire import to_message

O = TypeVar("O", bound=Turn)  # noqa: E741
T = TypeVar("T")


class Replies(NamedTuple):
    """Replies to orders to train, to evaluate, and to others."""

    train: list[Message]
    evaluate: list[Message]
    others: list[Message]


_APART = (EvaluateOrder, CheckpointOrder, RestoreOrder)  # their traffic does not train
_TRIES = 3  # times to bring a party into step for one turn


class Messenger(Outbox):
    """Sends turns, takes and counts the answers, and handles failures.

    The log of releases records every order before it leaves. ``rejoin`` asks a party back, but
    lacks its number and surrogates. ``check`` refuses a returning party that does not fit the run.
    In a rerun, the transcript compares all messages with the earlier run's.
    """

    def __init__(
        self,
        config: RunConfig,
        transport: Transport,
        records: Sequence[PartyRecord],
        holder: LabelHolder,
        releases: ReleaseLog | None,
        budget: StepBudget,
        waiting: UnansweredUploads,
        history: History,
        tell: Callable[..., None],
        rejoin: RejoinOrder,
        check: Callable[[Description], None],
        transcript: Transcript,
    ) -> None:
        super().__init__(transport, config.running.party_timeout)
        self.records = records
        self.party_memory_mb = 0.0  # largest peak memory that a party has reported
        self._config = config
        self._holder = holder
        self._releases = releases
        self._budget = budget
        self._waiting = waiting
        self._history = history
        self._tell = tell
        self._rejoin_order = rejoin
        self._check = check
        self._transcript = transcript
        self._by_node = {record.node_id: record for record in records}
        self._by_party = {record.party: record for record in records}

    # --- sending and taking ---------------------------------------------------------------------

    def message(self, record: PartyRecord, order: Turn) -> Message:
        """Return the message of a party's turn, and note that it is in flight."""
        self._transcript.ordered(record.party, order)
        record.send(order)
        record.sent_at, record.sent_at_clock = time.monotonic(), self.transport.clock
        if isinstance(order, TrainOrder):
            record.ordered_at_step = self._holder.steps
        record.feedback = {}  # it goes with this order
        record.traffic.bytes_down += order.nbytes
        if self._releases:
            self._releases.ordered(record.party, order)
        how = self.timeout, self.transport.calls, self.transport.parties
        return to_message(order, record.node_id, *how)

    def gather(self) -> Replies:
        """Wait for a reply, and return all replies. A party that stays silent has failed."""
        replies = Replies([], [], [])
        if not self.out:
            return replies
        node, sent_at = min(self.out.values(), key=itemgetter(1))
        wait = partial(self.receive, sent_at + self.timeout)
        messages = self._transcript.in_order(wait, self._record_of)
        if not messages:
            self.failed(node, errors.VflError(f"did not answer within {self.timeout:g} s."))
        for message in messages:
            record = self._record_of(message)
            order = record.order if record else None
            if isinstance(order, TrainOrder):
                replies.train.append(message)
            elif isinstance(order, EvaluateOrder):
                replies.evaluate.append(message)
            elif order:
                replies.others.append(message)
        return replies

    def _record_of(self, message: Message) -> PartyRecord | None:
        """Return the party whose order a reply answers; None if the reply came twice."""
        node, _ = self.out.get(message.metadata.reply_to_message_id, (0, 0))
        return self._by_node.get(node)

    def take(
        self,
        kind: type[O],
        replies: Iterable[Message],
        use: Callable[[PartyRecord, O, Upload], T],
    ) -> Iterator[tuple[PartyRecord, T]]:
        """Yield what ``use`` makes of each upload that answers an order of this kind.

        A party whose upload is invalid has failed, or is brought into step.
        """
        for message in replies:
            record = self._record_of(message)
            if record is None or not isinstance(record.order, kind):
                continue
            try:
                upload = self.read(message, Upload, record.order.kind)
                if (upload.party, upload.exchange) != (record.party, record.exchange):
                    raise errors.VflError(
                        f"answered as party {upload.party} to message {upload.exchange}, when "
                        f"message {record.exchange} of party {record.party} was due."
                    )
                self._transcript.answered(record.party, upload)
                used = use(record, record.order, upload)
                refuse_unused(upload.arrays)
            except errors.VflError as error:
                self.failed(record.node_id, error)
                continue
            self.party_memory_mb = max(self.party_memory_mb, upload.peak_memory_mb)
            if isinstance(record.order, _APART):
                record.traffic.evaluation_bytes += upload.nbytes
            else:
                record.traffic.exchanges += 1
                record.traffic.bytes_up += upload.nbytes
                record.reply_seconds.add(time.monotonic() - record.sent_at)
                record.reply_virtual_seconds.add(self.transport.clock - record.sent_at_clock)
            record.rest()
            record.unserved, record.out_of_step = None, 0
            yield record, used

    def _use(self, record: PartyRecord, order: Turn, upload: Upload) -> None:
        if isinstance(order, EmbedOrder):
            self._holder.refresh(record.party, order.arrays.get("ids"), upload)
        elif isinstance(order, CheckpointOrder):
            record.checkpoint = order.number

    def use(self, replies: Sequence[Message]) -> None:
        """Use replies to orders that are neither to train nor to evaluate."""
        for message in replies:
            record = self._record_of(message)
            if not record or not isinstance(record.order, RejoinOrder):
                list(self.take(Turn, [message], self._use))
                continue
            try:
                found = self.read(message, Description, RejoinOrder.kind)
                if found.party != record.party:
                    raise errors.VflError(f"came back as party {found.party}.")
                self._check(found)
            except errors.VflError as error:
                self.failed(record.node_id, error)
                continue
            self._go_on_with(record, found)

    # --- answers --------------------------------------------------------------------------------

    def answer(self, group: Sequence[Arrival]) -> None:
        """Answer a quorum of uploads; drop a party whose upload made the loss infinite."""
        # Count every row of the mini-batches, also rows that a party lacks: the top model steps on
        # them too.
        batches = [(each.party, each.batches) for each in group]
        allowed = self._releases is None or self._releases.permits_answers(batches)
        for arrival in group:
            record = self._by_party[arrival.party]
            record.staleness.add(self._holder.steps - record.ordered_at_step)
        answers: dict[int, Arrays] = {}
        while group:
            try:
                answers = self._holder.answer(group) if allowed else self._holder.silent(group)
                break
            except errors.PoisonError as error:
                self._waiting.drop(error.party)  # from the group, too
                was_alive = self._by_party[error.party].alive
                self.fail(self._by_party[error.party], error)
                if not was_alive:
                    raise
        for party, feedback in answers.items():
            self._by_party[party].take_feedback(feedback)
        self._budget.answered += sum(len(arrival.window.lengths) for arrival in group)

    # --- failures -------------------------------------------------------------------------------

    def failed(self, node: int, error: errors.VflError) -> None:
        """Bring a party into step if it lacks state; else it has failed."""
        record = self._by_node[node]
        comes_back = isinstance(record.order, RejoinOrder)
        if isinstance(error, errors.SumError):
            raise error
        if isinstance(error, errors.OutOfStepError) and not comes_back:
            self._bring_into_step(record, error)
        elif isinstance(error, errors.ConfigError) and comes_back:  # it names the party
            self.fail(record, error)
        else:
            self.fail(record, errors.PartyError(f"Party {record.party}", str(error)))

    def fail(self, record: PartyRecord, error: errors.VflError) -> None:
        """Stop the run, or go on without a party, with its last embeddings."""
        was_alive, self._transcript.whole = record.alive, False
        record.rest(State.FAILED)
        record.unserved, record.out_of_step = None, 0
        self.out = {key: sent for key, sent in self.out.items() if sent[0] != record.node_id}
        if not was_alive:  # it was asked back, and failed again
            return
        record.asked_back = self._budget.evaluation
        nobody = not any(each.alive for each in self.records)
        stops = self._config.running.on_party_failure == "stop" or self._transcript.repeats
        if stops or nobody:
            raise error
        self._budget.without(record.steps)
        self._tell("failed", record.party, error)
        log.warning("%s The run continues without it, with its last embeddings.", error)

    def ask_back(self) -> None:
        """Ask failed parties to come back, once an evaluation."""
        due = self._budget.evaluation
        for record in self.records:
            if record.state is State.FAILED and record.asked_back < due:
                record.asked_back = due
                self._ask_to_rejoin(record)

    def _ask_to_rejoin(self, record: PartyRecord) -> None:
        arrays = self._holder.links.surrogate(record.party)
        order = replace(
            self._rejoin_order,
            exchange=record.exchange + 1,
            best=record.best_evaluation,
            last=record.evaluation,
            arrays=arrays,
        )
        self.post([self.message(record, order)])

    def _bring_into_step(self, record: PartyRecord, error: errors.OutOfStepError) -> None:
        """Send a party with an old state its surrogates, so that it can go on."""
        record.out_of_step += 1
        self._transcript.whole = False
        if self._holder.aggregation.abreast:  # no party may train alone
            cause = f"{error} Resume the run: all parties then go back to its last checkpoint."
            self.fail(record, errors.PartyError(f"Party {record.party}", cause))
            return
        if self._holder.estimator.broadcasts or record.out_of_step > _TRIES:
            self.fail(record, errors.PartyError(f"Party {record.party}", str(error)))
            return
        notice.warning(
            "Party %d has an older state (%s). It continues from that state, and loses what it "
            "has learned since.",
            record.party,
            str(error).removeprefix("failed: ").rstrip("."),
        )
        record.unserved = record.order
        self._ask_to_rejoin(record)

    def _go_on_with(self, record: PartyRecord, found: Description) -> None:
        """Go on with a party that has come back."""
        self._holder.links.begin_again(record.party)
        record.remembers = 0 < record.evaluation == found.last
        if not 0 < record.best_evaluation == found.best:
            record.best_evaluation = 0
        self._tell("returned", record.party)
        self._waiting.drop(record.party)
        if record.rests is State.AWAITS_QUORUM:
            record.rests = State.IDLE
        if record.unserved:
            # The feedback was for a window that the party has forgotten.
            arrays = {key: each for key, each in record.unserved.arrays.items() if key == "ids"}
            order = replace(record.unserved, exchange=record.exchange + 1, arrays=arrays)
            record.surrogates = self._holder.links.digest(record.party)
            self.post([self.message(record, order)])
            return
        record.rest(State.IDLE)
        # The others may have answered the last evaluation without it.
        self._history.recorded = min(self._history.recorded, self._budget.evaluation)
        record.remembers &= record.evaluation == self._history.recorded
        record.evaluation = self._history.recorded
        self._budget.with_again(record.steps)
        notice.info("Party %d is back.", record.party)
