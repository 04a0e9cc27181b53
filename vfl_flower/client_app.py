"""The Flower ClientApp of a party: five messages, each served by a method of `Party`.

A sixth, "session", brings those five over a stream.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from logging import ERROR
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common import log

from vfl_flower import stream
from vfl_flower.errors import OutOfStepError, VflError
from vfl_flower.party import Party, identity
from vfl_flower.records import (
    DescribeOrder,
    EmbedOrder,
    EvaluateOrder,
    Order,
    Payload,
    RejoinOrder,
    TrainOrder,
    read_order,
    to_failure,
    to_reply,
)

O = TypeVar("O", bound=Order)  # noqa: E741

app = ClientApp()


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Begin a run: rows, columns, embedding size and digests of this party."""

    def begin(context: Context, order: DescribeOrder) -> Party:
        return Party(*identity(context), order.outputs)

    return _serve(message, context, DescribeOrder, Party.describe, begin)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One exchange: the feedback for the last window in, the upload of the next out."""
    return _serve(message, context, TrainOrder, Party.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The feedback for the last window in, the embeddings of the test rows out."""
    return _serve(message, context, EvaluateOrder, Party.evaluate)


@app.query("embed")
def embed(message: Message, context: Context) -> Message:
    """Fresh embeddings of rows that have grown too old at the label holder."""
    return _serve(message, context, EmbedOrder, Party.embed)


@app.query("rejoin")
def rejoin(message: Message, context: Context) -> Message:
    """Go on after a failure, by what the label holder knows."""

    def resume_or_begin(context: Context, order: RejoinOrder) -> Party:
        return Party.resume(context) if context.state else Party(*identity(context), order.outputs)

    return _serve(message, context, RejoinOrder, Party.rejoin, resume_or_begin)


@app.query("session")
def session(message: Message, context: Context) -> Message:
    """Serve the messages of a stream, until it ends."""
    return stream.serve(app, message, context)


def _serve(
    message: Message,
    context: Context,
    kind: type[O],
    method: Callable[[Party, O], Payload],
    party_of: Callable[[Context, O], Party] = lambda context, order: Party.resume(context),
) -> Message:
    """Serve one message; what goes wrong becomes an answer that names it and holds no data."""
    try:
        order = read_order(message, kind)
        party = party_of(context, order)
        payload = method(party, order)
        party.keep(context)
        return to_reply(payload, message)
    except VflError as error:
        return to_failure(str(error), message, isinstance(error, OutOfStepError))
    except Exception as error:  # told to the label holder without its text, which may quote data
        log(ERROR, "%s", "".join(traceback.format_tb(error.__traceback__)))
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        return to_failure(f"raised {type(error).__name__} in {where}; see its own log.", message)
