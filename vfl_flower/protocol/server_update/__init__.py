"""Server-update axis: how the top model learns. `choose` says by which, for a run."""

from __future__ import annotations

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import SERVER_UPDATES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.privacy.ledger import ledger_of
from vfl_flower.protocol.server_update.base import ServerUpdate


def choose(config: RunConfig) -> type[ServerUpdate]:
    """Return the server update of a configuration."""
    found: type[ServerUpdate] = SERVER_UPDATES.load(config.estimator.server_update)
    return found


def check(config: RunConfig) -> None:
    """Raise `ConfigError` if noise on scalars does not know what the top model learns from."""
    name = config.estimator.server_update
    if ledger_of(config).noise_on == "scalars" and name not in SERVER_UPDATES.known:
        raise ConfigError(
            f"privacy = {config.privacy.mechanism!r} does not know what server-update = {name!r} "
            f"shows of labels. Choose {' or '.join(map(repr, SERVER_UPDATES.known))}."
        )
