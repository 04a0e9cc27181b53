"""The parties of a service, and their states: ready, asked, late, loading or down.

At most one message is out to a party. A party that misses the deadline of an order is not waited
for again until it answers. A party that has lost its model is asked to load it again.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from flwr.app import Message

from vfl_flower.alignment.seeking import Seeker
from vfl_flower.config.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.node_rules import Rules
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.tasks.inference.model import TrainedModel
from vfl_flower.tasks.inference.serving.joining import (
    ASKED,
    DOWN,
    LATE,
    LOADING,
    READY,
    Joining,
    PartyRecord,
)
from vfl_flower.tasks.inference.serving.metrics import Metrics
from vfl_flower.tasks.inference.serving.requests import FAULTY, REFUSED
from vfl_flower.transport import messages
from vfl_flower.transport.early_messages import (
    OpenSetOrder,
    Reused,
    ReuseOrder,
    SeekOrder,
    SetKept,
    Sought,
)
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.gather import gather
from vfl_flower.transport.wire import read_reply, to_message

P = TypeVar("P", bound=messages.Payload)

_NEW = 100_000  # most places that a party's set gains between two questions
MOST_ROWS = 10_000
"""Most rows of a batch."""
_OVERDUE = 5.0  # seconds after which a late party is asked to load its model again
_TELL = 60.0  # seconds between two log lines about parties that do not answer
_AGAIN = 2.0  # seconds between two tries to load a model
_FAILING = 5.0  # seconds after a failure until the party counts as ready again
_LASTING = 86400.0 * 30  # seconds that a message may live


class Parties:
    """Ask parties for embeddings, each within a deadline."""

    def __init__(self, model: TrainedModel, metrics: Metrics) -> None:
        self._model, self._metrics, self._transport = model, metrics, model.transport
        self._all = PartyRecord.of_all(len(model.predictor.sizes), model.rows)
        self.apart = False  # whether parties of masked sums have served other orders
        self._tried, self._timeout = 0.0, model.config.running.party_timeout
        self._told = time.monotonic()  # or when all parties answered last
        # Finds ids outside the alignment. Masked sums need the same order to all parties, which
        # places in their different sets would not be.
        self._joining: Joining | None = None
        self.joined: Callable[[], None] = lambda: None
        self.lost_rows = False  # whether a party of a model of all parties must be aligned anew
        self.seeker: Seeker | None = None
        if not model.predictor.aggregation.abreast:
            self.seeker = model.rows.seeker(model.run)

    # --- the beginning ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Have all parties load their models and rows, and open their sets."""
        model = self._model
        self._load_order = model.order(messages.ServeOrder)
        per_row = 4 * max(model.predictor.sizes, default=0) + 4
        expected = {messages.ScoreOrder.kind: messages.SMALL + per_row * MOST_ROWS}
        rules = len(self.seeker.rules) if self.seeker else 1
        expected |= {SeekOrder.kind: messages.SMALL + 32 * (MOST_ROWS + _NEW * rules)}
        by_rules = self.seeker is not None and self.seeker.by_text
        expected |= {OpenSetOrder.kind: messages.SMALL + 32 * Rules.max_ids} if by_rules else {}
        self._transport.expect(expected)
        answers = model.ask(self._load_order, messages.Serving)
        for node, answer in answers.items():
            party = self._all[answer.party]
            party.node = node
            self._metrics.connected(party.number, False)
            try:
                self._loaded(party, answer)
            except VflError as error:
                raise ConfigError(f"Party {party.number} {error}") from None
        if self.seeker:
            asked = {node: answer.party for node, answer in answers.items()}
            lenient = model.there is not None
            self.seeker.open(self._transport, asked, model.about, self._timeout, lenient)

    def look_for_others(self) -> None:
        """Look for parties that were left out at the start, or have lost their rows."""
        if self._model.there:
            opens = self.seeker is not None
            self._joining = Joining(self._model, self._all, self._load_order, opens)

    def _take_joined(self, joining: Joining) -> None:
        """Use the parties that have joined since."""
        for party, found in joining.arrived():
            self.joined()
            try:
                self._loaded(party, found.answer)
            except VflError as error:
                self.refused(party.number, str(error))
                continue
            party.node = found.node
            if self.seeker and found.seeker:
                self.seeker.take(party.number, found.seeker)
            notice.info("Party %d has joined the service.", party.number)

    @property
    def must_align(self) -> bool:
        """Return whether a party that the model needs has lost its rows, while all are there."""
        return self.lost_rows and all(map(self._reaches, self._all))

    def close(self) -> None:
        """Take no further party."""
        if self._joining:
            self._joining.close()
            self._joining = None

    def begin_again(self) -> None:
        """Have the parties load this version again, since they may have loaded another."""
        self.lost_rows = False
        self.look_for_others()
        for party in self._all:
            self._lose(party)

    def _loaded(self, party: PartyRecord, answer: messages.Serving) -> None:
        """Take a party's answer that it has loaded its model, or raise `VflError` about it."""
        check_states(self._model.found, [answer], whole=False)
        mine = int(self._model.rows.known_by(len(self._all))[:, party.number].sum())
        known = party.number, party.alignment, mine
        if (answer.party, answer.alignment, answer.rows) != known:
            raise VflError("serves other rows.")
        self._set(party, READY)

    def _set(self, party: PartyRecord, state: str) -> None:
        connected = state in (READY, ASKED)
        if connected != (party.state in (READY, ASKED)):
            self._metrics.connected(party.number, connected)
            if state in (DOWN, LATE):
                any_subset = self._model.predictor.aggregation.any_subset
                then = "scores leave it out" if any_subset else "no score until it returns"
                notice.warning("Party %d is %s: %s.", party.number, state, then)
            elif connected:
                log.info("Party %d answers.", party.number)
        party.state = state

    @property
    def ready(self) -> list[int]:
        """Return the parties that answer now."""
        return [each.number for each in self._all if each.state in (READY, ASKED)]

    @property
    def all_answer(self) -> bool:
        """Return whether all parties answer, and none has failed lately, as on a full disk."""
        before = time.monotonic() - _FAILING
        return len(self.ready) == len(self._all) and all(each.failed < before for each in self._all)

    # --- a batch ----------------------------------------------------------------------------------

    def ask(
        self, orders: Mapping[int, messages.Order], kind: type[P], until: float
    ) -> tuple[dict[int, P], dict[int, str]]:
        """Send orders to parties; return their answers, and why others have given none."""
        self.look(0)
        answers: dict[int, P] = {}
        missing: dict[int, str] = {}
        waiting: dict[str, PartyRecord] = {}
        for number, order in orders.items():
            party = self._all[number]
            if party.state == READY and not self._reaches(party):
                self._lose(party)
            if party.state == READY:
                self._send(party, order)
                party.state = ASKED
                waiting[party.key] = party
            else:
                missing[number] = LATE if party.state == LATE else DOWN
        while waiting:
            left = until - time.monotonic()
            for key, party in list(waiting.items()):
                if not self._reaches(party):
                    missing[party.number] = DOWN
                    self._lose(waiting.pop(key))
                elif left <= 0:
                    missing[party.number] = LATE
                    self._set(waiting.pop(key), LATE)
            for message in self._transport.wait([*waiting], min(left, 0.05)) if waiting else ():
                party = waiting.pop(message.metadata.reply_to_message_id)
                seconds = time.monotonic() - party.sent
                self._metrics.party_seconds.labels(str(party.number)).observe(seconds)
                party.key, party.state = "", READY
                try:
                    answers[party.number] = self._read(message, kind)
                except OutOfStepError:
                    self._lose(party)
                    missing[party.number] = DOWN
                except VflError as error:
                    party.failed = time.monotonic()
                    missing[party.number] = self.refused(party.number, str(error))
        return answers, missing

    def refused(self, number: int, sentence: str) -> str:
        """Note that a party has refused, or sent something useless; return which of both."""
        party, refused = self._all[number], sentence.startswith("failed: ")
        reason = sentence.rpartition(": ")[2]  # the sentence before it may count ids
        if reason != party.why:
            party.why = reason
            notice.warning("Party %d %s", party.number, sentence)
        self._metrics.refused(party.number, sentence)
        return REFUSED if refused else FAULTY

    # --- parties that are not ready ---------------------------------------------------------------

    def look(self, seconds: float) -> None:
        """Look after parties that are late or down, for at most so long or until `wake`."""
        out = {each.key: each for each in self._all if each.key}
        keys = [*out]
        if self._joining:
            self._joining.carried.carry()
            keys += self._joining.carried.out
        for message in self._transport.wait(keys, seconds) if keys or seconds else ():
            if party := out.get(message.metadata.reply_to_message_id):
                party.key = ""
                self._answered(party, message)
            elif self._joining:
                self._joining.carried.take(message)
        if self._joining:
            self._take_joined(self._joining)
        now = time.monotonic()
        known = [each for each in self._all if each.node is not None]
        gone = [each for each in known if each.state not in (READY, ASKED)]
        if not gone:
            self._told = now
        elif now >= self._told + _TELL:
            self._told = now
            named = ", ".join(f"party {each.number} ({each.state})" for each in gone)
            notice.warning("The service waits for %s.", named)
        if self.apart:
            self._bring_together()
            return
        for party in gone:
            if party.state == LATE and now > party.sent + _OVERDUE:
                self._lose(party)
            if party.state == DOWN and now > party.sent + _AGAIN:
                self._ask_to_load(party)

    def _bring_together(self) -> None:
        """Have parties of masked sums agree anew, after one of them has missed an order."""
        if (
            all(self._reaches(each) for each in self._all)
            and time.monotonic() > self._tried + _AGAIN
        ):
            self._tried = time.monotonic()
            try:
                if self._model.rows.shown is not None:  # one of them may have started anew
                    every = {each.node: each for each in self._all if each.node is not None}
                    orders = {node: self._reuse(each) for node, each in every.items()}
                    answers = gather(self._transport, orders, Reused, self._timeout)
                    for node, said in answers.items():
                        self._check_kept(every[node], said)
                self.begin()
                self.apart = False
            except VflError as error:
                notice.warning("The parties have not agreed on keys: %s", error)

    def _answered(self, party: PartyRecord, message: Message) -> None:
        order = party.order
        try:
            if isinstance(order, ReuseOrder):
                self._check_kept(party, self._read(message, Reused))
                self._send(party, self._load_order)
            elif isinstance(order, messages.ServeOrder):
                self._loaded(party, self._read(message, messages.Serving))
                self._open(party, anew=True)
            elif isinstance(order, OpenSetOrder):
                if self.seeker:
                    self.seeker.opened(party.number, self._read(message, SetKept))
                self._open(party)
            else:  # an overdue answer: whatever it says, the party answers again
                kinds = {SeekOrder: Sought, ReasonsOrder: GivenReasons}
                self._read(message, kinds.get(type(order), messages.Scored))
                self._set(party, READY)
        except OutOfStepError:
            self._lose(party)
        except VflError as error:
            self.refused(party.number, str(error))
            self._set(party, DOWN)

    def _open(self, party: PartyRecord, anew: bool = False) -> None:
        """Have a party open what people are found in; it is ready after that."""
        seeker = self.seeker
        order = seeker.order(party.number, self._model.about, anew) if seeker else None
        if order:
            self._send(party, order)
        self._set(party, LOADING if order else READY)

    def _lose(self, party: PartyRecord) -> None:
        """Note that a party has lost its model, or cannot be reached."""
        party.key, party.sent = "", 0.0
        self._set(party, DOWN)

    def _ask_to_load(self, party: PartyRecord) -> None:
        """Have a party that has come back use the same rows, and load its model."""
        aligned = self._model.rows.shown is not None
        self._send(party, self._reuse(party) if aligned else self._load_order)
        self._set(party, LOADING)

    def _reuse(self, party: PartyRecord) -> ReuseOrder:
        return party.reuse(self._all, self._model.run, self._model.found.config)

    def _check_kept(self, party: PartyRecord, answer: Reused) -> None:
        if answer.became == "kept":
            return
        if self._joining and self._model.rows.nodes is not None:
            party.node = None  # it joins anew
        else:
            self.lost_rows = True
        raise VflError("has other ids than at the alignment, or has lost it. It is aligned anew.")

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, party: PartyRecord, order: messages.Order) -> None:
        assert party.node is not None
        post = self._transport
        message = to_message(order, party.node, _LASTING, post.calls, post.parties)
        (party.key,) = post.send([message])
        party.order, party.sent = order, time.monotonic()

    def _reaches(self, party: PartyRecord) -> bool:
        return party.node is not None and self._transport.reaches(party.node)

    def _read(self, message: Message, kind: type[P]) -> P:
        sizes = self._transport.largest
        kinds = messages.ScoreOrder.kind, SeekOrder.kind, OpenSetOrder.kind
        largest = max(sizes.get(each, messages.SMALL) for each in kinds)
        return read_reply(message, kind, largest)
