"""The message that opens a stream, and the answer when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from vfl_flower.config.checks import Line
from vfl_flower.transport.messages import Number, Order, Payload, Text


@dataclass(frozen=True, kw_only=True)
class SessionOrder(Order):
    """Connect to the label holder's stream, and serve it. The answer is `SessionEnd`.

    ``address`` is the address of the stream, and ``certificate`` (PEM) the only one to accept
    there. The party shows the ``token`` once. ``keep`` says whether it writes its state to a file,
    under ``nonce``.
    """

    kind: ClassVar[str] = "query.session"
    address: Annotated[str, Field(max_length=300), Line]
    certificate: Annotated[str, Field(max_length=10_000)]
    token: Text
    keep: bool
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class SessionEnd(Payload):
    """Answer to `SessionOrder`, once the session is over.

    ``connected`` says whether the party ever reached the stream, ``served`` how many messages it
    served, and ``cause`` why the session broke, if it did. Pass it through `transport.wire.said` to
    show it.
    """

    connected: bool
    served: Number
    cause: str
