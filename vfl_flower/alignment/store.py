"""Alignments on disk: what a side needs to use one again, in a file that only its owner can read.

An npz: arrays, and a text in JSON; nothing is pickled. A checksum follows, and a file that is
damaged is not used. A party's is named by the alignment, which may be known to others, and by its
number; the label holder's by digests of where its own file is and of the ids in it, by the method
and the number of parties, since by these it is looked for.
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
from vfl_flower.config.files import alone_in, make_folder, told, unsealed, whole
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import simulated

log = logging.getLogger("flwr")

T = TypeVar("T")

_MOST = 30  # alignments that a side keeps, the newest
_NAME = re.compile("[0-9a-f]{32}")
_ABOUT = "about"


@dataclass(frozen=True)
class StoredAlignment:
    """One side's half of an alignment.

    parties : how many took part.
    made : when it was, in seconds since 1970.
    file : digest of all ids of the side's own file, in their order.
    arrays : "rows", places in that file, and whatever else the side needs to use them.
    """

    name: str
    parties: int
    made: float
    file: str
    arrays: Arrays


def check_name(name: str) -> None:
    """Refuse, by `VflError`, what is no name of an alignment: it becomes part of a file's."""
    if not _NAME.fullmatch(name):
        raise VflError("was told rows by an alignment without a name.")


def of_party(folder: Path, name: str, party: int) -> Path:
    """A party's file of the alignment of this name."""
    check_name(name)
    return folder / f"{name}-party-{party}.npz"


def of_label_holder(folder: Path, path: str, file: str, method: str, parties: int | str) -> Path:
    """The label holder's file; where it asks for any ``*``, a pattern of theirs."""
    return folder / f"of-{where(path)}-{file[:32]}-{method}-{parties}.npz"


def where(path: str) -> str:
    """What stands in a file's name for where the label holder's own file is; any, for any."""
    return path if path == "*" else hashlib.sha256(path.encode()).hexdigest()[:16]


def home(name: str, context: Context | None = None) -> Path:
    """A folder of what a side keeps; of a real node beside its states, if it has named a place."""
    named = context and not simulated(context) and context.node_config.get("states")
    return (Path(str(named)).expanduser() if named else lasting_home()) / name


def save(path: Path, kept: Any, beside: str) -> None:
    """Write it, in place of what is there; of all with names of this pattern the newest stay.

    Raises
    ------
    VflError
        If the disk refuses.
    """
    with told(path):
        make_folder(path.parent)
        with alone_in(path.parent):  # another run may write the same
            write(path, kept, beside)


def write(path: Path, kept: Any, beside: str) -> None:
    """As `save`, by who is alone in the folder."""
    about = {name: each for name, each in vars(kept).items() if name != "arrays"}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    arrays: dict[str, Any] = {f"array.{name}": array for name, array in kept.arrays.items()}
    arrays[_ABOUT] = text
    with whole(path, sealed=True) as file:
        np.savez(file, **arrays)
    for old in newest_first(path.parent, beside)[_MOST:]:
        old.unlink(missing_ok=True)


def load(path: Path, needed: Set[str]) -> StoredAlignment | None:
    """What is in a file; none if it is not there, not as it was written, or lacks such arrays."""

    def is_half(kept: StoredAlignment) -> bool:
        rows, kinds = kept.arrays["rows"], (("name", str), ("parties", int), ("made", float))
        if rows.dtype != np.int64 or rows.ndim != 1 or not len(rows) or needed - kept.arrays.keys():
            return False
        return all(type(getattr(kept, name)) is kind for name, kind in kinds)

    return load_as(StoredAlignment, path, is_half)


def load_as(kind: Callable[..., T], path: Path, is_one: Callable[[T], bool]) -> T | None:
    """What `save` has written; none if it is not there, or not what it should be."""
    try:
        with np.load(BytesIO(unsealed(path)), allow_pickle=False) as file:
            arrays = {name[6:]: file[name] for name in file.files if name.startswith("array.")}
            kept = kind(arrays=arrays, **json.loads(file[_ABOUT].tobytes()))
        if not is_one(kept):
            raise ValueError
        return kept
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OSError, EOFError, BadZipFile, VflError):
        log.warning("The alignment in %s is damaged, or of another version: it is left out.", path)
        return None


def newest_first(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder, the last written first."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # another run may just remove it
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def forget(folder: Path, pattern: str, seconds: float) -> None:
    """Remove files that were written longer ago than that."""
    for path in newest_first(folder, pattern):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= seconds:
                path.unlink()


def age(kept: Any) -> float:
    """Seconds since it was made."""
    made: float = kept.made
    return time.time() - made


def in_words(seconds: float) -> str:
    """How long ago that is: ``3 days``."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            many = int(seconds / length)
            return f"{many} {unit}{'s' * (many > 1)}"
    return "less than a minute"
