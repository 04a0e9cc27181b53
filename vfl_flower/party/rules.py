"""What a party insists on: rules of its own, in its node configuration, which nobody else can set.

They are checked at the party before anything is computed, whatever a run configuration or an order
asks. What gives a protection away (a named path, a comparison of digests, a public seed of noise)
is done only if the party's own node configuration says the same as the run configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import Context

from vfl_flower.errors import ConfigError
from vfl_flower.flower_internals import in_ray


@dataclass(frozen=True)
class Rules:
    """Keys of a node configuration, by their names with hyphens."""

    align: str = "psi"
    """How ids may be compared: ``ids`` permits that method, and no other."""
    min_rows: int = 50
    """Fewest rows that all must have in common."""
    max_ids: int = 10_000_000
    """Most ids that the other side may send."""
    stream_address: str = ""
    """Where to connect to: hosts, each with :PORT or without, and commas; empty: this machine."""

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Rules:
        """The rules in a node configuration.

        Raises
        ------
        ConfigError
            If a value is of another type than its rule.
        """
        given = {}
        for spec in fields(cls):
            key = spec.name.replace("_", "-")
            if key not in node_config:
                continue
            value = node_config[key]
            if type(value).__name__ != spec.type:
                party = node_config.get("partition-id")
                raise ConfigError(
                    f"Party {party}'s node configuration gives {key} = {value!r}, where "
                    f"{'a text in quotes' if spec.type == 'str' else 'a whole number'} is due."
                )
            given[spec.name] = value
        return cls(**given)


def simulated(context: Context) -> bool:
    """Whether all parties are of one owner: in one process, or under Ray."""
    return bool(context.node_config.get("simulated")) or in_ray()
