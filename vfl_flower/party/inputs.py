"""A party's training rows: its own data, or columns of a partitioned data set."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.store import common_rows
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import log
from vfl_flower.config.plugins import AUGMENTATIONS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_party import (
    ArrayBlock,
    FeatureBlock,
    load_own_features,
    load_partition,
)
from vfl_flower.data.drift import Watch, columns_of, sampled
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.samples import Samples
from vfl_flower.data.source import Preparation, Source
from vfl_flower.data.sources import source_of
from vfl_flower.data.withdrawn import place, version
from vfl_flower.protocol.batches import Window, kept
from vfl_flower.transport.node import index_and_parties


@dataclass(frozen=True)
class Inputs:
    """A party's features, and the run's rows that they belong to."""

    block: FeatureBlock
    rows: int  # number N of training rows of the run, including rows that the party lacks
    mask: NDArray[np.bool_] | None  # row mask [N] of the party; None if it has all rows
    places: NDArray[np.int32] | None  # [N], of each row in the block; None if it has all rows
    sample: Samples  # one row, without the row dimension
    columns: int  # numbers in a sample

    @classmethod
    def of(cls, block: FeatureBlock) -> Inputs:
        """Describe the rows of a block."""
        sample = samples.first(block.train if len(block.train) else block.test)
        columns = samples.numbers(sample)
        if block.row_masks is None:
            return cls(block, len(block.train), None, None, sample, columns)
        mask = block.row_masks[0].mask
        places = (np.cumsum(mask) - 1).astype(np.int32)
        return cls(block, block.row_masks[0].rows, mask, places, sample, columns)

    @property
    def test_rows(self) -> int:
        """Return the number of test rows of the run, including rows that the party lacks."""
        masks = self.block.row_masks
        return masks[1].rows if masks else len(self.block.test)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Return the ids of all training rows that the party has."""
        return np.flatnonzero(np.ones(self.rows) if self.mask is None else self.mask).astype("i4")

    def places_of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the positions of these rows of the run in the block."""
        return ids if self.places is None else self.places[ids]

    def held(self, window: Window) -> Window:
        """Return the rows of a window that the party has."""
        return window if self.mask is None else kept(window, self.mask)

    def check_ids(self, ids: NDArray[np.int32]) -> bool:
        """Return whether these are ids of training rows that the party has."""
        if ids.dtype != np.int32 or ids.ndim != 1:
            return False
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.rows):
            return False
        return self.mask is None or bool(self.mask[ids].all())


def own_source(context: Context) -> Source:
    """Return the data that a party's node configuration names."""
    index, _ = index_and_parties(context)
    return source_of(context.node_config, index)


def aligning_source(context: Context) -> Source:
    """Return the data as `own_source`, and keep a file's data while the file stays as it is.

    An alignment has many orders, and reading ids takes longer than most of them.
    """
    words = context.node_config
    try:
        seen = os.stat(os.path.expanduser(str(words["file"])))
    except (KeyError, OSError):  # other data, or no such file
        return own_source(context)
    stamp = seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_dev, version(place(words))
    return _of_file(tuple(sorted(words.items())), index_and_parties(context)[0], stamp)


@lru_cache(maxsize=16)  # parties in this process
def _of_file(words: tuple[tuple[str, Any], ...], index: int, stamp: tuple[int, ...]) -> Source:
    return source_of(dict(words), index)


forget_aligning = _of_file.cache_clear


def load_block(
    context: Context,
    config: RunConfig,
    preparation: Preparation | None = None,
    watched: bool = False,
) -> FeatureBlock:
    """Read a party's own data, or its columns of the partitioned data set.

    Without a preparation, learn it from the training rows; if ``watched``, also their shares.
    """
    index, parties = index_and_parties(context)
    own_words = context.node_config.get("augment")
    augment = AUGMENTATIONS.load(str(own_words or config.data.augment))
    if not config.data.own_data:
        if context.node_config.keys() & {"file", "images", "source", "monotonic"}:
            raise ConfigError(
                f"Party {index} names its own data, but dataset = {config.data.dataset!r}. It "
                "takes part only in runs with dataset = 'files:PATH'."
            )
        block = load_partition(config, index, parties)
        shares = None
        if watched and isinstance(block, ArrayBlock) and block.train.ndim == 2:
            few = sampled(*block.train.shape)
            shares = Watch.learn(columns_of(block.train[few]))
        return replace(block, augment=augment, shares=shares)
    own = own_source(context)
    if watched and isinstance(own, OwnFile):  # a digest that leaves the party could confirm guesses
        log.info("Party %d trains on %s: %s", index, own.path, own.about_file)
    counted = "max-uploads" in context.node_config
    common = common_rows(context, own)
    block = load_own_features(config.data, own, common, counted, preparation, watched)
    return replace(block, augment=augment)
