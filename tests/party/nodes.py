"""A real node with its own file, to which tests send orders in any sequence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from vfl_flower import client_app
from vfl_flower.alignment import store
from vfl_flower.config.errors import VflError
from vfl_flower.party import session as between
from vfl_flower.party.inputs import own_source
from vfl_flower.transport import messages
from vfl_flower.transport.flower_internals import state_from_bytes
from vfl_flower.transport.wire import pack, read_reply, to_message

Array = NDArray[Any]

ROWS, BATCH = 60, 8  # of the party's file; 48 of the rows are trained on, in 6 mini-batches
KEYS: dict[str, Any] = {
    **{"dataset": "files:elsewhere.csv", "bottom-model": "linear", "embedding-size": 8},
    **{"embedding-activation": "none", "batch-size": BATCH, "party-lr": 0.0, "epochs": 4},
}
DESCRIBE = messages.DescribeOrder(outputs=1)


Node = Callable[..., Context]


def align(context: Context, rows: Array | None = None) -> None:
    """Tell a party which of its rows all have."""
    rows = np.arange(ROWS) if rows is None else rows
    digest = store.digest_of(own_source(context), rows)
    name = np.full(32, ord("a"), np.uint8)
    context.state["aligned"] = pack(
        {"rows": rows, "digest": digest, "name": name, "method": store.PSI}
    )


def asked(
    context: Context, order: messages.Order, kind: type[messages.Payload] = messages.Upload
) -> Any:
    """A party's answer to an order, or the error that is told of it."""
    return read_reply(client_app.app(to_message(order, 2, 60), context), kind)


def refused(context: Context, order: messages.Order, why: str | None = None) -> str:
    """Return the text of the error when a party refuses an order."""
    with pytest.raises(VflError, match=why) as raised:
        asked(context, order)
    return str(raised.value)


def begun(context: Context) -> Context:
    """A node that has described itself, and has trained in each mini-batch once."""
    asked(context, DESCRIBE, messages.Description)
    asked(context, train(1))
    return context


def train(
    exchange: int, steps: int = 6, epoch: int = 0, first: int = 0, **sent: Any
) -> messages.TrainOrder:
    """An order for some mini-batches; without more, for a whole pass."""
    place: dict[str, Any] = {"epoch": epoch, "first": first, "steps": steps}
    return messages.TrainOrder(exchange=exchange, coordinated=True, arrays=sent, **place)


def gradient(rows: int = 48) -> Array:
    return np.zeros((rows, 8), np.float32)


def restarted(context: Context, kept: bytes | None = None) -> None:
    """The process has ended, and its SuperNode too, if nothing but a state is kept."""
    between.live.clear()
    context.state = RecordDict() if kept is None else state_from_bytes(kept)
