"""Sampling: which rows a step uses. `sampling_of` returns the scheme of a run."""

from functools import lru_cache

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import SAMPLINGS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.sampling.base import Sampling


def sampling_of(config: RunConfig, rows: int) -> Sampling:
    """Return the scheme of a run. All ends in one process share it, and draw a window once."""
    if SAMPLINGS.is_place(config.schedule.sampling):  # the file may have changed
        return _sampling_of.__wrapped__(config, rows)
    return _sampling_of(config, rows)


@lru_cache(maxsize=16)
def _sampling_of(config: RunConfig, rows: int) -> Sampling:
    return SAMPLINGS.load(config.schedule.sampling)(config, rows)


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if privacy needs to count draws of a row, and cannot for a scheme."""
    name = config.schedule.sampling
    if mechanism_of(config).costs_by_step and name not in _COUNTED:
        raise ConfigError(
            f"privacy = {config.privacy.mechanism!r} does not know how often sampling = {name!r} "
            f"draws a row. Choose sampling = {' or '.join(map(repr, _COUNTED))}."
        )


_COUNTED = ("shuffle", "poisson")
