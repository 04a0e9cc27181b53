"""Checks of folders: their owner, their permissions, free space, and checksums of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vfl_flower.config.errors import SharedError, VflError
from vfl_flower.config.files import check_own, is_secret
from vfl_flower.records import ledger
from vfl_flower.tools.doctor.finding import OK, PROBLEM, WARNING, Finding, many, some

_GIB = 2**30
_LEAST = 0.1 * _GIB  # bytes for logs, histories and checkpoints of small models
_OTHERS = 0o077
_SECRET = ("*.key", "*.secret", "*.token", "*.draws", "credentials.yaml")
_SEALED = (
    *("*.state", "*.key", "*.draws", "*.ids", "*.uploads", "*.predictions", "*.explained"),
    *("withdrawn", "alignments/*.npz", "sets/*.npz"),
)


def about(folder: Path, private: bool) -> Iterator[Finding]:
    """Yield the findings about space, and permissions: others may not even list a private one."""
    yield _permissions(folder, private)
    yield from _secret_files(folder)
    yield space(folder)


def _permissions(folder: Path, private: bool) -> Finding:
    try:
        check_own(folder)
    except SharedError as error:
        return Finding("folder", PROBLEM, str(error))
    if not os.access(folder, os.W_OK):
        sentence = f"{folder} cannot be written to. Give it to the user who runs this software."
        return Finding("folder", PROBLEM, sentence)
    mode = folder.stat().st_mode & 0o777
    if private and mode & _OTHERS:
        sentence = f"Others can list {folder} (mode {mode:04o}). Run `chmod 700 {folder}`."
        return Finding("folder", WARNING, sentence)
    return Finding("folder", OK, f"Nobody else can change {folder}.")


def _secret_files(folder: Path) -> Iterator[Finding]:
    found = {file for pattern in _SECRET for file in folder.glob(pattern)}
    files = sorted(file for file in found if file.exists())  # a link may lead nowhere
    shared = [file for file in files if not is_secret(file)]
    for file in shared:
        mode = file.stat().st_mode & 0o777
        said = f"Others can read {file} (mode {mode:04o}). Run `chmod 600 {file}`, and replace it."
        yield Finding("secrets", PROBLEM, said)
    if files and not shared:
        said = f"Only its owner can read {', '.join(file.name for file in files)}."
        yield Finding("secrets", OK, said)


def space(folder: Path) -> Finding:
    """Check the free space: a file that is replaced needs its size once more."""
    free = shutil.disk_usage(folder).free
    largest = max((each.stat().st_size for each in folder.iterdir() if each.is_file()), default=0)
    least = max(_LEAST, 2 * largest)
    left = f"{folder} has {free / _GIB:.1f} GiB free"
    if free < least:
        sentence = f"{left}, and a run needs {least / _GIB:.1f} GiB. Delete old files."
        return Finding("space", PROBLEM, sentence)
    if free < 10 * least:
        sentence = f"{left}, and should have {10 * least / _GIB:.1f} GiB. Delete old files."
        return Finding("space", WARNING, sentence)
    return Finding("space", OK, f"{left}.")


def sealed_files(folder: Path) -> Finding:
    """Check the checksums of the files that a party or a label holder keeps."""
    files = sorted({file for pattern in _SEALED for file in folder.glob(pattern)})
    damaged = []
    for file in files:
        try:
            ledger.check(file)
        except FileNotFoundError:
            continue  # a run has just replaced it
        except (OSError, VflError):
            damaged.append(file.name)
    if damaged:
        said = f"{folder}: {some(damaged)} cannot be read, or is damaged. Restore a backup."
        return Finding("states", PROBLEM, said)
    return Finding("states", OK, f"{many(len(files), 'file')} in {folder} are whole.")
