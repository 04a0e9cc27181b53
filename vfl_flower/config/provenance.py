"""Provenance of a run: code, package versions and memory."""

from __future__ import annotations

import hashlib
import platform
import resource
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return the digest of the application's source, which all sides must share."""
    here = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (here, here.parent / "strategies"):
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(here.parent).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def running() -> str:
    """Return the version of this package; its last word is a short digest of the code."""
    try:
        number = version("vfl-flower")
    except PackageNotFoundError:  # a checkout that is not installed
        number = "of a checkout"
    return f"vfl-flower {number} (code {code_digest()[:12]})"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    packages = ("flwr", "torch", "numpy", "ray", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def free_memory() -> float:
    """Return the bytes of available memory; infinite if the system hides them."""
    found = _linux("/proc/meminfo", "MemAvailable:")
    return float("inf") if found is None else found


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
