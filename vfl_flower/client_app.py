"""The Flower ClientApp of a party: each message is served by a method of `Party`, or beside it.

One of them, "session", brings the others over a stream.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from logging import ERROR, WARNING
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common import log

from vfl_flower.alignment import at_party, reuse
from vfl_flower.config.errors import CodeError, OutOfStepError, VflError
from vfl_flower.data.source import Source
from vfl_flower.party import context as between
from vfl_flower.party import stacked, state_file
from vfl_flower.party.inputs import own_source
from vfl_flower.party.party import Party
from vfl_flower.party.predict import predict
from vfl_flower.party.refusals import check_order
from vfl_flower.party.stacked import Turn
from vfl_flower.protocol.aggregation import aggregation_of, keys
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport import shared_actor
from vfl_flower.transport.messages import (
    Agreed,
    AgreeOrder,
    AlignOrder,
    CheckpointOrder,
    CommonOrder,
    ConfirmOrder,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    GrowOrder,
    KeyOrder,
    Order,
    Payload,
    PredictOrder,
    RejoinOrder,
    RestoreOrder,
    ResumeOrder,
    ReuseOrder,
    SessionOrder,
    SetOrder,
    SharedActorOrder,
    TrainOrder,
    refuse_unused,
)
from vfl_flower.transport.node import seat, simulated
from vfl_flower.transport.stream import session as stream
from vfl_flower.transport.wire import read_order, to_failure, to_reply

O = TypeVar("O", bound=Order)  # noqa: E741
A = TypeVar("A", bound=Payload)


class PartyApp(ClientApp):
    """The ClientApp, which in one process also serves turns of many parties at once."""

    fewest_turns = stacked.FEWEST

    def serve_turns(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message]:
        """The answers to train messages of as many parties, as by `train`."""
        turns: list[Turn | Exception] = []
        for message, context in zip(messages, contexts, strict=True):
            try:
                order = _order(message, context, TrainOrder)
                turns.append(Turn(between.resume(context), order))
            except Exception as error:
                turns.append(error)
        stacked.train([turn for turn in turns if isinstance(turn, Turn)])
        return [
            _answer(message, context, partial(_upload_of, turn, context))
            for message, context, turn in zip(messages, contexts, turns, strict=True)
        ]


app = PartyApp()


@app.query("set")
def find_set(message: Message, context: Context) -> Message:
    """Whether this party still has the blinded ids of an earlier alignment."""
    return _serve(message, context, SetOrder, _aligning(at_party.find_set))


@app.query("align")
def align(message: Message, context: Context) -> Message:
    """Which ids this party has, in a form that does not tell them."""
    return _serve(message, context, AlignOrder, _aligning(at_party.blind))


@app.query("common")
def common(message: Message, context: Context) -> Message:
    """Which of this party's rows all have."""
    return _serve(message, context, CommonOrder, _aligning(at_party.take_common))


@app.query("confirm")
def confirm(message: Message, context: Context) -> Message:
    """These rows are to be used."""

    def confirm(context: Context, order: ConfirmOrder) -> Payload:
        party, parties = seat(context)
        answer = at_party.confirm(context, party, parties, order)
        reuse.store_rows(context, party, parties)
        return answer

    return _serve(message, context, ConfirmOrder, confirm)


@app.query("recall")
def reuse_rows(message: Message, context: Context) -> Message:
    """Rows that were confirmed in an earlier run are to be used."""
    return _serve(message, context, ReuseOrder, _aligning(reuse.reuse_rows))


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Begin a run: rows, columns, embedding size and digests of this party."""

    def begin(context: Context, order: DescribeOrder) -> Payload:
        payload = _by(Party.describe, between.begin)(context, order)
        if not aggregation_of(resolve(context.run_config)).agrees:  # else once all have agreed
            _keep_first(context)
        return payload

    return _serve(message, context, DescribeOrder, begin)


@app.query("grow")
def grow(message: Message, context: Context) -> Message:
    """Begin a run by the model of an earlier one; or, if this party was not of it, as ever."""

    def begin(context: Context, order: GrowOrder) -> Payload:
        payload = _by(Party.describe, between.grow)(context, order)
        state_file.save(context, 0)
        return payload

    return _serve(message, context, GrowOrder, begin)


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """A fresh key for masked sums of this run, signed."""
    return _serve(message, context, KeyOrder, keys.make_key)


@app.query("agree")
def agree(message: Message, context: Context) -> Message:
    """From now on uploads are masked by keys with all other parties."""

    def agree(party: Party, order: AgreeOrder) -> Payload:
        if party.seal is None:
            raise VflError("was asked to agree on keys, and its uploads are not masked.")
        tags = party.seal.agree(context, order.arrays, party.alike)
        return Agreed(party=party.index, parties=party.parties, arrays=tags)

    def agree_and_keep(context: Context, order: AgreeOrder) -> Payload:
        payload = _by(agree)(context, order)
        if between.is_new(context):
            _keep_first(context)
        return payload

    return _serve(message, context, AgreeOrder, agree_and_keep)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One exchange: the feedback for the last window in, the upload of the next out."""
    return _serve(message, context, TrainOrder, _by(Party.train))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The feedback for the last window in, the embeddings of the test rows out."""

    def evaluate(context: Context, order: EvaluateOrder) -> Payload:
        payload = _by(Party.evaluate)(context, order)
        between.remember(context, order)
        return payload

    return _serve(message, context, EvaluateOrder, evaluate)


@app.query("restore")
def restore(message: Message, context: Context) -> Message:
    """The model is to be that of an earlier evaluation."""

    def go_back(party: Party, order: RestoreOrder) -> Payload:
        return party.restore(order, between.model_at(context, order.number))

    return _serve(message, context, RestoreOrder, _by(go_back))


@app.query("embed")
def embed(message: Message, context: Context) -> Message:
    """Fresh embeddings of rows that have grown too old at the label holder."""
    return _serve(message, context, EmbedOrder, _by(Party.embed))


@app.query("rejoin")
def rejoin(message: Message, context: Context) -> Message:
    """Go on after a failure, by what the label holder knows."""

    def resume_or_begin(context: Context, order: RejoinOrder) -> Party:
        return between.resume(context) if context.state else between.begin(context, order)

    return _serve(message, context, RejoinOrder, _by(Party.rejoin, resume_or_begin))


@app.query("checkpoint")
def checkpoint(message: Message, context: Context) -> Message:
    """The feedback for the last window in; this party's state is kept on its disk."""

    def keep(context: Context, order: CheckpointOrder) -> Payload:
        payload = _by(Party.checkpoint)(context, order)
        state_file.save(context, order.number)
        return payload

    return _serve(message, context, CheckpointOrder, keep)


@app.query("resume")
def resume(message: Message, context: Context) -> Message:
    """Go on from a checkpoint, in another run."""

    def go_on(context: Context, order: ResumeOrder) -> Payload:
        run = state_file.run_name(context, order.nonce)
        loaded, number = state_file.load(context, order.run, order.number)
        between.forget_copies(context)
        for name, record in loaded.items():
            context.state[name] = record
        between.rename(context, run)
        keys.forget(context)
        describe: Callable[[Party, ResumeOrder], Description] = Party.describe
        payload = _by(describe)(context, order)
        state_file.save(context, order.number)  # this run's first, should it lose its state
        return replace(payload, checkpoint=number)

    return _serve(message, context, ResumeOrder, go_on)


@app.query("predict")
def embed_new_rows(message: Message, context: Context) -> Message:
    """Embeddings of rows by a model that was kept."""

    def load(context: Context, order: PredictOrder) -> Payload:
        return predict(context, state_file.load(context, order.run, order.number), order)

    return _serve(message, context, PredictOrder, load)


@app.query("session")
def session(message: Message, context: Context) -> Message:
    """Serve the messages of a stream, until it ends."""

    def serve(context: Context, order: SessionOrder) -> Payload:
        run = state_file.run_name(context, order.nonce)
        if order.keep:
            state_file.restore(context, run)
        end = stream.serve(app, order, context, lambda: between.largest_order(context))
        if order.keep:
            state_file.save(context, run=run)
        return end

    return _serve(message, context, SessionOrder, serve)


@app.query("host")
def shared(message: Message, context: Context) -> Message:
    """Serve the orders for the parties of this shared actor."""

    def serve(context: Context, order: SharedActorOrder) -> Payload:
        if not simulated(context):
            raise VflError("is one party, and no shared actor: only a simulation has those.")
        return shared_actor.serve(app, context, order)

    return _serve(message, context, SharedActorOrder, serve)


def _keep_first(context: Context) -> None:
    """Keep the state in which a party begins, where it may be gone back to.

    So that a run can be gone on with from its beginning; and where this party was told its rows,
    since the label holder could not tell it again.
    """
    every = resolve(context.run_config).running.exchanges_apart(simulated(context))
    if every or at_party.is_aligned(context):
        state_file.save(context, 0)


def _aligning(
    method: Callable[[Context, Source, int, O], Payload],
) -> Callable[[Context, O], Payload]:
    """Have an order about ids served by the party's own data."""

    def serve(context: Context, order: O) -> Payload:
        _, parties = seat(context)
        return method(context, own_source(context), parties, order)

    return serve


def _by(
    method: Callable[[Party, O], A],
    party_of: Callable[[Context, O], Party] = lambda context, order: between.resume(context),
) -> Callable[[Context, O], A]:
    """Have the party of the node serve an order, and keep its state."""

    def serve(context: Context, order: O) -> A:
        party = party_of(context, order)
        with _leaving(party, context, order):
            return method(party, order)

    return serve


def _upload_of(turn: Turn | Exception, context: Context) -> Payload:
    """What came of a turn."""
    if isinstance(turn, Exception):
        raise turn
    with _leaving(turn.party, context, turn.order):
        return turn.upload()


@contextmanager
def _leaving(party: Party, context: Context, order: Order) -> Iterator[None]:
    """Keep what a party has served, if all of its order was of use; else what it has learned."""
    try:
        yield
        refuse_unused(order.arrays, "was sent")
        between.keep(party, context)
    except BaseException:
        between.break_off(party, context)
        raise


def _serve(
    message: Message,
    context: Context,
    kind: type[O],
    serve: Callable[[Context, O], Payload],
) -> Message:
    """Serve one message."""
    return _answer(message, context, lambda: serve(context, _order(message, context, kind)))


def _order(message: Message, context: Context, kind: type[O]) -> O:
    """Return the order in a message, unless the party refuses it."""
    order = read_order(message, kind, between.largest_order(context))
    check_order(context, order)
    return order


def _answer(message: Message, context: Context, serve: Callable[[], Payload]) -> Message:
    """The answer to a message; what goes wrong becomes one that names it and holds no data."""
    try:
        return to_reply(serve(), message)
    except CodeError as error:
        log(WARNING, "%s", error)
        said = str(error) if simulated(context) else error.outside  # one owner may read it all
        return to_failure(said, message)
    except VflError as error:
        return to_failure(str(error), message, isinstance(error, OutOfStepError))
    except MemoryError:
        return to_failure("has not enough memory for what it was asked.", message)
    except Exception as error:  # told to the label holder without its text, which may quote data
        log(ERROR, "%s", "".join(traceback.format_tb(error.__traceback__)))
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        return to_failure(f"raised {type(error).__name__} in {where}; see its own log.", message)
