"""The state of a party on its own disk, since a SuperNode keeps it in memory only.

It is written at checkpoints, and when a session of the stream ends. A party goes on from it that
has lost its state, since its SuperNode was killed and started again, or since the run was; and its
model is read from it, to predict. Only its owner can read it. It holds all that the state does, in
Flower's protobuf: the bottom model and how its columns are prepared, the secret that decides noise
and directions, surrogates, and with shared labels also the labels and the other parties'
surrogates. A checksum follows, and a file that is damaged is not used.

Keys of masked sums are in no file: who had them all could take the masks off what was uploaded.

The folder is FLWR_HOME/vfl-flower, or the one that ``states`` in the node configuration names; of
actors of a Ray cluster, which have no such, the one that a run of `vfl` has told them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flwr.app import Context, RecordDict

from vfl_flower.errors import ConfigError, VflError
from vfl_flower.files import make_folder, told, unsealed, whole
from vfl_flower.flower_internals import STATES, flower_home, state_from_bytes, state_to_bytes

log = logging.getLogger("flwr")

KEYS_OF_SUMS = "sums"
"""Name of the record in ``Context.state`` that no file gets (`party.sums`)."""


def place(context: Context, number: int | None = None, run: str = "") -> Path:
    """Where a party keeps checkpoint ``number`` of a Flower run, this one unless it is named.

    Without a number, the state at the end of a session.
    """
    named = context.node_config.get("states") or os.environ.get(STATES)
    party = context.node_config.get("partition-id")
    folder = Path(str(named)).expanduser() if named else flower_home() / "vfl-flower"
    suffix = "" if number is None else f"-checkpoint-{number}"
    return folder / f"run-{run or context.run_id}-party-{party}{suffix}.state"


def save(context: Context, number: int | None = None) -> None:
    """Write the state as it is now, as checkpoint ``number`` or as the end of a session.

    Besides it, the last other checkpoint of that run is kept.

    Raises
    ------
    VflError
        If the disk refuses a checkpoint.
    """
    path = place(context, number)
    try:
        with told(path):
            make_folder(path.parent)
            kept = {name: each for name, each in context.state.items() if name != KEYS_OF_SUMS}
            with whole(path, sealed=True) as file:
                file.write(state_to_bytes(RecordDict(kept)))
            if number is not None:
                numbered = _checkpoints(context).items()
                others = {each: file for each, file in numbered if file != path}
                for each in sorted(others)[:-1]:
                    others[each].unlink(missing_ok=True)
    except VflError as error:
        log.warning("The party's state cannot be kept: %s", error)
        if number is not None:
            raise VflError("cannot keep its state: its own log says why.") from None


def restore(context: Context) -> None:
    """Read the latest sound state of this run into a Context that has none, if there is one."""
    if context.state:
        return
    kept = [each for each in (*_checkpoints(context).values(), place(context)) if each.exists()]
    for path in sorted(kept, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        try:
            state = read(path)
        except (OSError, VflError):
            log.warning("The party's state in %s cannot be read: it is left out.", path)
            continue
        for name, record in state.items():
            context.state[name] = record
        return


def is_there(context: Context) -> bool:
    """Whether a state of this run was kept."""
    return bool(_checkpoints(context)) or place(context).exists()


def load(context: Context, run: str, number: int) -> RecordDict:
    """The state that this party kept as a checkpoint of a Flower run.

    If it was away then, the last before.

    Raises
    ------
    ConfigError
        If there is none, or it is not sound.
    """
    kept = _checkpoints(context, run if run.isdecimal() else "0")
    try:
        return read(kept[max(each for each in kept if each <= number)])
    except (ValueError, OSError, VflError):
        log.warning("There is no sound %s.", place(context, number, run))
        party = context.node_config.get("partition-id")
        raise ConfigError(
            f"Party {party} does not have checkpoint {number} of that run: start its SuperNode "
            "with the `states` folder, or the FLWR_HOME, that it had then."
        ) from None


def read(path: Path) -> RecordDict:
    """The state in a file; raises `OSError` if that cannot be read, `VflError` if it is damaged."""
    return state_from_bytes(unsealed(path))


def _checkpoints(context: Context, run: str = "") -> dict[int, Path]:
    """Number -> file."""
    any_number = place(context, 0, run)
    pattern = any_number.stem.removesuffix("0") + "*.state"
    numbered = {path.stem.rsplit("-", 1)[1]: path for path in any_number.parent.glob(pattern)}
    return {int(number): path for number, path in numbered.items() if number.isdecimal()}
