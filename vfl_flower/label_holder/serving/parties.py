"""The parties of a service: who is ready, who is late, and who is down.

At most one message is out to a party. A party that misses the deadline of an order is not waited
for again until it answers. A party that has lost its model is asked to load it again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.alignment.reuse import proof_of
from vfl_flower.config.errors import ConfigError, OutOfStepError, SumError, VflError
from vfl_flower.config.provenance import code_digest
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.ids import encoded as encoded_id
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.label_holder.predictor import Predictor
from vfl_flower.label_holder.rows_to_predict import RowsToPredict
from vfl_flower.label_holder.serving.metrics import Metrics
from vfl_flower.protocol.aggregation.base import Collection
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import (
    OpenSetOrder,
    Reused,
    ReuseOrder,
    SeekOrder,
    SetKept,
    Sought,
)
from vfl_flower.transport.gather import AvailableParties, gather, gather_all
from vfl_flower.transport.messages import (
    SMALL,
    Arrays,
    Order,
    Payload,
    Scored,
    ScoreOrder,
    ServeOrder,
    Serving,
)
from vfl_flower.transport.wire import read_reply, to_message

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")

P = TypeVar("P", bound=Payload)

READY, ASKED, LATE, LOADING, DOWN = "ready", "asked", "late", "loading", "down"
_NEW = 100_000  # most places that a party's set gains between two questions
MOST_ROWS = 10_000
"""Most rows of a batch."""
_OVERDUE = 5.0  # seconds after which a late party is asked to load its model again
_AGAIN = 2.0  # seconds between two tries to load a model
_LASTING = 86400.0 * 30  # seconds that a message may live

UNKNOWN, REFUSED, FAULTY = "unknown", "refused", "faulty"
"""Reasons, besides `LATE` and `DOWN`, why a party's embedding is missing from a score."""


@dataclass
class _Party:
    """The label holder's knowledge of one party.

    node : Flower's node; None if the party has not come yet.
    key, order, sent : the message that is out to it, what it asks, and when it was sent.
    rows : rows of that order.
    why : the party's last refusal.
    """

    number: int
    node: int | None
    state: str = DOWN
    key: str = ""
    order: Order | None = None
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sent: float = 0.0
    why: str = ""


@dataclass
class Found:
    """Ids outside the alignment, and where the parties have them.

    places : place of each id in a party's set, or -1, [k, M].
    missing : party -> why it has not answered.
    """

    encoded: list[bytes]
    places: NDArray[np.int32]
    missing: dict[int, str]


@dataclass
class Embedded:
    """The parties' embeddings of rows.

    blocks : embeddings, [R, width]; zeros where a party has given none.
    given, has : whether a party has given a row, and whether it should have it, [R, M].
    missing : party -> why it has given nothing.
    found : number of the last rows that are ids outside the alignment.
    """

    blocks: Tensor
    given: NDArray[np.bool_]
    has: NDArray[np.bool_]
    missing: dict[int, str]
    found: int


class Parties:
    """Ask parties for embeddings, each within a deadline.

    Parameters
    ----------
    run : number of the service's Flower run.
    """

    def __init__(
        self,
        transport: Transport,
        config: RunConfig,
        predictor: Predictor,
        rows: RowsToPredict,
        run: str,
        metrics: Metrics,
    ) -> None:
        self._transport, self._config, self._predictor = transport, config, predictor
        self._rows, self._run, self._metrics = rows, run, metrics
        sizes = predictor.sizes
        has = np.ones((len(rows.ids), len(sizes)), bool) if rows.present is None else rows.present
        self.present = has
        """Whether a party has a row, [N, M]."""
        self._at = (np.cumsum(has, axis=0) - 1).astype(np.int32)  # among the party's own rows
        self._all = [_Party(number, None) for number in range(len(sizes))]
        self._apart = False  # whether parties of masked sums have served other orders
        self._tried = 0.0
        self._seeker = rows.seeker(run)  # finds ids outside the alignment

    # --- the beginning ----------------------------------------------------------------------------

    def begin(self, there: AvailableParties | None) -> None:
        """Have all parties load their models and rows.

        Raises
        ------
        ConfigError, PartyError
            If a party that the model needs is missing, refuses, or has another model or rows.
        """
        running, nodes = self._config.running, self._rows.nodes
        per_row = 4 * max(self._predictor.sizes, default=0) + 4
        arrays = self._predictor.aggregation.question(self._transport, running)
        found = self._predictor.found
        self._load_order = ServeOrder(run=found.run, number=found.number, arrays=arrays)
        expected = {ScoreOrder.kind: SMALL + per_row * MOST_ROWS}
        self._transport.expect(expected | {SeekOrder.kind: SMALL + 32 * (MOST_ROWS + _NEW)})
        if there and nodes is not None:
            orders: dict[int, Order] = dict.fromkeys(nodes.values(), self._load_order)
            timeout = running.party_timeout
            answers = gather(self._transport, orders, Serving, timeout, lenient=True)
        else:
            answers = gather_all(self._transport, self._load_order, Serving, running, there)
        check_states(found, answers.values(), whole=there is None)
        self._predictor.aggregation.check_agreed(answers.values())
        for node, answer in answers.items():
            party = self._all[answer.party]
            party.node = node
            self._metrics.connected(party.number, False)
            try:
                self._loaded(party, answer)
            except VflError as error:
                raise ConfigError(f"Party {party.number} {error}") from None
        if self._seeker:
            orders = dict.fromkeys(answers, self._opening)
            timeout, lenient = running.party_timeout, there is not None
            for said in gather(self._transport, orders, SetKept, timeout, lenient).values():
                self._seeker.opened(said.party, said)

    def begin_again(self) -> None:
        """Have the parties load this version again, since they may have loaded another."""
        for party in self._all:
            self._lose(party)

    @property
    def _opening(self) -> OpenSetOrder:
        assert self._seeker is not None
        about = json.dumps(self._predictor.found.config.values())
        return OpenSetOrder(config=about, arrays=self._seeker.opening.arrays)

    def _loaded(self, party: _Party, answer: Serving) -> None:
        """Take a party's answer that it has loaded its model; raise `VflError` if it does not fit.

        The message continues a sentence that names the party.
        """
        check_states(self._predictor.found, [answer], whole=False)
        mine = int(self.present[:, party.number].sum())
        same = (answer.party, answer.alignment, answer.code_digest, answer.rows) == (
            party.number,
            self._rows.alignment,
            code_digest(),
            mine,
        )
        if not same:
            raise VflError("serves other rows, or runs another version of the code.")
        self._set(party, READY)

    def _set(self, party: _Party, state: str) -> None:
        connected = state in (READY, ASKED)
        if connected != (party.state in (READY, ASKED)):
            self._metrics.connected(party.number, connected)
            if state in (DOWN, LATE):
                notice.warning("Party %d is %s: scores leave it out.", party.number, state)
            elif connected:
                log.info("Party %d answers.", party.number)
        party.state = state

    @property
    def ready(self) -> list[int]:
        """Return the parties that would be asked now."""
        return [each.number for each in self._all if each.state == READY]

    # --- a batch ----------------------------------------------------------------------------------

    def embed(self, rows: NDArray[np.int64], found: Found, until: float) -> Embedded:
        """Return embeddings of aligned rows [n], and then of ids that were found, [k].

        Parameters
        ----------
        until : monotonic time after which no party is waited for.
        """
        size = len(rows) + len(found.encoded)
        said = Embedded(
            torch.zeros(size, self._predictor.width),
            np.zeros((size, len(self._all)), bool),
            np.concatenate([self.present[rows], found.places >= 0]),
            dict(found.missing),
            len(found.encoded),
        )
        orders: dict[int, Order] = {}
        for party in self._all:
            number, has = party.number, said.has[:, party.number]
            if not has.any():
                said.missing.setdefault(number, UNKNOWN)
                continue
            party.rows = np.flatnonzero(has)
            at = self._at[rows[has[: len(rows)]], number]
            orders[number] = ScoreOrder(arrays={"rows": at, **self._of_found(found, number)})
        answers, silent = self._ask(orders, Scored, until)
        said.missing.update(silent)
        collection = self._predictor.aggregation.collection(len(self._all))
        for number, answer in answers.items():
            reason = self._take(self._all[number], answer, said, collection)
            if reason:
                said.missing[number] = reason
        if said.missing and self._predictor.aggregation.abreast and orders:
            self._apart = True
        return said

    def find(self, ids: Sequence[int | str], until: float) -> Found:
        """Find ids outside the alignment at the parties, in one round trip."""
        nowhere = np.full((len(ids), len(self._all)), -1, np.int32)
        if self._seeker is None or not ids:
            return Found([], nowhere[:0], {})
        encoded = [encoded_id(one) for one in ids]
        found, points = Found(encoded, nowhere, {}), self._seeker.blinded(encoded)
        known = {each.number: self._seeker.knows(each.number) for each in self._all}
        orders: dict[int, Order] = {
            number: SeekOrder(known=places, arrays={"ids": points})
            for number, places in known.items()
            if places
        }
        answers, found.missing = self._ask(orders, Sought, until)
        for number, answer in answers.items():
            try:
                found.places[:, number] = self._seeker.places(number, encoded, answer.arrays)
            except VflError as error:
                found.missing[number] = self._refused(self._all[number], f"sent {error}")
        return found

    def _of_found(self, found: Found, number: int) -> Arrays:
        """Return the arrays of an order about found ids that a party has."""
        has = np.flatnonzero(found.places[:, number] >= 0)
        if self._seeker is None or not len(has):
            return {}
        proofs = self._seeker.proofs(number, [found.encoded[at] for at in has.tolist()])
        return {"places": found.places[has, number], "proofs": proofs}

    def _ask(
        self, orders: Mapping[int, Order], kind: type[P], until: float
    ) -> tuple[dict[int, P], dict[int, str]]:
        """Send orders to parties; return their answers, and why others have given none."""
        self.look(0)
        answers: dict[int, P] = {}
        missing: dict[int, str] = {}
        for number, order in orders.items():
            party = self._all[number]
            if party.state != READY:
                missing[number] = LATE if party.state == LATE else DOWN
            elif not self._reaches(party):
                self._lose(party)
                missing[number] = DOWN
            else:
                self._send(party, order, ASKED)
        while waiting := [each for each in self._all if each.state == ASKED]:
            left = until - time.monotonic()
            lost = [each for each in waiting if not self._reaches(each)]
            for party in waiting if left <= 0 else lost:
                missing[party.number] = DOWN if party in lost else LATE
                self._lose(party) if party in lost else self._set(party, LATE)
            if left <= 0:
                break
            for message in self._receive([each.key for each in waiting], min(left, 0.05)):
                party = self._party_of(message)
                self._metrics.party(party.number, time.monotonic() - party.sent)
                self._set(party, READY)
                try:
                    answers[party.number] = self._read(message, kind)
                except OutOfStepError:
                    self._lose(party)
                    missing[party.number] = DOWN
                except VflError as error:
                    missing[party.number] = self._refused(party, str(error))
        return answers, missing

    def _take(self, party: _Party, answer: Scored, said: Embedded, collection: Collection) -> str:
        """Take a party's embeddings; return why they cannot be used, or an empty text."""
        rows, size = party.rows, self._predictor.sizes[party.number]
        try:
            block = collection.add(party.number, answer.arrays, (len(rows), size))
            gone = answer.arrays.get("gone", np.zeros(0, np.int32))
            if (
                gone.dtype != np.int32
                or gone.ndim != 1
                or not np.isin(gone, range(len(rows))).all()
            ):
                raise VflError("'gone' names rows that were not asked for.")
        except SumError as error:
            self._apart = True
            return self._refused(party, str(error))
        except VflError as error:
            return self._refused(party, str(error))
        there = np.ones(len(rows), bool)
        there[gone] = False
        if block is not None:
            said.blocks[torch.from_numpy(rows), self._predictor.columns[party.number]] = block
        said.given[rows[there], party.number] = True
        return ""

    def _refused(self, party: _Party, sentence: str) -> str:
        refused = sentence.startswith("failed: ")
        if sentence != party.why:
            party.why = sentence
            notice.warning("Party %d %s", party.number, sentence)
        self._metrics.refused(party.number, sentence)
        return REFUSED if refused else FAULTY

    # --- parties that are not ready ---------------------------------------------------------------

    def look(self, seconds: float) -> None:
        """Look after parties that are late or down, for at most so long or until `wake`."""
        out = [each.key for each in self._all if each.key]
        for message in self._receive(out, seconds):
            self._answered(self._party_of(message), message)
        now = time.monotonic()
        if self._apart:
            self._bring_together()
            return
        for party in self._all:
            if party.state == LATE and now > party.sent + _OVERDUE:
                self._lose(party)
            if party.state == DOWN and party.node is not None and now > party.sent + _AGAIN:
                self._ask_to_load(party)

    def _bring_together(self) -> None:
        """Have parties of masked sums agree anew, after one of them has missed an order."""
        if (
            all(self._reaches(each) for each in self._all)
            and time.monotonic() > self._tried + _AGAIN
        ):
            self._tried = time.monotonic()
            try:
                self.begin(None)
                self._apart = False
            except VflError as error:
                notice.warning("The parties have not agreed on keys: %s", error)

    def _answered(self, party: _Party, message: Message) -> None:
        order = party.order
        try:
            if isinstance(order, ReuseOrder):
                if self._read(message, Reused).became != "kept":
                    raise VflError("has lost its rows. Start the service anew.")
                self._send(party, self._load_order, LOADING)
            elif isinstance(order, ServeOrder):
                self._loaded(party, self._read(message, Serving))
                if self._seeker:
                    self._send(party, self._opening, LOADING)
            elif isinstance(order, OpenSetOrder):
                if self._seeker:
                    self._seeker.opened(party.number, self._read(message, SetKept))
                self._set(party, READY)
            else:  # an overdue answer: whatever it says, the party answers again
                self._read(message, Sought if isinstance(order, SeekOrder) else Scored)
                self._set(party, READY)
        except OutOfStepError:
            self._lose(party)
        except VflError as error:
            self._refused(party, str(error))
            self._set(party, DOWN)

    def _lose(self, party: _Party) -> None:
        """Note that a party has lost its model, or cannot be reached."""
        party.key, party.sent = "", 0.0
        self._set(party, DOWN)

    def _ask_to_load(self, party: _Party) -> None:
        """Have a party that has come back use the same rows, and load its model."""
        if self._rows.shown is None:
            self._send(party, self._load_order, LOADING)
            return
        parties = len(self._all)
        who = sorted(self._rows.nodes) if self._rows.nodes else range(parties)
        proofs = np.zeros((parties, 32), np.uint8)
        for number, shown in zip(who, self._rows.shown, strict=True):
            proof = proof_of(shown, self._rows.alignment, self._run)
            proofs[number] = np.frombuffer(proof, np.uint8)
        about = json.dumps(self._predictor.found.config.values())
        order = ReuseOrder(alignment=self._rows.alignment, config=about, arrays={"proofs": proofs})
        self._send(party, order, LOADING)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, party: _Party, order: Order, state: str) -> None:
        assert party.node is not None
        message = to_message(order, party.node, _LASTING, self._transport.calls)
        (party.key,) = self._transport.send([message])
        party.order, party.sent = order, time.monotonic()
        self._set(party, state)

    def _reaches(self, party: _Party) -> bool:
        return party.node is not None and self._transport.reaches(party.node)

    def _receive(self, keys: list[str], seconds: float) -> list[Message]:
        return self._transport.wait(keys, seconds) if keys or seconds else []

    def _party_of(self, message: Message) -> _Party:
        key = message.metadata.reply_to_message_id
        party = next(each for each in self._all if each.key == key)
        party.key = ""
        return party

    def _read(self, message: Message, kind: type[P]) -> P:
        sizes = self._transport.largest
        largest = max(sizes.get(each, SMALL) for each in (ScoreOrder.kind, SeekOrder.kind))
        return read_reply(message, kind, largest)
