"""A party's half of task "information": weight of evidence of the party's columns.

`tasks.information.label_holder` is the other half, and says what each side learns. The party's file
beside its states has the names of columns and bins. Nobody else gets them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import astuple
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.store import common_rows
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import RawColumns, own_columns, partition_columns
from vfl_flower.data.bins import Bins, segments
from vfl_flower.data.evidence import ColumnEvidence, Evidence, merged, write_files
from vfl_flower.data.split import divide
from vfl_flower.data.tables import Table
from vfl_flower.party import about, state_file
from vfl_flower.party.inputs import own_source
from vfl_flower.party.label_sets import count_labels
from vfl_flower.party.refusals import check_task, told
from vfl_flower.party.state import load_about
from vfl_flower.transport.early_messages import (
    ColumnBins,
    ColumnBinsOrder,
    ColumnInformation,
    EarlyOrder,
    EvidenceOrder,
    InformationOffer,
    InformationOrder,
)
from vfl_flower.transport.explain_messages import GroupCounts, GroupsOrder
from vfl_flower.transport.messages import Arrays, checked, refuse_unused
from vfl_flower.transport.node import index_and_parties, refused, simulated, states_folder
from vfl_flower.transport.wire import said as in_one_line

_DIGITS = 3  # decimals of a value that leaves the party


def offer(context: Context, order: InformationOrder) -> InformationOffer:
    """Return the numbers of training rows and of columns, or why the party takes no part."""
    party, parties = index_and_parties(context)
    try:
        columns = _columns(context, _config(context, order))
        number = sum(1 for _ in columns.read())
        if not number:
            raise ConfigError(f"Party {party} has no columns. Give it some.")
    except VflError as error:
        return InformationOffer(party=party, parties=parties, refused=in_one_line(str(error)))
    said: Any = {"rows": columns.rows, "columns": number, "alignment": columns.alignment}
    return InformationOffer(party=party, parties=parties, **said)


def upload_bins(context: Context, order: ColumnBinsOrder) -> ColumnBins:
    """Return the bin of each row in each column."""
    config = _config(context, order)
    if config.information != "exact":
        raise VflError("was asked for bins, which noisy labels do not need.")
    binned = _binned(_columns(context, config))
    found = [(bins.of(values), bins.count) for _, bins, values in binned]
    bins, sizes = ([each[n] for each in found] for n in (0, 1))
    arrays = {"bins": np.array(bins, np.uint8), "sizes": np.array(sizes, np.uint8)}
    party, parties = index_and_parties(context)
    return ColumnBins(party=party, parties=parties, arrays=arrays)


def compute(context: Context, order: EvidenceOrder) -> ColumnInformation:
    """Compute the weight of evidence of each column, write it to the disk, return the values."""
    config = _config(context, order)
    exact = config.information == "exact"
    found = list(_of_counts(context, config, order) if exact else _noisy(context, config, order))
    refuse_unused(order.arrays, "was sent")
    party, parties = index_and_parties(context)
    path = states_folder(context) / f"run-{context.run_id}-party-{party}.information.csv"
    try:
        write_files(path, found)
    except VflError:
        raise VflError("cannot write its table of bins. See its own log.") from None
    values = [astuple(each.information) if each.information else (0.0,) * 3 for each in found]
    bins = [len(each.names) if each.information else 0 for each in found]
    arrays: Arrays = {
        "values": np.round(np.array(values, np.float64), _DIGITS),
        "bins": np.array(bins, np.uint8),
    }
    return ColumnInformation(party=party, parties=parties, arrays=arrays)


def _noisy(context: Context, config: RunConfig, order: EvidenceOrder) -> Iterator[ColumnEvidence]:
    """Yield the evidence of each column by labels with noise; at last, count the labels.

    A label holder that chooses labels could read bins of single people from the values. A person
    is known by the id, so the question is the same in each order of the rows.
    """
    if order.kept == 1:
        raise VflError("was sent labels without noise.")
    columns, rules = _columns(context, config), Rules.of(context.node_config)
    labels = checked(order.arrays, "labels", "uint8", (columns.rows,))
    if labels.max() > 1:
        raise VflError("was sent labels that are neither 0 nor 1.")
    limited, least = not simulated(context), config.min_bin
    if limited:
        least = max(least, rules.min_rows)
        _check_rarest(context, labels, 2)
        people = columns.people()
        by_person = np.argsort(people)
        question = hashlib.sha256(repr((round(order.kept, 10), least)).encode())
        question.update(people[by_person].tobytes() + labels[by_person].tobytes())
    for name, bins, values in _binned(columns):
        at = bins.of(values)
        if limited:
            question.update(at[by_person].astype(np.uint8).tobytes())
        by_bin = Evidence.count(at, labels, bins.count, order.kept)
        groups = merged(by_bin, least)
        yield ColumnEvidence.of(name, bins, by_bin.rows.tolist(), groups, by_bin.grouped(groups))
    if limited:
        count_labels(context, people, labels, question.digest(), rules.min_rows)


def _check_rarest(context: Context, labels: NDArray[np.uint8], classes: int) -> None:
    """Refuse labels with fewer rows of a class than the party's rule ``min-rows``."""
    least = Rules.of(context.node_config).min_rows
    if np.bincount(labels, minlength=classes).min() < least:
        rule = f"its rule is min-rows = {least}"
        raise refused(context, f"labels with fewer than {least} rows of a class: {rule}")


def _of_counts(
    context: Context, config: RunConfig, order: EvidenceOrder
) -> Iterator[ColumnEvidence]:
    """Yield the evidence of each column by the label holder's counts."""
    groups, counts = order.arrays.get("groups"), order.arrays.get("counts")
    if groups is None or counts is None or groups.ndim != 2 or counts.ndim != 3:
        raise VflError("was sent no counts of its bins.")
    checked(order.arrays, "groups", "uint8", groups.shape)
    checked(order.arrays, "counts", "int64", (len(groups), counts.shape[1], 2))
    number = 0
    for number, (name, bins, values) in enumerate(_binned(_columns(context, config)), start=1):
        rows = bins.counts(values)
        if number > len(groups) or groups.shape[1] < bins.count:
            raise VflError("was sent counts of other columns.")
        of_bins = groups[number - 1, : bins.count]
        of_groups = counts[number - 1, : int(of_bins.max()) + 1]
        mine = np.bincount(of_bins, rows, minlength=len(of_groups))
        exact, events = of_groups[:, 0], of_groups[:, 1]
        fit = len(of_groups) == int(of_bins.max()) + 1 and np.array_equal(mine, exact)
        if not fit or (events < 0).any() or (events > exact).any():
            raise VflError("was sent counts that do not fit its rows.")
        evidence = Evidence(exact, events.astype(np.float64))
        yield ColumnEvidence.of(name, bins, rows.tolist(), of_bins, evidence)
    if number != len(groups):
        raise VflError("was sent counts of other columns.")


# --- segments of a trained model ------------------------------------------------------------------


def count_groups(context: Context, order: GroupsOrder) -> GroupCounts:
    """Count the cells of the test rows in the groups of each column that ``segments`` names."""
    party, parties = index_and_parties(context)
    try:
        check_task(context, "information")
        saved = copy(context)
        saved.state = state_file.load(context, order.run, order.number).state
        config, own = about.read(load_about(saved.state)).config, own_source(context)
        if not isinstance(own, Table) or not own.segment_names:
            raise ConfigError(f"Party {party} names no segments in its node configuration.")
        common = common_rows(saved, own)
        _, rows, validation = divide(config.data, len(common.rows), common.held_out)
        rows = common.rows[rows[validation:]]
        columns = own.segments_of(rows[rows >= 0])
        return _counted(context, order, own, rows, columns)
    except VflError as error:
        return GroupCounts(party=party, parties=parties, refused=in_one_line(str(error)))


def _counted(
    context: Context,
    order: GroupsOrder,
    own: Table,
    rows: NDArray[Any],
    columns: Mapping[str, NDArray[Any]],
) -> GroupCounts:
    """Return the counts, once the party's rules permit these cells."""
    cells = checked(order.arrays, "cells", "uint8", (len(rows),))[rows >= 0]
    if not len(cells) or cells.max() > 3:
        raise VflError("has none of the test rows, or was sent cells that do not exist.")
    limited, least = not simulated(context), order.least
    if limited:
        least = max(least, Rules.of(context.node_config).min_rows)
        _check_rarest(context, cells, 4)
    people = own.people(rows[rows >= 0])
    by_person = np.argsort(people)
    question = hashlib.sha256(f"groups {least}".encode() + people[by_person].tobytes())
    question.update(cells[by_person].tobytes())
    groups, counts = dict[str, list[str]](), []
    for column, values in columns.items():
        groups[column], of = _without_small(*segments(column, values), least)
        question.update(of[by_person].tobytes())
        together = np.bincount(4 * of + cells, minlength=4 * len(groups[column]))
        counts.append(together.reshape(-1, 4))
    if limited:
        least = Rules.of(context.node_config).min_rows
        count_labels(context, people, cells, question.digest(), least)
    party, parties = index_and_parties(context)
    arrays: Arrays = {"counts": np.concatenate(counts).astype(np.int64)}
    return GroupCounts(party=party, parties=parties, groups=json.dumps(groups), arrays=arrays)


def _without_small(
    names: list[str], of: NDArray[np.int64], least: int
) -> tuple[list[str], NDArray[np.int64]]:
    """Return names and rows of groups, where small groups are one, with at least so many rows.

    It takes in the next larger groups, if it needs them. So no small group follows by subtraction.
    """
    sizes = np.bincount(of)
    smallest, few = np.argsort(sizes, kind="stable"), int((sizes < least).sum())
    if few:
        few = max(few, 1 + int(np.searchsorted(sizes[smallest].cumsum(), least)))
    small = np.isin(np.arange(len(sizes)), smallest[:few])
    small |= bool(few) & np.array([name == "other groups" for name in names], bool)
    kept = np.array(names, object)[~small].tolist()
    place = np.where(small, len(kept), (~small).cumsum() - 1)
    return kept + ["other groups"] * bool(few), place[of]


# --- the party's columns ------------------------------------------------------------------------


def _config(context: Context, order: EarlyOrder) -> RunConfig:
    """Return the configuration of an order, if the party's rules permit the task."""
    check_task(context, "information")
    config = told(context, order.config)
    if config.task != "information":
        raise VflError("was asked for the information of its columns in another task.")
    rules = Rules.of(context.node_config)
    one_owner = simulated(context) and "information" not in context.node_config
    if config.information == "exact" and rules.information != "exact" and not one_owner:
        rule = f"its rule is information = {rules.information!r}"
        raise refused(context, f"information = 'exact': {rule}")
    return config


def _columns(context: Context, config: RunConfig) -> RawColumns:
    """Return the party's columns in its training rows."""
    party, parties = index_and_parties(context)
    if config.data.own_data:
        own = own_source(context)
        return own_columns(config.data, own, common_rows(context, own))
    if context.node_config.keys() & {"file", "images", "source"}:
        raise ConfigError(
            f"Party {party} has its own file, but dataset = {config.data.dataset!r}. It takes part "
            "only in runs with dataset = 'files:PATH'."
        )
    return partition_columns(config, party, parties)


def _binned(columns: RawColumns) -> Iterator[tuple[str, Bins, NDArray[np.float64]]]:
    """Yield the name, the bins and the values of each column."""
    for name, values in columns.read():
        yield name, Bins.learn(values), values
