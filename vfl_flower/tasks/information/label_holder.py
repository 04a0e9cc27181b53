"""The label holder's half of task "information": labels with noise out, or exact counts.

Noisy: the label holder randomises each training label once (`protocol.privacy.labels`), and sends
every party the same draw, also in later runs with this epsilon. So one epsilon covers all columns
and parties, and training with privacy = 'labels' too. A party counts noisy events in its own bins,
and answers the information value of each column, by number, and no more.

Exact: each party uploads the bin of each of its rows, and gets the events of each bin. So the label
holder learns the bins of every person, without names and edges, and a party learns sums of labels
over rows that it knows. Bins with few rows of a class are merged, and `Shown` bounds what all sums
together say about one label.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment.reuse import aligned
from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError, PartyError, VflError, sent_by
from vfl_flower.config.files import write_json
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels, own_labels, with_row_masks
from vfl_flower.data.at_party import own_columns
from vfl_flower.data.bins import Bins
from vfl_flower.data.evidence import (
    MOST_TOLD,
    ColumnEvidence,
    Estimate,
    Evidence,
    Groups,
    least_rows,
    leverages,
    merged,
    note_of,
    value_of,
    write_files,
)
from vfl_flower.data.labels import Labels
from vfl_flower.data.tables import Table
from vfl_flower.label_holder.results import INFORMATION, in_use
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.labels import DrawAccountant
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import (
    ColumnBins,
    ColumnBinsOrder,
    ColumnInformation,
    EvidenceOrder,
    InformationOffer,
    InformationOrder,
)
from vfl_flower.transport.gather import gather, gather_all
from vfl_flower.transport.messages import SMALL, checked

_MOST_COLUMNS = 100_000  # of one party
_MOST_SUMS = 2000  # of all parties; more take too long to check
_LARGEST = 1e3  # information value

Events = NDArray[np.uint8]
"""Label of each training row: 1 for an event, [N]."""


def information(
    transport: Transport, config: RunConfig, own: Table | None, run: str, folder: Path
) -> None:
    """Have parties compute the information value of their columns; write ``information.json``."""
    with in_use(folder):
        _Information(transport, config, folder).write(own, run)


class _Information:
    """One run of task "information"."""

    def __init__(self, transport: Transport, config: RunConfig, folder: Path) -> None:
        self.transport, self.config, self.folder = transport, config, folder
        self.about = json.dumps(config.values())

    def write(self, own: Table | None, run: str) -> None:
        """Ask all parties, and write the results."""
        config = self.config
        parties: dict[str, Any] = {}
        if own is None:
            labels = load_labels(config)
            true = events_of(config, labels)
        else:
            common = aligned(self.transport, config, own, run)
            labels = own_labels(config.data, own, common)
            true = events_of(config, labels)
            if own.feature_names:
                columns = own_columns(config.data, own, common).read()
                found = [of_column(name, values, true, config.min_bin) for name, values in columns]
                write_files(self.folder / "label-holder.information.csv", found)
                of_each = ((each.column, each.information, len(each.names)) for each in found)
                parties["label holder"] = {"features": [_feature(*each) for each in of_each]}
        order = InformationOrder(config=self.about)
        offers = gather_all(self.transport, order, InformationOffer, config.running)
        labels = with_row_masks(labels, config, len(offers))
        here = {node: each for node, each in offers.items() if not each.refused}
        for each in offers.values():
            if each.refused:
                parties[str(each.party)] = {"refused": each.refused}
                notice.warning("Party %d takes no part: %s", each.party, each.refused)
            else:
                _check_rows(each, labels)
        answers, spent = {}, None
        if here and config.information == "exact":
            notice.warning("Exact counts tell parties sums of labels. No epsilon covers them.")
            answers = self._exact(here, labels, true)
        elif here:
            sent, spent = self._noisy_labels(labels)
            answers = self._noisy(here, labels, sent)
        parties |= {str(here[node].party): answer for node, answer in answers.items()}
        for answer in answers.values():
            if "refused" in answer:
                notice.warning("%s", answer["refused"])
        result = {
            "mode": config.information,
            "epsilon": config.privacy.epsilon,
            "spent": spent,
            "rows": len(true),
            **names.with_names(),
            "parties": dict(sorted(parties.items(), key=lambda each: (len(each[0]), each[0]))),
        }
        write_json(self.folder / INFORMATION, result)
        notice.info("information values: %s", self.folder / INFORMATION)

    # --- noisy ----------------------------------------------------------------------------------

    def _noisy_labels(self, labels: Labels) -> tuple[Events, float | None]:
        """Return labels with noise, the same in each run, and the sum of epsilons spent on them."""
        config = self.config
        noisy, spent = randomised(config, labels)
        kept = mechanism_of(config).kept(2)
        together = Evidence.count(np.zeros(len(noisy), int), noisy, 1, kept)
        if 2 * least_rows(together, config.min_bin) > len(noisy):
            raise ConfigError(
                f"epsilon = {config.privacy.epsilon:g} leaves too little in {len(noisy)} rows: "
                "noise hides the rarer class in half of them. Raise epsilon, or use more rows."
            )
        return noisy, spent

    def _noisy(
        self, here: Mapping[int, InformationOffer], labels: Labels, sent: Events
    ) -> dict[int, Any]:
        """Send labels with noise; return the values that parties compute."""
        kept = mechanism_of(self.config).kept(2)
        orders = {}
        for node, each in here.items():
            arrays = {"labels": sent[_mask(labels, each.party)]}
            orders[node] = EvidenceOrder(kept=kept, config=self.about, arrays=arrays)
        answers = self._gather(here, orders)
        found: dict[int, Any] = {
            node: {"refused": FAILED.format(party=here[node].party)}
            for node in here.keys() - answers.keys()
        }
        for node, answer in answers.items():
            columns = here[node].columns
            with sent_by(here[node].party):
                values = checked(answer.arrays, "values", "float64", (columns, 3))
                bins = checked(answer.arrays, "bins", "uint8", (columns,))
                value, low, high = values.T
                if not ((low >= 0) & (low <= value) & (value <= high) & (high <= _LARGEST)).all():
                    raise VflError("values that are no information values.")
            rows = enumerate(zip(values.tolist(), bins.tolist(), strict=True))
            of_each = ((at, Estimate(*row) if n else None, n or 1) for at, (row, n) in rows)
            found[node] = {"features": [_feature(*each) for each in of_each]}
        return found

    # --- exact ----------------------------------------------------------------------------------

    def _exact(
        self, here: Mapping[int, InformationOffer], labels: Labels, true: Events
    ) -> dict[int, Any]:
        """Count events in the bins that parties upload; return the values."""
        columns = max((each.columns * each.rows for each in here.values()), default=0)
        self.transport.expect({ColumnBinsOrder.kind: SMALL + 2 * columns})
        orders = dict.fromkeys(here, ColumnBinsOrder(config=self.about))
        uploads = gather(self.transport, orders, ColumnBins, self.config.running.party_timeout)
        shown, found = Shown(len(true)), dict[int, Any]()
        evidence: dict[int, EvidenceOrder] = {}
        for node, each in here.items():
            party, rows = each.party, np.flatnonzero(_mask(labels, each.party))
            with sent_by(party):
                arrays = uploads[node].arrays
                bins = checked(arrays, "bins", "uint8", (each.columns, each.rows))
                sizes = checked(arrays, "sizes", "uint8", (each.columns,))
                if (sizes < 2).any() or (bins.max(1) >= sizes).any():
                    raise VflError("bins that do not exist.")
            counted = [
                counted_bins(of_column, size, true[rows], self.config.min_bin)
                for of_column, size in zip(bins, sizes, strict=True)
            ]
            groups = [of_column[bins[at]] for at, (of_column, _) in enumerate(counted)]
            if not shown.add(rows, groups):
                found[node] = {"refused": TOO_MANY.format(party=party, columns=each.columns)}
                continue
            evidence[node] = EvidenceOrder(kept=1.0, config=self.about, arrays=_counts(counted))
            found[node] = {"features": []}
            for at, (_, of) in enumerate(counted):
                value = value_of(np.bincount(bins[at]), of)
                found[node]["features"].append(_feature(at, value, len(of.rows)))
        self._gather(here, evidence)
        return found

    def _gather(
        self, here: Mapping[int, InformationOffer], orders: Mapping[int, EvidenceOrder]
    ) -> dict[int, ColumnInformation]:
        """Return the answers, without parties that fail. A notice names those."""
        columns = max((each.columns for each in here.values()), default=0)
        self.transport.expect({EvidenceOrder.kind: SMALL + 32 * columns})
        timeout = self.config.running.party_timeout
        return gather(self.transport, orders, ColumnInformation, timeout, lenient=True)


class Shown:
    """Sums of labels that exact counts show to all parties of a run, and what they say.

    Each group of a column is a row of a matrix A [K, N] of zeros and ones, and parties learn A y.
    `leverages` bounds what they say.
    """

    def __init__(self, rows: int, most: float = MOST_TOLD) -> None:
        self.sums = np.ones((1, rows), np.float32)  # A: all parties know the sum of all labels
        self._rows, self._most = rows, most

    def add(self, rows: NDArray[Any], groups: list[NDArray[np.uint8]]) -> bool:
        """Show the sums of groups [n] of each column over rows [n], unless they tell too much."""
        number = len(self.sums) + sum(int(each.max()) + 1 for each in groups)
        if number > min(_MOST_SUMS, self._most * self._rows + len(groups)):
            return False
        added = np.zeros((number - len(self.sums), self._rows), np.float32)
        first = 0
        for each in groups:
            added[first + each.astype(np.int64), rows] = 1
            first += int(each.max()) + 1
        sums = np.concatenate([self.sums, added])
        if leverages(sums).max() > self._most:
            return False
        self.sums = sums
        return True


# --- labels and columns -------------------------------------------------------------------------


def randomised(config: RunConfig, labels: Labels) -> tuple[NDArray[np.uint8], float | None]:
    """Return the training labels with noise, and the sum of all epsilons spent on them."""
    mechanism = mechanism_of(config)
    accountant = mechanism.accountant(len(labels.train), estimators.choose(config)(config))
    assert isinstance(accountant, DrawAccountant)  # `systems.resolve` guarantees it
    return mechanism.labels(labels, accountant).train.astype(np.uint8), accountant.spent


def events_of(config: RunConfig, labels: Labels) -> Events:
    """Return the true labels of the training rows: 1 for the second class, in order of names.

    For exact counts, refuse too few rows of a class. With an epsilon, nothing that others see may
    depend on a true count: `_noisy_labels` decides.
    """
    called = config.data.called
    if len(labels.classes) != 2:
        raise ConfigError(
            f"The labels of {called} have {len(labels.classes)} classes, and an information value "
            "is for two. Give a label column that says whether the event happened."
        )
    counts = np.bincount(labels.train, minlength=2)
    if config.information == "exact" and counts.min() < 2 * config.min_bin:
        raise ConfigError(
            f"The {len(labels.train)} training rows of {called} have only {counts.min()} rows of a "
            f"class, and two bins need {2 * config.min_bin}. Use more rows, or lower min-bin = "
            f"{config.min_bin}."
        )
    return labels.train.astype(np.uint8)


def of_column(name: str, values: NDArray[Any], events: Events, min_bin: int) -> ColumnEvidence:
    """Return the evidence of an own column [N] by exact labels [N]."""
    bins = Bins.learn(values)
    groups, evidence = counted_bins(bins.of(values), bins.count, events, min_bin)
    return ColumnEvidence.of(name, bins, bins.counts(values).tolist(), groups, evidence)


def counted_bins(
    bins: NDArray[Any], size: int, events: Events, min_bin: int
) -> tuple[Groups, Evidence]:
    """Return the groups of a column's bins [R], and their evidence."""
    by_bin = Evidence.count(bins, events, int(size))
    groups = merged(by_bin, min_bin)
    return groups, by_bin.grouped(groups)


def _counts(counted: list[tuple[Groups, Evidence]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `EvidenceOrder` with exact counts, filled up by zeros."""
    most_bins = max(len(groups) for groups, _ in counted)
    most_groups = max(len(each.rows) for _, each in counted)
    all_groups = np.zeros((len(counted), most_bins), np.uint8)
    counts = np.zeros((len(counted), most_groups, 2), np.int64)
    for at, (groups, each) in enumerate(counted):
        all_groups[at, : len(groups)] = groups
        counts[at, : len(each.rows)] = np.stack([each.rows, each.events], axis=1)
    return {"groups": all_groups, "counts": counts}


def _feature(name: int | str, value: Estimate | None, bins: int) -> dict[str, Any]:
    """Return a column's entry. Its value is null if it has none; a note says why."""
    ends = asdict(value) if value else dict.fromkeys(("value", "low", "high"))
    note = note_of(value, bins)
    return {"feature": name, **ends, "bins": bins, **({"note": note} if note else {})}


# --- checks of what parties send ----------------------------------------------------------------


def _mask(labels: Labels, party: int) -> NDArray[np.bool_]:
    """Return which training rows a party has, [N]."""
    if labels.present is None:
        return np.ones(len(labels.train), bool)
    return labels.present[0][:, party]


def _check_rows(each: InformationOffer, labels: Labels) -> None:
    """Raise `PartyError` if a party has other rows."""
    rows = int(_mask(labels, each.party).sum())
    if each.alignment != labels.alignment or each.rows != rows:
        said = f"has {each.rows} other training rows, not {rows}. Start it anew."
        raise PartyError(f"Party {each.party}", said)
    if not 0 < each.columns <= _MOST_COLUMNS:
        raise PartyError(f"Party {each.party}", f"has {each.columns} columns. Give it fewer.")


FAILED = "Party {party} has computed no values. Its own log says why."
TOO_MANY = (
    "Exact counts of the bins of party {party}'s {columns} columns would reveal single labels. "
    "Give the party fewer columns or more rows, or set information = 'noisy'."
)
