"""Aggregation: how the label holder combines the parties' embeddings."""

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import AGGREGATIONS, TOPS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation.base import Aggregation
from vfl_flower.protocol.aggregation.partial import Partial, check_rows


def aggregation_of(config: RunConfig) -> Aggregation:
    """Return the aggregation of a configuration. For partial rows, `plain` is `Partial`."""
    kind: type[Aggregation] = AGGREGATIONS.load(config.models.aggregation)
    if kind is Aggregation and Partial.is_for(config):
        kind = Partial
    return kind(config)


def check(
    config: RunConfig, answers_by_scalars: bool, baseline: bool, coordinated: bool = True
) -> None:
    """Raise `ConfigError` if the aggregation contradicts other options."""
    check_rows(config)
    aggregation, name = aggregation_of(config), config.models.aggregation
    if config.models.top not in TOPS.known and aggregation.tops[1] is None:
        raise ConfigError(
            f"aggregation = {name!r} combines the embeddings itself, and top-model = "
            f"{config.models.top!r} reads them side by side. Choose a built-in top model."
        )
    if not coordinated:  # at any number of parties
        aggregation.check_schedule(2, coordinated)
    aggregation.check(answers_by_scalars, baseline)
    check_flags(aggregation, config.assessment.flag_rate)
    if config.running.grow and not aggregation.may_grow:
        raise ConfigError(
            f"aggregation = {name!r} cannot start from an earlier run's models. Leave grow out."
        )
    if Partial.is_for(config) and not aggregation.any_subset:
        raise ConfigError(
            f"aggregation = {name!r} needs the embeddings of all parties. Leave out align, "
            "presence and subsets."
        )


def check_flags(aggregation: Aggregation, rate: float) -> None:
    """Raise `ConfigError` if scores shall be flagged by embeddings that nobody sees."""
    if rate and aggregation.waits:
        raise ConfigError(
            f"flag-rate = {rate:g} compares the parties' embeddings, and aggregation = "
            f"{aggregation.config.models.aggregation!r} shows their sum alone. Leave flag-rate out."
        )
