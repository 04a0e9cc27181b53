"""What a node is: which party, whether it is simulated, and how it says that it refuses."""

from __future__ import annotations

import logging

from flwr.app import Context

from vfl_flower.config.errors import ConfigError
from vfl_flower.transport.flower_internals import in_ray

log = logging.getLogger("flwr")


def seat(context: Context) -> tuple[int, int]:
    """The index of a node's party, and the number of parties."""
    node = context.node_config
    index, parties = node.get("partition-id"), node.get("num-partitions")
    if not (isinstance(index, int) and isinstance(parties, int) and 0 <= index < parties):
        raise ConfigError(
            "A SuperNode does not know which party it is: start it with "
            "--node-config 'partition-id=0 num-partitions=4', partition-id counting from 0."
        )
    return index, parties


def simulated(context: Context) -> bool:
    """Whether all parties are of one owner: in one process, or under Ray."""
    return bool(context.node_config.get("simulated")) or in_ray()


def refused(context: Context, what: str) -> ConfigError:
    """The sentence by which a party refuses, for the label holder; its own log has it too."""
    sentence = f"Party {context.node_config.get('partition-id')} refuses {what}."
    log.warning("%s", sentence)
    return ConfigError(sentence)
