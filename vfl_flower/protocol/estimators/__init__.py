"""Estimator axis: how parties learn. `choose` returns the estimator of a run."""

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import DIRECTIONS, ESTIMATORS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol import server_update
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.estimators.shared_labels import SharedLabels


def choose(config: RunConfig) -> type[Estimator]:
    """Return the estimator of a configuration."""
    found: type[Estimator] = ESTIMATORS.load(config.estimator.kind)
    return SharedLabels if config.estimator.labels == "shared" else found


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if the estimator's options contradict any option."""
    if config.estimator.mu < 1e-6:
        raise ConfigError(
            f"mu = {config.estimator.mu} is too small for 32-bit numbers. Set mu to 1e-6 or more."
        )
    if config.estimator.labels == "shared" and config.estimator.kind != "first-order":
        raise ConfigError(
            "labels = 'shared' is for first-order parties: they differentiate the loss "
            f"themselves, and estimator = {config.estimator.kind!r} does not. Leave `labels` out, "
            "or set estimator = 'first-order'."
        )
    if config.estimator.perturbs == "all" and not choose(config).answers_by_scalars:
        raise ConfigError(
            "perturbs = 'all' is for differences of losses, and estimator = "
            f"{config.estimator.kind!r} does not use them. Leave `perturbs` out, or set estimator "
            "= 'zeroth-order'."
        )
    by_differences = server_update.choose(config).by_differences
    by_differences |= choose(config).answers_by_scalars
    if by_differences:
        DIRECTIONS.load(config.estimator.directions)  # a user's code that does not load fails early
    if by_differences and config.training.precision != "float32":
        raise ConfigError(
            f"precision = {config.training.precision!r} rounds off the differences that zeroth "
            "order learns from. Leave `precision` out, or choose a first-order system."
        )
    choose(config).check(config)
