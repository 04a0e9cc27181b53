"""Files that are on the disk whole or not at all, and that only their owner can read.

All that a run leaves follows from data, so that whatever the umask, files are made with mode 0600
and folders with 0700.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vfl_flower.config.errors import ConfigError, SharedError, VflError

_MOST_LINKS = 40  # as the kernel follows
_SEAL = hashlib.sha256().digest_size


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(0o700, exist_ok=True)


def make_own_folder(folder: Path) -> None:
    """Make a folder as `make_folder` does, if no other user can change what is in it.

    Raises
    ------
    SharedError
        If another user can write to the folder or to one above it, also by a link.
    OSError
        If the disk refuses.
    """
    check_own(folder)
    make_folder(folder)


def check_own(folder: Path) -> None:
    """Raise `SharedError` if another user can change a folder, or put another in its place.

    Each folder on the way is looked at, and each link. Root and this user may own them. A folder
    above that others can write to passes if it is sticky, as the system's temporary folder is.
    """
    here, left = Path("/"), list(folder.expanduser().absolute().parts[1:])
    links = 0
    while True:
        try:
            found = here.lstat()
        except FileNotFoundError:
            return  # it will be made, in a folder that was looked at
        if found.st_uid not in (0, os.geteuid()):
            raise SharedError(folder, here, f"belongs to user {found.st_uid}", "")
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = here.parent / here.readlink()
            here, left = Path("/"), [*target.parts[1:], *left]
            continue
        sticky = bool(found.st_mode & stat.S_ISVTX) and bool(left)
        if found.st_mode & stat.S_IWOTH and not sticky:
            raise SharedError(folder, here, "can be written to by every user", "o-w")
        if found.st_mode & stat.S_IWGRP and not sticky and not _is_private(here, found.st_gid):
            raise SharedError(folder, here, "can be written to by its group", "g-w")
        if not left:
            return
        name = left.pop(0)
        here = here.parent if name == ".." else here / name


def _is_private(folder: Path, group: int) -> bool:
    """Whether nobody but this user and root is in the group that can write to a folder.

    Many systems give each user a group of the same name. An access list may name others.
    """
    if "system.posix_acl_access" in _attributes(folder):
        return False
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return True  # no user has it: root alone gives it to a process, as a container's runtime
    try:
        user = pwd.getpwuid(os.geteuid())
        mine = user.pw_gid == group and user.pw_name == found.gr_name
        allowed = {user.pw_name, "root"}
    except KeyError:  # a user by number alone, as in a container
        mine, allowed = False, {"root"}
    return (mine or group == 0) and set(found.gr_mem) <= allowed


def _attributes(folder: Path) -> list[str]:
    try:
        return os.listxattr(folder)
    except (AttributeError, OSError):  # another system, or a file system without any
        return []


@contextmanager
def whole(path: Path, sealed: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which comes to stand at ``path`` when all of it is on the disk.

    Until then what stood there is as it was; where writing fails, nothing new is left.

    Parameters
    ----------
    sealed : whether a checksum is added, for `unsealed` to find any damage by.

    Raises
    ------
    VflError
        If the disk refuses.
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
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by `whole`."""
    with whole(path) as file:
        file.write(content)


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file by `whole`, with a checksum for `unsealed`."""
    with whole(path, sealed=True) as file:
        file.write(content)


def unsealed(path: Path) -> bytes:
    """The content of a file that `whole` has sealed.

    Raises
    ------
    VflError
        If it is not as it was written.
    OSError
        If it cannot be read.
    """
    content = path.read_bytes()
    if len(content) < _SEAL or hashlib.sha256(content[:-_SEAL]).digest() != content[-_SEAL:]:
        raise VflError(f"{path} is damaged, or another version's: put back the file of then.")
    return content[:-_SEAL]


def lasting_secret(path: Path) -> bytes:
    """Return the 32 secret bytes in a file, which is made by chance if it is not there.

    Raises
    ------
    VflError
        If the file is damaged, the disk refuses, or another user can change the folder.
    """
    with told(path):
        make_own_folder(path.parent)
        with alone_in(path.parent):
            if not path.exists():
                write_sealed(path, secrets.token_bytes(32))
            return unsealed(path)


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file, all of it or nothing; it is on the disk when this returns.

    Raises
    ------
    VflError
        If the disk refuses.
    """
    with opened_to_append(path) as file, told(path):
        before = os.fstat(file.fileno()).st_size
        try:
            write_all(file.fileno(), content)
            os.fsync(file.fileno())
        except BaseException:
            os.ftruncate(file.fileno(), before)
            raise


def opened_to_append(path: Path) -> BinaryIO:
    """A file to write to the end of, which is made if it is not there; as `append`, if refused."""
    with told(path):
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of it to an open file, which the system may take in parts."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


@contextmanager
def locked(path: Path, sentence: str) -> Iterator[None]:
    """Hold a file that nobody else holds meanwhile, in this process or another; then remove it.

    The kernel lets go of it when the process ends, however it does.

    Raises
    ------
    ConfigError
        With this sentence, if somebody holds it.
    VflError
        If the disk refuses.
    """
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


def _hold(path: Path) -> int | None:
    """The file, opened and locked; -1 if somebody holds it, none if it was removed meanwhile."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(opened).st_nlink:
            return opened
    except BlockingIOError:
        os.close(opened)
        return -1
    except OSError:
        os.close(opened)
        raise
    os.close(opened)
    return None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is so in this folder, and keep others waiting meanwhile."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say in a sentence, by `VflError`, that a file cannot be written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise VflError(
            f"{path} cannot be written, since there is a file where a folder is due: name another."
        ) from error
    except OSError as error:
        raise VflError(
            f"{path} cannot be written ({error.strerror or error}): mend that, and try again."
        ) from error


def _sync(folder: Path) -> None:
    """Have a folder on the disk as it is now, with the file that was just put there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not do that to folders
            raise
    finally:
        os.close(opened)
