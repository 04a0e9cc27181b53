"""Files that are written as a whole or not at all, readable only by their owner.

All files of a run derive from data. So files have mode 0600 and folders 0700, with any umask.
"""

import errno
import fcntl
import grp
import hashlib
import json
import os
import pwd
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vfl_flower.config.errors import ConfigError, SharedError, VflError

_MOST_LINKS = 40  # the kernel's own limit
_SEAL = hashlib.sha256().digest_size


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(0o700, exist_ok=True)


def make_own_folder(folder: Path) -> None:
    """Make a folder as `make_folder` does, if it passes `check_own`."""
    check_own(folder)
    make_folder(folder)


def check_own(folder: Path) -> None:
    """Raise `SharedError` if another user can change or replace a folder, or a file.

    Each parent folder and each link counts. A sticky parent, as a temporary folder is, passes.
    """
    here, left = Path("/"), list(folder.expanduser().absolute().parts[1:])
    links = 0
    while True:
        try:
            status = here.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return  # this process will make it, in a folder that passed the check, or cannot
        if status.st_uid not in (0, os.geteuid()):
            raise SharedError(folder, here, f"belongs to user {status.st_uid}", "")
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = here.parent / here.readlink()
            here, left = Path("/"), [*target.parts[1:], *left]
            continue
        sticky = bool(status.st_mode & stat.S_ISVTX) and bool(left)
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise SharedError(folder, here, "can be written to by every user", "o-w")
        if status.st_mode & stat.S_IWGRP and not sticky and not _is_private(here, status.st_gid):
            raise SharedError(folder, here, "can be written to by its group", "g-w")
        if not left:
            return
        name = left.pop(0)
        here = here.parent if name == ".." else here / name


def is_secret(path: Path) -> bool:
    """Return whether only its owner can read a file; or a private group, as of Kubernetes."""
    status = path.stat()
    if status.st_uid != os.geteuid() and _is_private(path, status.st_gid):
        return not stat.S_IMODE(status.st_mode) & 0o037
    return not stat.S_IMODE(status.st_mode) & 0o077


def _is_private(folder: Path, group: int) -> bool:
    """Return whether only this user and root are in the group that owns a folder or a file.

    An access list may name others.
    """
    with suppress(AttributeError, OSError):  # the system or the file system has no attributes
        if "system.posix_acl_access" in os.listxattr(folder):
            return False
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return True  # no user has this group: only root gives it to a process, as in containers
    try:
        user = pwd.getpwuid(os.geteuid())
        mine = user.pw_gid == group and user.pw_name == entry.gr_name
        allowed = {user.pw_name, "root"}
    except KeyError:  # the user has no name, as in a container
        mine, allowed = False, {"root"}
    return (mine or group == 0) and set(entry.gr_mem) <= allowed


@contextmanager
def whole(path: Path, sealed: bool = False, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write. It replaces ``path`` when all of it is on the disk.

    Until then the old file stays. If writing fails, no new file is left. ``sealed`` adds a checksum
    for `unsealed`. A file that can be made again need not be ``synced`` to survive a power failure.
    """
    new = path.with_name(f"{path.name}.new")
    with told(path):
        try:
            new.unlink(missing_ok=True)
            opened = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(opened, "w+b") as file:
                yield file
                if sealed:
                    file.seek(0)
                    seal = hashlib.file_digest(file, "sha256").digest()
                    file.seek(0, os.SEEK_END)
                    file.write(seal)
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        if synced:
            _sync(path.parent)


def write_whole(path: Path, content: bytes, synced: bool = True) -> None:
    """Write a file through `whole`."""
    with whole(path, synced=synced) as file:
        file.write(content)


def write_json(path: Path, content: object) -> None:
    """Write a file of results in JSON through `whole`."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file through `whole`, with a checksum for `unsealed`."""
    with whole(path, sealed=True) as file:
        file.write(content)


def unsealed(path: Path) -> bytes:
    """Return the content of a file that `whole` has sealed, unless it is damaged."""
    content = path.read_bytes()
    if len(content) < _SEAL or hashlib.sha256(content[:-_SEAL]).digest() != content[-_SEAL:]:
        raise VflError(f"{path} is damaged, or another version wrote it. Restore the earlier file.")
    return content[:-_SEAL]


def lasting_secret(path: Path) -> bytes:
    """Return the 32 secret bytes in a file, which is made in a folder that others cannot change."""
    with told(path):
        make_own_folder(path.parent)
        with alone_in(path.parent):
            if not path.exists():
                write_sealed(path, secrets.token_bytes(32))
            return unsealed(path)


def remove_older(folder: Path, pattern: str, days: int) -> None:
    """Remove the files of a pattern that were last written so many days ago, or earlier."""
    for path in folder.glob(pattern):
        with suppress(OSError):  # another run may remove it at the same time
            if time.time() - path.stat().st_mtime >= days * 86400:
                path.unlink()


def append(path: Path, content: bytes) -> None:
    """Append to a file and sync it to the disk. Append all of ``content`` or nothing."""
    with opened_to_append(path) as file, told(path):
        before = os.fstat(file.fileno()).st_size
        try:
            write_all(file.fileno(), content)
            os.fsync(file.fileno())
        except BaseException:
            os.ftruncate(file.fileno(), before)
            raise


def opened_to_append(path: Path) -> BinaryIO:
    """Open a file for appending, or make it. It raises the errors of `append`."""
    with told(path):
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content`` to an open file. The system may write it in parts."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


@contextmanager
def locked(path: Path, sentence: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, across processes; then remove it. Else raise a sentence."""
    with told(path):
        while (held := _hold(path)) is None:
            pass
    if held < 0:
        raise ConfigError(sentence)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(held)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file by `locked`. A killed process leaves the file alone."""
    with suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _hold(path: Path) -> int | None:
    """Open and lock a file; -1 if another process holds it, None if it was removed meanwhile."""
    with ExitStack() as stack:
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, opened)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return -1
        if not os.fstat(opened).st_nlink:
            return None
        stack.pop_all()
        return opened


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, or on a file; wait for all others first."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Raise `VflError` with a clear message if a file cannot be written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise VflError(
            f"{path} cannot be written: a file stands where a folder must be. Name another path."
        ) from error
    except OSError as error:
        elsewhere = error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
        do = "Name a path that you can write to" if elsewhere else "Fix that, and try again"
        raise VflError(f"{path} cannot be written ({error.strerror or error}). {do}.") from error


def _sync(folder: Path) -> None:
    """Sync a folder to the disk, with the file that was just put there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(opened)
