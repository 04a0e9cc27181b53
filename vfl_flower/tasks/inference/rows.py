"""The rows that a model predicts, at the label holder, and the parties that it can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment.reuse import aligned
from vfl_flower.alignment.seeking import Seeker
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels, load_own_labels, own_table, with_row_masks
from vfl_flower.data.at_party import prepared
from vfl_flower.data.labels import Labels
from vfl_flower.data.source import Preparation
from vfl_flower.data.split import Alignment, divide, used_by
from vfl_flower.data.tables import Table
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import AvailableParties

Array = NDArray[Any]


def available_parties(config: RunConfig, found: Checkpoint) -> AvailableParties | None:
    """Return the parties that a model of any subset can use; None if it needs all."""
    parties = len(found.strategy["holder"]["sizes"])
    words = config.without.replace(",", " ").split()
    if not aggregation_of(found.config).any_subset:
        asked = "without" if words else "align = 'any'" if config.data.align == "any" else ""
        if asked:
            raise ConfigError(
                f"The model in {config.model} needs all its parties. Leave {asked} out, or train "
                "a model that predicts with any subset: set subsets = 'sampled'."
            )
        return None
    if words and config.data.align == "ids":
        raise ConfigError(
            "align = 'ids' is for rows that all parties have. Set align = 'psi' to leave some out."
        )
    if not all(word.isdecimal() and int(word) < parties for word in words):
        raise ConfigError(
            f"without = {config.without!r} must be numbers of parties, from 0 to {parties - 1}. "
            "Separate them with commas."
        )
    return AvailableParties(parties, frozenset(int(word) for word in words))


@dataclass(frozen=True)
class RowsToPredict:
    """The label holder's data of the rows to predict.

    ids, called : ids, and the name of their column.
    own : the label holder's own columns, float32 [N, F].
    order : puts rows into the order of its file.
    labels : their labels, if there are some. Without those that the noise of training protects.
    learnt : whether a row trained or chose the model, [N]; None without a table.
    present, nodes : row mask [N, M] if parties may lack rows, and party -> node.
    shown, words : the label holder's answers in the alignment of the rows, and its options.
    segments : name of a column -> its values, for columns that ``segments`` names.
    places : places of the rows in the label holder's file, [N], if it has one.
    known, rules : party -> number of the label holder's ids that it has; figures of rules.
    chosen : number of each row among the rows that a party has, or -1, [N, M]; None for all rows.
    """

    ids: Array
    alignment: str
    own: NDArray[np.float32]
    order: Array
    labels: Array | None = None
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] | None = None
    called: str = "id"
    shown: Array | None = None
    table: Table | None = None
    psi: bool = False
    segments: Mapping[str, Array] = field(default_factory=dict)
    places: Array | None = None
    chosen: Array | None = None
    learnt: NDArray[np.bool_] | None = None
    known: Mapping[int, int] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()
    words: RunConfig | None = None

    def only(self, wanted: NDArray[np.bool_], parties: int) -> RowsToPredict:
        """Return these rows alone, by a mask [N]."""
        known = self.known_by(parties)
        numbers = np.where(known, np.cumsum(known, 0) - 1, -1)[wanted]
        names = "ids", "own", "labels", "present", "places", "learnt"
        left: dict[str, Any] = {name: getattr(self, name) for name in names}
        left = {name: None if each is None else each[wanted] for name, each in left.items()}
        left["segments"] = {name: values[wanted] for name, values in self.segments.items()}
        return replace(self, **left, order=np.arange(int(wanted.sum())), chosen=numbers)

    def known_by(self, parties: int) -> NDArray[np.bool_]:
        """Return whether a party has a row, [N, M]."""
        if self.present is None:
            return np.ones((len(self.ids), parties), bool)
        return self.present

    def seeker(self, run: str) -> Seeker | None:
        """Return what finds people outside these rows, if it can.

        A model that reads columns of the label holder needs people that a caller describes.
        """
        table, words = self.table, self.words
        if table is None or not self.psi or table.path.startswith("memory:") or words is None:
            return None
        if words.data.match:
            return Seeker(table, run, words.data.match, words.data.match_error)
        return None if self.own.shape[1] else Seeker(table, run)


def rows_to_predict(
    transport: Transport,
    config: RunConfig,
    given: Mapping[str, Any],
    found: Checkpoint,
    run: str,
    there: AvailableParties | None,
) -> RowsToPredict:
    """Return the rows of the file that can be predicted, or the test rows."""
    trained = found.config
    if not trained.data.own_data:
        return _test_rows(config, given, found)
    file, words = _file_to_predict(config, given, found)
    if there and words.data.align == "psi":  # every row of the file gets a prediction
        words = words.with_values({"align": "any"})
    there = there if words.data.align == "any" else None
    if found.parties:
        common = aligned(transport, words, file, run, there)
    else:  # a distilled model scores everybody in the file
        common = Alignment("", np.arange(len(file.ids)), None)
    rows = common.rows
    own = np.zeros((len(rows), 0), np.float32)
    if preparation := found.about_labels["preparation"]:
        own = np.asarray(prepared(file, rows, Preparation(**preparation))[:])
    labels = file.labels_with_gaps(rows) if file.has_labels else None
    learnt = learnt_by(found, file, rows)
    if labels is not None and mechanism_of(trained).hides_labels:
        labels = labels.astype(object)
        labels[learnt] = None
        _tell_of_protected(int(learnt.sum()), len(rows))
    return RowsToPredict(
        ids=file.id_values(rows),
        called=file.id if file.has_ids else "id",
        alignment=common.name,
        own=own,
        order=np.argsort(rows),
        labels=labels,
        learnt=learnt,
        present=common.present,
        nodes=common.nodes if there else None,
        shown=common.answers,
        table=file,
        segments=file.segments_of(rows),
        psi=words.data.align != "ids" and found.parties > 0,
        places=rows,
        known=common.known,
        rules=common.rules,
        words=words,
    )


def _file_to_predict(
    config: RunConfig, given: Mapping[str, Any], found: Checkpoint
) -> tuple[Table, RunConfig]:
    """Return the checked file of the label holder, and the options of its alignment."""
    trained = found.config
    if not config.data.own_data and config.task == "predict":  # other tasks have the file
        raise ConfigError(
            f"The model in {config.model} learned from files. Name the file of the new rows by "
            "dataset='files:PATH'."
        )
    if given.get("match", trained.data.match) != trained.data.match:
        raise ConfigError(
            f"The model in {config.model} was trained with match = {trained.data.match!r}, and "
            "finds people by these rules. Leave match out."
        )
    named = {name: given[name] for name in OF_FILE if name in given}
    words = trained.with_values({**named, "split": "random"})  # all rows are predicted
    file = own_table(words.data).with_known_segments(given)
    file.check_segments()
    # Refuse other columns before the parties count ids.
    if preparation := found.about_labels["preparation"]:
        file.check_columns(Preparation(**preparation))
    if words.data.match:  # few new people tell too little of how often keys repeat
        known = (found.about_labels.get("coverage") or {}).get("rules", ())
        file.keys.chances = {each["rule"]: each["chance"] for each in known if each.get("chance")}
    return file, words


def _test_rows(config: RunConfig, given: Mapping[str, Any], found: Checkpoint) -> RowsToPredict:
    """Return the test rows of a partitioned data set."""
    trained = found.config
    if given.get("dataset", trained.data.dataset) != trained.data.dataset:
        raise ConfigError(
            f"The model in {config.model} learned from {trained.data.dataset}, a partitioned "
            "data set, and predicts its test rows. Leave dataset out. New rows need dataset = "
            "'files:PATH' from training on."
        )
    labels = labels_of(found)
    protected = labels.repeats and mechanism_of(trained).hides_labels
    labels = labels.tested
    ids = np.arange(len(labels.test))
    _tell_of_protected(len(ids) * protected, len(ids))
    return RowsToPredict(
        ids=ids,
        alignment=labels.alignment,
        own=np.zeros((len(ids), 0), np.float32),
        order=ids,
        labels=None if protected else labels.test,
        present=labels.present[1].copy() if labels.present else None,
    )


def labels_of(found: Checkpoint) -> Labels:
    """Return the labels of a run's rows. Raise `ConfigError` if its data have changed."""
    config: RunConfig = found.config
    if not config.data.own_data:
        parties = len(found.strategy["holder"]["sizes"])
        labels = with_row_masks(load_labels(config), config, parties)
    else:
        own = own_table(config.data)
        if len(own.ids) <= found.rows.max():
            raise ConfigError(
                f"{own.path} has lost rows since the run began. Restore its rows. After a "
                "withdrawal, train anew."
            )
        common = Alignment(found.about_labels["alignment"], found.rows, found.present)
        about = found.about_labels if config.running.grow else None
        labels = load_own_labels(config.data, own, common, about)
    if labels.differ_from(found.about_labels):
        raise ConfigError(
            f"{config.data.called} has changed since the model was trained: it has other rows, "
            "classes or values. Restore its data. After a withdrawal, train anew."
        )
    return labels


def tested(rows: RowsToPredict, found: Checkpoint) -> NDArray[np.bool_]:
    """Return which rows of the training file are the run's test rows, [N]."""
    assert rows.table is not None and rows.places is not None
    table, trained = rows.table, found.rows
    if len(table.ids) <= trained.max() or table.digest(trained) != found.about_labels["ids"]:
        raise ConfigError(
            f"{table.path} has changed since the model was trained, so its test rows are not "
            "known. Restore it, or name the file of the rows by dataset='files:PATH'."
        )
    _, test, validation = divide(found.config.data, len(trained))
    tested: NDArray[np.bool_] = np.isin(rows.places, trained[test[validation:]])
    if not tested.any():
        raise ConfigError(
            "No test row of the run is common to all parties any more. Name a file of rows by "
            "dataset='files:PATH'."
        )
    return tested


OF_FILE = (
    *("dataset", "id", "label", "columns", "segments", "missing", "missing-words", "text", "dates"),
    *("align", "time"),
    *("match-columns", "match-error"),
    "party-timeout",
)


def learnt_by(found: Checkpoint, table: Table, rows: Array) -> NDArray[np.bool_]:
    """Return which rows trained or chose the model, [N], by its file, or by ids under noise."""
    learnt, known = np.zeros(len(rows), bool), found.rows
    is_file = len(known) > 0 and len(table.ids) > known.max()
    if is_file and table.digest(known) == found.about_labels["ids"]:
        used = np.concatenate(used_by(found.config.data, known, found.used))
        learnt |= np.isin(rows, used)
    elif table.has_ids and mechanism_of(found.config).hides_labels and "people" not in found.arrays:
        return ~learnt  # an older checkpoint names no protected people
    if table.has_ids and "people" in found.arrays:
        learnt |= np.isin(table.people(rows), found.arrays["people"])
    return learnt


def _tell_of_protected(protected: int, rows: int) -> None:
    if protected:
        said = "Noise protects the labels of %d of these %d rows, so no figure counts them."
        notice.info(said, protected, rows)
