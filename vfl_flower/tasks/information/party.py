"""A party's half of task "information": weight of evidence of the party's columns.

`tasks.information.label_holder` is the other half, and says what each side learns. The party's file
beside its states has the names of columns and bins. Nobody else gets them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.store import common_rows
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import RawColumns, own_columns, partition_columns
from vfl_flower.data.bins import Bins
from vfl_flower.data.evidence import ColumnEvidence, Evidence, merged, write_files
from vfl_flower.party.inputs import own_source
from vfl_flower.party.label_sets import count_labels
from vfl_flower.party.refusals import check_task, told
from vfl_flower.transport.early_messages import (
    ColumnBins,
    ColumnBinsOrder,
    ColumnInformation,
    EarlyOrder,
    EvidenceOrder,
    InformationOffer,
    InformationOrder,
)
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
    return InformationOffer(
        party=party,
        parties=parties,
        rows=columns.rows,
        columns=number,
        alignment=columns.alignment,
    )


def upload_bins(context: Context, order: ColumnBinsOrder) -> ColumnBins:
    """Return the bin of each row in each column."""
    config = _config(context, order)
    if config.information != "exact":
        raise VflError("was asked for bins, which noisy labels do not need.")
    found = [
        (bins.of(values), bins.count) for _, bins, values in _binned(_columns(context, config))
    ]
    arrays = {
        "bins": np.array([each for each, _ in found], np.uint8),
        "sizes": np.array([size for _, size in found], np.uint8),
    }
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
    limited, least, events = not simulated(context), config.min_bin, int(labels.sum())
    if limited:
        least = max(least, rules.min_rows)
        if min(events, len(labels) - events) < rules.min_rows:
            raise refused(
                context,
                f"labels with fewer than {rules.min_rows} rows of a class: its rule is min-rows = "
                f"{rules.min_rows}",
            )
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
