"""The state of a party on its own disk, since a SuperNode keeps it in memory only.

It is written when a session of the stream ends, and read by a party that has lost its state: one
whose SuperNode was killed and started again. It holds the bottom model, never features or labels
of others, in Flower's protobuf, and only its owner can read it.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.supercore.utils import get_flwr_home

from vfl_flower.errors import VflError
from vfl_flower.records import state_from_bytes, state_to_bytes


def place(context: Context) -> Path:
    """The file of this node's party, in the folder FLWR_HOME."""
    party = context.node_config.get("partition-id")
    return Path(get_flwr_home(), "vfl-flower", f"run-{context.run_id}-party-{party}.state")


def save(context: Context) -> None:
    """Write the state as it is now, in place of what there was."""
    path = place(context)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(state_to_bytes(context.state))
    os.replace(new, path)


def restore(context: Context) -> None:
    """Read it into a Context that has no state, if the file is there."""
    path = place(context)
    if context.state or not path.exists():
        return
    try:
        state = state_from_bytes(path.read_bytes())
    except VflError:
        raise VflError(f"found in {path} what is no state of a party: move it away.") from None
    for name, record in state.items():
        context.state[name] = record
