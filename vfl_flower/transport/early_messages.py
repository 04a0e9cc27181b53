"""Messages before a run: alignment of rows, keys for masked sums, and evidence of columns."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from vfl_flower.config.checks import Line
from vfl_flower.transport.messages import ConfigText, Introduction, Number, Order, Payload, Text

RuleText = Annotated[str, Field(max_length=800), Line]


@dataclass(frozen=True, kw_only=True)
class EarlyOrder(Order):
    """An order before a party begins, resumes or predicts.

    ``config`` is the configuration of the run that it prepares, in JSON. The run configuration does
    not have all of it: with ``grow`` and ``task='predict'``, most comes from an earlier run.
    """

    config: ConfigText = ""


@dataclass(frozen=True, kw_only=True)
class SetOrder(EarlyOrder):
    """Say which of these sets of blinded ids you keep (`alignment.blinded_ids`).

    The answer is `SetKept`. ``arrays["names"]``, uint8 [30, 16], are names of sets.
    ``arrays["proofs"]``, uint8 [30, 32], prove that the label holder keeps these sets too. Most
    names are padding: there is no such set.
    """

    kind: ClassVar[str] = "query.set"
    names: ClassVar = ("names", "proofs")


@dataclass(frozen=True, kw_only=True)
class OpenSetOrder(SetOrder):
    """Keep one of these sets in memory, for `SeekOrder`. The answer is `SetKept`.

    With a ``rule``, make a set of the keys of your people by it (`alignment.seeking`), and no sets
    are named. Unless ``anew``, add it to the last one.
    """

    kind: ClassVar[str] = "query.openset"
    anew: bool = True
    rule: RuleText = ""


@dataclass(frozen=True, kw_only=True)
class SeekOrder(Order):
    """Blind these ids too, with the secret of the set that `OpenSetOrder` has opened.

    ``arrays["ids"]``, uint8 [n, 32], are the label holder's blinded ids, or keys of a ``rule``.
    ``known`` is the number of the set's places that the label holder knows. The answer is `Sought`.
    """

    kind: ClassVar[str] = "query.seek"
    names: ClassVar = ("ids",)
    known: Number
    rule: RuleText = ""


@dataclass(frozen=True, kw_only=True)
class AlignOrder(EarlyOrder):
    """Say which ids you have, by a ``method`` that hides them; answer by `Aligned`.

    ``arrays["ids"]``, uint8 [n, 32], are a piece of the label holder's blinded ids; with method
    "ids", one blinded digest of all ids. Unless ``anew``, they are only the ids added since the set
    of blinded ids that `SetOrder` found. ``piece`` is the number of this order, from 0. If there is
    ``more``, further ids follow (`alignment.pieces`).

    With a ``rule``, the ids are keys of people (`alignment.by_rules`). Unless ``anew``, it is not
    the first rule. ``arrays["matched"]``, int32 [m], are then places in the party's order of the
    last rule, of people that have matched. ``arrays["proof"]``, uint8 [1, 32], shows that the label
    holder knows their keys. Both come with the first piece.
    """

    kind: ClassVar[str] = "query.align"
    names: ClassVar = ("ids", "matched", "proof")
    method: Text
    anew: bool = True
    piece: Number = 0
    more: bool = False
    rule: RuleText = ""


@dataclass(frozen=True, kw_only=True)
class CommonOrder(EarlyOrder):
    """Use these rows: their ``places`` in the party's secret order, int32 [N].

    The place of a row that the party lacks is -1; with align = 'any', there can be such rows. With
    split = 'time', ``arrays["held"]``, int32 [1], is the number of test rows. The answer, an
    `Introduction`, has ``arrays["question"]``, uint8 [1, 32], about the ids of
    ``arrays["rows"]``, int32 [n].
    """

    kind: ClassVar[str] = "query.common"
    names: ClassVar = ("places", "held")


@dataclass(frozen=True, kw_only=True)
class ConfirmOrder(EarlyOrder):
    """Use the common rows: the label holder proves that it knows their ids.

    The proof is ``arrays["answer"]``, uint8 [2, 32] (`psi.answer`). With method "ids" it is the
    party's question, blinded by the label holder too, [1, 32]. ``alignment`` is a random name of
    this alignment: 32 characters.
    """

    kind: ClassVar[str] = "query.confirm"
    names: ClassVar = ("answer",)
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class ReuseOrder(EarlyOrder):
    """Reuse the rows of a stored alignment, unless its ids or your rules have changed.

    The answer is `Reused`. ``arrays["proofs"]``, uint8 [parties, 32], prove to each party that the
    same label holder made the alignment.
    """

    kind: ClassVar[str] = "query.recall"
    names: ClassVar = ("proofs",)
    alignment: Text


@dataclass(frozen=True, kw_only=True)
class KeyOrder(EarlyOrder):
    """Make a key for masked sums of this run. The answer is `KeyMade`."""

    kind: ClassVar[str] = "query.key"


@dataclass(frozen=True, kw_only=True)
class AgreeOrder(Order):
    """Agree with all parties on keys: a row of `KeyMade` for each. The answer is `Agreed`."""

    kind: ClassVar[str] = "query.agree"
    names: ClassVar = ("keys", "identities", "signatures")


@dataclass(frozen=True, kw_only=True)
class InformationOrder(EarlyOrder):
    """Say whether you take part in task "information". The answer is `InformationOffer`."""

    kind: ClassVar[str] = "query.information"


@dataclass(frozen=True, kw_only=True)
class ColumnBinsOrder(EarlyOrder):
    """Upload the bins of your columns, for exact counts. The answer is `ColumnBins`."""

    kind: ClassVar[str] = "query.columnbins"


@dataclass(frozen=True, kw_only=True)
class EvidenceOrder(EarlyOrder):
    """Compute the weight of evidence of your C columns. The answer is `ColumnInformation`.

    Noisy: ``arrays["labels"]``, uint8 [n], are labels of the party's training rows. Each is the
    true one with probability ``kept``. Exact: ``kept`` is 1, and the label holder has merged the
    bins of `ColumnBins`. ``arrays["groups"]``, uint8 [C, B], have the group of each bin, and
    ``arrays["counts"]``, int64 [C, G, 2], rows and events of each group.
    """

    kind: ClassVar[str] = "query.evidence"
    names: ClassVar = ("labels", "groups", "counts")
    kept: Annotated[float, Field(gt=0.5, le=1)]


@dataclass(frozen=True, kw_only=True)
class SetKept(Introduction):
    """Answer to `SetOrder`: ``arrays["proof"]``, uint8 [1, 32], if the set is there.

    Of `OpenSetOrder` with a rule: ``arrays["own"]``, uint8 [n, 32], are outputs of the party's
    keys, and ``why`` names the party's rule that forbids them.
    """

    names: ClassVar = ("proof", "own")
    why: RuleText = ""


@dataclass(frozen=True, kw_only=True)
class Sought(Payload):
    """Answer to `SeekOrder`.

    ``arrays["again"]``, uint8 [n, 32], are the ids in their order, blinded by the party too.
    ``arrays["own"]``, uint8 [m, 32], are outputs of the places after ``known``.
    ``arrays["refused"]``, int32 [r], are positions of ids that a rule forbids, and ``why`` is the
    sentence. ``again`` leaves these ids out.
    """

    names: ClassVar = ("again", "own", "refused")
    why: Text = ""


@dataclass(frozen=True, kw_only=True)
class Aligned(Introduction):
    """Answer to `AlignOrder`.

    ``arrays["again"]``, uint8 [n, 32], are the label holder's ids in their order, blinded by the
    party too. ``arrays["own"]``, uint8 [m, 32], are a piece of the outputs of the party's ids
    (`psi.outputs`) in a secret order. There are ``places`` of them in all, without those that the
    label holder knows. Both come after the last ids. ``arrays["gone"]``, int32 [k], are places of
    ids that the party's file has lost. They come with the last piece. With method "ids" there is
    only ``arrays["question"]``, as in the answer to `CommonOrder`. With a rule, ``missing`` names
    columns of the rule that the party lacks. ``ambiguous`` counts people whose key is not theirs
    alone. ``why`` names the party's rule that forbids an answer.
    """

    names: ClassVar = ("again", "own", "gone", "question")
    places: Number = 0
    missing: RuleText = ""
    ambiguous: Number = 0
    why: RuleText = ""


@dataclass(frozen=True, kw_only=True)
class Reused(Introduction):
    """Answer to `ReuseOrder`: what became of that alignment (`alignment.reuse`)."""

    names: ClassVar = ()
    became: Text


@dataclass(frozen=True, kw_only=True)
class KeyMade(Introduction):
    """Answer to `KeyOrder`: the party's fresh key, signed by its lasting identity.

    ``arrays`` are "keys" and "identities", uint8 [1, 32], and "signatures", uint8 [1, 64].
    """

    names: ClassVar = ("keys", "identities", "signatures")


@dataclass(frozen=True, kw_only=True)
class Agreed(Introduction):
    """Answer to `AgreeOrder`: a tag of the key with each party, uint8 [parties, 16]."""

    names: ClassVar = ("tags",)


@dataclass(frozen=True, kw_only=True)
class InformationOffer(Introduction):
    """Answer to `InformationOrder`: number of training rows and of columns.

    ``alignment`` is as in `Description`. A party that takes no part says why in ``refused``.
    """

    names: ClassVar = ()
    rows: Number = 0
    columns: Number = 0
    alignment: Text = ""
    refused: Annotated[str, Field(max_length=400), Line] = ""


@dataclass(frozen=True, kw_only=True)
class ColumnBins(Introduction):
    """Answer to `ColumnBinsOrder`.

    ``arrays["bins"]``, uint8 [C, n], have the bin of each training row. ``arrays["sizes"]``, uint8
    [C], have the number of bins of each column.
    """

    names: ClassVar = ("bins", "sizes")


@dataclass(frozen=True, kw_only=True)
class ColumnInformation(Introduction):
    """Answer to `EvidenceOrder`: information value of each column.

    ``arrays["values"]``, float64 [C, 3], have the value and its interval. ``arrays["bins"]``, uint8
    [C], have the number of bins after merging.
    """

    names: ClassVar = ("values", "bins")
