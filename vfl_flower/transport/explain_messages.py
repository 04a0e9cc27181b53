"""Messages of an explanation: permuted columns of parties, and what each changes.

`ExplainOrder` comes first. A `PermuteOrder` for each block of columns and rows follows. At the end,
`FiguresOrder` tells a party its own figures. A `ReasonsOrder` is about one score, and a
`GroupsOrder` about groups of test rows.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vfl_flower.config.checks import Line
from vfl_flower.transport import messages

MOST_FEATURES = 4096  # most features of a party that are explained

Features = Annotated[int, Field(ge=0, le=MOST_FEATURES)]
Sentence = Annotated[str, Field(max_length=600), Line]
Metric = Literal["auc", "accuracy", "r2"]
Amount = Annotated[float, Field(ge=-1e9, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class ExplainOrder(messages.PredictOrder):
    """Embed rows as for `PredictOrder`, and get ready to permute columns. Answer: `Explained`.

    ``arrays["rows"]``, int32 [n], ascending, are positions among the rows that the party has.
    Without them, all these rows count. ``repeats`` is the number of permutations of each column.
    """

    kind: ClassVar[str] = "query.explain"
    names: ClassVar[tuple[str, ...]] = (*messages.PredictOrder.names, "rows")
    repeats: messages.Positive


@dataclass(frozen=True, kw_only=True)
class Explained(messages.Predicted):
    """Answer to `ExplainOrder`: as `Predicted`, and the number of features to explain.

    ``refused`` is the sentence of a party that has none explained. Then ``features`` is 0.
    """

    features: Features
    refused: Sentence = ""


@dataclass(frozen=True, kw_only=True)
class PermuteOrder(messages.Order):
    """Embed rows ``start`` to ``stop`` of the rows in `ExplainOrder`. The answer is `Permuted`.

    Once for each feature from ``first`` on, ``count`` of them, ``party`` replaces the feature by
    the same feature of other rows: by permutation number ``repeat``. Under masked sums, all other
    parties repeat their embeddings as often.
    """

    kind: ClassVar[str] = "query.permute"
    party: messages.Number
    first: Features
    count: Annotated[int, Field(ge=1, le=MOST_FEATURES)]
    repeat: messages.Number
    start: messages.Number
    stop: messages.Positive


@dataclass(frozen=True, kw_only=True)
class Permuted(messages.Payload):
    """Answer to `PermuteOrder`: ``arrays["embedding"]``, float32 [count * (stop - start), E].

    If sums are masked, embeddings are masked too, int32.
    """

    names: ClassVar = ("embedding",)


@dataclass(frozen=True, kw_only=True)
class FiguresOrder(messages.Order):
    """Take the figures of your features. The answer is `Noted`.

    ``arrays["values"]``, float64 [features], are the falls of the metric. Half of each 95 %
    interval is in ``arrays["margins"]``. Without arrays, parties are told no figures. The figures
    are about ``rows`` rows. ``grain`` is the deviation of the noise on each value, or 0.
    """

    kind: ClassVar[str] = "query.figures"
    names: ClassVar = ("values", "margins")
    metric: Metric
    grain: Annotated[float, Field(ge=0, le=1e9)]
    rows: messages.Number


@dataclass(frozen=True, kw_only=True)
class Noted(messages.Introduction):
    """Answer to `FiguresOrder`: the party has written its table."""

    names: ClassVar = ()


@dataclass(frozen=True, kw_only=True)
class ReasonsOrder(messages.Order):
    """Split your contribution to one score among your columns. The answer is `GivenReasons`.

    One of ``arrays["rows"]``, ``arrays["places"]`` and ``arrays["proofs"]`` names the person, as in
    `ScoreOrder`. ``arrays["gradients"]``, float32 [k, E], are gradients of the score on paths
    to the person's embedding. The paths begin at the rows ``arrays["background"]``, int32 [k], of
    `background_rows`. The parts add up to ``total``. The party keeps them under the number
    ``request``.
    """

    kind: ClassVar[str] = "query.reasons"
    names: ClassVar = ("rows", "places", "proofs", "background", "gradients")
    request: messages.Text
    total: Amount


@dataclass(frozen=True, kw_only=True)
class GivenReasons(messages.Payload):
    """Answer to `ReasonsOrder`: what the party tells by its rule ``reasons``.

    ``arrays["columns"]``, int32 [k], are numbers of the columns with the largest parts, the largest
    first. ``arrays["effects"]``, int32 [k], are the signs of these parts. ``arrays["names"]``,
    uint8, are the names of the columns in UTF-8, in lines. The party may leave out all three, or
    the names.
    """

    names: ClassVar = ("columns", "effects", "names")


@dataclass(frozen=True, kw_only=True)
class GroupsOrder(messages.PredictOrder):
    """Count cells of the run's test rows in groups of your columns. The answer is `GroupCounts`.

    ``arrays["cells"]``, uint8 [R], are the noisy cells of all test rows (`information.groups`). A
    group has at least ``least`` rows.
    """

    kind: ClassVar[str] = "query.groups"
    names: ClassVar = ("cells",)
    least: messages.Number


@dataclass(frozen=True, kw_only=True)
class GroupCounts(messages.Introduction):
    """Answer to `GroupsOrder`: ``arrays["counts"]``, int64 [G, 4], of each group and cell.

    ``groups`` maps each column to the names of its groups, in JSON. ``refused`` is the sentence of
    a party that takes no part.
    """

    names: ClassVar = ("counts",)
    groups: messages.ConfigText = ""
    refused: Sentence = ""
