"""The label holder's data: labels, and its own columns.

`data.at_party` is the party's half. Labels never reach a party, and features never reach the label
holder. Before training, both sides check that they use the same rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.config.provenance import return_memory
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import memory
from vfl_flower.data.at_party import load_own_features
from vfl_flower.data.labels import Labels, as_known, class_weights, digest_of_labels, encode_labels
from vfl_flower.data.on_disk import of_size
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.partitioned import decisive, opened, version_of
from vfl_flower.data.source import Compact, Preparation
from vfl_flower.data.split import Alignment, digest_of_rows, divide, row_masks_of, split
from vfl_flower.data.tables import Table


def own_table(data: DataConfig) -> Table:
    """Return the label holder's own table: ids, labels, and perhaps features."""
    if data.dataset.startswith("memory:"):
        return memory.of_label_holder(data)
    return of_size(OwnFile.of_label_holder(data))


def load_labels(config: RunConfig) -> Labels:
    """Return the labels of the training and test rows of a partitioned data set."""
    labels = _load_labels(decisive(config.data), version_of(config.data))
    class_weights(config.data, labels.train, len(labels.classes))  # raises early if wrong
    return labels


def with_row_masks(labels: Labels, config: RunConfig, parties: int) -> Labels:
    """Add the row masks of a partitioned data set to labels, if parties lack rows."""
    if config.data.own_data or config.data.presence >= 1:
        return labels
    assert labels.places is not None and labels.test_places is not None
    masks = row_masks_of(config, (labels.places, labels.test_places), parties)
    return replace(labels, present=masks)


@lru_cache(maxsize=4)
def _load_labels(data: DataConfig, version: Any) -> Labels:
    parts = opened(data, version).labels()
    if any(part.ndim != 1 for part in parts):
        raise ConfigError(
            f"The labels of {data.called} have shape {parts[0].shape}. Give one label for each row."
        )
    train, test, (*rows, validation) = split(data, parts)
    digest = digest_of_rows(*rows)
    return replace(
        encode_labels(data, train, test, digest),
        alignment=digest,
        whole=digest_of_labels("", data.target == "regression", *parts),
        validation=validation,
        places=rows[0],
        test_places=rows[1],
    )


def own_labels(
    data: DataConfig, own: Table, common: Alignment, about: Mapping[str, Any] | None = None
) -> Labels:
    """Return the labels of the common rows, without the label holder's own columns."""
    train, test, validation = divide(data, len(common.rows), common.held_out)
    values, digest = own.labels(common.rows), own.digest(common.rows)
    labels = encode_labels(data, values[train], values[test], digest)
    labels = labels if about is None else as_known(data, labels, about)
    return_memory(len(own.ids))
    people, whole, present = None, "", common.present
    if own.has_ids:
        numbers = own.people(common.rows)
        people = numbers[train], numbers[test]
    else:
        every = np.arange(len(own.ids))
        known = own.labels_with_gaps(every)
        whole = digest_of_labels(own.digest(every), data.target == "regression", known)
    labels = replace(
        labels,
        alignment=common.name,
        validation=validation,
        places=common.rows[train],
        test_places=common.rows[test],
        people=people,
        whole=whole,
        present=None if present is None else (present[train], present[test]),
        segments=own.segments_of(common.rows[test]),
    )
    class_weights(data, labels.train, len(labels.classes))  # raises early if wrong
    return labels


def load_own_labels(
    data: DataConfig, own: Table, common: Alignment, about: Mapping[str, Any] | None = None
) -> Labels:
    """Return the labels, and the label holder's own columns, of the common rows.

    A warm start gives `Labels.about` of the earlier run.
    """
    labels = own_labels(data, own, common, about)
    then = about["preparation"] if about else None
    if about and bool(then) != bool(own.feature_names):
        raise ConfigError(
            f"{own.path} differs from the earlier run's file: only one of them has feature "
            "columns. Give it the earlier columns, or leave grow out."
        )
    if not own.feature_names and not own.monotonic:
        return labels
    preparation = Preparation(**then) if then else None
    block = load_own_features(data, own, common, preparation=preparation, watched=True)
    # Every evaluation reads the held-out rows, so memory holds them. A large table's training rows
    # stay on disk.
    assert not isinstance(block.train, Compact)
    features = block.train, np.asarray(block.test[:])
    return replace(labels, features=features, preparation=block.preparation, shares=block.shares)
