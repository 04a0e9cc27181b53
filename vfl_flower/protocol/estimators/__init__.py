"""Estimator axis: how parties learn. `choose` says by which, for a run."""

from __future__ import annotations

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import DIRECTIONS, ESTIMATORS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol import server_update
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.estimators.shared_labels import SharedLabels


def choose(config: RunConfig) -> type[Estimator]:
    """The estimator of a configuration."""
    found: type[Estimator] = ESTIMATORS.load(config.estimator.kind)
    return SharedLabels if config.estimator.labels == "shared" else found


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if keys of the estimator contradict each other, or others."""
    if config.estimator.mu < 1e-6:
        raise ConfigError(
            f"mu = {config.estimator.mu} is lost in 32-bit numbers: give at least 1e-6."
        )
    if config.estimator.labels == "shared" and config.estimator.kind != "first-order":
        raise ConfigError(
            "labels = 'shared' is for first-order parties, which then differentiate the loss "
            "themselves: leave it out, or choose estimator = 'first-order'."
        )
    if config.estimator.perturbs == "all" and not choose(config).answers_by_scalars:
        raise ConfigError(
            "perturbs = 'all' is for differences: leave it out, or choose estimator = "
            "'zeroth-order'."
        )
    by_differences = server_update.choose(config).by_differences
    by_differences |= choose(config).answers_by_scalars
    if by_differences:
        DIRECTIONS.load(config.estimator.directions)  # so that code of one's own fails early
    if by_differences and config.training.precision != "float32":
        raise ConfigError(
            f"precision = {config.training.precision!r} rounds off the differences that zeroth "
            "order learns from: leave it out, or choose a first-order system."
        )
    choose(config).check(config)
