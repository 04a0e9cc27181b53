"""The Flower ClientApp of a party: one function for each message.

A method of `Party` serves most messages (`session.serve`). `check_order` comes first, and may
refuse a message. Message "session" brings the others over a stream. To add Flower's mods, make
your own app: ``app = PartyApp(mods=[...])``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from vfl_flower.alignment import at_party, reuse, store
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.provenance import running, speaks
from vfl_flower.party import builder, own_card, session, stacked, state, state_file
from vfl_flower.party.inputs import aligning_source, forget_aligning
from vfl_flower.party.party import Party
from vfl_flower.party.refusals import OF_OTHER_RUNS, check_order
from vfl_flower.party.session import Session
from vfl_flower.party.stacked import StackedTurn
from vfl_flower.protocol.aggregation import keys
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.party import explain, scoring
from vfl_flower.tasks.inference.party.model import forget, predict
from vfl_flower.tasks.information import party as information
from vfl_flower.transport import early_messages as early
from vfl_flower.transport import explain_messages, shared_actor
from vfl_flower.transport import messages as orders
from vfl_flower.transport.flower_internals import Framed
from vfl_flower.transport.messages import EvaluateOrder, Order, Payload, TrainOrder
from vfl_flower.transport.node import describe_records, failure, index_and_parties, simulated
from vfl_flower.transport.shared_actor import SharedActorOrder
from vfl_flower.transport.stream import session as stream
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import SAME_VERSION, read_order, to_reply, version_in

logs.without_colours()

O = TypeVar("O", bound=Order)  # noqa: E741
A = TypeVar("A", bound=Payload)
Serve = Callable[[Context, O], Payload]

_served: dict[type[Order], Serve[Any]] = {}  # kind of order -> the function that serves it


class PartyApp(ClientApp):
    """Flower's ClientApp of a party; it can also serve turns of many parties together.

    Parameters
    ----------
    mods : Flower's mods. They run around every message, also around each message that a stream or
        a shared actor brings. A mod sees one message, so with mods no turns are served together.
    """

    def __init__(self, mods: Sequence[Mod] = ()) -> None:
        super().__init__(mods=list(mods))
        self.fewest_turns = math.inf if mods else stacked.FEWEST
        own: dict[type[Order], Serve[Any]] = {
            SessionOrder: self.stream,
            SharedActorOrder: self.shared,
        }
        for kind, serve in {**_served, **own}.items():
            action = kind.kind.removeprefix("query.")
            named = {"train": self.train, "evaluate": self.evaluate}
            register = named.get(action) or partial(self.query, action)
            register()(partial(_answer, kind, serve))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message. An error of a mod leaves no text, as any other error."""
        try:
            return super().__call__(message, context)
        except Exception as error:
            return failure(error, message, context)

    def serve_turns(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message]:
        """Answer orders of as many parties to train, or to evaluate, as the app answers each."""
        turns: list[tuple[Session, StackedTurn] | Exception] = []
        trains = messages[0].metadata.message_type == TrainOrder.kind
        kind: type[TrainOrder | EvaluateOrder] = TrainOrder if trains else EvaluateOrder
        for message, context in zip(messages, contexts, strict=True):
            try:
                own = session.current(context)  # if accepted, it has nothing to log
                with nullcontext() if own and own.accepted else describe_records(context):
                    order = _read(message, kind, context, own)
                    own = session.resume(context)
                    turns.append((own, StackedTurn(own.party, order)))
            except Exception as error:
                turns.append(error)
        stacked.serve([turn[1] for turn in turns if isinstance(turn, tuple)])
        return [
            _answer_turn(message, context, turn)
            for message, context, turn in zip(messages, contexts, turns, strict=True)
        ]

    def stream(self, context: Context, order: SessionOrder) -> Payload:
        """Serve the messages of a stream, until it ends."""
        run = state_file.run_name(context, order.nonce)
        if order.keep:
            state_file.load_latest(context, run)
        try:
            end = stream.serve(self, order, context, lambda: session.largest_order(context))
        finally:
            forget(context.run_id, index_and_parties(context)[0])
        if order.keep:
            session.save(context, run=run)
        return end

    def shared(self, context: Context, order: SharedActorOrder) -> Payload:
        """Serve the orders for the parties of this shared actor."""
        if not simulated(context):
            raise VflError("is one party, and no shared actor: only a simulation has those.")
        return shared_actor.serve(self, context, order, session.hand_over)


# --- every message ------------------------------------------------------------------------------


def serves(kind: type[O]) -> Callable[[Serve[O]], Serve[O]]:
    """Have a function serve orders of a kind, in every `PartyApp` that is made later."""

    def decorate(serve: Serve[O]) -> Serve[O]:
        _served[kind] = serve
        return serve

    return decorate


def _read(message: Message, kind: type[O], context: Context, own: Session | None) -> O:
    """Return the order in a message, if both sides' versions and the party's rules permit it.

    A session checks versions, and rules on the run of its state, once. Orders about other runs are
    checked each time.
    """
    accepted = own is not None and own.accepted and not issubclass(kind, OF_OTHER_RUNS)
    if not accepted and not speaks(theirs := version_in(message)):
        raise ConfigError(
            f"Party {context.node_config.get('partition-id')} runs {running()}, and the label "
            f"holder runs {theirs or 'an older version'}. {SAME_VERSION}"
        )
    largest = own.party.largest_order if own else session.largest_order(context)
    order = read_order(message, kind, largest)
    if not accepted or order.of_parties:
        check_order(context, order)
        if own:
            own.accepted = True
    elif own:
        own.is_current = isinstance(order, orders.Turn)
    return order


def _answer(kind: type[O], serve: Serve[O], message: Message, context: Context) -> Message:
    """Answer a message: read its order, check it, and serve it."""
    with describe_records(context):
        try:
            order = _read(message, kind, context, session.current(context))
            answer = serve(context, order)
            if isinstance(answer, orders.Introduction):
                answer = replace(answer, name=Rules.of(context.node_config).name)
            return to_reply(answer, message)
        except Exception as error:
            return failure(error, message, context)
        finally:
            if not isinstance(message, Framed):  # the context may leave this process
                session.hand_over(context)


def _answer_turn(
    message: Message, context: Context, turned: tuple[Session, StackedTurn] | Exception
) -> Message:
    """Answer a turn that was computed together with others."""
    try:
        if isinstance(turned, Exception):
            raise turned
        (own, turn), order = turned, turned[1].order
        upload = session.serve(lambda party, order: turn.upload(), context, order, own)
        if isinstance(order, EvaluateOrder):
            with describe_records(context):
                _keep_copy(context, order)
        return to_reply(upload, message)
    except Exception as error:
        with describe_records(context):
            return failure(error, message, context)


# --- messages of a run --------------------------------------------------------------------------


serves(TrainOrder)(partial(session.serve, Party.train))
serves(orders.EmbedOrder)(partial(session.serve, Party.embed))


@serves(EvaluateOrder)
def evaluate(context: Context, order: EvaluateOrder) -> Payload:
    """The feedback for the last window in, the embeddings of the test rows out."""
    payload = session.serve(Party.evaluate, context, order)
    _keep_copy(context, order)
    return payload


def _keep_copy(context: Context, order: EvaluateOrder) -> None:
    """Keep a copy of the evaluated model, and write the state if the last model is the best."""
    state.keep_copy(context.state, order)
    if 0 < order.best == order.last and _keeps_states(context):
        session.save(context)  # a killed party comes back with the copy of a new best model


@serves(orders.RestoreOrder)
def restore(context: Context, order: orders.RestoreOrder) -> Payload:
    """Take the model of an earlier evaluation."""

    def go_back(party: Party, order: orders.RestoreOrder) -> Payload:
        return party.restore(order, state.load_copy(context.state, order.number))

    return session.serve(go_back, context, order)


@serves(orders.CheckpointOrder)
def checkpoint(context: Context, order: orders.CheckpointOrder) -> Payload:
    """The feedback for the last window in; then write this party's state to its disk."""
    payload = session.serve(Party.checkpoint, context, order)
    session.save(context, order.number)
    if own := session.current(context):
        own_card.write(context, own.party)
    return payload


@serves(orders.RejoinOrder)
def rejoin(context: Context, order: orders.RejoinOrder) -> Payload:
    """Go on after a failure, by what the label holder knows."""
    own = None if context.state else Session(context, builder.begin(context, order))
    payload = session.serve(Party.rejoin, context, order, own)
    best, last = (state.copy_there(context.state, each) for each in (order.best, order.last))
    return replace(payload, best=best, last=last)


# --- the beginning of a run ---------------------------------------------------------------------


@serves(orders.DescribeOrder)
def describe(context: Context, order: orders.DescribeOrder) -> Payload:
    """Begin a run: rows, columns, embedding size and digests of this party."""
    party = builder.begin(context, order)
    payload = session.serve(Party.describe, context, order, Session(context, party))
    if not party.estimator.aggregation.agrees:  # else once all have agreed on these models
        _keep_first(context)
    return payload


@serves(orders.GrowOrder)
def grow(context: Context, order: orders.GrowOrder) -> Payload:
    """Begin a run with the model of an earlier run; a new party begins anew."""
    own = Session(context, builder.grow(context, order))
    payload = session.serve(Party.describe, context, order, own)
    session.save(context, 0)
    return payload


@serves(orders.ResumeOrder)
def resume(context: Context, order: orders.ResumeOrder) -> Payload:
    """Go on from a checkpoint, in another run."""
    run = state_file.run_name(context, order.nonce)
    loaded, number = state_file.load(context, order.run, order.number)
    state.forget_copies(context.state)
    for name, record in loaded.items():
        context.state[name] = record
    session.rename(context, run)
    keys.forget(context)
    payload = session.serve(Party.describe, context, order)
    session.save(context, order.number)  # this run's first, should it lose its state
    return replace(payload, checkpoint=number)


serves(early.KeyOrder)(keys.make_key)


@serves(early.AgreeOrder)
def agree(context: Context, order: early.AgreeOrder) -> Payload:
    """Mask uploads from now on, by keys with all other parties."""

    def agree(party: Party, order: early.AgreeOrder) -> Payload:
        if party.seal is None:
            raise VflError("was asked to agree on keys, and its uploads are not masked.")
        tags = party.seal.agree(context, order.arrays, party.alike)
        return early.Agreed(party=party.learner.index, parties=party.learner.parties, arrays=tags)

    payload = session.serve(agree, context, order)
    if session.is_new(context):
        _keep_first(context)
    return payload


def _keep_first(context: Context) -> None:
    """Write the first state, if the run may go back to it, or nobody could tell its rows again."""
    if _keeps_states(context) or store.is_aligned(context):
        session.save(context, 0)


def _keeps_states(context: Context) -> bool:
    """Return whether parties write their states during this run."""
    return resolve(context.run_config).running.exchanges_apart(simulated(context)) > 0


# --- alignment ----------------------------------------------------------------------------------


def _by_ids(
    serve: Callable[..., Payload], context: Context, order: Order, last: bool = False
) -> Payload:
    """Serve an order about ids by the rows that this party holds, and keep them for the next."""
    ends = True
    try:
        payload = serve(context, aligning_source(context), index_and_parties(context)[1], order)
        ends = last
        return payload
    finally:
        if ends:
            forget_aligning()


serves(early.SetOrder)(partial(_by_ids, at_party.find_set))
serves(early.AlignOrder)(partial(_by_ids, at_party.blind))
serves(early.CommonOrder)(partial(_by_ids, at_party.take_common))
serves(early.ReuseOrder)(partial(_by_ids, reuse.reuse_rows, last=True))


@serves(early.ConfirmOrder)
def confirm(context: Context, order: early.ConfirmOrder) -> Payload:
    """Use these rows from now on, and keep the alignment."""
    party, parties = index_and_parties(context)
    answer = at_party.confirm(context, party, parties, order)
    forget_aligning()
    reuse.store_rows(context, party, parties)
    return answer


# --- information of columns ----------------------------------------------------------------------


serves(early.InformationOrder)(information.offer)
serves(early.ColumnBinsOrder)(information.upload_bins)
serves(early.EvidenceOrder)(information.compute)
serves(explain_messages.GroupsOrder)(information.count_groups)


# --- prediction ---------------------------------------------------------------------------------


serves(orders.PredictOrder)(predict)
serves(orders.ServeOrder)(scoring.load)
serves(explain_messages.ExplainOrder)(explain.begin)
serves(explain_messages.PermuteOrder)(explain.permute)
serves(explain_messages.FiguresOrder)(explain.note)
serves(orders.ScoreOrder)(scoring.score)
serves(explain_messages.ReasonsOrder)(scoring.give_reasons)
serves(early.OpenSetOrder)(scoring.open_set)
serves(early.SeekOrder)(scoring.seek)


app = PartyApp()
