"""Alignments on disk and in a party's state: one side's half, which only its owner can read.

A file is an npz of arrays and a text in JSON. Nothing is pickled. A checksum follows, and a damaged
file is not used. A folder that another user can write to is not used either: a checksum is no
signature.

The name of a party's file is the alignment, which others may know, and the party's number. The name
of the label holder's file has digests of the path and the ids of its data, the method, and the
number of parties. The label holder looks the file up by these.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from vfl_flower.alignment.psi import Places
from vfl_flower.config import files
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.keys import parse
from vfl_flower.data.source import Source
from vfl_flower.data.split import Alignment
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import check_folder, lasting_folder, simulated
from vfl_flower.transport.wire import pack, record_of, unpack

T = TypeVar("T")

_MOST = 30  # number of newest files of a kind that a side keeps
_NAME = re.compile("[0-9a-f]{32}")
_ABOUT = "about"


@dataclass(frozen=True)
class StoredAlignment:
    """One side's half of an alignment.

    parties : number of parties.
    made : time when it was made, in seconds since 1970.
    file : digest of all ids of the side's own file, in their order.
    arrays : "rows", places in that file, and further arrays that the side needs to use them.
    """

    name: str
    parties: int
    made: float
    file: str
    arrays: Arrays


# --- names of files -----------------------------------------------------------------------------


def home(name: str, context: Context | None = None) -> Path:
    """Return a side's folder for files, which no other user can write to."""
    if context is None:
        folder = lasting_home() / name
        with files.told(folder):
            files.check_own(folder)
        return folder
    return check_folder(context, lasting_folder(context.node_config) / name, "alignments")


def check_name(name: str) -> None:
    """Raise `VflError` unless this names an alignment. File names contain the name."""
    if not _NAME.fullmatch(name):
        raise VflError("was told rows by an alignment without a valid name. Start the run anew.")


def of_party(folder: Path, name: str, party: int) -> Path:
    """Return a party's file of this name."""
    check_name(name)
    return folder / f"{name}{every_of_party(party)[1:]}"


def every_of_party(party: int) -> str:
    """Return the pattern of all files of a party."""
    return f"*-party-{party}.npz"


def of_label_holder(folder: Path, path: str, file: str, method: str, parties: int | str) -> Path:
    """Return the label holder's file; with ``*`` for a part, a pattern of its files."""
    return folder / f"of-{digest_of_path(path)}-{file[:32]}-{method}-{parties}.npz"


def digest_of_path(path: str) -> str:
    """Return the digest of the label holder's path, for a file's name; or ``*``."""
    return path if path == "*" else hashlib.sha256(path.encode()).hexdigest()[:16]


# --- files --------------------------------------------------------------------------------------


def save(path: Path, stored: Any, beside: str) -> None:
    """Write or replace a file; keep the newest files of a pattern."""
    with alone(path):
        write(path, stored, beside)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other runs from changing the files beside this one during the block."""
    with files.told(path):
        files.make_folder(path.parent)
        with files.alone_in(path.parent):
            yield


def write(path: Path, stored: Any, beside: str) -> None:
    """Do as `save`, for a caller that is `alone`."""
    about = {name: each for name, each in vars(stored).items() if name != "arrays"}
    arrays: dict[str, Any] = {f"array.{name}": array for name, array in stored.arrays.items()}
    arrays[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with files.whole(path, sealed=True) as file:
        np.savez(file, **arrays)
    for old in newest_first(path.parent, beside)[_MOST:]:
        old.unlink(missing_ok=True)


def load(path: Path, needed: Set[str]) -> StoredAlignment | None:
    """Return the alignment in a file; None if it is missing, damaged, or lacks needed arrays."""

    def is_half(stored: StoredAlignment) -> bool:
        rows, kinds = stored.arrays["rows"], (("name", str), ("parties", int), ("made", float))
        sound = rows.dtype == np.int64 and rows.ndim == 1 and len(rows) > 0
        typed = all(type(getattr(stored, name)) is kind for name, kind in kinds)
        return sound and typed and needed <= stored.arrays.keys()

    return load_as(StoredAlignment, path, is_half)


def load_as(kind: Callable[..., T], path: Path, is_one: Callable[[T], bool]) -> T | None:
    """Return the object that `save` wrote; None if it is missing or invalid."""
    try:
        with np.load(BytesIO(files.unsealed(path)), allow_pickle=False) as file:
            arrays = {name[6:]: file[name] for name in file.files if name.startswith("array.")}
            stored = kind(arrays=arrays, **json.loads(file[_ABOUT].tobytes()))
        if not is_one(stored):
            raise ValueError
        return stored
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile, VflError):
        log.warning(
            "The alignment in %s is damaged, or from another version. It is not used.", path
        )
        return None


def newest_first(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern, newest first."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # another run may remove it at the same time
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


# --- age ----------------------------------------------------------------------------------------


def age(stored: Any) -> float:
    """Return the seconds since an alignment or a set was made."""
    made: float = stored.made
    return time.time() - made


def is_valid(stored: Any, rules: Rules) -> bool:
    """Return whether a party's rules still permit an alignment or a set."""
    return 0 <= age(stored) < rules.alignment_days * 86400


def forget_old(folder: Path, party: int, rules: Rules) -> None:
    """Remove a party's files that its rules no longer permit."""
    files.remove_older(folder, every_of_party(party), rules.alignment_days)


def in_words(seconds: float) -> str:
    """Return a duration in words, such as ``3 days``."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            many = int(seconds / length)
            return f"{many} {unit}{'s' * (many > 1)}"
    return "less than a minute"


_RECORD = "aligned"
IDS, PSI = np.zeros(1, np.uint8), np.ones(1, np.uint8)  # methods, as the record encodes them
_OF_LATER_RUNS = "file", "answer"  # arrays that only `reuse` reads


# --- the rows of a run ----------------------------------------------------------------------------


def confirmed(context: Context) -> Arrays:
    """Return confirmed rows and their proof, for `use` in another run; the state keeps less."""
    kept = saved_state(context)
    use(context, kept)
    return kept


def use(context: Context, arrays: Arrays) -> None:
    """Make a party use rows as if the label holder had just confirmed them."""
    _check_rules(context, arrays)
    save_state(context, **{name: arrays[name] for name in arrays if name not in _OF_LATER_RUNS})


def common_rows(context: Context, own: Source) -> Alignment:
    """Return the party's rows for a run, in its own data; -1 for a row that it lacks."""
    if not is_aligned(context):
        raise VflError("was not told which of its rows are common to all. Start the run anew.")
    kept = saved_state(context)
    rows: Places = kept["rows"]
    _check_rules(context, kept)  # the owner may have made the rules stricter
    mine = rows[rows >= 0]
    if mine.max() >= len(own.ids) or not np.array_equal(kept["digest"], digest_of(own, mine)):
        raise VflError(
            "has lost or changed rows of its file since they were aligned. Restore the file, or "
            "align anew."
        )
    held_out = int(kept["held"][0]) if "held" in kept else 0
    return Alignment(text_of(kept["name"]), rows, held_out=held_out)


def is_aligned(context: Context) -> bool:
    """Return whether a party has been told its rows."""
    return "rows" in saved_state(context)


# --- rules ----------------------------------------------------------------------------------------


def rules_of(context: Context, method: str) -> Rules:
    """Return the party's rules. In a simulation by one owner, these three hold only if named."""
    rules, named = Rules.of(context.node_config), context.node_config
    lax: dict[str, Any] = {"align": method, "min_rows": 1, "match_bits": 0.0}
    lax = {name: each for name, each in lax.items() if name.replace("_", "-") not in named}
    return replace(rules, **lax) if simulated(context) else rules


def _check_rules(context: Context, kept: Arrays) -> None:
    method = "psi" if kept["method"].any() else "ids"
    rules = rules_of(context, method)
    check_method(rules, method)
    check_fewest(rules, int((kept["rows"] >= 0).sum()))
    used = parse("; ".join(text_of(kept["rules"]).splitlines())) if "rules" in kept else ()
    if rules.match and (new := set(used) - set(parse(rules.match))):
        raise VflError(
            f"matched people by {min(map(str, new))}, and its rule is match = {rules.match!r}. "
            "Align anew."
        )
    if used and min(kept.get("bits", [0.0])) < rules.match_bits:
        raise VflError(
            f"matched people by keys that are easier to guess than its rule match-bits = "
            f"{rules.match_bits:g} permits. Align anew."
        )


def check_method(rules: Rules, method: str) -> None:
    """Raise `VflError` unless the rules allow this method."""
    if method != rules.align or method not in ("psi", "ids"):
        raise VflError(
            f"aligns only by {rules.align!r}, by its node configuration, and was asked to align by "
            f"{method!r}. Set align = {rules.align!r}, or have its owner change its rule."
        )


def check_fewest(rules: Rules, rows: int) -> None:
    """Raise `VflError` if the rules demand more rows."""
    if rows < rules.min_rows:
        raise VflError(
            f"was asked to align {rows} rows, and aligns no fewer than {rules.min_rows}: its rule "
            f"min-rows. Use {rules.min_rows} rows or more at once, or ask its owner for a lower "
            "min-rows."
        )


def check_file(kept: Arrays, file: NDArray[np.uint8]) -> None:
    """Raise `VflError` unless the file has the digest that the record has."""
    if not np.array_equal(kept["file"], file):
        raise VflError("has other ids than a moment ago: its file has changed. Start the run anew.")


# --- the party's state ----------------------------------------------------------------------------


def digest_of(own: Source, rows: Places | None = None) -> NDArray[np.uint8]:
    """Return the digest of these rows' ids, or of all ids. It never leaves the party."""
    digest = own.whole_digest if rows is None else own.digest(rows)
    return np.frombuffer(bytes.fromhex(digest), np.uint8)


def text_of(array: NDArray[Any]) -> str:
    """Return the text in an array of bytes."""
    return array.tobytes().decode()


def save_state(context: Context, **arrays: NDArray[Any]) -> None:
    """Replace the arrays of the record. An array that the record has already is not copied."""
    views, record = saved_state(context), ArrayRecord()
    for name, array in arrays.items():
        view = views.get(name, array[:0])
        if name in views and (view.shape, view.ctypes.data) == (array.shape, array.ctypes.data):
            record[name] = record_of(context.state, _RECORD, ArrayRecord)[name]
        else:
            record.update(pack({name: array}))
    context.state[_RECORD] = record


def saved_state(context: Context) -> Arrays:
    """Return the arrays of the record."""
    if _RECORD not in context.state:
        return {}
    return unpack(record_of(context.state, _RECORD, ArrayRecord))
