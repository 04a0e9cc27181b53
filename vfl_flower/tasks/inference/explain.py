"""Explain a model: how much its metric falls if one feature of a party is permuted.

A party permutes a feature of the test rows, or of another file's rows, and uploads embeddings. The
label holder evaluates the model on them (permutation importance: Breiman, 2001), and learns no
name. At the end, each party gets its own figures, with noise (`told_figures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError, PartyError, sent_by
from vfl_flower.config.files import make_folder, told
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.ids import People
from vfl_flower.data.source import Preparation
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.models.column_change import for_each
from vfl_flower.protocol.privacy.accountant import delta_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference import explanation, told_figures
from vfl_flower.tasks.inference.importance import Fall, Score
from vfl_flower.tasks.inference.model import Predictor, TrainedModel, check_model, check_streams
from vfl_flower.tasks.inference.predictions import labelled
from vfl_flower.tasks.inference.releases import UploadCount, counts_uploads
from vfl_flower.tasks.inference.rows import tested
from vfl_flower.tasks.inference.told_figures import FiguresToTell, Noise
from vfl_flower.transport import explain_messages
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import gather
from vfl_flower.transport.messages import SMALL, Order

_UPLOAD = 2**24  # bytes of the embeddings that an order asks for
_NUMBERS = 2**25  # most outputs of permuted rows in memory

Floats = NDArray[np.float64]


def explain(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Write the importance of each party's features, and tell each party its own figures."""
    are_tested, model = _loaded(transport, config, given, run)
    found, predictor, rows = model.found, model.predictor, model.rows
    folder = Path(config.running.out or config.model).expanduser()
    with told(folder):
        make_folder(folder)  # before anything is spent
    uploads = UploadCount(config, found)
    epsilon = uploads.add()
    scored, answers = model.embed(
        explain_messages.ExplainOrder, explain_messages.Explained, repeats=config.repeats
    )
    assert rows.labels is not None
    known, labels = labelled(rows.labels, scored.known, found)
    if not len(known):
        raise ConfigError(
            "No row with a label is known to any party. Name a file of other rows by "
            "dataset='files:PATH'."
        )
    score = Score(labels, len(found.about_labels["classes"]), found.calibration)
    people = told_figures.people_of(rows, found.config.data.dataset)[known]
    fresh = np.ones(len(people), bool) if transport.simulated else told_figures.fresh(people)
    plain = _Plain(predictor, scored, known, score, fresh)
    _check_features(answers.values(), found)
    by_party = sorted(answers.items(), key=lambda each: each[1].party)
    turns = {node: _Turns(plain, answer, config.repeats) for node, answer in by_party}
    most = max((each.features for each in turns.values()), default=0) * config.repeats
    if most and counts_uploads(found):
        # A record's features are in its own uploads, and in uploads of rows that get a value of it.
        epsilon = uploads.add(2 * most)
    _permute(model, turns)
    parties = {str(each.party): each.figures() for each in turns.values()}
    parties |= _of_label_holder(plain, found.about_labels["preparation"], config.repeats)
    figures = {
        "metric": score.metric,
        "rows": len(labels),
        "repeats": config.repeats,
        "baseline": score.value(plain.shares),
        **({"epsilon": epsilon} if epsilon is not None else {}),
        **names.with_names(),
        "parties": parties,
    }
    explanation.write(folder, figures)
    said = _tell(transport, config, turns, plain, people, found)  # last: it may fail at a party
    for sentence in filter(None, (each.refused for each in answers.values())):
        notice.warning("%s", sentence)
    if are_tested and not found.config.data.test_fraction:
        notice.warning("The run held out no test rows, so these figures are of training rows.")
    if said:
        notice.info("%s", said)
    if epsilon is not None:
        notice.info("epsilon of the run, its predictions and this explanation %.3g", epsilon)


def _loaded(
    transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str
) -> tuple[bool, TrainedModel]:
    """Return the model and its rows, and whether these are the test rows of its run."""
    check_model(config, "explain")
    check_streams(transport, "An explanation needs")
    model = TrainedModel(transport, config, given, run)
    found, predictor = model.found, model.predictor
    are_tested = model.rows.table is not None and "dataset" not in given
    if are_tested:
        model.rows = model.rows.only(tested(model.rows, found), len(predictor.sizes))
    if model.rows.labels is None:
        raise ConfigError(
            "The rows have no labels, and an explanation needs them. Name the label column by "
            "label, or another file by dataset='files:PATH'."
        )
    return are_tested, model


def _check_features(answers: Iterable[explain_messages.Explained], found: Checkpoint) -> None:
    """Raise `PartyError` if a party has more features than it had columns in training."""
    columns = {each["party"]: each.get("columns") for each in found.strategy["seats"]}
    for answer in answers:
        most = columns.get(answer.party)  # None: an older version wrote the checkpoint
        if most is not None and answer.features > most:
            raise PartyError(
                f"Party {answer.party}",
                f"has {answer.features} features to explain, and had {most} columns in training.",
            )


# --- the model on permuted rows -----------------------------------------------------------------


@dataclass
class _Plain:
    """Rows as they are, and their outputs; ``known`` rows count, and parties learn of ``fresh``."""

    predictor: Predictor
    rows: ScoredRows
    known: NDArray[np.int64]
    score: Score
    fresh: NDArray[np.bool_]

    def __post_init__(self) -> None:
        self.outputs = self.rows.outputs.numpy()
        self.shares = self.score.shares(self.outputs[self.known])


class _Turns:
    """The features of one party, which are permuted in turn, and their figures."""

    def __init__(self, plain: _Plain, said: explain_messages.Explained, repeats: int) -> None:
        self.party, self.features, self.repeats = said.party, said.features, repeats
        self._plain, self._refused = plain, said.refused
        party, features = said.party, said.features
        self._rows = np.flatnonzero(plain.rows.given[:, party])
        self.size = plain.predictor.sizes[party]
        self._outputs = np.zeros((0, 0, 0), np.float32)  # of permuted rows, [count, R, C]
        self._falls = np.zeros((0, 0))  # of the shares, summed over repeats, [count, known]
        self.values, self.margins = np.zeros((2, features))
        outputs = plain.outputs[plain.known]
        self.to_tell = FiguresToTell(plain.score, outputs, plain.fresh, features)

    def orders(self) -> Iterator[explain_messages.PermuteOrder]:
        """Yield the orders that permute all features, a block of features and rows at a time."""
        rows, outputs = len(self._rows), self._plain.outputs.shape[1]
        together = max(1, min(self.features, _NUMBERS // max(1, rows * outputs)))
        most = max(1, _UPLOAD // (4 * self.size * together))
        for first in range(0, self.features, together):
            count = min(together, self.features - first)
            for repeat in range(self.repeats):
                for start in range(0, rows, most):
                    of_rows = {"start": start, "stop": min(rows, start + most)}
                    of_features = {"first": first, "count": count, "repeat": repeat}
                    yield explain_messages.PermuteOrder(party=self.party, **of_features, **of_rows)

    def take(self, order: explain_messages.PermuteOrder, block: Tensor) -> None:
        """Take embeddings [count * (stop - start), width]; masked, they are all parties' sum."""
        plain, predictor = self._plain, self._plain.predictor
        if not order.start:
            self._outputs = np.repeat(plain.outputs[None], order.count, 0)
        rows = self._rows[order.start : order.stop]
        part, permuted = plain.rows.at(rows), block.split(len(rows))

        def evaluate(at: int) -> None:
            blocks = part.blocks.clone()
            blocks[:, predictor.columns[self.party]] = permuted[at]
            self._outputs[at, rows] = predictor.outputs(blocks, part.own, part.given).numpy()

        if predictor.top.by_step:  # threads may not share a user's module
            for at in range(order.count):
                evaluate(at)
        else:
            for_each(evaluate, range(order.count))
        if order.stop == len(self._rows):
            self._add(order)

    def _add(self, order: explain_messages.PermuteOrder) -> None:
        """Add the falls of a repeat; after the last repeat, compute the figures."""
        plain, score, outputs = self._plain, self._plain.score, self._outputs[:, self._plain.known]
        if not order.repeat:
            self._falls = np.zeros((order.count, len(plain.shares)))
        for falls, each in zip(self._falls, outputs, strict=True):
            falls += plain.shares - score.shares(each)
        self.to_tell.add(order.first, outputs, order.repeat, self.repeats)
        if order.repeat < self.repeats - 1:
            return
        for feature, falls in enumerate(self._falls, start=order.first):
            fall = score.fall(falls / self.repeats)
            self.values[feature], self.margins[feature] = fall

    def figures(self) -> dict[str, Any]:
        """Return the figures of all features, or the party's refusal, for the results."""
        if self._refused:
            return {"refused": self._refused}
        falls = map(Fall, self.values.tolist(), self.margins.tolist())
        return {"features": [{"feature": at, **each.ends()} for at, each in enumerate(falls)]}


def _of_label_holder(
    plain: _Plain, preparation: dict[str, Any] | None, repeats: int
) -> dict[str, dict[str, Any]]:
    """Return the figures of the label holder's own columns by their names, if it has some."""
    columns = Preparation(**preparation).columns if preparation else {}
    if not columns:
        return {}
    rows, score = plain.rows.at(plain.known), plain.score
    figures = []
    for name, place in columns.items():
        falls = np.zeros(len(plain.shares))
        for _ in range(repeats):
            own = rows.own.copy()
            own[:, place] = _permuted(own[:, place])
            outputs = plain.predictor.outputs(rows.blocks, own, rows.given).numpy()
            falls += plain.shares - score.shares(outputs)
        figures.append({"feature": name, **score.fall(falls / repeats).ends()})
    return {explanation.LABEL_HOLDER: {"features": figures}}


def _permuted(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return values [R, ...] with their rows in random order."""
    return np.random.default_rng().permutation(values)


def _permute(model: TrainedModel, turns: Mapping[int, _Turns]) -> None:
    """Have parties permute side by side; under masked sums, all take part in each upload."""
    transport, aggregation = model.transport, model.predictor.aggregation
    timeout, masked = model.config.running.party_timeout, aggregation.abreast
    sizes = [each.size for each in turns.values()]
    largest = SMALL + max(_UPLOAD, 4 * max(sizes, default=0))
    transport.expect({explain_messages.PermuteOrder.kind: largest})
    if masked:
        steps: Iterator[dict[int, Order]] = (
            dict.fromkeys(turns, order) for each in turns.values() for order in each.orders()
        )
    else:
        of_nodes = [[(node, order) for order in each.orders()] for node, each in turns.items()]
        steps = (dict(filter(None, step)) for step in zip_longest(*of_nodes))
    for orders in steps:
        collection = aggregation.collection(len(turns))
        for node, answer in gather(transport, orders, explain_messages.Permuted, timeout).items():
            order, sender = orders[node], turns[node]
            assert isinstance(order, explain_messages.PermuteOrder)
            shape = order.count * (order.stop - order.start), sender.size
            with sent_by(sender.party):
                block = collection.add(sender.party, answer.arrays, shape)
            if block is not None:
                next(each for each in turns.values() if each.party == order.party).take(
                    order, block
                )


def _tell(
    transport: Transport,
    config: RunConfig,
    turns: Mapping[int, _Turns],
    plain: _Plain,
    people: People,
    found: Checkpoint,
) -> str:
    """Tell each party its figures, with noise unless one owner has all; return what to report."""
    shown = {node: each for node, each in turns.items() if each.features}
    rows, said = int(plain.fresh.sum()), ""
    figures = {node: (each.values, each.margins, 0.0) for node, each in shown.items()}
    if mechanism_of(found.config).hides_labels:
        figures, said = {}, "Parties get no figures, since the run protects the labels by noise."
    elif not transport.simulated and len(people) < told_figures.LEAST:
        figures, said = {}, told_figures.FEW
    elif not transport.simulated and figures:
        if rows < told_figures.LEAST or not told_figures.claim(people[plain.fresh]):
            return told_figures.LATE  # their earlier tables stay as they are
        epsilon, delta = config.privacy.epsilon or told_figures.EPSILON, delta_of(config, rows)
        noise = Noise(plain.score, plain.fresh, len(shown), epsilon, delta)
        figures = {node: each.to_tell.told(noise) for node, each in shown.items()}
        said = f"Parties get figures of {rows} people with noise: epsilon {epsilon:g} for a label."
    orders: dict[int, Order] = {}
    for node in shown:
        *arrays, grain = figures.get(node, (0.0,))
        told = dict(zip(explain_messages.FiguresOrder.names, arrays, strict=bool(arrays)))
        orders[node] = explain_messages.FiguresOrder(
            metric=plain.score.metric, grain=grain, rows=rows, arrays=told
        )
    gather(transport, orders, explain_messages.Noted, config.running.party_timeout)
    return said
