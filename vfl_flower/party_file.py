"""The state of a party on its own disk, since a SuperNode keeps it in memory only.

It is written when a session of the stream ends, and read by a party that has lost its state: one
whose SuperNode was killed and started again. Only its owner can read it. It holds all that the
state does, in Flower's protobuf: the bottom model, the secret that decides noise and directions,
surrogates, and with shared labels also the labels and the other parties' surrogates.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.supercore.utils import get_flwr_home

from vfl_flower.errors import VflError
from vfl_flower.records import state_from_bytes, state_to_bytes

log = logging.getLogger("flwr")


def place(context: Context) -> Path:
    """The file of this node's party, in the folder FLWR_HOME."""
    party = context.node_config.get("partition-id")
    return Path(get_flwr_home(), "vfl-flower", f"run-{context.run_id}-party-{party}.state")


def save(context: Context) -> None:
    """Write the state as it is now, in place of what there was; a disk that refuses is told."""
    path = place(context)
    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.touch(mode=0o600)
        with new.open("wb") as file:
            file.write(state_to_bytes(context.state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        log.warning("The party's state cannot be kept in %s: %s.", path, error.strerror)


def restore(context: Context) -> None:
    """Read it into a Context that has no state, if the file is there and sound."""
    path = place(context)
    if context.state:
        return
    try:
        state = state_from_bytes(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, VflError):
        log.warning("The party's state cannot be read from %s: it begins without.", path)
        return
    for name, record in state.items():
        context.state[name] = record
