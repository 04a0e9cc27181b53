"""The state of a party on its own disk, since a SuperNode keeps it only in memory.

A party writes the file at checkpoints, and when a session of the stream ends. It continues from the
file after its SuperNode, or the whole run, was killed and restarted. It also predicts with the
model in the file. Only its owner can read the file.

The file holds the whole state, in Flower's protobuf: the bottom model, its optimizer, the
preparation of columns, surrogates and counters. It also holds the secret of each message, which
seeds noise and directions. With shared labels it also holds the labels and other parties'
surrogates. A checksum follows, and the party refuses a damaged file. No
file holds the keys of masked sums: the keys of all parties could remove the masks.

The name of a file contains the run, the party and the checkpoint. A mark inside repeats them, so a
renamed file is refused. A run's name is Flower's run id and a nonce of the label holder, so a
repeated run id names no old state. `transport.node.states_folder` names the folder.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from vfl_flower.config.audit_chain import beside
from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import (
    is_locked,
    make_folder,
    remove_older,
    told,
    unsealed,
    whole,
)
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.drift import Watch
from vfl_flower.data.ids import People
from vfl_flower.party.state import load_scalars
from vfl_flower.protocol.aggregation.keys import RECORD
from vfl_flower.transport.flower_internals import state_from_bytes, state_to_bytes
from vfl_flower.transport.node import states_folder
from vfl_flower.transport.wire import record_of

_MARK = "mark"
_SESSION = -1  # replaces a checkpoint's number at the end of a session
_ANY = -2
PEOPLE, _SHARES = "background", "drift"
"""Record of a state that names the reference people of reasons."""
_NO_ROWS = f"(mark|about|scalars|model|model-at-.*|optimizer|{_SHARES}|transcript|{PEOPLE})$"
Gone = Callable[[People], NDArray[np.bool_]]
"""Tells which people have withdrawn, by their numbers."""
_MORE_LOGS = "-2", "-3", "-4"  # a SuperNode serves four runs at once


class Saved(NamedTuple):
    """A party's state, and the number of its checkpoint."""

    state: RecordDict
    number: int


class _Mark(NamedTuple):
    """The run, the party and the checkpoint of the state in a file."""

    run: str
    party: int
    number: int


def run_name(context: Context, nonce: str) -> str:
    """Return the name of the run that began with this nonce, which a file name must permit."""
    if not re.fullmatch("[0-9a-f]{0,32}", nonce):
        raise VflError("was sent a nonce that is not a hexadecimal number.")
    return f"{context.run_id}-{nonce}" if nonce else str(context.run_id)


def run_of(context: Context) -> str:
    """Return the name of the run of a party's state, or else of its Flower run."""
    return str(load_scalars(context.state).get("run", context.run_id))


def place(context: Context, number: int | None = None, run: str = "") -> Path:
    """Return the file of a checkpoint, or of the end of a session, by default this run's."""
    party = context.node_config.get("partition-id")
    suffix = "" if number is None else f"-checkpoint-{number}"
    name = f"run-{run or run_of(context)}-party-{party}{suffix}.state"
    return states_folder(context) / name


def save(context: Context, number: int | None = None, run: str = "") -> None:
    """Write the state, as checkpoint ``number`` or as the end of a session.

    Of other checkpoints of the run, keep the last.
    """
    run = run or run_of(context)
    path = place(context, number, run)
    mark = _mark(context, run, _SESSION if number is None else number)
    try:
        with told(path):
            make_folder(path.parent)
            kept = {name: each for name, each in context.state.items() if name != RECORD}
            kept[_MARK] = ConfigRecord(mark._asdict())
            with whole(path, sealed=True) as file:
                file.write(state_to_bytes(RecordDict(kept)))
            if number is not None:
                numbered = _checkpoints(context, run).items()
                others = {each: file for each, file in numbered if file != path}
                for each in sorted(others)[:-1]:
                    others[each].unlink(missing_ok=True)
                if days := Rules.of(context.node_config).retention_days:
                    party = context.node_config.get("partition-id")
                    remove_older(path.parent, f"run-*-party-{party}[-.]*", days)
    except VflError as error:
        log.warning("The party's state cannot be saved: %s", error)
        if number is not None:
            raise VflError("cannot save its state. See its own log.") from None


def load_latest(context: Context, run: str) -> None:
    """Load the latest intact state of a run, if any, into a Context without a state."""
    if context.state:
        return
    last = place(context, run=run)
    kept = [each for each in (*_checkpoints(context, run).values(), last) if each.exists()]
    for path in sorted(kept, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        try:
            state = read(path, _mark(context, run, _ANY))
        except (OSError, VflError):
            log.warning("The party's state in %s cannot be read and is ignored.", path)
            continue
        for name, record in state.items():
            context.state[name] = record
        return


def is_there(context: Context, run: str) -> bool:
    """Return whether the party has a state of this run on its disk."""
    return bool(_checkpoints(context, run)) or place(context, run=run).exists()


def load(context: Context, run: str, number: int) -> Saved:
    """Load this party's checkpoint of a run, or if it was absent then, its last one before."""
    known = re.fullmatch(r"\d+(-[0-9a-f]+)?", run)
    kept = _checkpoints(context, run) if known else {}
    found = max((each for each in kept if each <= number), default=None)
    try:
        if found is None:  # no path is made of what the label holder says
            raise VflError("there is none of that run.")
        return Saved(read(kept[found], _mark(context, run, found)), found)
    except (ValueError, OSError, VflError) as error:
        log.warning("There is no intact file %s: %s", place(context, number, run), error)
        party = context.node_config.get("partition-id")
        raise ConfigError(
            f"Party {party} does not have checkpoint {number} of that run. Start its SuperNode "
            "with the `states` folder, or the FLWR_HOME, of that run."
        ) from None


def audit_log(context: Context) -> AuditLog:
    """Open an audit log of the party, beside its states. A second service at once has another."""
    party = context.node_config.get("partition-id")
    names = (f"party-{party}-audit{which}.jsonl" for which in ("", *_MORE_LOGS))
    paths = [place(context).with_name(name) for name in names]
    try:
        free = (path for path in paths if not is_locked(beside(path, "lock")))
        return AuditLog(next(free, paths[0]))
    except VflError as error:
        log.warning("%s", error)
        raise VflError("cannot write its audit log: its own log says why.") from None


def background(state: RecordDict) -> People:
    """Return the numbers of the reference people in a party's state (`FeatureBlock`)."""
    said = record_of(state, PEOPLE, ConfigRecord)[PEOPLE] if PEOPLE in state else b""
    assert isinstance(said, bytes)
    return np.frombuffer(said, np.uint64)


def has_rows(path: Path, gone: Gone) -> bool:
    """Return whether a state holds rows of people, or names some who are gone. Raise as `read`."""
    state = read(path)
    named = bool(gone(background(state)).any())
    return named or any(not re.match(_NO_ROWS, name) for name in state)


def without_rows(path: Path, gone: Gone) -> None:
    """Write a state anew without rows and people who are gone. Its model still predicts."""
    state = state_from_bytes(unsealed(path))
    kept = {name: each for name, each in state.items() if re.match(_NO_ROWS, name)}
    if len(named := background(state)):
        kept[PEOPLE] = ConfigRecord({PEOPLE: np.where(gone(named), 0, named).tobytes()})
    with whole(path, sealed=True) as file:
        file.write(state_to_bytes(RecordDict(kept)))


def read(path: Path, mark: _Mark | None = None) -> RecordDict:
    """Read the state in a file; raise `OSError`, or `VflError` if damaged or of another mark."""
    state = state_from_bytes(unsealed(path))
    said = dict(record_of(state, _MARK, ConfigRecord)) if _MARK in state else None
    state = RecordDict({name: each for name, each in state.items() if name != _MARK})
    if mark is None or (said is None and mark.run.isdecimal()):  # older versions write no mark
        return state
    if said is None or (said["run"], said["party"]) != (mark.run, mark.party):
        raise VflError("it is the state of another run or party.")
    if mark.number not in (said["number"], _ANY):
        raise VflError(f"it is the state of checkpoint {said['number']!r}.")
    return state


def _mark(context: Context, run: str, number: int) -> _Mark:
    return _Mark(run, int(str(context.node_config.get("partition-id", 0))), number)


def _checkpoints(context: Context, run: str) -> dict[int, Path]:
    """Return the files of a run's checkpoints, by number."""
    any_number = place(context, 0, run)
    pattern = any_number.stem.removesuffix("0") + "*.state"
    numbered = {path.stem.rsplit("-", 1)[1]: path for path in any_number.parent.glob(pattern)}
    return {int(number): path for number, path in numbered.items() if number.isdecimal()}


def keep_shares(context: Context, block: FeatureBlock) -> None:
    """Keep the shares of the training rows, and the reference people, in the party's state."""
    context.state.pop(_SHARES, None)
    context.state[PEOPLE] = ConfigRecord({PEOPLE: block.background.tobytes()})
    if block.shares is not None and block.shares.names:
        text = json.dumps(block.shares.as_json())
        context.state[_SHARES] = ConfigRecord({_SHARES: text})


def load_shares(state: RecordDict) -> Watch | None:
    """Return the shares in a party's state, from which drift is counted; None if there are none."""
    if _SHARES not in state:
        return None
    return Watch.from_json(json.loads(str(record_of(state, _SHARES, ConfigRecord)[_SHARES])))
