"""The features that a party trains on: its own data, or its columns of a partitioned data set."""

from __future__ import annotations

from dataclasses import replace

from flwr.app import Context

from vfl_flower.alignment.at_party import common_rows
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import AUGMENTATIONS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import FeatureBlock, load_own_features, load_partition
from vfl_flower.data.source import Preparation, Source
from vfl_flower.data.sources import source_of
from vfl_flower.transport.node import seat


def own_source(context: Context) -> Source:
    """The data that a party's node configuration names."""
    index, _ = seat(context)
    return source_of(context.node_config, index)


def load_block(
    context: Context, config: RunConfig, preparation: Preparation | None = None
) -> FeatureBlock:
    """The features of a node's party: its own, or its columns of the data set that is divided.

    Own ones are prepared as the training rows say, or as they said to its model of then.
    """
    index, parties = seat(context)
    own_words = context.node_config.get("augment")
    augment = AUGMENTATIONS.load(str(own_words or config.data.augment))
    if not config.data.own_data:
        if context.node_config.keys() & {"file", "images", "source"}:
            raise ConfigError(
                f"Party {index} has a file of its own, and takes part in nothing else than runs "
                "with dataset = 'files:PATH'."
            )
        return replace(load_partition(config, index, parties), augment=augment)
    own = own_source(context)
    counted = "max-uploads" in context.node_config
    block = load_own_features(config.data, own, common_rows(context, own), counted, preparation)
    return replace(block, augment=augment)
