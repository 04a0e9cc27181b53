"""What code runs, on what, and what it took."""

from __future__ import annotations

import hashlib
import platform
import resource
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the application's own source: all sides of a run must run the same."""
    here = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (here, here.parent / "strategies"):
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(here.parent).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    packages = ("flwr", "torch", "numpy", "ray", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def free_memory() -> float:
    """Bytes of memory that are free, or can be freed at once; infinite if the system hides it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    except OSError:
        pass
    return float("inf")


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
