"""A ledger: a file of SQLite that counts something once, and survives a crash.

An entry of a ledger has a name and a key. Its value is a count or bytes, such as a table: many
ascending keys of 64 bits, and a number for each of them. `opened` gives a ledger to one block at a
time, among all threads and processes. When the block ends, all its changes are on the disk, or none
if it failed. So a block counts, and what it counts happens after it. A count is then never too low,
even if the process is killed.

SQLite notices a damaged structure, but no changed bit of a value. So each entry has a digest, and
one entry has the number of all entries. A damaged ledger is refused. A deleted ledger begins anew,
with another secret. After a kill, a file ``-journal`` may lie beside a ledger. It belongs to it,
also in a backup. The owner of a ledger can read counts:
``sqlite3 party-0.ids "SELECT name, key, value FROM entries WHERE name = 'asked'"``.

An earlier version had another format for each file. `opened` reads such a file once, and replaces
it by a ledger.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import alone_in, make_folder, told, unsealed, whole
from vfl_flower.config.logs import log

Keys = NDArray[Any]  # keys of a table: whole numbers of 64 bits, [n]
Value = int | bytes
Reader = Callable[[Path], Iterable[tuple[str, int, Value]]]
"""Reads the name, key and value of entries in a file of an earlier version, if the file exists."""

_FORMAT = 0x56464C31  # "VFL1"
_SCHEMA = f"""
PRAGMA application_id = {_FORMAT};
CREATE TABLE entries (
    name TEXT, key INTEGER, value, digest BLOB, PRIMARY KEY (name, key)
) WITHOUT ROWID;
"""
_NUMBER = "entries", 0  # the entry with the number of all entries
_WAIT = 600  # seconds for which a block waits for others


def today() -> int:
    """Return the number of this day of UTC since 1970."""
    return int(time.time()) // 86400


class Ledger:
    """The entries of a ledger, (name, key) -> value, and a secret that no other ledger has."""

    def __init__(self, entries: dict[tuple[str, int], Value]) -> None:
        self._entries = entries
        self._tables: dict[str, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
        self._changed: set[tuple[str, int]] = set()
        self.secret = self.content("secret")

    def count(self, name: str, key: int = 0) -> int:
        """Return a count, or 0 if it is new."""
        return int(self._entries.get((name, key), 0))

    def add(self, name: str, more: int, key: int = 0) -> None:
        """Add to a count. It does not fall below 0."""
        self.write(name, max(0, self.count(name, key) + more), key)

    def last(self, name: str) -> int:
        """Return the largest key of the counts of a name, or 0."""
        return max((key for which, key in self._entries if which == name), default=0)

    def content(self, name: str) -> bytes:
        """Return the bytes of a name; none if it is new."""
        return bytes(self._entries.get((name, 0), b""))

    def write(self, name: str, value: Value, key: int = 0) -> None:
        """Give an entry this value."""
        self._entries[name, key] = value
        self._changed.add((name, key))

    def numbers(self, name: str, keys: Keys) -> NDArray[np.int64]:
        """Return the numbers of these keys in a table, [n]; 0 for a new key."""
        known, numbers = self.table(name)
        places, there = _places(keys, known)
        found = np.zeros(len(keys), np.int64)
        found[there] = numbers[places[there]]
        return found

    def put(self, name: str, keys: Keys, numbers: NDArray[np.int64] | int) -> None:
        """Give these keys these numbers in a table. No number is negative."""
        known, values = self.table(name)
        new = np.unique(keys[~_places(keys, known)[1]].astype(np.uint64))
        first = np.searchsorted(known, new)
        known, values = np.insert(known, first, new), np.insert(values, first, 0)
        values[_places(keys, known)[0]] = numbers
        self.write(name, np.stack([known, values.astype(np.uint64)]).astype("<u8").tobytes())
        self._tables[name] = known, values

    def remove(self, name: str, keys: Keys) -> None:
        """Remove these keys from a table."""
        kept, numbers = self.table(name)
        self._tables[name] = kept[:0], numbers[:0]
        left = ~np.isin(kept, keys)
        self.put(name, kept[left], numbers[left])

    def table(self, name: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the ascending keys of a table and their numbers, [n] each."""
        if name not in self._tables:
            keys, numbers = np.frombuffer(self.content(name), "<u8").reshape(2, -1)
            self._tables[name] = keys.astype(np.uint64), numbers.astype(np.int64)
        return self._tables[name]

    @classmethod
    def _read(cls, path: Path, connection: sqlite3.Connection) -> Ledger:
        """Read all entries, or raise `VflError` if they are damaged."""
        rows = connection.execute("SELECT name, key, value, digest FROM entries").fetchall()
        entries = {(name, key): value for name, key, value, _ in rows}
        sound = all(digest == _digest(*entry) for *entry, digest in rows)
        if not sound or entries.get(_NUMBER) != len(rows):
            raise _damaged(path)
        return cls(entries)

    def _save(self, connection: sqlite3.Connection) -> None:
        """Write the entries that have changed, and commit."""
        self._entries.setdefault(_NUMBER, 0)
        self.write("entries", len(self._entries))
        changed = [(*which, self._entries[which]) for which in self._changed]
        rows = [(*entry, _digest(*entry)) for entry in changed]
        connection.executemany("REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)
        connection.execute("COMMIT")


def check(path: Path) -> None:
    """Raise `VflError` unless a ledger is sound, or a file that an earlier version sealed."""
    if _is_ledger(path):
        with opened(path):
            pass
    else:
        unsealed(path)


def no_file(path: Path) -> Iterable[tuple[str, int, Value]]:
    """Raise `VflError` if a file exists: no earlier version wrote this one."""
    if path.exists():
        raise _damaged(path)
    return ()


def content_in_file(name: str) -> Reader:
    """Return a reader of a file that an earlier version sealed: it has the bytes of one entry."""
    return lambda path: [(name, 0, unsealed(path))] if path.exists() else ()


@contextmanager
def opened(path: Path, earlier: Reader = no_file) -> Iterator[Ledger]:
    """Open a ledger, and wait for other blocks first. Keep the changes if the block ends."""
    path = path.absolute()
    try:
        with told(path):
            make_folder(path.parent)
            if not _is_ledger(path):
                with alone_in(path.parent):
                    if not _is_ledger(path):
                        _make(path, earlier)
            if path.stat().st_mode & 0o077:  # as a backup may have restored it
                path.chmod(0o600)
        with closing(_connection(path)) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("BEGIN IMMEDIATE")
            ledger = Ledger._read(path, connection)
            yield ledger
            if ledger._changed:
                ledger._save(connection)
    except sqlite3.OperationalError as error:
        raise VflError(f"{path} cannot be written ({error}). Fix that, and try again.") from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path) from error


@contextmanager
def opened_by_party(path: Path, sentence: str, earlier: Reader = no_file) -> Iterator[Ledger]:
    """Open a ledger as `opened` does. If that fails, only ``sentence`` leaves the party."""
    in_block: BaseException | None = None
    try:
        with opened(path, earlier) as ledger:
            try:
                yield ledger
            except BaseException as error:
                in_block = error
                raise
    except VflError as error:
        if error is in_block:
            raise
        log.warning("The party cannot keep its count in %s: %s", path, error)
        raise VflError(sentence) from None


def _connection(path: Path) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=_WAIT, isolation_level=None)


def _is_ledger(path: Path) -> bool:
    """Return whether this is a ledger. Nothing else may open its file, which would end a lock."""
    if not path.exists():
        return False
    with closing(_connection(path)) as connection:
        try:
            return bool(connection.execute("PRAGMA application_id").fetchone() == (_FORMAT,))
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            return False


def _make(path: Path, earlier: Reader) -> None:
    """Write a new ledger, with what an earlier version wrote."""
    try:
        entries = {(name, key): value for name, key, value in earlier(path)}
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    ledger = Ledger({("secret", 0): secrets.token_bytes(32), **entries})
    ledger._changed.update(ledger._entries)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(f"{_SCHEMA} BEGIN")
        ledger._save(connection)
        # A process may have been killed before the owner deleted its ledger.
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        with whole(path) as file:
            file.write(connection.serialize())


def _digest(name: str, key: int, value: Value) -> bytes:
    content = value if isinstance(value, bytes) else str(value).encode()
    about = f"{name} {key} {type(value).__name__} ".encode()
    return hashlib.blake2b(about + content, digest_size=16).digest()


def _places(keys: Keys, known: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the places of keys among ascending keys, and which are there, [n] each."""
    keys = keys.astype(np.uint64)
    places = np.searchsorted(known, keys)
    there = places < len(known)
    there[there] = known[places[there]] == keys[there]
    return places, there


def _damaged(path: Path) -> VflError:
    return VflError(f"{path} is damaged, or another version wrote it. Restore the earlier file.")
