"""The messages of the protocol, as typed dataclasses, and checks of the arrays in them.

Each is a few scalars and named NumPy arrays. `transport.wire` takes them to Flower records and
back, and refuses scalars that are not within the bounds that stand here. The byte counters count
the arrays, as sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vfl_flower.config.checks import Line
from vfl_flower.config.errors import VflError

Arrays = dict[str, NDArray[Any]]

SMALL = 2**16
"""Bytes of a message without large arrays, at most."""
MOST = 2**53
"""What a number of messages, rows or steps can be, at most."""
LARGEST = 1e6
"""What an embedding, a gradient or a difference of losses can be, up and down.

Models that learn keep far below it. Above it a few steps take 32-bit numbers to infinity.
"""


Number = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Outputs = Annotated[int, Field(ge=1, le=2**16)]
Text = Annotated[str, Field(max_length=128), Line]
ConfigText = Annotated[str, Field(max_length=20_000), Line]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Scalar fields, and named arrays.

    names : of the arrays that it can have; None if who reads them decides, and says by `Received`
        which were used.
    """

    names: ClassVar[tuple[str, ...] | None] = ()
    arrays: Arrays = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, as sent."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, kw_only=True)
class Order(Payload):
    """From the label holder to a party."""

    kind: ClassVar[str]  # Flower's message type


@dataclass(frozen=True, kw_only=True)
class DescribeOrder(Order):
    """Describe yourself, and begin anew; the model is to have this many outputs.

    The label holder draws the ``nonce`` once for a run. A party keeps its states under it, and
    under Flower's run id, which may come again.
    """

    kind: ClassVar[str] = "query.describe"
    outputs: Outputs
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class Turn(Order):
    """One of a party's messages, numbered from 1, so that one that comes twice is noticed."""

    exchange: Number


@dataclass(frozen=True, kw_only=True)
class TrainOrder(Turn):
    """The feedback for the last window, in ``arrays``, and the order for the next.

    ``coordinated`` says whose order of the rows counts: the one that all parties share, or the
    party's own.
    """

    kind: ClassVar[str] = "train"
    names: ClassVar = None
    epoch: Number
    first: Number
    steps: Positive
    coordinated: bool


@dataclass(frozen=True, kw_only=True)
class EvaluateOrder(Turn):
    """The feedback for the last window, if any; upload the embeddings of the test rows.

    Where validation rows choose the model, the party keeps a copy of its own as that of evaluation
    ``number``, which is above 0, beside those of the ``best`` and of the ``last``.
    """

    kind: ClassVar[str] = "evaluate"
    names: ClassVar = None
    number: Number = 0
    best: Number = 0
    last: Number = 0


@dataclass(frozen=True, kw_only=True)
class EmbedOrder(Turn):
    """Upload fresh embeddings of the training rows in ``arrays["ids"]`` (bounded delay).

    The other arrays are the feedback for the last window, if there is any to come with it.
    """

    kind: ClassVar[str] = "query.embed"
    names: ClassVar = None


@dataclass(frozen=True, kw_only=True)
class RejoinOrder(Turn):
    """Go on after a failure: count messages from this one, and forget the window before it.

    ``arrays["embedding"]`` is the label holder's copy of the party's surrogate, if there is one. A
    party that has lost all its state begins anew, as by `DescribeOrder`.
    """

    kind: ClassVar[str] = "query.rejoin"
    names: ClassVar = ("embedding",)
    outputs: Outputs
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder(Turn):
    """Learn from the feedback, if any, and keep all state on disk, as checkpoint ``number``."""

    kind: ClassVar[str] = "query.checkpoint"
    names: ClassVar = None
    number: Number


@dataclass(frozen=True, kw_only=True)
class RestoreOrder(Turn):
    """Have the model that you had at evaluation ``number``: it was the best."""

    kind: ClassVar[str] = "query.restore"
    number: Positive


@dataclass(frozen=True, kw_only=True)
class EarlyOrder(Order):
    """An order that comes before a party has begun, resumed or predicted.

    ``config`` is the configuration of the run that it prepares, in JSON. The run configuration can
    lack it: with ``grow`` and ``task='predict'`` most of it is that of an earlier run.
    """

    config: ConfigText = ""


@dataclass(frozen=True, kw_only=True)
class SetOrder(EarlyOrder):
    """Say whether you keep one of these sets of blinded ids (`alignment.blinded_ids`).

    ``arrays["names"]``, uint8 [30, 16], are their names, with ``proofs``, uint8 [30, 32], that the
    label holder keeps them too; most are of none. Answered by `SetKept`.
    """

    kind: ClassVar[str] = "query.set"
    names: ClassVar = ("names", "proofs")


@dataclass(frozen=True, kw_only=True)
class AlignOrder(EarlyOrder):
    """Say which ids you have, by a ``method`` that does not tell them (`data.alignment`).

    ``id_kind`` is what the label holder's ids are; ``arrays["ids"]`` are these, blinded, or by
    method "ids" one digest of them all, blinded: uint8 [n, 32]. Unless ``anew``, only ids that are
    new since the set that was just found to be kept.
    """

    kind: ClassVar[str] = "query.align"
    names: ClassVar = ("ids",)
    method: Text
    id_kind: Text
    anew: bool = True


@dataclass(frozen=True, kw_only=True)
class CommonOrder(EarlyOrder):
    """The rows to use, by their ``places`` in the party's secret order, int32 [N].

    That is -1 of a row that the party lacks, of which with align = 'any' there may be some.
    Answered by ``arrays["question"]``, uint8 [1, 32], about the ids of ``rows``, int32 [n].
    """

    kind: ClassVar[str] = "query.common"
    names: ClassVar = ("places",)


@dataclass(frozen=True, kw_only=True)
class ConfirmOrder(EarlyOrder):
    """Use the rows that all have, since the label holder knows their ids.

    That is shown by ``arrays["answer"]``, uint8 [2, 32] (`psi.answer`); by method "ids" the party's
    question blinded by the label holder too, [1, 32]. ``alignment`` is a name for all this, drawn
    at random: 32 characters.
    """

    kind: ClassVar[str] = "query.confirm"
    names: ClassVar = ("answer",)
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class ReuseOrder(EarlyOrder):
    """Use the rows of an alignment that was kept, if its ids and your rules are still as then.

    ``arrays["proofs"]``, uint8 [parties, 32], shows to each party, by its number, that this is the
    label holder of then. Answered by `Reused`.
    """

    kind: ClassVar[str] = "query.recall"
    names: ClassVar = ("proofs",)
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class ResumeOrder(Order):
    """Go on from checkpoint ``number`` that you kept in ``run``; from now on under ``nonce``."""

    kind: ClassVar[str] = "query.resume"
    run: Text
    number: Number
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class GrowOrder(DescribeOrder):
    """Begin a run by the models of an earlier one, which was of so many ``parties``, the first.

    Each of them kept its own in ``run``, as checkpoint ``number``. ``config`` is the configuration
    of the new run, in JSON: what the run configuration does not say is as then.
    """

    kind: ClassVar[str] = "query.grow"
    run: Text
    number: Number
    parties: Number
    config: ConfigText


@dataclass(frozen=True, kw_only=True)
class KeyOrder(EarlyOrder):
    """Make a key for masked sums of this run (`protocol.secure_sum`). Answered by `KeyMade`."""

    kind: ClassVar[str] = "query.key"


@dataclass(frozen=True, kw_only=True)
class AgreeOrder(Order):
    """Agree with all parties on keys; the arrays are those of `KeyMade`, a row of each party.

    Answered by `Agreed`.
    """

    kind: ClassVar[str] = "query.agree"
    names: ClassVar = ("keys", "identities", "signatures")


@dataclass(frozen=True, kw_only=True)
class PredictOrder(Order):
    """Embed rows with the model of that checkpoint: those just aligned, or the test rows.

    Where sums are masked, the arrays are those of `AgreeOrder`. Answered by `Predicted`.
    """

    kind: ClassVar[str] = "query.predict"
    names: ClassVar = ("keys", "identities", "signatures")
    run: Text
    number: Number


@dataclass(frozen=True, kw_only=True)
class SessionOrder(Order):
    """Connect to the label holder's stream, and serve what it carries (`transport.stream`).

    ``address`` is where, ``certificate`` the only one to accept there (PEM), ``token`` what to show
    for oneself, once, and ``keep`` whether the party keeps its state in a file, under ``nonce``.
    """

    kind: ClassVar[str] = "query.session"
    address: Annotated[str, Field(max_length=300), Line]
    certificate: Annotated[str, Field(max_length=10_000)]
    token: Text
    keep: bool
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class SharedActorOrder(Order):
    """Serve orders to several of the ``parties`` of a run (`transport.shared_actor`).

    ``arrays["packed"]`` are the orders (`wire.pack_many`). Answered by `SharedActorAnswer`.
    """

    kind: ClassVar[str] = "query.host"
    names: ClassVar = ("packed",)
    parties: Positive


@dataclass(frozen=True, kw_only=True)
class SharedActorAnswer(Payload):
    """The answers to the orders of a `SharedActorOrder`, in their order."""

    names: ClassVar = ("packed",)


@dataclass(frozen=True, kw_only=True)
class Introduction(Payload):
    """Which party answers, of how many; with what arrays is said by the order."""

    names: ClassVar[tuple[str, ...] | None] = ("question", "rows")
    party: Number
    parties: Positive


@dataclass(frozen=True, kw_only=True)
class SetKept(Introduction):
    """A party's answer to `SetOrder`: ``arrays["proof"]``, uint8 [1, 32], if it keeps that set."""

    names: ClassVar = ("proof",)


@dataclass(frozen=True, kw_only=True)
class Aligned(Introduction):
    """A party's answer to `AlignOrder`: "again" and "own", uint8 [n, 32].

    These are the label holder's ids, in their order, blinded by the party too; and outputs of the
    party's (`psi.outputs`), in a secret order, or those at the end of it that the label holder does
    not know. "gone", int32 [m], are places of ids that the party's file has no more. By method
    "ids" there is "question" alone, as in the answer to `CommonOrder`.
    """

    names: ClassVar = ("again", "own", "gone", "question")


@dataclass(frozen=True, kw_only=True)
class Reused(Introduction):
    """A party's answer to `ReuseOrder`: what became of that alignment (`alignment.reuse`)."""

    names: ClassVar = ()
    became: Text


@dataclass(frozen=True, kw_only=True)
class Description(Introduction):
    """A party's answer to orders that begin or go on with a run: what must agree before it trains.

    ``alignment`` says which rows it has, in which order: with own data the name of the alignment
    that told it of them, else a digest of their numbers.
    """

    names: ClassVar = ()
    train_rows: Number
    test_rows: Number
    columns: Number
    embedding_size: Positive
    alignment: Text
    code_digest: Text
    exchange: (
        Number  # messages that it has served, or when a run begins its model of an earlier one
    )
    checkpoint: Number = 0  # number of the checkpoint from which it goes on, or begins


@dataclass(frozen=True, kw_only=True)
class KeyMade(Introduction):
    """A party's answer to `KeyOrder`: its fresh key, and the lasting one that has signed it.

    ``arrays`` are "keys" and "identities", uint8 [1, 32], and "signatures", uint8 [1, 64].
    """

    names: ClassVar = ("keys", "identities", "signatures")


@dataclass(frozen=True, kw_only=True)
class Agreed(Introduction):
    """A party's answer to `AgreeOrder`: a tag of the key with each party, uint8 [parties, 16]."""

    names: ClassVar = ("tags",)


@dataclass(frozen=True, kw_only=True)
class Predicted(Introduction):
    """A party's answer to `PredictOrder`: ``arrays["embedding"]``, float32 [N, E], of which rows.

    ``alignment`` is as in `Description`; ``exchange`` is the number of messages that the model had
    seen, and ``checkpoint`` the number of the checkpoint that it is of. Where sums are masked,
    embeddings are so, int32, and there are tags as in `Agreed`.
    """

    names: ClassVar = ("embedding", "tags")
    exchange: Number
    checkpoint: Number = 0
    alignment: Text
    code_digest: Text


@dataclass(frozen=True, kw_only=True)
class Upload(Payload):
    """A party's answer to every other order: embeddings, through the codec, and the rows' ids.

    With test embeddings comes a digest of the party's copies of surrogates, and its peak memory.
    """

    names: ClassVar = None
    party: Number
    exchange: Number
    peak_memory_mb: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    surrogates: Text = ""


@dataclass(frozen=True, kw_only=True)
class SessionEnd(Payload):
    """A party's answer to `SessionOrder`, when the session is over: why, if it broke."""

    connected: bool  # whether it ever was
    served: Number
    cause: str  # to be shown as `transport.wire.said` has it


class Received(Arrays):
    """Arrays of a message that know which of them have been used."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(arrays)
        self.unused = set(arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.unused.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dictionary."""
        self.unused.discard(name)
        return super().get(name, default)


def refuse_unused(arrays: Mapping[str, NDArray[Any]], verb: str = "sent") -> None:
    """Raise `VflError`, as the end of a sentence, if arrays came that nobody has used."""
    unused = sorted(arrays.unused) if isinstance(arrays, Received) else []
    if unused:
        raise VflError(f"{verb} an array {unused[0]!r}, for which there is no use here.")


def checked(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, shape: tuple[int, ...]
) -> Any:
    """The array of that name, if it has just this dtype and shape, and is finite.

    Raises
    ------
    VflError
        What is wrong with it, as the end of a sentence.
    """
    if name not in arrays:
        raise VflError(f"array {name!r} is missing.")
    array = arrays[name]
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise VflError(
            f"{name!r} is {array.dtype} of shape {array.shape}, not {dtype} of shape {shape}."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise VflError(f"{name!r} has values that are not finite; lower the learning rates.")
    return array


def bounded(name: str, rows: Any) -> Any:
    """The rows, of NumPy or torch, if each of their numbers is within `LARGEST`.

    Raises
    ------
    VflError
        If one is not, or is no number at all, as the end of a sentence.
    """
    if 0 in rows.shape:
        return rows
    least, most = rows.aminmax() if hasattr(rows, "aminmax") else (rows.min(), rows.max())
    if not (float(least) >= -LARGEST and float(most) <= LARGEST):  # as tensors, it takes longer
        raise VflError(
            f"{name!r} has values beyond {LARGEST:,.0f}, by which no model can learn; lower the "
            "learning rates."
        )
    return rows
