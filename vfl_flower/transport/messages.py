"""The messages of the protocol as dataclasses, and checks of their arrays.

Each message has a few scalars and named NumPy arrays. `transport.wire` converts it to Flower
records and back, and refuses scalars outside these limits. Byte counters count arrays as sent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vfl_flower.config.arrays import peak
from vfl_flower.config.checks import Line
from vfl_flower.config.errors import VflError
from vfl_flower.config.names import Name
from vfl_flower.config.provenance import running

Arrays = dict[str, NDArray[Any]]

SMALL = 2**16  # most bytes of a message without large arrays
MOST = 2**53  # largest number of messages, rows or steps
LARGEST = 1e6
"""Largest magnitude of an embedding, a gradient or a difference of losses.

Models that learn stay far below it. Above it, 32-bit numbers reach infinity within a few steps.
"""
_BEYOND = (
    f"values beyond {LARGEST:,.0f}, and no model can learn from them. Lower the learning rates."
)


Number = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Outputs = Annotated[int, Field(ge=1, le=2**16)]
Text = Annotated[str, Field(max_length=128), Line]
ConfigText = Annotated[str, Field(max_length=20_000), Line]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Scalar fields, and named arrays.

    names : names of the permitted arrays. With None, the reader decides: it refuses arrays that
        `Received` lists as unused.
    """

    names: ClassVar[tuple[str, ...] | None] = ()
    arrays: Arrays = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the arrays, as sent."""
        return sum([array.nbytes for array in self.arrays.values()])


@dataclass(frozen=True, kw_only=True)
class Order(Payload):
    """A message from the label holder to a party.

    ``of_parties`` is the number of parties, if the label holder has counted more than some party
    knows of; else 0. ``version`` is the label holder's. A party compares it before all else.
    """

    kind: ClassVar[str]  # Flower's message type
    of_parties: Number = 0
    version: Text = field(default_factory=running)


@dataclass(frozen=True, kw_only=True)
class DescribeOrder(Order):
    """Describe yourself, and begin anew.

    ``outputs`` is the number of outputs of the model. The label holder draws the ``nonce`` once for
    a run. A party stores its states under the nonce and Flower's run id, since run ids can repeat.
    A rerun names the ``run`` to repeat, and its last checkpoint's ``number``.
    """

    kind: ClassVar[str] = "query.describe"
    outputs: Outputs
    nonce: Text = ""
    run: Text = ""
    number: Number = 0


@dataclass(frozen=True, kw_only=True)
class Turn(Order):
    """A message to one party, numbered from 1: the party notices repetitions."""

    exchange: Number


@dataclass(frozen=True, kw_only=True)
class TrainOrder(Turn):
    """Learn from the last window's feedback, in ``arrays``; upload the next window.

    ``coordinated`` says whether all parties draw the same rows, or each party draws its own.
    """

    kind: ClassVar[str] = "train"
    names: ClassVar = None
    epoch: Number
    first: Number
    steps: Positive
    coordinated: bool


@dataclass(frozen=True, kw_only=True)
class EvaluateOrder(Turn):
    """Learn from the feedback, if any; upload the embeddings of the test rows.

    If validation rows choose the model, ``number`` is above 0. The party then keeps a copy of its
    model under this number, beside the copies of evaluations ``best`` and ``last``.
    """

    kind: ClassVar[str] = "evaluate"
    names: ClassVar = None
    number: Number = 0
    best: Number = 0
    last: Number = 0


@dataclass(frozen=True, kw_only=True)
class EmbedOrder(Turn):
    """Upload fresh embeddings of the rows in ``arrays["ids"]`` (bounded delay).

    Without ids, upload all training rows that the party has. The other arrays are the feedback for
    the last window, if any.
    """

    kind: ClassVar[str] = "query.embed"
    names: ClassVar = None


@dataclass(frozen=True, kw_only=True)
class RejoinOrder(Turn):
    """Continue after a failure: count from this message, and forget the last window.

    ``arrays["embedding"]`` is the label holder's copy of the party's surrogate, if there is one. A
    party without any state begins anew, as with `DescribeOrder`. ``best`` and ``last`` are as in
    `EvaluateOrder`. The answer says which of them the party has a copy of.
    """

    kind: ClassVar[str] = "query.rejoin"
    names: ClassVar = ("embedding",)
    outputs: Outputs
    nonce: Text = ""
    best: Number = 0
    last: Number = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder(Turn):
    """Learn from the feedback, if any; write all state as checkpoint ``number``."""

    kind: ClassVar[str] = "query.checkpoint"
    names: ClassVar = None
    number: Number


@dataclass(frozen=True, kw_only=True)
class RestoreOrder(Turn):
    """Restore your model of evaluation ``number``, which was the best."""

    kind: ClassVar[str] = "query.restore"
    number: Positive


@dataclass(frozen=True, kw_only=True)
class ResumeOrder(Order):
    """Resume from checkpoint ``number`` of ``run``; from now on, use this ``nonce``."""

    kind: ClassVar[str] = "query.resume"
    run: Text
    number: Number
    nonce: Text = ""


@dataclass(frozen=True, kw_only=True)
class GrowOrder(DescribeOrder):
    """Begin a run with the models of an earlier ``run``.

    The first ``parties`` parties took part in it. Each stored its model there as checkpoint
    ``number``. ``config`` is the configuration of the new run, in JSON. It has the earlier run's
    values for options that the run configuration leaves out.
    """

    kind: ClassVar[str] = "query.grow"
    run: Text
    number: Number
    parties: Number
    config: ConfigText


@dataclass(frozen=True, kw_only=True)
class PredictOrder(Order):
    """Embed rows with the model of a checkpoint. The answer is `Predicted`.

    The rows are the rows just aligned, or else the test rows. If sums are masked, ``arrays`` are as
    in `early_messages.AgreeOrder`.
    """

    kind: ClassVar[str] = "query.predict"
    names: ClassVar[tuple[str, ...]] = ("keys", "identities", "signatures")
    run: Text
    number: Number


@dataclass(frozen=True, kw_only=True)
class ServeOrder(PredictOrder):
    """Load the model of a checkpoint and the rows, as for `PredictOrder`; keep both in memory.

    The answer is `Serving`. Each `ScoreOrder` then asks for embeddings of some rows.
    """

    kind: ClassVar[str] = "query.serve"


@dataclass(frozen=True, kw_only=True)
class ScoreOrder(Order):
    """Embed some rows with the model that `ServeOrder` loaded. The answer is `Scored`.

    ``arrays["rows"]``, int32 [n], are positions among the rows that the party has. Further rows can
    follow: ``arrays["places"]``, int32 [k], are places in the set of blinded ids that
    `OpenSetOrder` has opened. ``arrays["proofs"]``, uint8 [k, 32], show that the label holder knows
    their ids.
    """

    kind: ClassVar[str] = "query.score"
    names: ClassVar = ("rows", "places", "proofs")


@dataclass(frozen=True, kw_only=True)
class Introduction(Payload):
    """An answer that says which party sends it, its name if any, and how many there are."""

    names: ClassVar[tuple[str, ...] | None] = ("question", "rows")
    party: Number
    parties: Positive
    name: Name = ""


@dataclass(frozen=True, kw_only=True)
class Description(Introduction):
    """Answer to orders that begin or continue a run: what must agree before training.

    ``alignment`` identifies the party's rows and their order. With own data it is the name of the
    alignment, else a digest of the row numbers. ``exchange`` is the number of messages served;
    when a run begins, of messages that the earlier run's model has seen. ``checkpoint`` is the
    number of the checkpoint from which the party continues or begins. ``best`` and ``last`` repeat
    the numbers of a `RejoinOrder`, or are 0 where the party has no copy. ``monotone`` says that
    some columns are monotonic.
    """

    names: ClassVar = ()
    train_rows: Number
    test_rows: Number
    columns: Number
    embedding_size: Positive
    alignment: Text
    monotone: bool = False
    exchange: Number
    checkpoint: Number = 0
    best: Number = 0
    last: Number = 0


@dataclass(frozen=True, kw_only=True)
class Predicted(Introduction):
    """Answer to `PredictOrder`: ``arrays["embedding"]``, float32 [N, E].

    ``alignment`` is as in `Description`. ``exchange`` is the number of messages that the model has
    seen, and ``checkpoint`` the number of its checkpoint. If sums are masked, embeddings are masked
    too, int32, and there are tags as in `early_messages.Agreed`. ``arrays["drift"]``, int32 [2], is
    how many of the party's columns drift moderately, and how many largely. A party may leave it
    out.
    """

    names: ClassVar = ("embedding", "tags", "drift")
    exchange: Number
    checkpoint: Number = 0
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class Serving(Introduction):
    """Answer to `ServeOrder`: the party has loaded its model and ``rows`` rows.

    The other fields, and the tags, are as in `Predicted`.
    """

    names: ClassVar = ("tags",)
    rows: Number
    exchange: Number
    checkpoint: Number = 0
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class Scored(Payload):
    """Answer to `ScoreOrder`: ``arrays["embedding"]``, float32 [n + k, E].

    ``arrays["gone"]``, int32 [m], are positions of rows that the party has lost since it loaded
    them. ``arrays["refused"]`` are those that a rule forbids; ``why`` is the sentence. Both have
    embeddings of zero. If sums are masked, embeddings are int32, and no row may be gone or refused.
    ``arrays["drift"]`` is as in `Predicted`, for the last rows.
    """

    names: ClassVar = ("embedding", "gone", "refused", "drift")
    why: Text = ""


@dataclass(frozen=True, kw_only=True)
class Upload(Payload):
    """Answer to every other order: encoded embeddings, and the ids of their rows.

    With test embeddings come a digest of the party's surrogates, and its peak memory.
    """

    names: ClassVar = None
    party: Number
    exchange: Number
    peak_memory_mb: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    surrogates: Text = ""


class Received(Arrays):
    """Arrays of a message that record which of them nobody has used."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(arrays)
        self.unused = set(arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.unused.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an array, as any dictionary does."""
        self.unused.discard(name)
        return super().get(name, default)


def refuse_unused(arrays: Mapping[str, NDArray[Any]], verb: str = "sent") -> None:
    """Refuse arrays that nobody has used, by `VflError` with the end of a sentence."""
    unused = sorted(arrays.unused) if isinstance(arrays, Received) else []
    if unused:
        raise VflError(f"{verb} an array {unused[0]!r}, which nobody uses here.")


def checked(
    arrays: Mapping[str, NDArray[Any]],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    most: float = math.inf,
    peaks: dict[str, float] | None = None,
) -> Any:
    """Return the array of that name, if it has this dtype and shape, and finite numbers.

    Their magnitude may be ``most``: any, or `LARGEST`. ``peaks`` gets the largest.
    Raise `VflError` if it is missing or different; the text is the end of a sentence.
    """
    if name not in arrays:
        raise VflError(f"array {name!r} is missing.")
    array = arrays[name]
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise VflError(
            f"{name!r} is {array.dtype} of shape {array.shape}, not {dtype} of shape {shape}."
        )
    if array.dtype.kind == "f":
        largest = peak(array)  # one pass for both checks
        if not math.isfinite(largest):
            raise VflError(f"{name!r} has values that are not finite. Lower the learning rates.")
        if largest > most:
            raise VflError(f"{name!r} has {_BEYOND}")
        if peaks is not None:
            peaks[name] = largest
    return array


def bounded(name: str, rows: Any) -> float:
    """Return the largest magnitude of rows, of NumPy or torch.

    If it exceeds `LARGEST`, or one is NaN, raise `VflError`, the end of a sentence.
    """
    if not (largest := peak(rows)) <= LARGEST:  # NaN is not
        raise VflError(f"{name!r} has {_BEYOND}")
    return largest
