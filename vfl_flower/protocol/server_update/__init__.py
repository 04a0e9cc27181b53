"""Server-update axis: how the top model learns. `choose` returns a run's rule."""

from vfl_flower.config.plugins import SERVER_UPDATES
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.server_update.base import ServerUpdate


def choose(config: RunConfig) -> type[ServerUpdate]:
    """Return the server update of a configuration."""
    return SERVER_UPDATES.load(config.estimator.server_update)
