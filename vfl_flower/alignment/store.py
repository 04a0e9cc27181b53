"""Alignments on disk: one side's half in a file that only its owner can read.

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
import logging
import re
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from flwr.app import Context

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import (
    alone_in,
    check_own,
    make_folder,
    remove_older,
    told,
    unsealed,
    whole,
)
from vfl_flower.config.node_rules import Rules
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import check_folder, lasting_folder

log = logging.getLogger("flwr")

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
    """Return a side's folder for files. A real node's folder is beside its states.

    Raise `ConfigError` if another user can write to it.
    """
    if context is None:
        folder = lasting_home() / name
        with told(folder):
            check_own(folder)
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
    with told(path):
        make_folder(path.parent)
        with alone_in(path.parent):  # another run may write the same file
            write(path, stored, beside)


def write(path: Path, stored: Any, beside: str) -> None:
    """Do as `save`, for a caller that holds the lock of the folder."""
    about = {name: each for name, each in vars(stored).items() if name != "arrays"}
    arrays: dict[str, Any] = {f"array.{name}": array for name, array in stored.arrays.items()}
    arrays[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with whole(path, sealed=True) as file:
        np.savez(file, **arrays)
    for old in newest_first(path.parent, beside)[_MOST:]:
        old.unlink(missing_ok=True)


def load(path: Path, needed: Set[str]) -> StoredAlignment | None:
    """Return the alignment in a file.

    Return None if it is missing, damaged, or lacks needed arrays.
    """

    def is_half(stored: StoredAlignment) -> bool:
        rows, kinds = stored.arrays["rows"], (("name", str), ("parties", int), ("made", float))
        sound = rows.dtype == np.int64 and rows.ndim == 1 and len(rows) > 0
        typed = all(type(getattr(stored, name)) is kind for name, kind in kinds)
        return sound and typed and needed <= stored.arrays.keys()

    return load_as(StoredAlignment, path, is_half)


def load_as(kind: Callable[..., T], path: Path, is_one: Callable[[T], bool]) -> T | None:
    """Return the object that `save` wrote; None if it is missing or invalid."""
    try:
        with np.load(BytesIO(unsealed(path)), allow_pickle=False) as file:
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
    remove_older(folder, every_of_party(party), rules.alignment_days)


def in_words(seconds: float) -> str:
    """Return a duration in words, such as ``3 days``."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            many = int(seconds / length)
            return f"{many} {unit}{'s' * (many > 1)}"
    return "less than a minute"
