"""Provenance of a run: code, package versions and memory."""

import ctypes
import hashlib
import json
import logging
import platform
import re
import resource
import sys
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vfl_flower.config.protocol_version import VERSION

log = logging.getLogger(__name__)

_HERE = Path(__file__).parents[2]
_SHARED = (
    *("vfl_flower/protocol", "vfl_flower/alignment", "vfl_flower/models", "vfl_flower/transport"),
    *("vfl_flower/config/options", "strategies/papers", "strategies/baselines"),
)
"""Folders that decide what label holder and parties send each other."""


def utc_now() -> str:
    """Return the date and time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return the digest of the application's whole source, for the results of a run."""
    return _digest("vfl_flower", "strategies")


@lru_cache(maxsize=1)
def shared_code() -> str:
    """Return the digest of the source that decides the messages of a run.

    It is a diagnostic: sides with different digests, but one protocol version, work together.
    """
    return _digest(*_SHARED)


def _digest(*folders: str) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((_HERE / folder).rglob("*.py")):
            name = file.relative_to(_HERE).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def running() -> str:
    """Return the versions of this package and of its protocol, and a short digest."""
    try:
        number = version("vfl-flower")
    except PackageNotFoundError:  # a checkout that is not installed
        number = "of a checkout"
    return f"vfl-flower {number} (protocol {VERSION}, code {shared_code()[:12]})"


def speaks(version: str) -> bool:
    """Return whether the other side, with this text of `running`, has our protocol version."""
    found = re.search(r"\(protocol (\d{1,9}), code \w+\)$", version)
    if found is None or int(found[1]) != VERSION:
        return False
    _note_other_code(version)
    return True


@lru_cache(maxsize=8)
def _note_other_code(version: str) -> None:
    """Log once that the other side has other code for the same protocol."""
    if version.split()[-1] != running().split()[-1]:
        log.info("The label holder runs %s, and this party %s.", version, running())


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    packages = ("flwr", "torch", "numpy", "ray", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


@lru_cache(maxsize=1)
def environment() -> str:
    """Return versions, processor and a short digest of the code, in JSON, for a later rerun."""
    from torch.backends.cpu import get_cpu_capability  # lazy: it is slow to import

    processor = f"{platform.machine()} {get_cpu_capability()}"
    return json.dumps({**versions(), "processor": processor, "code": code_digest()[:12]})


def changed(then: str) -> str:
    """Return what differs here from the `environment` of an earlier run; empty if nothing does."""
    before, now = json.loads(then or "{}"), json.loads(environment())
    differ = (key for key in now if now[key] != before.get(key))
    return ", ".join(f"{key} {before.get(key, 'unknown')} is now {now[key]}" for key in differ)


def free_memory() -> float:
    """Return the bytes of available memory; infinite if the system hides them."""
    found = _linux("/proc/meminfo", "MemAvailable:")
    return float("inf") if found is None else found


_MANY = 100_000  # rows of a file; giving back takes 0.1 s, and a process may hold 1,000 parties


def return_memory(rows: int) -> None:
    """Give freed memory back to the system, after a file of many rows: a tenth of the process.

    Many small pieces of a table are freed, and C's allocator keeps them for later ones.
    """
    if rows < _MANY:
        return
    if pyarrow := sys.modules.get("pyarrow"):
        pyarrow.default_memory_pool().release_unused()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc has it, and musl has not


def peak_memory_mb() -> float:
    """Return the peak resident memory of this process so far, in MiB."""
    found = _linux("/proc/self/status", "VmHWM:")
    if found is not None:  # on Linux, `ru_maxrss` begins with the peak of the parent process
        return found / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _linux(file: str, name: str) -> float | None:
    """Return the bytes that a file of the Linux kernel has under a name; None without it."""
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return 1024 * float(line.split()[1])
    except OSError:
        pass
    return None
