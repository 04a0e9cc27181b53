"""`vfl forget`: find people who have withdrawn in files, and remove them.

A file that names people loses their entries. An alignment or a set is deleted, since its proof
covers all of them. A state loses all rows. An audit log stays, since no line may leave its chain. A
checkpoint gets zeros for training rows, and copies of others for held-out rows.
"""

import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config import audit_chain
from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.csv_text import are_predictions, restored
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import is_locked, unsealed, whole, write_json, write_whole
from vfl_flower.data import withdrawn
from vfl_flower.data.ids import encoded, identities
from vfl_flower.data.keys import row_keys
from vfl_flower.data.split import background_rows
from vfl_flower.data.table_file import TableFile, is_csv
from vfl_flower.data.withdrawn import Withdrawn, numbers_of
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.results import TESTED
from vfl_flower.party import label_sets, state_file
from vfl_flower.records.ledger import opened
from vfl_flower.results.model_card import write_card
from vfl_flower.results.terminal import tabulated
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.messages import Arrays


class Leftover(NamedTuple):
    """A file that holds people who have withdrawn, what it holds, and what removes that."""

    path: Path
    holds: str
    remove: Callable[[], object]


def forget(id_file: Path, folders: Sequence[Path], dry_run: bool) -> None:
    """Do what the command `vfl forget` says."""
    if absent := next((each for each in folders if not each.is_dir()), None):
        raise ConfigError(f"{absent} is not a folder. Name a folder of runs or of states.")
    people, found = _people(id_file), dict[Path, str]()
    numbers = numbers_of([*people, *(one[2:] for one in people)])  # as files know them
    homes = homes_of(folders)
    for home in () if dry_run else homes:  # first, so that they stay out whatever happens
        withdrawn.add(home / withdrawn.FILE, numbers, math.ceil(time.time()))
    locks = (lock for folder in [*folders, *homes] for lock in folder.rglob("*.lock"))
    if not dry_run and (used := next(filter(is_locked, locks), None)):
        raise ConfigError(
            f"A run or a service uses {used.parent}. The people are on the list already. End it, "
            "and repeat this command to remove them from files."
        )
    for home in homes:
        listed = withdrawn.read(home / withdrawn.FILE)
        hashes = np.union1d(listed.hashes, listed.tags(numbers))
        for each in leftovers([*folders, *homes], replace(listed, hashes=hashes, now=people)):
            found.setdefault(each.path, each.holds)
            if not dry_run:
                each.remove()
    print(tabulated(("file", "held"), [(str(path), held) for path, held in found.items()], texts=2))
    for home in () if dry_run else homes:
        with AuditLog(home / "audit.jsonl") as log:
            log.write("forget", people=len(people), files=len(found))
    what = "Nothing was changed" if dry_run else "They are on the list of all who stay out"
    print(f"{len(found)} files held {len(people)} people. {what}.")


def homes_of(folders: Sequence[Path]) -> list[Path]:
    """Return the folders that have lists, or may have them: this user's, and the parties'."""
    signs = "alignments", "*.ids", withdrawn.FILE
    found = [each.parent for folder in folders for sign in signs for each in folder.rglob(sign)]
    found += [each for each in folders if not any(each.rglob(checkpoint.FILE))]
    return list(dict.fromkeys([*found, *[lasting_home()] * (lasting_home().is_dir() or not found)]))


def _people(file: Path) -> list[bytes]:
    """Return what lists and files know the people by."""
    try:
        if file.suffix == ".csv":
            import pandas as pd

            frame = pd.read_csv(file, dtype=str, keep_default_na=False).replace("", None)
            columns = dict(frame.items())
            return [*row_keys(columns, str(file)), *identities(columns, str(file))]
        lines = map(str.strip, file.read_text(encoding="utf-8-sig").splitlines())
        if people := [encoded(line) for line in lines if line]:
            return people
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Name a file of ids.") from None
    raise ConfigError(f"{file} names nobody. Write one id on each line.")


def leftovers(folders: Sequence[Path], listed: Withdrawn) -> Iterator[Leftover]:
    """Yield what files in these folders hold of people on a list."""
    pairs = [(folder, pattern) for folder in folders for pattern in _KINDS]
    files = {path: _KINDS[which] for each, which in pairs for path in sorted(each.rglob(which))}
    for path, find in files.items():
        try:
            if found := find(path, listed):
                yield Leftover(path, *found)
        except (VflError, OSError, ValueError, KeyError) as error:
            yield Leftover(path, f"cannot be read: {error}", bool)


_Found = tuple[str, Callable[[], object]] | None


def _older(path: Path, listed: Withdrawn) -> bool:
    """Return whether a file that names nobody may hold people on the list."""
    return bool(listed.now) or path.stat().st_mtime <= listed.since


def _deleted(path: Path, listed: Withdrawn) -> _Found:
    delete = partial(path.unlink, missing_ok=True)
    return ("places or points of all people", delete) if _older(path, listed) else None


def _state(path: Path, listed: Withdrawn) -> _Found:
    if not _older(path, listed) or not state_file.has_rows(path, listed.have):
        return None
    return "rows of all people", partial(state_file.without_rows, path, listed.have)


def _ledger(path: Path, listed: Withdrawn) -> _Found:
    with opened(path) as ledger:
        tables = {name: ledger.table(name)[0] for name in ("uploads", "set", "day")}
    gone = {name: keys[listed.have(keys)] for name, keys in tables.items()}

    def remove() -> None:
        with opened(path) as ledger:
            for name, keys in gone.items():
                ledger.remove(name, keys)

    return _entries(sum(map(len, gone.values())), remove)


def _sets(path: Path, listed: Withdrawn) -> _Found:
    count = partial(label_sets.without, path, listed.have)
    return _entries(count(False), partial(count, True))


def _entries(count: int, remove: Callable[[], object], of: str = "") -> _Found:
    return (f"{count} entries{of}", remove) if count else None


def _audit_log(path: Path, listed: Withdrawn) -> _Found:
    lines = sum(1 for _ in audit_chain.find(path, listed.now)) if listed.now else 0
    return _entries(lines, bool, " of keyed hashes, which stay as evidence of who asked")


def _predictions(path: Path, listed: Withdrawn) -> _Found:
    import pandas as pd

    file = TableFile(path, is_csv(path))
    names, of_run = file.names, path.name == TESTED
    if not names or not (of_run or are_predictions(names, names[0])):
        return None
    ids = file.ids(names[0])
    ids = restored(pd.Series(ids)) if of_run else ids
    kept = ~listed.have_ids([encoded(one) for one in ids.tolist()])

    def remove() -> None:
        if file.is_csv:
            left = pd.read_csv(path, dtype=str, keep_default_na=False)[kept]
            quotes = csv.QUOTE_ALL if b"\r" in path.read_bytes() else csv.QUOTE_MINIMAL
            write = partial(left.to_csv, index=False, quoting=quotes)
        else:
            write = partial(pd.read_parquet(path)[kept].to_parquet, index=False)
        with whole(path) as new:
            write(new)

    return _entries(int((~kept).sum()), remove)


def _reasons(path: Path, listed: Withdrawn) -> _Found:
    key = path.with_name(audit_chain.KEY)
    hashes = set(audit_chain.hashes_of(listed.now, unsealed(key)) if key.exists() else ())

    def stays(line: bytes) -> bool:
        about = json.loads(line)  # of the label holder, with an id, or of a party, with hashes
        named = "id" in about and listed.have_ids([encoded(about["id"])])[0]
        return not named and hashes.isdisjoint(about.get("person", ()))

    lines = path.read_bytes().splitlines(keepends=True)
    left = list(filter(stays, lines))
    return _entries(len(lines) - len(left), partial(write_whole, path, b"".join(left)))


def _checkpoint(path: Path, listed: Withdrawn) -> _Found:
    found = checkpoint.load(path.parent)
    tags = {name: each for name, each in found.arrays.items() if name.startswith("tags.")}
    gone = {name: np.isin(each, listed.hashes) for name, each in tags.items()}
    remove = partial(_rewrite, found, path.parent, gone, listed)
    if not tags and found.config.data.own_data and _older(path, listed):
        return "rows of all people, of an earlier version: delete the run, or train anew", bool
    return _entries(sum(int(each.sum()) for each in gone.values()), remove)


def _rewrite(found: Checkpoint, folder: Path, gone: Arrays, listed: Withdrawn) -> None:
    arrays = {name: _without(name, each, gone) for name, each in found.arrays.items()}
    if "people" in arrays:
        arrays["people"] = arrays["people"][~listed.have(arrays["people"])]
    new = replace(found, arrays=arrays)
    summary, (people, of) = folder / "summary.json", new.withdrawn
    if summary.exists():
        about = {**json.loads(summary.read_text()), "withdrawn": {"people": people, "of": of}}
        write_json(summary, about)
        if about["failure"] is None:
            write_card(folder, about)
    new.save(folder)  # last: until then, another try finds these people


_OF_HELD_OUT = "test_table.rows", "best.rows", "background.own", "compared.rows"


def _without(name: str, array: NDArray[Any], gone: Arrays) -> NDArray[Any]:
    """Return an array of a checkpoint without the rows of people who have withdrawn."""
    trained, held = gone["tags.train"], gone["tags.test"]
    zeros = gone.get(name, trained if name.startswith(("table.", "link.")) else np.zeros(0))
    if len(zeros) and array.shape[:1] == zeros.shape:
        array = array.copy()
        array[zeros] = 0
    if name == "background.own":
        held = held[background_rows(len(held), len(array))]
    if name == "compared.rows":
        held = held[: len(array)]
    if name in _OF_HELD_OUT and not held.all():
        others, at = np.flatnonzero(~held), np.arange(len(held))
        at[held] = others[np.searchsorted(others, at[held]) % len(others)]
        array = array[at]
    return array


_KINDS: dict[str, Callable[[Path, Withdrawn], _Found]] = {
    **dict.fromkeys(("alignments/*.npz", "sets/*.npz"), _deleted),
    "*.state": _state,
    checkpoint.FILE: _checkpoint,
    **dict.fromkeys(("*.uploads", "*.explained", "*.drift-rows", "explained-labels"), _ledger),
    "*.information": _sets,
    **dict.fromkeys(("*.csv", "*.parquet"), _predictions),
    "*reasons.jsonl": _reasons,
    "*audit*.jsonl": _audit_log,
}
