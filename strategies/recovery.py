"""What becomes of parties that fail, come back, or have lost their state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import Message

from strategies.evaluation import History
from strategies.messenger import Mailbox
from strategies.party_record import Seat, State
from strategies.step_budget import Plan
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
from vfl_flower.protocol.estimators.base import Arrival
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
        mailbox: Mailbox,
        holder: LabelHolder,
        plan: Plan,
        history: History,
        outputs: int,
        check: Callable[[Description], None],
        drop: Callable[[int], None],
        nonce: str = "",
    ) -> None:
        self.config = config
        self.mailbox = mailbox
        self.holder = holder
        self.plan = plan
        self.history = history
        self._outputs = outputs
        self._check = check
        self._drop = drop
        self._nonce = nonce

    def replies(self) -> list[Message]:
        """The replies that are in, after waiting for one; a silent party has failed."""
        messages = self.mailbox.replies()
        if not messages and not self.mailbox.empty:
            seat = self.mailbox.longest_silent()
            cause = f"did not answer within {self.config.running.party_timeout:g} s."
            self.fail(seat, PartyError(f"Party {seat.party}", cause))
        return messages

    def take(self, seat: Seat, message: Message, use: Callable[[Upload], T]) -> T | None:
        """What ``use`` makes of a party's answer; none if it has failed or is out of step."""
        try:
            return self.mailbox.take(seat, message, use)
        except SumError:
            raise
        except OutOfStepError as error:
            self._bring_into_step(seat, error)
        except VflError as error:
            self.fail(seat, PartyError(f"Party {seat.party}", str(error)))
        return None

    def answer(self, group: Sequence[Arrival]) -> dict[int, Arrays]:
        """Answers to a group of arrivals; who has poisoned them has failed, and is answered not."""
        while group:
            try:
                return self.holder.answer(group)
            except PoisonError as error:
                self._drop(error.party)  # from the group, too
                seat = next(each for each in self.mailbox.seats if each.party == error.party)
                was_alive = seat.alive
                self.fail(seat, error)
                if not was_alive:
                    raise
        return {}

    def fail(self, seat: Seat, error: VflError) -> None:
        """Stop, or go on without a party, by its last embeddings."""
        was_alive = seat.alive
        seat.rest(State.FAILED)
        seat.unserved, seat.out_of_step = None, 0
        self.mailbox.forget(seat)
        if not was_alive:  # it was asked back, and does not come
            return
        seat.asked_back = self.history.due(self.plan)
        nobody = not any(each.alive for each in self.mailbox.seats)
        if self.config.running.on_party_failure == "stop" or nobody:
            raise error
        self.plan.without(seat.steps)
        self.history.failed(seat.party, error)
        log.warning("%s Going on without it, by its last embeddings.", error)

    def ask_back(self) -> Iterator[Message]:
        """Once an evaluation, a failed party is asked whether it is there again."""
        for seat in self.mailbox.seats:
            if seat.state is State.FAILED and seat.asked_back < self.history.due(self.plan):
                seat.asked_back = self.history.due(self.plan)
                yield self._rejoin_message(seat)

    def _rejoin_message(self, seat: Seat) -> Message:
        order = RejoinOrder(
            exchange=seat.exchange + 1,
            outputs=self._outputs,
            nonce=self._nonce,
            arrays=self.holder.surrogate_of(seat.party),
        )
        return self.mailbox.message(seat, order)

    def _bring_into_step(self, seat: Seat, error: OutOfStepError) -> None:
        """A party has an older state than it should: tell it what is known of it, and go on."""
        seat.out_of_step += 1
        if self.config.secure:  # its masks would serve twice, and a sum's change be its own
            cause = f"{error} Resume the run, by which all go back to its last checkpoint."
            self.fail(seat, PartyError(f"Party {seat.party}", cause))
            return
        if self.holder.estimator.broadcasts or seat.out_of_step > _TRIES:
            self.fail(seat, PartyError(f"Party {seat.party}", str(error)))
            return
        notice.warning(
            "Party %d %s It goes on from there; what it has learned since then is lost.",
            seat.party,
            str(error).removeprefix("failed: "),
        )
        seat.unserved = seat.order
        self.mailbox.post([self._rejoin_message(seat)])

    def rejoin(self, seat: Seat, message: Message) -> None:
        """A party answers that it goes on by what the label holder knows of it."""
        try:
            description = read_reply(message, Description, SMALL)
            if description.party != seat.party:
                raise VflError(f"came back as party {description.party}.")
            self._check(description)
        except ConfigError as error:  # which names the party
            self.fail(seat, error)
            return
        except VflError as error:
            self.fail(seat, PartyError(f"Party {seat.party}", str(error)))
            return
        self.holder.rejoined(seat.party)
        seat.remembers = False
        if not self.history.restored:
            self.history.best = None  # of which it may have lost its copy of the model
        self._drop(seat.party)
        if seat.rests is State.AWAITS_QUORUM:
            seat.rests = State.IDLE
        if seat.unserved:
            # Its feedback was for a window that the party does not know of any more.
            arrays = {key: each for key, each in seat.unserved.arrays.items() if key == "ids"}
            order = replace(seat.unserved, exchange=seat.exchange + 1, arrays=arrays)
            seat.surrogates = self.holder.digest_for(seat.party)
            self.mailbox.post([self.mailbox.message(seat, order)])
            return
        seat.rest(State.IDLE)
        seat.evaluation = self.history.go_back(self.plan)
        self.plan.with_again(seat.steps)
        notice.info("Party %d is back.", seat.party)
