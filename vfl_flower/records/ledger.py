"""A ledger: a file of SQLite that counts something once, and survives a crash.

An entry of a ledger has a name and a key. Its value is a count, or bytes with a digest, such as a
table: many ascending keys of 64 bits, and a number for each of them. `opened` gives a ledger to one
block at a time, among all threads and processes. When the block ends, all its changes are on the
disk, or none if it failed. So a block counts, and what it counts happens after it. A count is then
never too low, even if the process is killed.

SQLite notices a damaged structure, but no changed bit of a count. So ``sums`` has a checksum for
each name. A damaged ledger is refused. A deleted ledger begins anew, with another `Ledger.secret`.
The owner of a file can read counts: ``sqlite3 party-0.ids "SELECT * FROM entries WHERE name =
'asked'"``.

An earlier version had another format for each file. `opened` reads such a file once, and replaces
it by a ledger.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import alone_in, make_folder, told, unsealed, whole

log = logging.getLogger("flwr")

Keys = NDArray[Any]
"""Keys of entries: whole numbers of 64 bits, [n]."""
Entry = tuple[str, int, int | bytes]
Reader = Callable[[Path], Iterable[Entry]]
"""Reads the entries in a file of an earlier version, if it exists."""

_FORMAT = 0x56464C31  # "VFL1"
_SCHEMA = f"""
PRAGMA application_id = {_FORMAT};
CREATE TABLE entries (
    name TEXT, key INTEGER, value NOT NULL, PRIMARY KEY (name, key)
) WITHOUT ROWID;
CREATE TABLE sums (name TEXT PRIMARY KEY, entries INTEGER, checksum INTEGER) WITHOUT ROWID;
"""
# The moduli are primes: no change of one bit leaves a checksum as it is, and no sum is too large.
_SUMS = """
SELECT name, count(*), sum((key % 65521 * 2 + 1) * (1 + CASE typeof(value)
    WHEN 'integer' THEN value % 1000003 ELSE length(value) END))
FROM entries GROUP BY name
"""
_DIGEST = 16  # bytes
_WAIT = 600  # seconds for which a block waits for others


def today() -> int:
    """Return the number of this day of UTC since 1970."""
    return int(time.time()) // 86400


class Ledger:
    """The entries of a ledger that `opened` has opened."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        self._tables: dict[str, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
        self.changed = False

    @property
    def secret(self) -> bytes:
        """Return 32 secret bytes, which no other ledger has."""
        return self.content("secret")

    def count(self, name: str, key: int = 0) -> int:
        """Return the count of a key, or 0."""
        return int(self._value("SELECT value FROM entries WHERE name = ? AND key = ?", name, key))

    def last(self, name: str) -> int:
        """Return the largest key of all counts of a name, or 0."""
        return int(self._value("SELECT max(key) FROM entries WHERE name = ?", name))

    def add(self, name: str, more: int, key: int = 0) -> None:
        """Add to the count of a key. It does not fall below 0."""
        self.write([(name, key, max(0, self.count(name, key) + more))])

    def content(self, name: str) -> bytes:
        """Return the bytes of a name; none if it is new.

        Raises
        ------
        VflError
            If they are damaged.
        """
        sealed = self._value("SELECT value FROM entries WHERE name = ?", name) or _sealed(b"")
        if _sealed(sealed[:-_DIGEST]) != sealed:
            raise _damaged(self._path)
        return bytes(sealed[:-_DIGEST])

    def numbers(self, name: str, keys: Keys) -> NDArray[np.int64]:
        """Return the numbers of these keys in a table, [n]; 0 for a new key."""
        known, numbers = self._table(name)
        places, there = _places(keys, known)
        found = np.zeros(len(keys), np.int64)
        found[there] = numbers[places[there]]
        return found

    def put(self, name: str, keys: Keys, numbers: NDArray[np.int64] | int) -> None:
        """Give these keys these numbers in a table. No number is negative."""
        known, values = self._table(name)
        new = np.unique(keys[~_places(keys, known)[1]].astype(np.uint64))
        first = np.searchsorted(known, new)
        known, values = np.insert(known, first, new), np.insert(values, first, 0)
        values[_places(keys, known)[0]] = numbers
        table = np.stack([known, values.astype(np.uint64)]).astype("<u8")
        self.write([(name, 0, table.tobytes())])
        self._tables[name] = known, values

    def write(self, entries: Iterable[Entry]) -> None:
        """Write entries, in place of entries of the same name and key."""
        sealed = (
            (name, key, _sealed(value) if isinstance(value, bytes) else value)
            for name, key, value in entries
        )
        self._connection.executemany("REPLACE INTO entries VALUES (?, ?, ?)", sealed)
        self.changed = True

    def _value(self, question: str, *about: str | int) -> Any:
        return (self._connection.execute(question, about).fetchone() or (0,))[0] or 0

    def _table(self, name: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return ascending keys and their numbers, [n] each."""
        if name not in self._tables:
            keys, numbers = np.frombuffer(self.content(name), "<u8").reshape(2, -1)
            self._tables[name] = keys.astype(np.uint64), numbers.astype(np.int64)
        return self._tables[name]

    def _sum(self) -> None:
        """Write the sums that `_is_sound` compares."""
        self._connection.execute("DELETE FROM sums")
        self._connection.execute(f"INSERT INTO sums {_SUMS}")

    def _is_sound(self) -> bool:
        due = set(self._connection.execute("SELECT * FROM sums"))
        return set(self._connection.execute(_SUMS)) == due


def no_file(path: Path) -> Iterable[Entry]:
    """Raise `VflError` if a file exists: no earlier version wrote this one."""
    if path.exists():
        raise _damaged(path)
    return ()


def table_in_file(name: str) -> Reader:
    """Return a reader of a file that an earlier version sealed: it has one table."""

    def read(path: Path) -> Iterable[Entry]:
        content = unsealed(path) if path.exists() else b""
        if len(content) % 16:
            raise _damaged(path)
        return [(name, 0, content)]

    return read


@contextmanager
def opened(path: Path, earlier: Reader = no_file) -> Iterator[Ledger]:
    """Open a ledger, and wait for other blocks first. Keep the changes if the block ends.

    Parameters
    ----------
    earlier : reads what an earlier version wrote.

    Raises
    ------
    VflError
        If the file is damaged, is no ledger, or cannot be written.
    """
    path = path.absolute()
    with told(path):
        make_folder(path.parent)
    try:
        if not _is_ledger(path):
            with told(path), alone_in(path.parent):
                if not _is_ledger(path):
                    _make(path, earlier)
        with closing(_connection(path)) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("BEGIN IMMEDIATE")
            ledger = Ledger(path, connection)
            if not ledger._is_sound():
                raise _damaged(path)
            yield ledger
            if ledger.changed:
                ledger._sum()
                connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise VflError(f"{path} cannot be written ({error}). Fix that, and try again.") from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path) from error


@contextmanager
def opened_by_party(path: Path, sentence: str, earlier: Reader = no_file) -> Iterator[Ledger]:
    """Open a ledger of a party as `opened` does.

    Parameters
    ----------
    sentence : the error if that fails. It leaves the party. The party's own log has the reason.
    """
    try:
        with opened(path, earlier) as ledger:
            yield ledger
    except ConfigError:
        raise  # a rule's refusal
    except VflError as error:
        log.warning("The party cannot keep its count in %s: %s", path, error)
        raise VflError(sentence) from None


def _connection(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=_WAIT, isolation_level=None
    )


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
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(_SCHEMA)
        ledger = Ledger(path, connection)
        try:
            ledger.write([("secret", 0, secrets.token_bytes(32)), *earlier(path)])
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path) from error
        ledger._sum()
        with whole(path) as file:
            file.write(connection.serialize())


def _places(keys: Keys, known: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the places of keys among ascending keys, and which are there, [n] each."""
    keys = keys.astype(np.uint64)
    places = np.searchsorted(known, keys)
    there = places < len(known)
    there[there] = known[places[there]] == keys[there]
    return places, there


def _sealed(content: bytes) -> bytes:
    return content + hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _damaged(path: Path) -> VflError:
    return VflError(f"{path} is damaged, or another version wrote it. Restore the earlier file.")
