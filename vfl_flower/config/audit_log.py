"""The audit log of a service: lines that nobody can cut, change or move without a trace.

A log is a file of JSON lines. Each line has four fields besides its content:

line : number of the line in its file, from 1.
time : time in UTC, in milliseconds.
event : kind of the event. `log-begun` is the first line of a file. `line-torn` follows a line that
    was written in part, because its process was killed.
before : SHA-256 digest of the line before, with its line break. In a first line, it is the last
    digest of the earlier file, or empty. `sed -n 5p FILE | sha256sum` gives the digest of line 5.

A first line also has `format`, `earlier-lines` (lines of the earlier file), and `key` (digest of
the key). It has `earlier-missing` if the earlier file was not there when this one began. Three
files lie beside a log, and only their owner can read them:

- `FILE.seal` counts the lines and bytes, and has the last digest. The process refreshes it within
  a second of a line, and when it closes the log. So `verify` finds a cut at the end.
- `audit-log.key` is the key of the hashes of ids. All logs of a folder use it.
- `FILE.lock` exists while a process writes the log.

To begin a new file, rename the old one. Within a second, the process begins a new file, whose first
line has the last digest of the old one. Or rename it while no process writes it, and leave it in
the folder until the next one starts. If the earlier file was emptied or removed instead, the new
chain says so, and `verify` fails.

The chain and the seal prove nothing against somebody who can write to the folder as its owner, such
as an administrator. Such a person can compute all digests anew, and write another seal. So note the
last digest at a place that this person cannot change, and have `verify` find it later. Without a
noted digest, nobody finds that log and seal are an older copy of both. Nor does anybody find that
log, seal and key were removed, or log and seal in a folder that has other logs. Lines of the last
second before a crash can be cut off without a trace, until the log is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Lock, Thread
from typing import Any, BinaryIO

from vfl_flower.config import audit_chain as chain
from vfl_flower.config.audit_chain import BEGUN, KEY, TORN, End, beside, fingerprint
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import (
    lasting_secret,
    locked,
    make_own_folder,
    opened_to_append,
    told,
    write_all,
    write_sealed,
    write_whole,
)
from vfl_flower.config.logs import log

_FORMAT = "vfl-flower audit log 1"
_OWN = {"line", "time", "event", "before"}  # fields of every line
_APART = 1.0  # seconds between two seals
_ROOM = 4096  # bytes that the disk must have for the next lines

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class AuditLog:
    """An audit log that this process writes. `close` it, or use it in a ``with`` block.

    It refuses a log that another process writes or another user can change, or whose seal, key or
    end is missing or changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock = Lock()
        self._failure = ""  # a sentence
        self._failed = False  # whether the last line could not be written
        self._end = self._sealed = End()
        with told(self.path):
            make_own_folder(self.path.parent)
        with ExitStack() as stack:  # closes what was opened if this fails
            sentence = f"Another process writes {self.path}. End it first, or name another file."
            stack.enter_context(locked(beside(self.path, "lock"), sentence))
            self._file = self._opened()
            stack.callback(lambda: self._file.close())  # the file that is open then
            self._seal()
            self._until_end = stack.pop_all()
        self._closing = Event()
        self._thread = Thread(target=self._seal_repeatedly, name="audit log", daemon=True)
        self._thread.start()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Sync the log to the disk, seal it, and release it."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            with self._until_end:
                self._seal()

    @property
    def is_writable(self) -> bool:
        """Return whether a line can be written, as far as the last second shows."""
        return not self._failure and not self._failed

    def hashes(self, ids: Sequence[bytes]) -> list[str]:
        """Return the keyed hash of each encoded id, for field ``ids`` of any line."""
        return chain.hashes_of(ids, self._key)

    def write(self, event: str, **fields: Any) -> None:
        """Append a line. The system has it at once, and the disk within about a second.

        No field may hold an id, a feature or a score. If writing fails, nothing of the line is
        left.
        """
        if event in (BEGUN, TORN) or not _OWN.isdisjoint(fields):
            raise ValueError(f"Event {event} or a field has a name that the log itself uses.")
        with self._lock:
            if self._failure:
                raise VflError(self._failure)
            try:
                self._append(event, fields)
            except VflError:
                self._failed = True
                raise
            self._failed = False

    def _append(self, event: str, fields: dict[str, Any]) -> None:
        line, opened = _line(self._end, event, fields), self._file.fileno()
        end = self._end.after(line)
        with told(self.path):
            try:
                write_all(opened, line)
                self._end = end
            except BaseException:  # also Ctrl-C between these two lines
                os.ftruncate(opened, self._end.size)
                raise

    def _opened(self) -> BinaryIO:
        """Open the file and check its end, or begin a new file."""
        key, found = self.path.parent / KEY, chain.read_seal(self.path)
        if found and found[0].lines and not key.exists():
            raise ConfigError(
                f"{key} is missing, and without it nobody finds ids in {self.path}. Restore it, or "
                "name a log in another folder."
            )
        lost = key.exists() and not any(self.path.parent.glob("*.seal"))
        if lost and _is_empty(self.path):
            raise ConfigError(
                f"{key} is there, but no seal: {self.path} was removed with its seal, or both were "
                "moved away. Restore both, or move the key away too to begin a new log."
            )
        if not found and _is_empty(self.path):
            # Else a process that is killed now would leave a key or a line, as a removed seal does.
            self._write_seal(End(), "")
            found = End(), ""
        self._key = lasting_secret(key)
        if found and found[0].lines and found[1] != fingerprint(self._key):
            raise ConfigError(f"{key} is not the key of {self.path}. Restore the log's key.")
        if _is_empty(self.path):
            end = found[0] if found else End()
            return self._begun(end, missing=bool(end.lines) and not chain.is_beside(self.path, end))
        if not found:
            raise ConfigError(
                f"{beside(self.path, 'seal')} is missing, so lines of {self.path} may be missing "
                "too. Restore the seal, or move the log away to begin a new one."
            )
        self._end, torn = chain.sound_end(self.path, found[0])
        file = opened_to_append(self.path)
        if torn:
            self._close_off(file, torn + b"\n")
        return file

    def _begun(self, earlier: End, missing: bool) -> BinaryIO:
        """Begin a file after an earlier one, which was renamed or is ``missing``, and open it."""
        fields: dict[str, Any] = {"format": _FORMAT, "key": fingerprint(self._key)}
        fields["earlier-lines"] = earlier.lines
        if missing:
            fields["earlier-missing"] = True
            log.warning(
                "The audit log %s was emptied or removed: %d lines are missing. Its new file says "
                "so. Restore them in a file beside it.",
                self.path,
                earlier.lines,
            )
        first = _line(End(digest=earlier.digest), BEGUN, fields)
        write_whole(self.path, first)
        file = opened_to_append(self.path)
        self._end = End().after(first)
        return file

    def _close_off(self, file: BinaryIO, torn: bytes) -> None:
        """End a line that was written in part, and say so in a line, unless it is complete."""
        said, end = b"", self._end.after(torn)
        if chain.fields_of(torn) is None:
            said = _line(end, TORN, {})
            end = end.after(said)
        with told(self.path):
            write_all(file.fileno(), b"\n" + said)
        self._end = end

    def _seal_repeatedly(self) -> None:
        """Seal the log every second. If the file was renamed, begin a new one."""
        while not self._closing.wait(_APART):
            try:
                self._seal()
                with self._lock:
                    if self._is_renamed():
                        self._rename()
                with told(self.path), TemporaryFile(dir=self.path.parent, buffering=0) as file:
                    file.seek(self._end.size)  # as the next lines of the log will do
                    write_all(file.fileno(), bytes(_ROOM))
                self._failure, self._failed = "", False
            except Exception as error:  # else the thread would end, and nobody would know
                self._failure = str(error) or type(error).__name__

    def _seal(self) -> None:
        """Sync the lines to the disk, and then write the seal, unless nothing is new."""
        end = self._end  # lines may be written meanwhile
        if end != self._sealed:
            with told(self.path):
                os.fsync(self._file.fileno())
            self._write_seal(end, fingerprint(self._key))
            self._sealed = end

    def _write_seal(self, end: End, key: str) -> None:
        content = json.dumps({**end._asdict(), "key": key}).encode()
        write_sealed(beside(self.path, "seal"), content)

    def _is_renamed(self) -> bool:
        with told(self.path):
            try:
                return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
            except FileNotFoundError:
                return True

    def _rename(self) -> None:
        """Begin a new file, since the old one was renamed."""
        if not _is_empty(self.path):
            raise VflError(f"{self.path} is another file now, which is not empty. Move it away.")
        with told(self.path):
            os.fsync(self._file.fileno())
            missing = os.fstat(self._file.fileno()).st_nlink == 0
        old, self._file = self._file, self._begun(self._end, missing)
        old.close()
        self._seal()


def _line(end: End, event: str, fields: dict[str, Any]) -> bytes:
    """Return the line after this position."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    content = {"line": end.lines + 1, "time": now, "event": event, **fields, "before": end.digest}
    return f"{_encode(content)}\n".encode()


def _is_empty(path: Path) -> bool:
    with told(path):
        return not path.exists() or path.stat().st_size == 0
