"""Checks of options that tasks and calibration need, beyond the checks of a training run."""

from __future__ import annotations

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.privacy.mechanism import Mechanism, mechanism_of


def check_task_options(config: RunConfig, mechanism: Mechanism) -> None:
    """Raise `ConfigError` if options contradict task "information"."""
    if config.task != "information":
        return
    privacy, exact = config.privacy.mechanism, config.information == "exact"
    if exact and privacy != "none":
        raise ConfigError(
            f"information = 'exact' answers exact counts, but privacy = {privacy!r}. Leave one of "
            "them out."
        )
    if not exact and not mechanism.learns_from_noise:
        raise ConfigError(
            f"task = 'information' draws noise on labels, but privacy = {privacy!r}. Leave privacy "
            "out."
        )
    if config.data.target != "classification":
        raise ConfigError(
            "task = 'information' needs labels of two classes, but target = "
            f"{config.data.target!r}. Give a label column that says whether the event happened."
        )


def check_calibration(config: RunConfig) -> None:
    """Raise `ConfigError` if there is nothing to calibrate, or no row to calibrate by."""
    method, privacy = config.training.calibrate, config.privacy.mechanism
    if method == "none":
        return
    if config.data.target == "regression":
        raise ConfigError(
            f"calibrate = {method!r} is for probabilities of classes, and target = 'regression' "
            "has no classes. Leave calibrate out."
        )
    if config.data.validation_fraction == 0:
        covers = mechanism_of(config).covers_validation
        why = "validation-fraction = 0" if covers else f"privacy = {privacy!r}"
        raise ConfigError(
            f"calibrate = {method!r} needs validation rows, and with {why} there are none. Leave "
            "one of them out."
        )
