"""A party's half of an explanation (the other: `vfl_flower.tasks.inference.explain`).

The party permutes one feature of the rows at a time, and uploads embeddings. Nobody else learns its
permutations, or the order of its features. So at the end only the party can say which name has
which figure.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.csv_text import write_csv
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import make_folder, told, whole
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.on_disk import SequenceColumn
from vfl_flower.models.column_change import ColumnChange
from vfl_flower.party import state_file
from vfl_flower.party.limits import counted_predictions
from vfl_flower.party.party import Party
from vfl_flower.party.refusals import check_task
from vfl_flower.protocol.batches import secret_generator
from vfl_flower.results.charts import bars
from vfl_flower.tasks.inference.party import model as models
from vfl_flower.tasks.inference.party.explained_people import claimed, people_of
from vfl_flower.tasks.inference.party.features import Feature, features_of
from vfl_flower.tasks.inference.party.model import LoadedModel
from vfl_flower.transport import explain_messages
from vfl_flower.transport.messages import checked
from vfl_flower.transport.node import index_and_parties, refused, simulated

_IN_MEMORY = 2**29  # bytes of samples; more samples are read again for each upload
_AT_ONCE = 2**26  # most numbers in the permutations of an order
_SHOWN = 30  # features in the picture

Rows = NDArray[np.float32]


class Explanation:
    """The rows and the features of a party that are being explained.

    features : the features, in a random order that only the party knows.
    secret : all permutations follow from it; fresh by default.
    people : numbers of the rows' people, [n]. Their order decides who gets whose value.
    plain : embeddings of the rows as they are, float32 [n, E].
    """

    def __init__(
        self,
        party: Party,
        places: NDArray[np.int32],
        features: list[Feature],
        repeats: int,
        secret: bytes = b"",
        people: NDArray[np.uint64] | None = None,
    ) -> None:
        self.party, self.features, self.repeats, self.rows = party, features, repeats, len(places)
        self.plain: Rows = np.zeros((0, party.learner.size), np.float32)
        test, columns = party.inputs.block.test, party.inputs.columns
        self._kept = test[places] if 4 * len(places) * columns <= _IN_MEMORY else None
        self._samples, self._places = test, places
        self._secret = secret or secrets.token_bytes(32)
        self._order = np.arange(len(places)) if people is None else np.argsort(people)
        self._turn = 0, 0, -1  # its first feature, the end of its features, and its repeat
        self._donors = np.zeros((0, 0), np.int32)  # row whose value each row gets, [count, n]
        self._done = np.zeros(0, bool)  # rows that the turn has embedded
        model, noisy = party.learner.model, party.learner.mechanism.perturbs_uploads
        is_table = isinstance(party.inputs.sample, Tensor) and party.inputs.sample.dim() == 1
        fast = is_table and not noisy and ColumnChange.fits(model)
        self._change = ColumnChange(model) if fast else None

    def close(self) -> None:
        """Do nothing: an explanation counts nothing ahead."""

    def permutation(self, feature: int, repeat: int) -> NDArray[np.int64]:
        """Return whose value each row gets, [n], by secret, feature's name and people's order."""
        said = f"explain|{repeat}|{self.features[feature].name}|".encode()
        drawn = secret_generator(said + self._secret).permutation(self.rows)
        donors = np.empty_like(drawn)
        donors[self._order] = self._order[drawn]
        return donors

    def embed(self) -> Rows:
        """Embed the rows as they are, [n, E]."""
        learner = self.party.learner
        if self._change and self._kept is not None:
            self.plain = self._change.plain(self._tensor(self._kept)).cpu().numpy()
        elif self._kept is not None:
            self.plain = learner.fresh_embeddings(self._kept)
        else:
            self.plain = learner.fresh_embeddings(self._samples, self._places)
        return self.plain

    def permuted(self, order: explain_messages.PermuteOrder) -> Rows:
        """Return embeddings [count * (stop - start), E] of rows with permuted features."""
        self._begin(order)
        rows = self._read(np.arange(order.start, order.stop))
        learner, found = self.party.learner, []
        features = self.features[order.first : order.first + order.count]
        values = (
            (feature.index, self._read(donors[order.start : order.stop])[feature.index])
            for feature, donors in zip(features, self._donors, strict=True)
        )
        if self._change:
            changes = [(index[-1], self._tensor(each)) for index, each in values]
            new = self._change.embeddings(self._tensor(rows), changes)
            return new.flatten(0, 1).cpu().numpy()
        for index, each in values:
            samples = rows.copy()
            samples[index] = each
            found.append(learner.fresh_embeddings(samples))
        return np.concatenate(found)

    def repeated(self, order: explain_messages.PermuteOrder) -> Rows:
        """Return embeddings of rows as they are, which tell nothing new, and count them."""
        self._check(order)
        self.party.count_uploads(self._places[order.start : order.stop], order.count)
        return np.tile(self.plain[order.start : order.stop], (order.count, 1))

    def _check(self, order: explain_messages.PermuteOrder) -> None:
        """Raise `VflError` if the party does not have the rows, or they are too many at once."""
        if not order.start < order.stop <= self.rows:
            raise VflError("was asked to embed rows that it does not have.")
        if order.count * self.rows > max(_AT_ONCE, self.rows):
            raise VflError("was asked for more permutations than it has agreed to.")

    def _begin(self, order: explain_messages.PermuteOrder) -> None:
        """Draw the permutations of a new turn, and note which rows the order embeds."""
        last = order.first + order.count
        self._check(order)
        if last > len(self.features):
            raise VflError("was asked to permute features that it does not have.")
        if order.repeat >= self.repeats:
            raise VflError("was asked for more permutations than it has agreed to.")
        turn = order.first, last, order.repeat
        if turn != self._turn:
            again = turn[:2] == self._turn[:2] and order.repeat > self._turn[2]
            if not again and order.first < self._turn[1]:
                raise VflError("was asked to permute a feature twice.")
            drawn = [self.permutation(each, order.repeat) for each in range(order.first, last)]
            self._donors, self._done = np.array(drawn, np.int32), np.zeros(self.rows, bool)
            self._turn = turn
        if self._done[order.start : order.stop].any():
            raise VflError("was asked to permute a feature of a row twice.")
        self._done[order.start : order.stop] = True

    def _tensor(self, rows: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.party.learner.device)

    def _read(self, rows: NDArray[Any]) -> Rows:
        samples: Any = self._samples if self._kept is None else self._kept
        return samples[self._places[rows] if self._kept is None else rows]


def begin(context: Context, order: explain_messages.ExplainOrder) -> explain_messages.Explained:
    """Load a saved model and the rows, embed them, and say how many features there are."""
    model = LoadedModel(context, order)
    party, places, asked = model.party, model.places, order.arrays.get("rows")
    if asked is not None:
        asked = checked(order.arrays, "rows", "int32", (asked.size,))
        if len(asked) and (asked[0] < 0 or asked[-1] >= len(places) or (np.diff(asked) < 1).any()):
            raise VflError("was asked to explain rows that it does not have.")
        places = places[asked]
    features, why = _features(model)
    secret, people = secrets.token_bytes(32), None
    _count(context, party, places, 1, 1)
    if features:
        times = len(features) * order.repeats
        try:
            with ExitStack() as claims:  # the people, only if the counts allow it
                if not simulated(context):
                    people = people_of(model, places)
                    secret = claims.enter_context(claimed(context, people, order.repeats))
                # A row's value is in its own uploads, and in uploads of rows that get the value.
                _count(context, party, places, 2 * times, times)
        except ConfigError as error:
            features, why = [], str(error)
    if model.block.preparation:  # a partitioned data set has no secrets between its parties
        drawn = secret_generator(b"features|" + secret).permutation(len(features))
        features = [features[at] for at in drawn]
    found = Explanation(party, places, features, order.repeats, secret, people)
    embedding = found.embed()
    tags = model.agree(order, places.tobytes())
    arrays = model.hide(embedding) | tags
    models.forget(context.run_id, model.index)
    models.in_use[context.run_id, model.index] = found
    return model.answer(
        explain_messages.Explained, arrays, features=len(features), refused=why[:600]
    )


def permute(context: Context, order: explain_messages.PermuteOrder) -> explain_messages.Permuted:
    """Embed rows with permuted features, or as they are if another party permutes its own."""
    index, _ = index_and_parties(context)
    found = current(context)
    if order.party == index:
        embedding = found.permuted(order)
    elif found.party.seal is None:
        raise VflError("was asked to permute another party's features.")
    else:
        embedding = found.repeated(order)
    arrays: dict[str, NDArray[Any]] = {"embedding": embedding}
    if found.party.seal:
        found.party.seal.bind(order)
        arrays = found.party.seal.hide(arrays)
    return explain_messages.Permuted(arrays=arrays)


def note(context: Context, order: explain_messages.FiguresOrder) -> explain_messages.Noted:
    """Write the party's own table and picture of its features."""
    index, parties = index_and_parties(context)
    found = current(context)
    figures = {
        name: checked(order.arrays, name, "float64", (len(found.features),))
        for name in ("values", "margins")
        if order.arrays
    }
    path = table_of(context)
    table = _table(found.features, figures)
    try:
        with told(path):
            make_folder(path.parent)
        with whole(path) as file:
            write_csv(file, table)
        if figures:
            _draw(table, order, path.with_suffix(".png"))
    except VflError as error:
        log.warning("%s", error)
        raise VflError("cannot write its table of features: its own log says why.") from None
    log.info("Party %d has written what its features are worth: %s", index, path)
    return explain_messages.Noted(party=index, parties=parties)


def current(context: Context) -> Explanation:
    """Return what this process explains for a party, or raise `OutOfStepError`."""
    return models.current(context, Explanation, "rows to explain")


def table_of(context: Context) -> Path:
    """Return the file of the party's own table. A new explanation replaces it."""
    party = context.node_config.get("partition-id")
    return state_file.place(context).with_name(f"party-{party}-explanation.csv")


def _table(features: Sequence[Feature], figures: Mapping[str, NDArray[np.float64]]) -> Any:
    """Return a frame with a line for each feature, the most important first.

    ``feature`` is the number under which the label holder knows the feature. The figures are
    missing if labels are protected.
    """
    import pandas as pd

    table = pd.DataFrame(
        {"feature": np.arange(len(features)), "name": [each.name for each in features]}
    )
    if not figures:
        return table
    values, margins = figures["values"], figures["margins"]
    columns = {"value": values, "low": values - margins, "high": values + margins}
    return table.assign(**columns).sort_values("value", ascending=False, kind="stable")


def _draw(table: Any, order: explain_messages.FiguresOrder, path: Path) -> None:
    """Draw the features with the largest figures as bars, with their intervals."""
    most = table.iloc[:_SHOWN][::-1]
    names = [text if len(text) <= 40 else f"{text[:39]}…" for text in map(str, most["name"])]
    metric = {"auc": "AUC", "r2": "R2"}.get(order.metric, order.metric)
    noise = f", with noise of deviation {order.grain:.2g}" if order.grain else ""
    bars(
        path,
        [name.replace("$", r"\$") for name in names],
        most["value"],
        (most["high"] - most["low"]) / 2,
        ["#0a56dd"] * len(most),
        f"fall of {metric} on {order.rows} rows if permuted{noise}",
    )


# --- steps of the first message -----------------------------------------------------------------


def _features(model: LoadedModel) -> tuple[list[Feature], str]:
    """Return the features in a secret order, or none and the sentence why."""
    context, party = model.context, model.party
    try:
        check_task(context, "explain")
        rules = Rules.of(context.node_config)
        if rules.aggregation == "secure" and not rules.refuse:
            raise refused(
                context,
                "task 'explain': its rule is aggregation = 'secure', and the difference of two "
                "sums would be its own embeddings. Give it refuse='none' to permit this",
            )
    except ConfigError as error:  # its log has the sentence already
        return [], str(error)
    try:
        lstm = party.config.models.bottom == "lstm"
        sequences = isinstance(model.source, SequenceColumn) or lstm
        of_sample = model.index, party.inputs.sample
        features = features_of(*of_sample, model.block.preparation, sequences)
        if len(features) > explain_messages.MOST_FEATURES:
            raise ConfigError(
                f"Party {model.index} has {len(features)} features, and at most "
                f"{explain_messages.MOST_FEATURES} can be explained. Train with fewer columns."
            )
    except ConfigError as error:
        log.warning("%s", error)
        return [], str(error)
    return features, ""


def _count(
    context: Context, party: Party, places: NDArray[np.int32], uploads: int, times: int
) -> None:
    """Count uploads with a row's values, and ``times`` embeddings of each, before they happen."""
    with counted_predictions(context, Rules.of(context.node_config), times * len(places)):
        party.count_uploads(places, uploads)
