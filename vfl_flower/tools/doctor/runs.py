"""Checks of a results folder: its checkpoint, its journal, and the parties' states."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from flwr.app import Context, RecordDict

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import is_locked
from vfl_flower.config.names import in_words
from vfl_flower.data.partitioned import OF_A_FILE
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import JOURNAL, Checkpoint
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.launch.own_states import load_state
from vfl_flower.protocol.privacy.journal import Journal, Mark, refused
from vfl_flower.records import second_count
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding, many


def about(folder: Path, states: Sequence[Path]) -> Iterator[Finding]:
    """Yield whether a run can be resumed, and predict, with parties' folders on this machine."""
    yield _summary(folder)
    try:
        found = checkpoint.load(folder)
    except ConfigError as error:
        yield Finding("checkpoint", PROBLEM, str(error))
        return
    end = "a finished run" if found.finished else f"a run at epoch {found.epoch:.3g}"
    yield Finding("checkpoint", OK, f"{folder} has checkpoint {found.number} of {end}.")
    if (mark := found.strategy.get("journal")) is not None:
        yield _journal(folder, mark, second_count.of_run(found.origin, JOURNAL))
    yield _states(found, folder, states)
    kind, _, place = found.config.data.dataset.partition(":")
    if kind not in OF_A_FILE:
        return
    if Path(place).expanduser().is_file():
        yield Finding("data", OK, f"{place} is there.")
    else:
        said = f"{place} is missing, so the run can neither resume nor predict. Restore it."
        yield Finding("data", PROBLEM, said)


def _summary(folder: Path) -> Finding:
    file = folder / "summary.json"
    if is_locked(folder / "run.lock"):
        return Finding("run", OK, f"A run uses {folder} now.")
    try:
        failure = json.loads(file.read_text())["failure"]
    except FileNotFoundError:
        said = f"The run in {folder} was cut off. Continue it with resume='{folder}'."
        return Finding("run", WARNING, said)
    except (OSError, ValueError, KeyError, TypeError):
        return Finding("run", PROBLEM, f"{file} cannot be read. Resume the run, or restore it.")
    if failure is not None:
        return Finding("run", WARNING, f"The run in {folder} ended early: {failure}")
    return Finding("run", OK, f"The run in {folder} has ended well.")


def _journal(folder: Path, mark: Mark, second: Path) -> Finding:
    """Check the journal, which a run may be writing."""
    file = folder / JOURNAL
    if not file.exists():
        return Finding("journal", PROBLEM, str(refused(file, "missing")))
    try:
        events = sum(1 for _ in Journal(file, second=second).read(mark))
    except VflError as error:
        return Finding("journal", PROBLEM, str(error))
    except OSError as error:
        return Finding("journal", UNKNOWN, f"{file} cannot be read ({error.strerror}).")
    return Finding("journal", OK, f"{file} counts {many(events, 'release')}.")


def _states(found: Checkpoint, folder: Path, others: Sequence[Path]) -> Finding:
    """Check that the parties of this machine have the states of a checkpoint."""
    files = {party: f"run-{found.run}-party-{party}[-.]*state" for party in range(found.parties)}
    folders = (*others[::-1], folder)  # the last one that has a state counts
    here = {party: f for party, file in files.items() for f in folders if any(f.glob(file))}
    if not here:
        said = "The parties keep their states. Each party names its folder to `vfl doctor`."
        return Finding("party states", UNKNOWN, said)
    kept, missing = [], sorted(files.keys() - here.keys())
    try:
        if folder in here.values() and missing:
            raise ConfigError(f"Party {missing[0]} has no state in {folder}. Restore a backup.")
        for party, place in here.items():
            node = Context(0, 0, {"partition-id": party, "states": str(place)}, RecordDict(), {})
            node.node_config["num-partitions"] = found.parties
            kept.append(load_state(found, party, node))
        check_states(found, kept, whole=False)
    except (VflError, KeyError, ValueError, TypeError) as error:
        said = in_words(f"The run cannot predict. {error}", found.names)
        return Finding("party states", PROBLEM, said)
    said = f"The states of parties {', '.join(map(str, here))} fit the checkpoint."
    return Finding("party states", OK, in_words(said, found.names))
