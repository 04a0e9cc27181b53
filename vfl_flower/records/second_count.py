"""Second counts: they notice a count that was deleted, or restored from a backup.

A second count lies in another folder than the count, and no backup should have both. If the count
has less than the second count, what the second count has is counted.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_flower.config.files import make_own_folder, told
from vfl_flower.records.ledger import Ledger, Reader, opened


def place(name: str, whose: str) -> Path:
    """Return the path of the second count of this name, outside of all folders with counts."""
    named = os.environ.get("XDG_STATE_HOME")
    folder = Path(named) if named else Path.home() / ".local" / "state"
    which = hashlib.sha256(whose.encode(errors="surrogateescape")).hexdigest()[:16]
    return folder / "vfl-flower" / f"{name}-{which}.count"


def of_run(run: str, name: str) -> Path:
    """Return the path of the second count of a run's file, by names of both."""
    return place(Path(name).stem, f"{name} {run}")


@contextmanager
def opened_with(
    path: Path, second: Path, earlier: Reader, earlier_second: Reader
) -> Iterator[tuple[Ledger, Ledger]]:
    """Open a ledger and its second count. The ledger is written first, so it never has less."""
    with told(second):
        make_own_folder(second.parent)
    with opened(second, earlier_second) as counted, opened(path, earlier) as ledger:
        yield ledger, counted
