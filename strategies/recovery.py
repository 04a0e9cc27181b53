"""What becomes of parties that fail, come back, or have lost their state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import Message

from strategies.history import History
from strategies.messenger import Messenger
from strategies.party_record import PartyRecord, State
from strategies.step_budget import StepBudget
from vfl_flower.config.errors import (
    ConfigError,
    OutOfStepError,
    PartyError,
    PoisonError,
    SumError,
    VflError,
)
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol.uploads import Arrival
from vfl_flower.transport.messages import SMALL, Arrays, Description, RejoinOrder, Upload
from vfl_flower.transport.wire import read_reply

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

T = TypeVar("T")

_TRIES = 3  # times that a party is brought into step for one turn


class Recovery:
    """Fails parties, asks them back, and brings those into step whose state is too old.

    Parameters
    ----------
    check : raises `ConfigError` if a party that comes back does not fit the run.
    drop : forgets the window of a party that has come back without what it knew of it.
    nonce : under which parties keep their states (`Keeper`).
    """

    def __init__(
        self,
        config: RunConfig,
        messenger: Messenger,
        holder: LabelHolder,
        budget: StepBudget,
        history: History,
        outputs: int,
        check: Callable[[Description], None],
        drop: Callable[[int], None],
        nonce: str = "",
    ) -> None:
        self.config = config
        self.messenger = messenger
        self.holder = holder
        self.budget = budget
        self.history = history
        self._outputs = outputs
        self._check = check
        self._drop = drop
        self._nonce = nonce

    def replies(self) -> list[Message]:
        """The replies that are in, after waiting for one; a silent party has failed."""
        messages = self.messenger.replies()
        if not messages and not self.messenger.empty:
            record = self.messenger.longest_silent()
            cause = f"did not answer within {self.config.running.party_timeout:g} s."
            self.fail(record, PartyError(f"Party {record.party}", cause))
        return messages

    def take(self, record: PartyRecord, message: Message, use: Callable[[Upload], T]) -> T | None:
        """What ``use`` makes of a party's answer; none if it has failed or is out of step."""
        try:
            return self.messenger.take(record, message, use)
        except SumError:
            raise
        except OutOfStepError as error:
            self._bring_into_step(record, error)
        except VflError as error:
            self.fail(record, PartyError(f"Party {record.party}", str(error)))
        return None

    def answer(self, group: Sequence[Arrival]) -> dict[int, Arrays]:
        """Answers to a group of arrivals; who has poisoned them has failed, and is answered not."""
        while group:
            try:
                return self.holder.answer(group)
            except PoisonError as error:
                self._drop(error.party)  # from the group, too
                record = next(each for each in self.messenger.records if each.party == error.party)
                was_alive = record.alive
                self.fail(record, error)
                if not was_alive:
                    raise
        return {}

    def fail(self, record: PartyRecord, error: VflError) -> None:
        """Stop, or go on without a party, by its last embeddings."""
        was_alive = record.alive
        record.rest(State.FAILED)
        record.unserved, record.out_of_step = None, 0
        self.messenger.forget(record)
        if not was_alive:  # it was asked back, and does not come
            return
        record.asked_back = self.history.due(self.budget)
        nobody = not any(each.alive for each in self.messenger.records)
        if self.config.running.on_party_failure == "stop" or nobody:
            raise error
        self.budget.without(record.steps)
        self.history.failed(record.party, error)
        log.warning("%s Going on without it, by its last embeddings.", error)

    def ask_back(self) -> Iterator[Message]:
        """Once an evaluation, a failed party is asked whether it is there again."""
        for record in self.messenger.records:
            if record.state is State.FAILED and record.asked_back < self.history.due(self.budget):
                record.asked_back = self.history.due(self.budget)
                yield self._rejoin_message(record)

    def _rejoin_message(self, record: PartyRecord) -> Message:
        order = RejoinOrder(
            exchange=record.exchange + 1,
            outputs=self._outputs,
            nonce=self._nonce,
            arrays=self.holder.links.surrogate(record.party),
        )
        return self.messenger.message(record, order)

    def _bring_into_step(self, record: PartyRecord, error: OutOfStepError) -> None:
        """A party has an older state than it should: tell it what is known of it, and go on."""
        record.out_of_step += 1
        if self.holder.aggregation.abreast:  # no party does anything alone
            cause = f"{error} Resume the run, by which all go back to its last checkpoint."
            self.fail(record, PartyError(f"Party {record.party}", cause))
            return
        if self.holder.estimator.broadcasts or record.out_of_step > _TRIES:
            self.fail(record, PartyError(f"Party {record.party}", str(error)))
            return
        notice.warning(
            "Party %d %s It goes on from there; what it has learned since then is lost.",
            record.party,
            str(error).removeprefix("failed: "),
        )
        record.unserved = record.order
        self.messenger.post([self._rejoin_message(record)])

    def rejoin(self, record: PartyRecord, message: Message) -> None:
        """A party answers that it goes on by what the label holder knows of it."""
        try:
            description = read_reply(message, Description, SMALL)
            if description.party != record.party:
                raise VflError(f"came back as party {description.party}.")
            self._check(description)
        except ConfigError as error:  # which names the party
            self.fail(record, error)
            return
        except VflError as error:
            self.fail(record, PartyError(f"Party {record.party}", str(error)))
            return
        self.holder.links.begin_again(record.party)
        record.remembers = False
        if not self.history.restored:
            self.history.best = None  # of which it may have lost its copy of the model
        self._drop(record.party)
        if record.rests is State.AWAITS_QUORUM:
            record.rests = State.IDLE
        if record.unserved:
            # Its feedback was for a window that the party does not know of any more.
            arrays = {key: each for key, each in record.unserved.arrays.items() if key == "ids"}
            order = replace(record.unserved, exchange=record.exchange + 1, arrays=arrays)
            record.surrogates = self.holder.links.digest(record.party)
            self.messenger.post([self.messenger.message(record, order)])
            return
        record.rest(State.IDLE)
        record.evaluation = self.history.go_back(self.budget)
        self.budget.with_again(record.steps)
        notice.info("Party %d is back.", record.party)
