"""The chain of an audit log (`config.audit_log`): read and verify it, and find the lines of ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import unsealed

BEGUN, TORN = "log-begun", "line-torn"
KEY = "audit-log.key"
_TYPES = {"line": int, "time": str, "event": str, "before": str}  # fields of every line
_HASH = 8  # bytes
_BLOCK = 1 << 16
_BEGINS = b'{"line":1,'  # each log


class End(NamedTuple):
    """Position after a line: lines and bytes of the file, and the digest of the line."""

    lines: int = 0
    size: int = 0
    digest: str = ""

    def after(self, line: bytes) -> End:
        """Return the position after one more line."""
        return End(self.lines + 1, self.size + len(line), hashlib.sha256(line).hexdigest())


class Verified(NamedTuple):
    """Findings of `verify` about a sound log, of all files together."""

    lines: int
    first: str  # time of the first line
    last: str
    digest: str  # of the last line
    torn: tuple[str, ...]  # places such as "FILE:7", whose process was killed while it wrote
    unsealed: int  # lines after the last seal, which can be cut off without a trace
    earlier: End  # of the file that `after` stood for


def verify(path: Path, *later: Path, noted: str = "", after: str = "") -> Verified:
    """Verify a log, or several files that continue each other, the oldest first.

    The last file needs its seal beside it. A line must have ``noted``, an earlier verification's
    digest. ``after`` ends a file that is no longer kept. Raise `VflError`, which names the line.
    """
    files = [path, *later]
    seal = read_seal(files[-1])  # before the lines, which may become more
    if not (seal or files[-1].exists()):
        raise VflError(f"{files[-1]} does not exist. Name the audit log of a service.")
    if seal and not files[-1].exists():
        raise VflError(
            f"{files[-1]} is missing: its seal says that it has {seal[0].lines} lines. Restore it."
        )
    ends = [earlier_end(each) for each in later]
    if seal is None:
        raise VflError(
            f"{beside(files[-1], 'seal')} is missing, and without it nobody knows whether lines "
            "were cut off. Restore it, or name the file that continues the log too."
        )
    for earlier, each, end in zip(files, later, ends, strict=False):
        if not end.digest:
            raise VflError(f"{each} continues no file, not even {earlier}. Name the oldest first.")
    if seal[0].digest == earlier_end(files[-1]).digest:
        seal = End(), ""  # the process was killed when it had just begun this file
    found = [_verified(*each) for each in zip(files, [*ends, seal[0]], strict=True)]
    for each in files:
        key = each.parent / KEY
        if key.exists() and _first(each).get("key", "") != fingerprint(unsealed(key)):
            raise VflError(f"{key} is not the key of {each}: it is another log. Restore the file.")
    if earlier_end(path).digest != after:
        raise _continues(path, after)
    if noted and not any(noted in each.digests for each in found):
        raise VflError(
            f"No line has the noted digest {noted}: the log was written anew, or the line is in an "
            "earlier file. Name that file too."
        )
    return Verified(
        sum(each.end.lines for each in found),
        found[0].times[0],
        found[-1].times[1],
        found[-1].end.digest,
        tuple(torn for each in found for torn in each.torn),
        sum(each.unsealed for each in found),
        earlier_end(path),
    )


def _continues(path: Path, after: str) -> VflError:
    """Return the error about a first file that does not begin where it must."""
    end = earlier_end(path)
    if not end.digest:
        return VflError(f"{path} continues no file. Leave out --after {after}.")
    absent = "The service did not find it when it began this file. "
    absent *= bool(_first(path).get("earlier-missing"))
    return VflError(
        f"Lines are missing: {path} continues a file of {end.lines} lines, which is not named. "
        f"{absent}Name that file first. If it is no longer kept, give --after the last digest that "
        f"you noted of it. {path} says that it is {end.digest}."
    )


class _Verified(NamedTuple):
    end: End
    times: tuple[str, str]
    digests: set[str]
    torn: list[str]
    unsealed: int


def _verified(path: Path, sealed: End) -> _Verified:
    """Verify one file, whose line number ``sealed.lines`` must have the digest of the seal."""
    end, digests, times, torn = End(), set[str](), list[str](), list[str]()
    for line, fields in checked(path, sealed=sealed):
        end = end.after(line)
        digests.add(end.digest)
        if fields is None or not line.endswith(b"\n"):
            torn.append(f"{path}:{end.lines}")
        else:
            times.append(fields["time"])
            del times[1:-1]
        if end.lines == sealed.lines and end.digest != sealed.digest:
            raise _changed(path, end.lines)
    if end.lines < sealed.lines:
        cut = f"line {sealed.lines}" if end.lines + 1 == sealed.lines else ""
        cut = cut or f"lines {end.lines + 1} to {sealed.lines}"
        raise VflError(f"The end of {path} was cut off: {cut}. Restore the file from a copy.")
    return _Verified(end, (times[0], times[-1]), digests, torn, end.lines - sealed.lines)


def checked(
    path: Path, start: End | None = None, sealed: End | None = None
) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line from ``start`` and its fields, None if it was torn, while the chain is sound.

    Raise `VflError` at the first line that is changed, added, moved or removed.
    """
    end = start or End()
    with _opened(path) as file:
        file.seek(end.size)
        line = file.readline()
        while line:
            following, fields, number = file.readline(), fields_of(line), end.lines + 1
            if fields is None:
                unfinished = not line.endswith(b"\n")  # the process is writing it, or was killed
                said_torn = (fields_of(following) or {}).get("event") == TORN
                if number == 1 or not (unfinished or said_torn):
                    raise _changed(path, number)
            elif fields["line"] != number:
                raise VflError(
                    f"Line {number} of {path} has number {fields['line']}: lines were removed, "
                    "added or moved. Restore the file from a copy."
                )
            elif number > 1 and fields["before"] != end.digest:
                known = (fields_of(following) or {}).get("before"), (sealed or End()).digest
                intact = hashlib.sha256(line).hexdigest() in known
                raise _changed(path, number - 1 if intact else number)
            elif (number == 1) != (fields["event"] == BEGUN):
                raise _changed(path, number)
            yield line, fields
            end, line = end.after(line), following


def find(path: Path, ids: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each encoded id with each line that has its hash. The lines are not verified."""
    try:
        key = unsealed(path.parent / KEY)
    except OSError as error:
        raise VflError(
            f"{path.parent / KEY} cannot be read ({error.strerror}), and without it nobody finds "
            "an id. Put the key beside the log."
        ) from error
    if _first(path).get("key") != fingerprint(key):
        raise VflError(f"{path.parent / KEY} is not the key of {path}. Put the log's key there.")
    ids = list(ids)
    hashes = dict(zip(hashes_of(ids, key), ids, strict=True))
    texts = [each.encode() for each in hashes]
    with _opened(path) as file:
        for line in file:
            if not any(each in line for each in texts):
                continue
            fields = fields_of(line) or {}
            there = fields.get("ids")
            for each in there if isinstance(there, list) else ():
                if isinstance(each, str) and each in hashes:
                    yield hashes[each], fields


def hashes_of(ids: Iterable[bytes], key: bytes) -> list[str]:
    """Return the keyed hash of each encoded id: 8 bytes of BLAKE2b, in hex."""
    return [hashlib.blake2b(each, key=key, digest_size=_HASH).hexdigest() for each in ids]


def fingerprint(key: bytes) -> str:
    """Return the digest that identifies a key in a log."""
    return hashlib.blake2b(key, digest_size=_HASH, person=b"vfl audit key").hexdigest()


def beside(path: Path, ending: str) -> Path:
    """Return the path of a file beside a log."""
    return path.with_name(f"{path.name}.{ending}")


def read_seal(path: Path) -> tuple[End, str] | None:
    """Return the sealed end of a log and the digest of its key; None if there is no seal."""
    try:
        content = json.loads(unsealed(beside(path, "seal")))
        return End(content["lines"], content["size"], content["digest"]), content["key"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VflError(f"{beside(path, 'seal')} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise VflError(f"{beside(path, 'seal')} is no seal. Restore the earlier file.") from error


def sound_end(path: Path, seal: End) -> tuple[End, bytes]:
    """Return the end of a log, and the torn line after it, without reading what is sealed."""
    if _has_line(path, seal):
        end = seal
    elif earlier_end(path).digest == seal.digest:
        end = End()  # the process was killed when it had just begun this file
    else:
        raise ConfigError(
            f"The end of {path} is not what its seal says. `vfl audit-log verify {path}` names the "
            "line. Restore the file from a copy, or move it away to begin a new one."
        )
    for line, _ in checked(path, end, seal):
        if not line.endswith(b"\n"):
            return end, line
        end = end.after(line)
    return end, b""


def _has_line(path: Path, seal: End) -> bool:
    """Return whether a line ends at the position of the seal, and has its digest."""
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size < seal.size:
            return False
        tail, at = b"", seal.size
        while at and b"\n" not in tail[:-1]:
            begin = max(0, at - _BLOCK)
            file.seek(begin)
            tail, at = file.read(at - begin) + tail, begin
    line = tail[tail.rfind(b"\n", 0, -1) + 1 :]
    return hashlib.sha256(line).hexdigest() == seal.digest


def earlier_end(path: Path) -> End:
    """Return the end of the file that a log continues, as its first line says."""
    first = _first(path)
    lines = first.get("earlier-lines")
    return End(lines if isinstance(lines, int) else 0, 0, first.get("before", ""))


def is_beside(path: Path, seal: End) -> bool:
    """Return whether another file of the folder is the sealed log, which was renamed."""
    for each in path.parent.iterdir():
        with suppress(VflError):  # another user's file
            if each != path and each.is_file():
                with _opened(each) as file:
                    is_log = file.read(len(_BEGINS)) == _BEGINS
                if is_log and _has_line(each, seal):
                    return True
    return False


def _first(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        return fields_of(file.readline()) or {}


def fields_of(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is no line of a log."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(found, dict)
    return found if fits and all(isinstance(found.get(k), v) for k, v in _TYPES.items()) else None


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise VflError(f"{path} cannot be read ({error.strerror}). Name an audit log.") from error


def _changed(path: Path, number: int) -> VflError:
    return VflError(f"Line {number} of {path} was changed. Restore the file from a copy.")
