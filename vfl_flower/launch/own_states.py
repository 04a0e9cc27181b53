"""The parties' states of a run in this process or on this machine: all lie in its folder."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from strategies.vertical import strategy_of
from vfl_flower.config.files import make_own_folder, told, whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import checkpoint, earlier_run
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.earlier_run import PartyState
from vfl_flower.party import session, state, state_file
from vfl_flower.transport.local import LocalGrid


def load_states(grid: LocalGrid, found: Checkpoint) -> None:
    """Load the parties' states of a run that has not saved its models yet."""
    if not found.finished:  # the parties load their states when they are asked to resume
        return
    nodes = enumerate(grid.contexts.values())
    earlier_run.check_states(found, [load_state(found, party, node) for party, node in nodes])


def load_state(found: Checkpoint, party: int, node: Context) -> PartyState:
    """Load a party's state of a checkpoint into its node."""
    node.state, number = state_file.load(node, found.run, found.number)
    return PartyState(party, int(state.load_scalars(node.state)["exchange"]), number)


def bring_states(config: RunConfig, folder: Path) -> None:
    """Copy the parties' states of the run that this one starts from into its folder."""
    begins_with = config.running.grow or config.running.rerun
    if not begins_with or config.running.resume:
        return
    earlier = Path(begins_with).expanduser().absolute()
    states = f"run-{checkpoint.load(earlier).run}-party-*.state"
    with told(folder):
        make_own_folder(folder)
        for path in (*earlier.glob(states), *earlier.glob("*.uploads")):
            if not (folder / path.name).exists():
                shutil.copy2(path, folder)


def save_models(grid: LocalGrid, config: RunConfig, folder: Path) -> None:
    """Write the parties' bottom models into the results folder."""
    for party, node in enumerate(grid.contexts.values()):
        session.hand_over(node)
        if strategy_of(config).trains_parties and "model" in node.state:
            model: dict[str, Any] = state.load_arrays(node.state, "model")
            with whole(folder / f"party-{party}.npz") as file:
                np.savez(file, **model)
