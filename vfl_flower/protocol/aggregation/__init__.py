"""Aggregation axis: how the label holder brings the parties' embeddings together."""

from __future__ import annotations

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import AGGREGATIONS, TOPS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation.base import Aggregation
from vfl_flower.protocol.aggregation.partial import Partial, check_rows


def aggregation_of(config: RunConfig) -> Aggregation:
    """Return the aggregation of a configuration.

    `plain` becomes `Partial` where parties may lack rows, or where the top model learns from
    subsets of the parties.
    """
    kind: type[Aggregation] = AGGREGATIONS.load(config.models.aggregation)
    if kind is Aggregation and Partial.is_for(config):
        kind = Partial
    return kind(config)


def check(config: RunConfig, answers_by_scalars: bool, baseline: bool) -> None:
    """Raise `ConfigError` if the aggregation contradicts other options.

    Parameters
    ----------
    answers_by_scalars : whether the label holder answers one number a step.
    baseline : whether the strategy is a baseline.
    """
    check_rows(config)
    aggregation, name = aggregation_of(config), config.models.aggregation
    if config.models.top not in TOPS.known and aggregation.tops[1] is None:
        raise ConfigError(
            f"aggregation = {name!r} brings the embeddings together itself, and top-model = "
            f"{config.models.top!r} reads them side by side: choose a top model of ours."
        )
    aggregation.check(answers_by_scalars, baseline)
    if config.running.grow and not aggregation.may_grow:
        raise ConfigError(
            f"aggregation = {name!r} cannot begin by the models of an earlier run: leave grow out."
        )
    if Partial.is_for(config) and not aggregation.any_subset:
        raise ConfigError(
            f"aggregation = {name!r} needs the embeddings of all parties: leave out align, "
            "presence and subsets."
        )
